"""The failure channel: the error that ends a rank is published to the peers that wait for it.

Whatever carries a text to the peers of one group is a `FailureChannel`; it is registered here while
its group lives. Groups of one host publish through their shared memory, others through their store.
An error that nobody handles reaches the channels

    from sys.excepthook         the program ends with it
    from threading.excepthook   a thread dies with it and the program goes on: peers read it if this
                                rank is missed later
    from a finalizer            multiprocessing catches whatever its processes raise, but runs
                                finalizers before
    through `publish_error`     our launcher catches it, too
    through `error_in_flight`   a group is destroyed in a `finally` while an error passes

The hooks are installed as long as a channel is registered; those that were there before are called
after ours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from paceline._interpreter import find_caller
from paceline.errors import PacelineError, PeerLost

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

__all__ = [
    "FailureChannel",
    "error_in_flight",
    "format_error",
    "peer_failed",
    "previous_excepthook",
    "publish_error",
    "register_channel",
    "registered_channels",
    "truncate",
    "unregister_channel",
]

# The priority of our finalizer among multiprocessing's: before those that close what the text is
# carried by.
_FINALIZER_PRIORITY = 1000

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_ThreadExceptHook = Callable[[threading.ExceptHookArgs], Any]


class FailureChannel(Protocol):
    """Carries the text of an error to the peers of one group."""

    def publish(self, text: str, *, leaving: bool) -> None:
        """Leave a text for the peers. `leaving`: those that wait for this rank need not wait any
        longer.
        """

    def lost_peer(self) -> PeerLost | None:
        """The failure a peer has published and this rank has not raised yet, if there is one."""

    def wait_for_readers(self) -> None:
        """Called when this process is about to end: the text may need it a moment longer."""


def register_channel(channel: FailureChannel) -> None:
    """From now on errors are published to the peers of this group, too."""
    _hooks.install()
    _hooks.channels.add(channel)


def unregister_channel(channel: FailureChannel) -> None:
    """The group is gone."""
    _hooks.channels.discard(channel)
    if not _hooks.channels:
        _hooks.remove()


def registered_channels() -> list[FailureChannel]:
    """The channels of all groups of this process."""
    return list(_hooks.channels)


def publish_error(error: BaseException, *, leaving: bool = True) -> None:
    """Publish an error that nobody handles to all peers. Never raises, never waits."""
    _hooks.publish_error(error, leaving)


def error_in_flight() -> str:
    """The error that is being handled right now, as text; empty if there is none, or if it has been
    published already.
    """
    error = sys.exception()
    if error is None or _is_success(error) or error is _hooks.published:
        return ""
    return format_error(error)


def format_error(error: BaseException) -> str:
    """The error with its traceback."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # an exception whose own __str__ fails
        return f"{type(error).__name__}\n"


def truncate(text: str, limit_bytes: int) -> bytes:
    """The text in at most so many bytes: its beginning and, above all, its end."""
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return data
    gap = b"\n  ...\n"
    head = limit_bytes // 4
    return data[:head] + gap + data[len(data) - (limit_bytes - head - len(gap)) :]


def peer_failed(rank: int, pid: int, error_text: str, when: str) -> PeerLost:
    """What a rank raises that has read the error of a peer."""
    return PeerLost(
        f"rank {rank} (pid {pid}) failed and left the group {when}. Its error:\n"
        f"{error_text.rstrip()}\nThis group can no longer be used: correct that error, then start "
        "all ranks again",
        rank=rank,
        pid=pid,
        traceback=error_text,
    )


def previous_excepthook(hook: _ExceptHook) -> _ExceptHook:
    """The excepthook that was there before ours, if `hook` is ours."""
    return _hooks.previous if hook == _hooks.on_error else hook


class _FailureHooks:
    """Our hooks in the interpreter, and the channels they publish to. Process-wide, as the
    interpreter's hooks are.
    """

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[FailureChannel] = weakref.WeakSet()
        self.published: BaseException | None = None  # the error this process ends with
        self.previous: _ExceptHook = sys.__excepthook__
        self._previous_thread: _ThreadExceptHook = threading.excepthook
        self._pid = 0  # of the process the hooks were installed in; 0: they are not
        self._finalizer: Finalize | None = None

    def install(self) -> None:
        if self._pid == os.getpid():
            return
        from multiprocessing.util import Finalize

        if not self._pid:  # else: a forked child, which has inherited the hooks
            self.previous, sys.excepthook = sys.excepthook, self.on_error
            self._previous_thread, threading.excepthook = threading.excepthook, self.on_thread_error
        self._pid = os.getpid()
        self.channels.clear()
        self._finalizer = Finalize(None, self.on_finalize, exitpriority=_FINALIZER_PRIORITY)

    def remove(self) -> None:
        """Leave everything as it was. Where others have put hooks over ours, ours stay below and do
        nothing.
        """
        are_on_top = (sys.excepthook, threading.excepthook) == (self.on_error, self.on_thread_error)
        if self._pid != os.getpid() or not are_on_top:
            return
        sys.excepthook, threading.excepthook = self.previous, self._previous_thread
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._pid = 0

    def publish_error(self, error: BaseException, leaving: bool) -> None:
        if _is_success(error) or error is self.published or os.getpid() != self._pid:
            return
        if leaving:
            self.published = error
        self._publish(format_error(error), leaving)

    def _publish(self, text: str, leaving: bool) -> None:
        for channel in registered_channels():
            # Whatever goes wrong, it must not hide the error that is being published.
            with contextlib.suppress(Exception):
                channel.publish(text, leaving=leaving)

    def _add_failure_of_peer(self, error: RuntimeError) -> None:
        """A collective of another kind of group raises no more than that a connection was lost: add
        what the peer published.
        """
        for channel in registered_channels():
            with contextlib.suppress(Exception):
                if (lost := channel.lost_peer()) is not None:
                    error.add_note(str(lost))
                    return

    def _wait_for_readers(self) -> None:
        for channel in registered_channels():
            with contextlib.suppress(Exception):
                channel.wait_for_readers()

    def on_error(
        self, kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:
        program_ends = _is_end_of_program()
        if (
            program_ends
            and isinstance(error, RuntimeError)
            and not isinstance(error, PacelineError)
        ):
            self._add_failure_of_peer(error)
        self.publish_error(error, leaving=program_ends)
        try:
            self.previous(kind, error, tb)
        finally:
            if program_ends:
                self._wait_for_readers()

    def on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and os.getpid() == self._pid:
            name = f"thread {args.thread.name}" if args.thread is not None else "a thread"
            text = f"{name} died with an error:\n{format_error(args.exc_value)}"
            self._publish(text, leaving=False)
        self._previous_thread(args)

    def on_finalize(self) -> None:
        error = sys.exception()
        if error is not None and not _is_success(error):
            self.publish_error(error, leaving=True)
            self._wait_for_readers()


_hooks = _FailureHooks()


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _is_end_of_program() -> bool:
    """Whether the interpreter calls the hook because the program ends - not a prompt, nor the
    program itself.
    """
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return False
    # A program that runs has a frame of this name.
    return find_caller("<module>") is None
