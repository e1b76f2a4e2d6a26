"""The step: hooks fill buckets during backward, full buckets are sent in plan order, the end of
backward waits.

    idle --(backward reaches an output of forward)--> muted     inside no_sync(): gradients only accumulate
                                              `-----> syncing   buckets: FILLING -> READY -> IN_FLIGHT -> DONE
    muted, syncing --(end of the outermost backward, or its failure)--> idle

A hook on forward's outputs tells which forward a backward belongs to, before any parameter gets its
gradient, and queues the end-of-backward callback in the outermost graph task: nested backwards
(re-entrant checkpointing) run inside it. A parameter whose hook has not run by then is unused;
nobody walks the graph to find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable

from paceline.ddp.buckets import Bucket, DenseBucket, InPlaceBucket, SparseBucket, State
from paceline.ddp.comm_hooks import CommHook
from paceline.ddp.group_calls import all_reduce
from paceline.ddp.passing_error import when_raised_in
from paceline.ddp.plan import (
    UNLIMITED,
    BucketLimits,
    BucketPlan,
    GradientSpec,
    first_plan,
    plan_buckets,
    plan_order,
)
from paceline.ddp.signals import Call, Signal, common_call
from paceline.ddp.transport import Transport
from paceline.ddp.weighting import Contribution, SampleWindow, weight_of
from paceline.errors import PacelineError, StepError
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Field, Phase, WaitLabel

__all__ = ["ForwardPass", "ManagedParameter", "GradientSnapshot", "Reducer"]

# From here on a gradient goes into its bucket at once: it is still in the cache, and its own memory
# is freed early.
_TAKE_AT_ONCE_BYTES = 256 * 1024


_logger = logging.getLogger("paceline")
_completions = itertools.count(1)
_reducers = itertools.count()  # made in the same order on every rank
_NAMES_SHOWN = 4
_PASSES_KEPT = 8
_BACKWARD, _OTHER = int(Phase.BACKWARD), int(Phase.OTHER)
_SYNCS = int(Field.SYNCS)


class _Mode(enum.Enum):
    IDLE = "idle"
    MUTED = "muted"
    SYNCING = "syncing"


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedParameter:
    """One parameter the reducer looks after."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False


class GradientSnapshot:
    """A rank without data sees the others' averages in its `.grad`; afterwards it has its own
    gradients again.
    """

    def __init__(self, managed: Sequence[ManagedParameter]) -> None:
        self._kept = [
            (one.parameter, None if one.parameter.grad is None else one.parameter.grad.clone())
            for one in managed
        ]

    def put_back(self) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient


class ForwardPass:
    """One call of forward: how many samples it saw and whether its backward synchronises."""

    __slots__ = ("__weakref__", "count", "spent", "sync", "task")

    def __init__(self, count: float, sync: bool) -> None:
        self.count = count
        self.sync = sync
        self.task = -1  # the graph task in which backward last reached it
        self.spent = False


