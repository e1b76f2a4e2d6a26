"""Being observed: what a process sets up when it joins a job, and takes down when it leaves."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.telemetry.collective_recorder import CallNotes
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Field, Phase
from paceline.telemetry.variables import RUN_ID, STALL_AFTER, TRACE, WATCHED, stall_after_s

if TYPE_CHECKING:
    from paceline.diagnostics.diagnosis import Diagnosis
    from paceline.diagnostics.peer_pages import Peers
    from paceline.diagnostics.stall_watcher import StallWatch

__all__ = ["begin", "end", "joined", "paused", "trace"]


class _Session:
    """What this process has set up: process-wide, as torch's default group is."""

    notes: CallNotes | None = None
    stall_watch: StallWatch | None = None
    handles: tuple[Any, ...] = ()


def begin(rank: int, world: int, *, job: str | None = None) -> None:
    """A process knows its place: show what it does from here on, and trace it if the environment
    asks for that.
    """
    recorder.open_page(
        job=job or os.environ.get(RUN_ID) or uuid.uuid4().hex, rank=rank, world=world
    )
    directory = os.environ.get(TRACE)
    if directory and recorder.trace is None:
        recorder.start_trace(directory, rank, world)
    # A script may make its groups with torch's own functions. Without torch it has to be one of
    # ours to be noted.
    if "torch.distributed" in sys.modules:
        _note_calls()


def _note_calls() -> None:
    if _Session.notes is None:
        _Session.notes = CallNotes()
        _Session.notes.install()
        _Session.handles = _note_optimizers()


def joined(rank: int, world: int, *, job: str, timeout_s: float) -> None:
    """The default group is there: note its calls, and watch for stalls if no launcher does."""
    begin(rank, world, job=job)
    recorder.page.words[Field.TIMEOUT] = int(timeout_s * 1e9)
    recorder.phase(Phase.OTHER)
    limit = stall_after_s(os.environ.get(STALL_AFTER))
    if world > 1 and os.environ.get(WATCHED) != "1" and _Session.stall_watch is None:
        _Session.stall_watch = _watch_others(rank, limit)


def _watch_others(rank: int, limit_s: float) -> StallWatch:
    from paceline.diagnostics.peer_pages import (
        Peers,  # ranks of a launcher do without: it does this for them
    )
    from paceline.diagnostics.stall_watcher import StallWatch

    peers = Peers()
    watch = StallWatch(peers.views, _say, limit_s, lambda: _is_on_duty(peers, rank), _mark)
    watch.start()
    return watch


def _is_on_duty(peers: Peers, rank: int) -> bool:
    """The first rank of a host that can: one that is stopped, or stuck with Python's lock held,
    cannot tell.
    """
    recorder.page.words[Field.WATCHED_AT] = time.monotonic_ns()
    return peers.nobody_watches_before(rank)


def end() -> None:
    """The process leaves its job."""
    stall_watch, _Session.stall_watch = _Session.stall_watch, None
    if stall_watch is not None:
        stall_watch.stop()
    notes, _Session.notes = _Session.notes, None
    if notes is not None:
        notes.remove()
    for handle in _Session.handles:
        handle.remove()
    _Session.handles = ()
    recorder.stop_trace()
    recorder.close_page()


def _mark(diagnosis: Diagnosis) -> None:
    """A rank that takes the watch over again shall not repeat what was told meanwhile."""
    recorder.page.words[Field.TOLD] = diagnosis.waiting[0][1]


@contextmanager
def paused() -> Iterator[None]:
    """Leave torch's classes and optimizers alone inside the block: for measuring what noting costs."""
    notes, handles = _Session.notes, _Session.handles
    if notes is not None:
        notes.remove()
    for handle in handles:
        handle.remove()
    try:
        yield
    finally:
        if notes is not None:
            notes.install()
            _Session.handles = _note_optimizers()


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


def _note_optimizers() -> tuple[Any, ...]:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    optimizer, other = int(Phase.OPTIMIZER), int(Phase.OTHER)

    def before(*_: Any) -> None:
        recorder.phase(optimizer)

    def after(*_: Any) -> None:
        recorder.phase(other, again=True)

    return register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)


@contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this rank does inside the block; `paceline report DIRECTORY` makes a page of all
    ranks' records.

        with paceline.trace("runs/today"):
            train()

    Call it on every rank, after `init_process_group()`.
    """
    page = recorder.page.words
    rank, world = int(page[Field.RANK]), max(1, int(page[Field.WORLD]))
    recorder.start_trace(os.fspath(directory), rank, world)
    try:
        yield
    finally:
        recorder.stop_trace()
