"""The replicas of one module: the module itself, workers, and what the workers know of it.

A replica set is used until the user changes the module in a way that needs new workers (another
child, a hook, a parameter of another shape) or a worker ends unexpectedly. Smaller
changes are noticed before each forward and sent along with the next order (`PendingUpdates`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.dp.autograd_functions import ReplicaParameters
from paceline.dp.bounded_cache import BoundedCache
from paceline.dp.call_template import CallKey, CallTemplate
from paceline.dp.channel import Message
from paceline.dp.gather import GatherPlan
from paceline.dp.global_batch_norm import StatisticsExchange
from paceline.dp.gradients import GradientAccumulator, GradientRegion, GradientViews
from paceline.dp.module_buffers import ModuleBuffers
from paceline.dp.module_snapshot import ModuleSnapshot
from paceline.dp.protocol import Update
from paceline.dp.scatter import SplitInputs
from paceline.dp.shared_parameters import SharedParameters, SubstitutedParameters
from paceline.dp.thread_limit import ThreadLimit
from paceline.dp.worker import WorkerSetup, serve
from paceline.dp.worker_pool import WorkerHandle, WorkerPool
from paceline.errors import GroupError

__all__ = ["ChannelUser", "ParameterProxies", "PendingUpdates", "ReplicaSet"]


class ChannelUser(Protocol):
    """A call whose answers lie in the channels' memory."""

    def leave_channels(self) -> None:
        """Copy what is still needed: the memory is about to be reused."""


@dataclasses.dataclass
class PendingUpdates:
    """What one worker has not been sent yet."""

    attributes: dict[tuple[int, str], Any] = dataclasses.field(default_factory=dict)
    requires_grad: dict[int, bool] = dataclasses.field(default_factory=dict)
    releases: list[int] = dataclasses.field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        """Whether the module changed; releases are no change."""
        return bool(self.attributes or self.requires_grad)

    def add(self, updates: Sequence[Update], requires_grad: Sequence[tuple[int, bool]]) -> None:
        """The user changed the module again."""
        self.attributes.update({(index, name): value for index, name, value in updates})
        self.requires_grad.update(requires_grad)

    def sent(self, releases: int) -> None:
        """All was sent, and so many releases: the garbage collector may have added some since."""
        if self.has_changes:
            self.attributes, self.requires_grad = {}, {}
        if releases:
            del self.releases[:releases]


class ParameterProxies:
    """Tensors that share 0 computes with in place of the parameters that require gradients.

    Autograd takes their gradients to `ReplicaParameters`, and from there, as sums over the
    replicas, to the parameters.
    """

    def __init__(
        self,
        parameters: SharedParameters,
        regions: Sequence[GradientRegion],
        lock: threading.RLock,
    ) -> None:
        self.slots = parameters.trainable
        # Of each worker.
        self.views = [GradientViews(region, parameters.trainable_indices) for region in regions]
        self.accumulator = GradientAccumulator(self.views, lock)
        with torch.inference_mode(False), torch.enable_grad():
            tensors = [slot.parameter for slot in self.slots]
            outputs = ReplicaParameters.apply(self.accumulator, *tensors)  # type: ignore[no-untyped-call]
            *proxies, self.anchor = outputs
        self.in_module = SubstitutedParameters(self.slots, proxies)


class ReplicaSet:
    """The module, its workers, and what is remembered of calls on them.

    `lock` is held by the thread that uses the channels. `exchange` is set for batch normalisation
    over the whole batch. `parameters` of an earlier set are taken over if they are still the
    module's: optimizers and graphs refer to their memory.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: int,
        threads: int,
        timeout_s: float,
        lock: threading.RLock,
        exchange: StatisticsExchange | None = None,
        parameters: SharedParameters | None = None,
        forward_mutates: bool = False,
    ) -> None:
        self.module = module
        self.lock = lock
        self.exchange = exchange
        self.parameters = parameters if parameters is not None else SharedParameters(module)
        self.parameters.requires_grad_changes()
        self._buffers = ModuleBuffers(module)
        self.snapshot = ModuleSnapshot(module, forward_mutates)
        self.thread_limit = ThreadLimit(threads)
        self.pending = [PendingUpdates() for _ in range(replicas)]
        self.templates: BoundedCache[CallKey, CallTemplate] = BoundedCache()
        self.gather_plans: BoundedCache[Any, list[GatherPlan]] = BoundedCache()
        self._channel_user: ChannelUser | None = None
        # Everything both sides share (parameters, buffers, gradient regions, the exchange) exists
        # before the pool forks: anonymous memory has no name by which it could be opened later.
        self._regions = [GradientRegion(self.parameters) for _ in range(replicas - 1)]
        self._proxies: ParameterProxies | None = None
        with torch.inference_mode(False):
            self._seed = torch.zeros((), dtype=torch.int64)
        setup = WorkerSetup(
            module, self.parameters, self._regions, self._buffers, exchange, threads
        )
        self.pool = WorkerPool(
            replicas - 1,
            lambda replica, channel, pid, pidfd: serve(setup, replica, channel, pid, pidfd),
            timeout_s,
        )

    def follow_changes(self) -> bool:
        """Note what the user changed; False if that takes new workers."""
        if not self.parameters.follow_changes() or not self._buffers.publish():
            return False
        updates = self.snapshot.updates()
        if updates is None:
            return False
        requires_grad = self.parameters.requires_grad_changes()
        # Noted for every worker, also those that a small batch leaves idle now: each gets all
        # that it has missed with its next share.
        if updates or requires_grad:
            for pending in self.pending[1:]:
                pending.add(updates, requires_grad)
        return True

    def template(self, key: CallKey | None, split: SplitInputs) -> CallTemplate:
        """What is known of calls with inputs like these; remembered if there is a key."""
        if key is None:
            return CallTemplate.of(split, are_plain=False)
        template = self.templates.get(key)
        if template is None:
            template = self.templates.add(key, CallTemplate.of(split, are_plain=True))
        return template

    def seed(self, workers: int) -> None:
        """Take one number from the user's generator, and let workers seed theirs with it."""
        self.vacate_channels()
        seed = int(self._seed.random_())
        for worker in self.pool.workers[:workers]:
            worker.seed(seed)

    def proxies(self) -> ParameterProxies:
        """What share 0 computes with; made again when other parameters require gradients."""
        known = self._proxies
        if known is None or known.slots is not self.parameters.trainable:
            known = self._proxies = ParameterProxies(self.parameters, self._regions, self.lock)
        return known

    def occupy_channels(self, call: ChannelUser) -> None:
        """The answers of this call will lie in the channels until it, or another, is done."""
        self._channel_user = call

    def occupies_channels(self, call: ChannelUser) -> bool:
        """Whether no later call has taken the channels."""
        return self._channel_user is call

    def free_channels(self) -> None:
        """The contents of the channels are not needed any more."""
        self._channel_user = None

    def vacate_channels(self) -> None:
        """Make the channels free for the next order."""
        # Reset first: to copy its gradients the call may have to receive them, and a failure there
        # must not leave it registered.
        user, self._channel_user = self._channel_user, None
        if user is not None:
            user.leave_channels()

    def receive(self, worker: WorkerHandle) -> Message:
        """A worker's answer.

        If it ended, or the user interrupts, all workers end: the others have answers that are not
        read any more and could not take another order.
        """
        try:
            return worker.receive()
        except (GroupError, KeyboardInterrupt, SystemExit):
            self.pool.end()
            raise
