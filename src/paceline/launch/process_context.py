"""What this process holds as a member of a job: one object, which `init_process_group` creates and
`destroy_process_group` drops.

    placement          where this rank is, if `init_process_group` found it
    store              the part of the job's store that belongs to this group
    elastic            how this rank enters the generations of an elastic job, if it is in one
    session            the status page, the recorded calls, the stall watcher
    save listener      made by the first `save_requested()`, with or without a group

Everything is closed in one place, `ProcessContext.close`, in the order that peers depend on. A
process that calls `save_requested()` without `paceline.init_process_group` gets a context that
holds just that.

Some state has to live longer than a membership, or below it, and stays process-wide:

    telemetry.recorder.recorder   Bound by name on hot paths; an object per group would cost every
                                  collective a lookup. The session opens and closes its page.
    diagnostics.session           Patches torch's classes, of which there is one set per process;
                                  the launcher begins a session before there is a group.
    failure_channel's hooks       sys.excepthook and threading.excepthook belong to the interpreter.
                                  A failure channel exists as long as its group, which may have been
                                  made with torch's own functions.
    core.communicator             One descriptor per watched process, however many groups watch it,
                                  and a fork handler that disables communicators in a child.
    launch.store                  Servers at a given address and the number of groups joined so far:
                                  they keep a group apart from the one before it.
    checkpoint                    Counts its calls, so that their keys in the store never repeat.
    fork and exit handlers        os.register_at_fork cannot be undone: registered once, they look
                                  up the current context.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import sys
import time
import uuid
from typing import TYPE_CHECKING

from paceline.core.store_exchange import wait_for_keys
from paceline.diagnostics import session
from paceline.launch.placement import Placement
from paceline.launch.save_listener import SaveListener
from paceline.telemetry.variables import RUN_ID

if TYPE_CHECKING:
    from paceline._torch_internals import Store
    from paceline.launch.elastic_group import ElasticGroup

__all__ = ["ProcessContext", "current_context", "drop_context", "enter_context"]

_LEAVE_TIMEOUT_S = 10.0


class ProcessContext:
    """One membership of this process in a default group."""

    def __init__(
        self,
        placement: Placement | None = None,
        store: Store | None = None,
        *,
        serves_store: bool = False,
        elastic: ElasticGroup | None = None,
    ) -> None:
        self.placement = placement
        self.elastic = elastic
        self._store = store
        self._serves_store = serves_store
        self._pid = os.getpid()
        self._save_listener: SaveListener | None = None

    def observe_default_group(self, timeout: datetime.timedelta | None) -> None:
        """Publish what this rank does, and the error that ends it. The job's name is the
        launcher's, or one that the ranks agree on in their store.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import default_pg_timeout

        from paceline._torch_internals import default_store
        from paceline.backend.store_failure_channel import failure_channel_of

        group = dist.group.WORLD
        assert group is not None
        failure_channel_of(group)
        job = os.environ.get(RUN_ID) or uuid.uuid4().hex
        if RUN_ID not in os.environ and group.size() > 1:
            job = default_store().compare_set("paceline/job", "", job).decode()
        timeout_s = (timeout or default_pg_timeout).total_seconds()
        session.joined(group.rank(), group.size(), job=job, timeout_s=timeout_s)

    def save_listener(self) -> SaveListener:
        """The listener for save requests, which starts to listen when it is first asked for."""
        if self._save_listener is None:
            self._save_listener = SaveListener()
            _register_handlers()
        return self._save_listener

    def detach_save_listener(self) -> SaveListener | None:
        """Forget the listener, if there is one, without closing it."""
        listener, self._save_listener = self._save_listener, None
        return listener

    @property
    def active_save_listener(self) -> SaveListener | None:
        """The listener, if there is one."""
        return self._save_listener

    def close(self) -> None:
        """Leave the job. Does nothing in a forked child, which never was a member."""
        if os.getpid() != self._pid:
            return
        session.end()
        if (listener := self.detach_save_listener()) is not None:
            listener.close()
        self._leave_store()

    def _leave_store(self) -> None:
        """Rank 0 may serve the store that others still read: it goes last, unless they do not come,
        or it has failed.
        """
        placement, store = self.placement, self._store
        if placement is None or store is None or placement.world_size == 1:
            return
        with contextlib.suppress(RuntimeError):  # the server is gone already
            store.set(f"left/{placement.rank}", "1")
            if self._serves_store and not hasattr(sys, "last_value"):
                keys = [f"left/{rank}" for rank in range(placement.world_size)]
                wait_for_keys(store, keys, time.monotonic() + _LEAVE_TIMEOUT_S)


class _Process:
    """The current context, and the listener that holds signals back while a fork is under way."""

    context: ProcessContext | None = None
    forking: SaveListener | None = None


def current_context() -> ProcessContext | None:
    """The context of this process, if it has one."""
    return _Process.context


def enter_context(context: ProcessContext) -> ProcessContext:
    """Make this the context of the process. One that `save_requested()` made before is closed."""
    drop_context()
    _Process.context = context
    return context


def drop_context() -> None:
    """Close the context of this process, if it has one."""
    context, _Process.context = _Process.context, None
    if context is not None:
        context.close()


@functools.cache
def _register_handlers() -> None:
    atexit.register(drop_context)
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


def _before_fork() -> None:
    _Process.forking = _Process.context.active_save_listener if _Process.context else None
    if _Process.forking is not None:
        _Process.forking.hold_signals()


def _after_fork() -> None:
    listener, _Process.forking = _Process.forking, None
    if listener is not None:
        listener.release_signals()


def _after_fork_in_child() -> None:
    if _Process.context is not None:
        _Process.context.detach_save_listener()
    if _Process.forking is not None:
        _Process.forking.abandon_signals()
    _after_fork()
