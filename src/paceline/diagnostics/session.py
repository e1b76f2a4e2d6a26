"""Being observed: what a process sets up when it joins a job, and takes down when it leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.diagnostics.optimizer_facts import OptimizerFacts, facts_of
from paceline.telemetry.collective_recorder import CollectiveRecorder
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Field, Phase
from paceline.telemetry.trace_writer import TraceWriter
from paceline.telemetry.variables import RUN_ID, STALL_AFTER, TRACE, WATCHED, stall_after_s

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from paceline.diagnostics.host_ranks import HostRanks
    from paceline.diagnostics.stall_watcher import StallWatch

__all__ = ["begin", "end", "joined", "paused", "trace"]


class _TorchHooks:
    """Everything in torch that reports to the recorder: process groups and optimizers."""

    def __init__(self) -> None:
        from paceline.backend.process_group import PacelineGroup
        from paceline.backend.work import DoneWork, PendingWork

        self._collectives = CollectiveRecorder([PacelineGroup], [PendingWork], DoneWork)
        self._optimizers: tuple[RemovableHandle, ...] = ()

    def install(self) -> None:
        self._collectives.install()
        self._optimizers = _hook_optimizers()

    def remove(self) -> None:
        self._collectives.uninstall()
        for handle in self._optimizers:
            handle.remove()
        self._optimizers = ()


class _MentionedOptimizer:
    """The one on the status page: the largest of those that torch steps with its loop."""

    def __init__(self) -> None:
        self._largest: OptimizerFacts | None = None
        self._count = 0

    def describe(self, facts: OptimizerFacts) -> None:
        self._count += 1
        is_larger = self._largest is None or facts.elements > self._largest.elements
        if facts.code.could_be_fused and is_larger:
            self._largest = facts
        if self._largest is not None:
            content = {"is_only_one": self._count == 1, "facts": self._largest.dump()}
            recorder.page.write_optimizer(json.dumps(content).encode())


_NOT_DESCRIBED = object()


def _hook_optimizers() -> tuple[RemovableHandle, ...]:
    from torch.optim.optimizer import (
        Optimizer,
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    stepping, other = int(Phase.OPTIMIZER), int(Phase.OTHER)
    # Those that were described already, on the page and in which trace.
    described: weakref.WeakKeyDictionary[Optimizer, TraceWriter | None]
    described = weakref.WeakKeyDictionary()
    mentioned = _MentionedOptimizer()

    def before(optimizer: Optimizer, *_: object) -> None:
        recorder.phase(stepping)
        trace = recorder.trace
        if described.get(optimizer, _NOT_DESCRIBED) is not trace:
            described[optimizer] = trace
            if (facts := facts_of(optimizer)) is not None:
                mentioned.describe(facts)
                if trace is not None:
                    trace.add_optimizer(facts.dump())

    def after(*_: object) -> None:
        recorder.phase(other, again=True)

    return register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)


@dataclasses.dataclass
class _Session:
    """What this process has set up: process-wide, as torch's default group is."""

    hooks: _TorchHooks | None = None
    peers: HostRanks | None = None
    stall_watch: StallWatch | None = None


_session = _Session()


def begin(rank: int, world: int, *, job: str | None = None, page_fd: int | None = None) -> None:
    """Start to observe a process that knows its rank; trace it if the environment asks for that.
    `page_fd` is a status page that its launcher has made for it.
    """
    if page_fd is not None:
        recorder.inherit_page(page_fd)
    recorder.open_page(
        job=job or os.environ.get(RUN_ID) or uuid.uuid4().hex, rank=rank, world=world
    )
    directory = os.environ.get(TRACE)
    if directory and recorder.trace is None:
        recorder.start_trace(directory, rank, world)
    # A script may make its groups with torch's own functions. If torch is not imported yet, it has
    # to join with ours to be observed.
    if "torch.distributed" in sys.modules and _session.hooks is None:
        _session.hooks = _TorchHooks()
        _session.hooks.install()


def joined(rank: int, world: int, *, job: str, timeout_s: float) -> None:
    """The default group exists: record its calls, and watch for stalls if no launcher does."""
    begin(rank, world, job=job)
    recorder.page.fields[Field.TIMEOUT] = int(timeout_s * 1e9)
    recorder.phase(Phase.OTHER)
    limit_s = stall_after_s(os.environ.get(STALL_AFTER))
    if world > 1 and os.environ.get(WATCHED) != "1" and _session.stall_watch is None:
        _watch_peers(rank, limit_s)


def _watch_peers(rank: int, limit_s: float) -> None:
    # Imported here: ranks of a launcher, which watches for them, do without.
    from paceline.diagnostics.host_ranks import HostRanks
    from paceline.diagnostics.stall_watcher import StallWatch

    _session.peers = peers = HostRanks()
    _session.stall_watch = StallWatch(
        peers.views, _report, limit_s, lambda: _is_on_duty(peers, rank), peers.may_report
    )
    _session.stall_watch.start()


def _is_on_duty(peers: HostRanks, rank: int) -> bool:
    """Whether this rank is the one of its host to report stalls: the lowest one that can. A rank
    that is stopped, or stuck while it holds the GIL, cannot.
    """
    recorder.page.fields[Field.WATCHED_AT] = time.monotonic_ns()
    return not peers.is_watched_below(rank)


def _report(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


def end() -> None:
    """The process leaves its job."""
    stall_watch, _session.stall_watch = _session.stall_watch, None
    if stall_watch is not None:
        stall_watch.stop()
    peers, _session.peers = _session.peers, None
    if peers is not None:
        peers.close()
    hooks, _session.hooks = _session.hooks, None
    if hooks is not None:
        hooks.remove()
    recorder.stop_trace()
    recorder.close_page()


@contextmanager
def paused() -> Iterator[None]:
    """Leave torch's classes and optimizers alone inside the block: to measure what telemetry
    costs.
    """
    hooks = _session.hooks
    if hooks is not None:
        hooks.remove()
    try:
        yield
    finally:
        if hooks is not None:
            hooks.install()


def _place() -> tuple[int, int]:
    """The rank of this process and the number of all: those of torch's default group, which the
    program may have made without us.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
    fields = recorder.page.fields
    return int(fields[Field.RANK]), max(1, int(fields[Field.WORLD]))


@contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this rank does inside the block. Use it on every rank, after
    `init_process_group()`.

    Args:
        directory: for the ranks' records; `paceline report DIRECTORY` makes one page of them.

    Returns:
        A context manager.

    Example:
        ```python
        with paceline.trace("runs/today"):
            train()
        ```
    """
    recorder.start_trace(os.fspath(directory), *_place())
    try:
        yield
    finally:
        recorder.stop_trace()