class _EndOfBackward:
    """Queued in the autograd engine. If backward raises, the engine drops it uncalled: that is how
    we learn of it.
    """

    __slots__ = ("_called", "_number", "_reducer")

    def __init__(self, reducer: Reducer, number: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._number = number
        self._called = False

    def __call__(self) -> None:
        self._called = True
        reducer = self._reducer()
        if reducer is not None:
            reducer.end_of_backward(self._number)

    def __del__(self) -> None:
        reducer = None if self._called else self._reducer()
        if reducer is not None:
            reducer.backward_failed(self._number, sys._getframe().f_back)


class Reducer:
    """Averages the gradients of one model over the ranks of one group, or only weighs them if there
    is one rank.
    """

    def __init__(  # noqa: PLR0915 - the state of a step, one line each
        self,
        managed: Sequence[ManagedParameter],
        transport: Transport | None,
        *,
        limits: BucketLimits,
        replan: bool = True,
        bucketed_from_start: bool = False,
        skip_unused: bool = False,
        check_finite: bool = False,
        label: str = "DistributedDataParallel",
    ) -> None:
        self.managed = list(managed)
        self.transport = transport
        self.label = label
        self.hook: CommHook | None = None
        self.bucket_dtype: torch.dtype | None = (
            None  # mixed precision: gradients come in another dtype
        )
        self.before_scatter: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        self.optimizer_in_backward = False  # the hook has stepped and cleared the gradients already
        self.pending_futures: list[Any] = []  # of buffer hooks: waited for at the end of backward
        self.last_error = ""
        self.failures = 0  # steps this rank has reported as failed
        self.defer_failure = False  # someone who has the traceback will report a failed backward
        self.steps = 0
        self.last_sync_seconds = (
            0.0  # what the last backward spent on synchronising after its own work was done
        )
        self.replanned = False
        self.buckets: list[Bucket] = []
        self.unhooked: list[torch.Tensor] = []  # parameters that were frozen when the plan was made
        self.window = SampleWindow()
        self.upcoming: float = 0.0  # samples of the forward that is running
        self.globally_used: torch.Tensor | None = None
        self.unequal_counts_seen = False
        self.limits = limits
        self._may_replan = replan
        self._skip_unused = skip_unused
        self._check_finite = check_finite
        self._counted = False
        self._used_count = 0
        self._hold_always = False
        self._mode = _Mode.IDLE
        self._task = -1
        self._hold = False
        self._next = 0
        self._begun = False
        self._completion: int | None = None
        self._arrived: list[int] = []
        self._used_since_exchange: set[int] = set()
        self._silent: set[int] = set()  # reached by backward, but without a gradient
        self._passes: list[weakref.ref[ForwardPass]] = []
        self._lookouts: list[
            Any
        ] = []  # hooks on parameters, for a backward that comes another way than by the outputs
        self._hidden = False  # it does in this model
        self._traces = False  # there were such hooks
        self._awaiting = False  # a forward was made, and no backward has come to its outputs yet
        self._itself = weakref.ref(self)
        self._hooks_missing = False
        self._sees_all = True  # every parameter has a hook
        self._keeps_graph = False  # backward(create_graph=True): gradients have a history
        self._scaling: list[Any] = []
        self._handles: list[Any] = []
        weakref.finalize(self, _remove_all, self._handles)
        weakref.finalize(self, _remove_all, self._lookouts)
        self._new_plan: BucketPlan | None = None
        self._trouble: str | None = None
        self._lock = threading.RLock()  # modules on several devices run hooks from several threads
        self.number = next(_reducers)
        self.wait_labels: list[
            WaitLabel
        ] = []  # what a rank that waits for a bucket says it waits for
        self._filling_since = 0
        self._launched: list[tuple[int, int]] = []  # (bucket, when)
        if transport is not None:
            specs = self._specs()
            start = limits if bucketed_from_start else BucketLimits((UNLIMITED,))
            self._build(first_plan(specs, start))

    # ------------------------------------------------------------------------------------------ plan and buckets

    def _specs(self) -> list[GradientSpec]:
        in_place = self.transport.sums_in_place if self.transport is not None else _never
        return [
            GradientSpec(
                one.parameter.nbytes, _kind(one.parameter), one.sparse, in_place(one.parameter)
            )
            for one in self.managed
        ]

    def _build(self, plan: BucketPlan) -> None:
        assert self.transport is not None
        self.remove_hooks()
        self.transport.forget()
        self.buckets, self.unhooked = [], []
        for index, members in enumerate(plan.buckets):
            parameters = [self.managed[i].parameter for i in members]
            dtype = self.bucket_dtype if parameters[0].is_floating_point() else None
            if self.managed[members[0]].sparse:
                self.buckets.append(SparseBucket(index, members, parameters))
            elif self.transport.sums_in_place(parameters[0]):
                self.buckets.append(InPlaceBucket(index, members[0], parameters[0], dtype))
            else:
                allocate, fill = self.transport.allocate, self.transport.filler()
                self.buckets.append(DenseBucket(index, members, parameters, allocate, dtype, fill))
        self.plan = plan
        # The last bucket waits for the end of backward: with it goes this rank's last word on the
        # step. And so do those for which ranks wait.
        self._sent_early = len(self.buckets) - max(
            sum(isinstance(one, InPlaceBucket) for one in self.buckets), 1
        )
        self._name_buckets()
        self.unhooked = [
            one for bucket in self.buckets for one in bucket.parameters if not one.requires_grad
        ]
        self._hooks_missing = (
            True  # until a forward that may have a backward: wrapping for inference costs none
        )

    def _name_buckets(self) -> None:
        assert self.transport is not None
        names = [_listed([self.managed[i].name for i in bucket.members]) for bucket in self.buckets]
        number, members = group_number(f"{self.label} {self.number}"), self.transport.members
        self.wait_labels = [
            WaitLabel("all_reduce", self.label, number, members, one).packed() for one in names
        ]
        self.transport.wait_labels = self.wait_labels
        forward = f"{self.label}'s meeting before forward"
        self._before_forward = WaitLabel(forward, "", group_number(forward), members).packed()
        sizes = [
            sum(one.numel() * one.element_size() for one in bucket.parameters)
            for bucket in self.buckets
        ]
        recorder.buckets_planned(self.number, names, sizes)

    def _install_hooks(self) -> None:
        """A hook on every parameter; later, where only the end of backward counts, on few (see
        _needs_hook).
        """
        self._hooks_missing = False
        for bucket in self.buckets:
            for position, (index, parameter) in enumerate(
                zip(bucket.members, bucket.parameters, strict=True)
            ):
                if not parameter.requires_grad:
                    continue  # frozen since: it counts as unused until the next plan
                if self._sees_all or self._needs_hook(bucket, position):
                    hook = self._gradient_hook(bucket, position, index, parameter)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _needs_hook(self, bucket: Bucket, position: int) -> bool:
        """The last gradient of a bucket to arrive, unless it is sent at the end anyway; and those
        taken at once.
        """
        is_last = position == bucket.size - 1 and bucket.index < self._sent_early
        return is_last or (
            _is_large(bucket.parameters[position]) and not isinstance(bucket, InPlaceBucket)
        )

    def _gradient_hook(
        self, bucket: Bucket, position: int, index: int, parameter: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        # Runs once per parameter and backward: as few steps as possible, all names bound
        # beforehand. The parameter keeps the hook, so the hook must not keep the reducer.
        if not self._sees_all:
            return self._rare_hook(bucket.index, position, bucket.size, _is_large(parameter))
        fired, size, number = bucket.fired, bucket.size, bucket.index
        note_position, note_arrival = fired.append, self._arrived.append
        reducer = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            note_position(position)
            note_arrival(index)
            if len(fired) >= size:
                alive = reducer()
                if alive is not None:
                    alive.bucket_full(number)

        def arrived_large(_: torch.Tensor) -> None:
            alive = reducer()
            if alive is not None:
                alive.take(number, position)
            arrived(_)

        return arrived_large if _is_large(parameter) else arrived

    def _rare_hook(
        self, number: int, position: int, size: int, large: bool
    ) -> Callable[[torch.Tensor], None]:
        reducer = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            alive = reducer()
            if alive is not None:
                if large:
                    alive.take(number, position)
                if position == size - 1:
                    alive.bucket_full(number)

        return arrived

    def take(self, number: int, position: int) -> None:
        """A large gradient arrived."""
        bucket = self.buckets[number]
        if self._mode is _Mode.SYNCING and bucket.state is State.FILLING:
            bucket.take(position)

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """Called by this name by torch's optimizer-in-backward and mixed-precision hooks: a plain
        sum.
        """
        assert self.transport is not None
        return all_reduce(self.transport.group, bucket.buffer()).get_future()

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last step."""
        assert self.transport is not None
        if self.globally_used is None:
            return torch.full((len(self.managed),), self.transport.world, dtype=torch.int32)
        return self.globally_used

    def remove_hooks(self) -> None:
        """Leave the parameters as they were."""
        self._hooks_missing = False
        _remove_all(self._handles)
        _remove_all(self._lookouts)

    def follow_plan(self) -> bool:
        """Change to the plan made after the first step, before a forward; true the one time that
        happens.
        """
        if self._new_plan is None or self._mode is not _Mode.IDLE:
            return False
        plan, self._new_plan = self._new_plan, None
        for bucket in self.buckets:
            bucket.vacate()
        self._sees_all = self.transport is None or not self.transport.reduces_at_end
        self._build(plan)
        self.replanned = True
        return True

    # ------------------------------------------------------------------------------------------ forward

    def watch(self, tensors: Sequence[torch.Tensor], count: float, sync: bool) -> None:
        """Forward returned these tensors: when backward reaches one, it belongs to this pass."""
        if self._hooks_missing:
            self._install_hooks()
        if self._mode is _Mode.IDLE:
            if self._traces:
                self._remove_traces()
            self._forget_arrivals()
        elif torch._C._current_graph_task_id() < 0 and self._completion is not None:
            self._tell_failed_backward(
                self._completion, None
            )  # a backward failed unseen: peers may wait for it
        one = ForwardPass(count, sync)
        reached = functools.partial(_reached, self._itself, one)
        hooked = False
        for tensor in tensors:
            if tensor.requires_grad:
                hooked = True
                tensor.register_hook(reached)
        if self._awaiting or self._hidden or self.steps == 0 or not hooked:
            self._look_out_for(one)
        self._awaiting = True
        if hooked:
            if (
                len(self._passes) >= _PASSES_KEPT
            ):  # forwards without a backward: their outputs are gone
                self._passes = [ref for ref in self._passes if ref() is not None]
            self._passes.append(weakref.ref(one))

    def _look_out_for(self, one: ForwardPass) -> None:
        """Outputs in an opaque object, a loss kept as an attribute: then the first gradient shows a
        backward.
        """
        self._traces = True
        _remove_all(self._lookouts)
        reached = functools.partial(_reached_hidden, self._itself, one)
        self._lookouts += [
            each.parameter.register_hook(reached)
            for each in self.managed
            if each.parameter.requires_grad
        ]

    def _remove_traces(self) -> None:
        """A hook that was removed leaves an empty table, for which autograd calls Python in every
        backward.
        """
        if self._lookouts or torch._C._current_graph_task_id() >= 0:
            return  # not while autograd may be in one of them
        self._traces = False
        for one in self.managed:
            hooks = one.parameter._backward_hooks
            if hooks is not None and not hooks:
                one.parameter._backward_hooks = None

    def reached_hidden(self, one: ForwardPass, gradient: torch.Tensor) -> torch.Tensor:
        """Backward arrived at a parameter before it came to an output of forward."""
        if not self._hidden and self.steps > 0:
            _logger.warning(
                "%s: a backward does not pass what forward returned. The one before it was perhaps not seen, and then "
                "its gradients were not averaged over ranks; from now on all are. Return from forward whatever the "
                "loss is made of.",
                self.label,
            )
        self._hidden = True
        self.reached_output(one)
        return (
            self._scaled(gradient) if self._scaling else gradient
        )  # the hooks of _scale_by come too late for this

    def _forget_arrivals(self) -> None:
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.fired.clear()
            if not self._sees_all:
                bucket.remember_gradients()

    def _outstanding(self) -> list[ForwardPass]:
        """Forwards whose backward has not come yet."""
        passes = [
            one for one in (ref() for ref in self._passes) if one is not None and not one.spent
        ]
        self._passes = [weakref.ref(one) for one in passes]
        return passes

    @property
    def accumulating(self) -> bool:
        return self.window.open

    # ------------------------------------------------------------------------------------------ backward

    def reached_output(self, one: ForwardPass) -> None:
        """Backward arrived at an output of forward."""
        task = torch._C._current_graph_task_id()
        if one.task == task:
            return
        with self._lock:
            one.task = task
            if self._mode is _Mode.IDLE or self._completion is None:
                self._arm(task, one)
            else:
                self._add_pass(one)

    def _arm(self, task: int, one: ForwardPass) -> None:
        if self._lookouts:
            _remove_all(self._lookouts)
        self._mode = _Mode.SYNCING if one.sync else _Mode.MUTED
        self._task = task
        self._awaiting = False
        self._next = 0
        self._begun = self._counted = False
        self._used_count = 0
        self._trouble = None
        recorder.phase(_BACKWARD)
        if recorder.trace is not None:
            self._filling_since = time.monotonic_ns()
            self._launched.clear()
        self._keeps_graph = torch.is_grad_enabled()
        one.spent = True
        others = self._outstanding()
        # Nothing to overlap with one bucket; with several forwards outstanding, how many samples
        # this backward covers is known at its end only; and the first step is the one that shows
        # how gradients arrive.
        self._hold = self._hold_always or self.steps == 0 or len(self.buckets) == 1 or bool(others)
        self._count = one.count
        # Only the engine keeps the callback; we know it by its number.
        self._completion = next(_completions)
        Variable._execution_engine.queue_callback(_EndOfBackward(self, self._completion))
        count = one.count + sum(other.count for other in others)
        if self.window.open or (count == 0 and self._mode is _Mode.MUTED):
            self._scale_by(self._preview(count))
        if self._mode is _Mode.SYNCING:
            for bucket in self.buckets:
                bucket.prepare()

    def _add_pass(self, one: ForwardPass) -> None:
        one.spent = True
        self._count += one.count
        if one.sync and self._mode is _Mode.MUTED:
            self._mode = _Mode.SYNCING
            for bucket in self.buckets:
                bucket.prepare()

    def _preview(self, count: float) -> float:
        reference = self.window.contribution().reference
        return count / reference if reference else float(count != 0)

    def _scale_by(self, factor: float) -> None:
        """Weigh this micro-batch against the first: its gradients are scaled before they are
        accumulated.
        """
        if factor == 1.0 or not self._by_samples:
            return

        def scaled(gradient: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(gradient) if factor == 0 else gradient * factor

        self._scaled, self._traces = scaled, True
        for one in self.managed:
            if one.parameter.requires_grad:
                self._scaling.append(one.parameter.register_hook(scaled))

    @property
    def _by_samples(self) -> bool:
        return self.by_samples_alone if self.transport is None else self.transport.by_samples

    by_samples_alone = True

    def bucket_full(self, number: int) -> None:
        """As many gradients arrived as the bucket has: send it, and those after it that had to wait
        for it.
        """
        if self._mode is not _Mode.SYNCING:
            return
        bucket = self.buckets[number]
        with self._lock:
            if bucket.state is not State.FILLING:
                self._arrived_too_late(bucket)
                return
            if not self._is_full(bucket):
                return
            bucket.state = State.READY
            # A nested backward may bring more gradients to parameters that already have one.
            if self._hold or torch._C._current_graph_task_id() != self._task:
                self._hold = True
                bucket.state = State.FILLING
                return
            while self._next < self._sent_early and self.buckets[self._next].state is State.READY:
                self._send(self.buckets[self._next])

    def _is_full(self, bucket: Bucket) -> bool:
        if self._sees_all:
            return len(bucket.fired) <= bucket.size or len(set(bucket.fired)) >= bucket.size
        return bucket.surely_full and not self._keeps_graph

    def _look_for_late_arrivals(self) -> None:
        """Gradients that have changed since their bucket was sent, of parameters whose hook would
        have told.
        """
        for bucket in self.buckets[: self._next]:
            late = bucket.arrived()
            if late:
                bucket.fired[:] = late
                self._arrived_too_late(bucket)

    def _arrived_too_late(self, bucket: Bucket) -> None:
        name = self.managed[bucket.members[bucket.fired[-1]]].name
        self._hold_always = True
        self._trouble = (
            f"{name} got another gradient in the same backward after its bucket had been sent. From now on buckets "
            "are sent at the end of backward: repeat the step. This comes from nested backward passes (re-entrant "
            "checkpointing) over shared parameters; torch.utils.checkpoint(..., use_reentrant=False) avoids it."
        )

    def _count_samples(self) -> None:
        if not self._counted:
            self._counted = True
            self.window.add(self._count)

    def _begin(self) -> None:
        """Tell the peers what this rank brings; learn whether any of them has failed."""
        assert self.transport is not None
        if self._begun:
            return
        self._begun = True
        failed = self._trouble is not None
        contribution = self.window.contribution()
        signal = Signal(Call.BACKWARD, contribution, failed=failed, unused=self._has_unused())
        self.transport.begin(signal, alone=len(self.buckets) == 1)
        if self.transport.needs_signals_first:
            self._enter_wait(at_end=False)
            try:
                self._check(self.transport.began())
            finally:
                recorder.leave()

    def _enter_wait(self, *, at_end: bool) -> None:
        """This rank has come to a point of the step where it waits for the others."""
        recorder.enter(self.wait_labels[0], 2 * self.steps + at_end, 0)

    def _close(self) -> None:
        """With one bucket everything was known at its beginning; with several, this is the last
        word.
        """
        assert self.transport is not None
        if len(self.buckets) > 1:
            failed = self._trouble is not None
            self.transport.close(Signal(Call.CLOSE, failed=failed, unused=self._has_unused()))

    def _has_unused(self) -> bool:
        """Known once every bucket has been gathered: at the end of a step, which is where it is
        asked.
        """
        return self._used_count < len(self.managed)

    def _used(self) -> set[int]:
        return self._used_since_exchange.union(self._arrived) - self._silent

    def _anything_arrived(self) -> bool:
        if self._sees_all or self._next:
            return bool(self._arrived)
        return any(bucket.arrived() for bucket in self.buckets)

    def _note_arrivals(self, bucket: Bucket) -> None:
        """Parameters without a hook: look which of them have a gradient."""
        if not self._sees_all:
            bucket.fired[:] = bucket.arrived()
            self._arrived.extend(bucket.members[position] for position in bucket.fired)

    def _send(self, bucket: Bucket) -> None:
        """Fill what is not filled and hand the bucket to the transport."""
        with torch.no_grad():
            self._count_samples()
            self._note_arrivals(bucket)
            reached = self._used_in(bucket)
            empty = self._by_samples and self.window.contribution().empty
            used = bucket.gather(reached, contribute=not empty)
            self._used_count += len(used)
            if len(used) < len(reached):
                self._silent.update(bucket.members[position] for position in reached - used)
            if self._check_finite and not bucket.is_finite():
                self._name_non_finite(bucket)
            self._begin()
            if bucket.index == len(self.buckets) - 1:
                self._close()
            bucket.state = State.IN_FLIGHT
            self._next = bucket.index + 1
            if not self._sees_all and not self._hold:
                bucket.remember_gradients()
            if self._skip_unused and not used:
                return
            self._launch(bucket)
            self._note_launch(bucket)

    def _note_launch(self, bucket: Bucket) -> None:
        if recorder.trace is not None:
            now = time.monotonic_ns()
            recorder.bucket_filled(bucket.index, self.number, self._filling_since, now)
            self._filling_since = now
            self._launched.append((bucket.index, now))

    def _note_averages(self) -> None:
        if recorder.trace is not None and self._launched:
            now = time.monotonic_ns()
            done = self.transport.averaged_at if self.transport is not None else {}
            for index, since in self._launched:
                recorder.bucket_averaged(index, self.number, since, done.get(index, now))
            self._launched.clear()

    def _name_non_finite(self, bucket: Bucket) -> None:
        names = [self.managed[index].name for index in bucket.members]
        found = [
            name
            for name, one in zip(names, bucket.parameters, strict=True)
            if not _is_finite(one.grad)
        ]
        self._trouble = f"non-finite gradient of {', '.join(found[:10])}\n"

    def _launch(self, bucket: Bucket) -> None:
        assert self.transport is not None
        if self.hook is None:
            self.transport.launch(bucket)
        else:
            # A hook divides by the world size itself: it gets what makes that division exact.
            bucket.scale(self.transport.weight() * self.transport.world)
            self.hook.start(bucket, is_last=bucket.index == len(self.buckets) - 1)

    def _used_in(self, bucket: Bucket) -> set[int]:
        used = set(bucket.fired)
        if len(used) < bucket.size and self._used_since_exchange:
            used.update(
                i for i, index in enumerate(bucket.members) if index in self._used_since_exchange
            )
        return used

    # ------------------------------------------------------------------------------------------ end of backward

    def end_of_backward(self, completion: int) -> None:
        """The outermost backward is through."""
        if completion != self._completion:
            return
        self._remove_scaling()
        try:
            if self.transport is not None and not self._anything_arrived():
                # torch.autograd.grad, or parameters that stand in for ours: nothing of ours was
                # touched
                return
            if self._mode is _Mode.MUTED:
                self._count_samples()
                for bucket in self.buckets:
                    self._note_arrivals(bucket)
                self._used_since_exchange.update(self._arrived)
            elif self.transport is None:
                self._weigh_alone()
            else:
                start = time.perf_counter()
                with torch.no_grad():
                    self._complete()
                self.last_sync_seconds = time.perf_counter() - start
        finally:
            self._go_idle()
            if recorder.current == _BACKWARD:
                recorder.phase(_OTHER)

    def _weigh_alone(self) -> None:
        """One rank: only micro-batches of different sizes change anything."""
        self._count_samples()
        contribution = self.window.contribution()
        weight = weight_of(
            0, [contribution], by_samples=self.by_samples_alone, divide_by_world=False
        )
        if weight not in (0.0, 1.0):
            for one in self.managed:
                if one.parameter.grad is not None:
                    one.parameter.grad.mul_(weight)

    def _complete(self) -> None:
        assert self.transport is not None
        if not self._sees_all:
            if len(self.buckets) == 1 and self._complete_at_once(self.buckets[0]):
                return
            self._look_for_late_arrivals()
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        self._finish()

    def _complete_at_once(self, bucket: Bucket) -> bool:
        """The usual step of a small model: every gradient is there, one call does the rest. False:
        nothing is done.
        """
        assert self.transport is not None
        if self._trouble is not None or self._check_finite or not isinstance(bucket, DenseBucket):
            return False
        self._count_samples()
        contribution = self.window.contribution()
        if contribution.empty or not bucket.place_quickly():
            return False
        bucket.fired.extend(bucket.positions)
        self._arrived.extend(bucket.members)
        self._used_count, self._begun, self._next = bucket.size, True, 1
        bucket.state = State.IN_FLIGHT
        self._note_launch(bucket)
        self._enter_wait(at_end=True)
        try:
            alike = self.transport.reduce_single_bucket(_row_of(contribution), bucket)
            signals = () if alike else self._wait_for_all()
        finally:
            recorder.leave(then=_OTHER)
        self._note_averages()
        recorder.count(_SYNCS)
        self._give_out(signals)
        return True

    def _finish(self) -> None:
        """Wait for all buckets, agree on what was used, give out the averages. Also run by ranks
        without data.
        """
        self._enter_wait(at_end=True)
        try:
            signals = self._wait_for_all()
        finally:
            recorder.leave(then=_OTHER)
        self._note_averages()
        recorder.count(_SYNCS)
        self._give_out(signals)

    def _wait_for_all(self) -> list[Signal]:
        assert self.transport is not None
        if self.hook is not None:
            self.hook.finish()
        for future in self.pending_futures:
            future.wait()
        self.pending_futures.clear()
        if not self.transport.needs_signals_first:
            self._check(self.transport.began())
        signals = self.transport.finish()
        self._check(signals)
        return signals

    def _give_out(self, signals: Sequence[Signal]) -> None:
        used = self._agree_on_used(any(signal.unused for signal in signals))
        for action in self.before_scatter:
            action()
        for bucket in self.buckets:
            members = enumerate(bucket.members)
            positions = (
                range(bucket.size) if used is None else [i for i, index in members if index in used]
            )
            if not self.optimizer_in_backward:
                bucket.scatter(positions)
            bucket.state = State.DONE
        self.steps += 1
        if self.steps == 1:
            self._agree_on_plan()
        for action in self.after_step:
            action()

    def _agree_on_used(self, some_unused: bool) -> set[int] | None:
        """Parameters that got a gradient on any rank; None means all."""
        if not some_unused:
            self.globally_used = None
            return None
        assert self.transport is not None
        local = torch.zeros(len(self.managed), dtype=torch.int32)
        local[sorted(self._used())] = 1
        table = self.transport.all_reduce_small(local)
        self.globally_used = table
        used = set(table.nonzero().flatten().tolist())
        return None if len(used) == len(self.managed) else used

    def _agree_on_plan(self) -> None:
        """After the first step: buckets in the order in which rank 0's gradients arrived."""
        assert self.transport is not None
        if len(set(self._arrived)) < len(self._arrived):
            self._hold_always = True  # nested backwards: a parameter may get several gradients
        if not self._may_replan:
            return
        limit = 0 if self.limits.given else self.transport.measure_limit()
        proposal = torch.tensor(
            [limit, *plan_order(self._arrived, len(self.managed))], dtype=torch.int64
        )
        if self.transport.rank != 0:
            proposal.zero_()
        limit, *order = self.transport.all_reduce_small(proposal).tolist()
        if limit:
            self.limits = BucketLimits((limit,))
        self._new_plan = plan_buckets(self._specs(), self.limits, order)

    def _go_idle(self) -> None:
        if self._mode is _Mode.SYNCING:
            self.window.clear()
            self._used_since_exchange.clear()
        self._mode = _Mode.IDLE
        self._completion = None
        self._task = -1
        self._begun = False
        self._arrived.clear()
        self._silent.clear()
        for bucket in self.buckets:
            bucket.reset()
        if not self._sees_all and self._outstanding():
            self._forget_arrivals()  # the next backward needs no forward before it

    def _remove_scaling(self) -> None:
        for handle in self._scaling:
            handle.remove()
        self._scaling = []

    # ------------------------------------------------------------------------------------------ without data

    def answer(self, answer_forward: Callable[[Sequence[Signal]], None]) -> list[Signal]:
        """Take part in whatever the peers do next, bringing nothing. Returns their signals; all
        ANSWER: all done.
        """
        assert self.transport is not None
        self.follow_plan()
        self.transport.begin(Signal(Call.ANSWER))
        self._enter_wait(at_end=not self.transport.needs_signals_first)
        try:
            signals = self.transport.began()
        finally:
            recorder.leave()
        self._check(signals)
        call = common_call(signals, self.label)
        if call is Call.FORWARD:
            answer_forward(signals)
        elif call is Call.BACKWARD:
            self._answer_backward()
        return signals

    def _answer_backward(self) -> None:
        self._mode, self._begun, self._next, self._trouble = _Mode.SYNCING, True, 0, None
        self._used_count = 0
        try:
            with torch.no_grad():
                self._send_nothing()
                self._finish()
        finally:
            self._go_idle()

    def _send_nothing(self) -> None:
        """Take part in the buckets that are not under way yet, bringing zeros."""
        for bucket in self.buckets[self._next :]:
            bucket.gather((), contribute=False)
            self._next = bucket.index + 1
            if self._next == len(self.buckets):
                self._close()
            self._launch(bucket)

    # ------------------------------------------------------------------------------------------ failures

    def _check(self, signals: Sequence[Signal]) -> None:
        """Everybody sees the same signals, so everybody raises or nobody does."""
        first = signals[0]
        if not first.failed and signals.count(first) == len(signals):
            return
        if any(signal.failed for signal in signals):
            self._raise_failure(signals)
        common_call(signals, self.label)
        self._notice_unequal_counts(signals)

    def _raise_failure(self, signals: Sequence[Signal]) -> None:
        assert self.transport is not None
        failed, texts = self._share_failure(signals)
        rank = self.transport.rank
        if rank in failed:
            raise StepError(texts[rank], rank=rank, traceback=texts[rank])
        told = "\n".join(f"rank {one}:\n{texts[one].rstrip()}" for one in failed)
        raise StepError(
            f"rank {failed[0]} failed in this step, so no rank applies it (this is rank {rank}). Its error:\n{told}",
            rank=failed[0],
            traceback=texts[failed[0]],
        )

    def _share_failure(self, signals: Sequence[Signal]) -> tuple[list[int], list[str]]:
        """End the step on all ranks and exchange what went wrong: who failed, and every rank's
        text.
        """
        assert self.transport is not None
        at_beginning = any(signal.call is Call.BACKWARD for signal in signals)
        if at_beginning and not self.transport.needs_signals_first:
            # Peers did not wait for our signal and have buckets under way: bring them to their end.
            with torch.no_grad():
                self._send_nothing()
            self.transport.finish()
        texts = self.transport.all_gather_text(self._trouble or "")
        self.last_error = "\n".join(filter(None, texts))
        self.abandon_step()
        return [rank for rank, signal in enumerate(signals) if signal.failed], texts

    def fail(self, error: BaseException | None, where: str) -> None:
        """This rank cannot finish its step: take part in what is left of it, bringing nothing, and
        say why.
        """
        if self.transport is None or isinstance(error, PacelineError):
            self.abandon_step()
            return
        callers = traceback.format_stack()[:-2]
        ending = (
            traceback.format_exception(error)
            if error is not None
            else [f"{where} raised an error\n"]
        )
        self._trouble = "".join(callers + ending)
        self.failures += 1
        if not self._begun:
            self._next = 0
            self.follow_plan()  # as the peers did before their forward
            signals = self.transport.exchange(Signal(Call.ANSWER, failed=True))
        else:
            with torch.no_grad():
                self._send_nothing()
            if self.hook is not None:
                self.hook.finish()
            signals = self.transport.finish()
        self._share_failure(signals)

    def backward_failed(self, completion: int, caller: FrameType | None) -> None:
        """Backward raised: the engine dropped our callback. `caller` is where the error will
        arrive.
        """
        if completion != self._completion:
            return
        self._remove_scaling()
        if self.defer_failure:
            return
        if self._mode is not _Mode.SYNCING:
            self.abandon_step()
        elif caller is None:  # a thread of the engine: nobody shows us the error
            self._tell_failed_backward(completion, None)
        else:
            when_raised_in(caller, functools.partial(self._tell_failed_backward, completion))

    def _tell_failed_backward(self, completion: int, error: BaseException | None) -> None:
        if completion == self._completion and not isinstance(error, KeyboardInterrupt | SystemExit):
            with contextlib.suppress(
                PacelineError
            ):  # the peers are gone: what is raised is the error at hand
                self.fail(error, "backward")

    def meet(self, signal: Signal) -> list[Signal]:
        """Exchange signals outside backward. Raises if a peer has failed."""
        assert self.transport is not None
        with recorder.waiting(self._before_forward, self.steps):
            signals = self.transport.exchange(signal)
            self._check(signals)
        return signals

    def use_bucket_dtype(self, dtype: torch.dtype | None) -> None:
        """Average in another dtype than that of the parameters."""
        self.bucket_dtype = dtype
        if self.transport is not None:
            self._build(self.plan)

    def abandon_step(self) -> None:
        self._remove_scaling()
        self._mode = _Mode.SYNCING  # so that the samples counted so far are forgotten
        self._go_idle()

    @property
    def in_backward(self) -> bool:
        return self._mode is not _Mode.IDLE

    def _notice_unequal_counts(self, signals: Sequence[Signal]) -> None:
        totals = [signal.contribution.total for signal in signals]
        if self.unequal_counts_seen or not self._by_samples or not any(totals):
            return
        if (
            len(
                {
                    total
                    for total, signal in zip(totals, signals, strict=True)
                    if signal.call is not Call.ANSWER
                }
            )
            > 1
        ):
            self.unequal_counts_seen = True
            for action in self.on_unequal_counts:
                action(totals)

    on_unequal_counts: tuple[Callable[[list[float]], None], ...] = ()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(
        torch.isfinite(tensor.coalesce().values() if tensor.is_sparse else tensor).all()
    )


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _reached(reducer: weakref.ref[Reducer], one: ForwardPass, _: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.reached_output(one)


def _reached_hidden(
    reducer: weakref.ref[Reducer], one: ForwardPass, gradient: torch.Tensor
) -> torch.Tensor:
    alive = reducer()
    return gradient if alive is None else alive.reached_hidden(one, gradient)


def _is_large(parameter: torch.Tensor) -> bool:
    return parameter.numel() * parameter.element_size() >= _TAKE_AT_ONCE_BYTES


def _never(_: torch.Tensor) -> bool:
    return False


def _row_of(contribution: Contribution) -> list[float]:
    """The signal of a backward that went well, packed."""
    one = contribution
    return [
        float(Call.BACKWARD),
        one.reference,
        one.total,
        float(one.micro_batches),
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def _kind(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
