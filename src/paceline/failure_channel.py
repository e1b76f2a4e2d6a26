"""What a rank says before it goes: the error that ends it is told to the peers that wait for it.

Whatever carries a text to the peers is a `FailureChannel`, kept here while its group lives. An
error that nobody handles comes

    from sys.excepthook         the program ends of it
    from threading.excepthook   a thread ends of it, the program goes on: peers read it if this rank is missed later
    from a finalizer            multiprocessing catches whatever its processes raise, but runs finalizers before
    through `publish_error`        our launcher catches it, too
    through `error_in_flight`   a group is destroyed in a `finally` while an error passes

The hooks are there as long as a channel is; those that were there before are called after ours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

from paceline.errors import PacelineError, PeerLost

__all__ = [
    "FailureChannel",
    "error_in_flight",
    "unregister_channel",
    "previous_excepthook",
    "register_channel",
    "peer_failed",
    "truncate",
    "publish_error",
    "format_error",
]

# of multiprocessing's finalizers: before those that end what the text would travel through
_FIRST = 1000


class FailureChannel(Protocol):
    """Carries a text to the peers of one group."""

    def publish(self, text: str, *, leaving: bool) -> None:
        """Leave a text for the peers. `leaving`: those that wait for this rank need not wait any
        longer.
        """

    def lost_peer(self) -> PeerLost | None:
        """What a peer has said that this rank does not know yet, if anything."""

    def wait_for_readers(self) -> None:
        """Called when this process is about to end: the text may need it a moment longer."""


def register_channel(channel: FailureChannel) -> None:
    """This group's peers are to be told, too."""
    _hooks.install()
    _hooks.channels.add(channel)


def unregister_channel(channel: FailureChannel) -> None:
    """The group is gone."""
    _hooks.channels.discard(channel)
    if not _hooks.channels:
        _hooks.remove()


def publish_error(error: BaseException, *, leaving: bool = True) -> None:
    """Tell all peers of an error that nobody handles. Never raises, never waits."""
    if _is_good_end(error) or error is _hooks.told or os.getpid() != _hooks.pid:
        return
    if leaving:
        _hooks.told = error
    _say(format_error(error), leaving)


def error_in_flight() -> str:
    """The error that is being handled right now, as text; empty if there is none."""
    error = sys.exception()
    return (
        "" if error is None or _is_good_end(error) or error is _hooks.told else format_error(error)
    )


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


def peer_failed(rank: int, pid: int, words: str, when: str) -> PeerLost:
    """What a peer raises that has read a rank's last words."""
    return PeerLost(
        f"rank {rank} (pid {pid}) failed and left the group {when}. Its error:\n{words.rstrip()}\n"
        "This group cannot be used again",
        rank=rank,
        pid=pid,
        traceback=words,
    )


def previous_excepthook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The excepthook that was there before ours, if `hook` is ours."""
    return _hooks.previous if hook == _hooks.on_error else hook


def _say(text: str, leaving: bool) -> None:
    for channel in list(_hooks.channels):
        with contextlib.suppress(
            Exception
        ):  # whatever it is, it must not hide the error that is being told
            channel.publish(text, leaving=leaving)


def _blame_peers(error: RuntimeError) -> None:
    """A collective of another kind of group says no more than that a connection was lost: add what
    the peer said.
    """
    for channel in list(_hooks.channels):
        with contextlib.suppress(Exception):
            if (lost := channel.lost_peer()) is not None:
                error.add_note(str(lost))
                return


def _wait_for_readers() -> None:
    for channel in list(_hooks.channels):
        with contextlib.suppress(Exception):
            channel.wait_for_readers()


def _is_good_end(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


class _Hooks:
    """Ours among the interpreter's hooks; process-wide, as those are."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[FailureChannel] = weakref.WeakSet()
        self.told: BaseException | None = None
        self.pid = 0
        self.previous: Callable[..., Any] = sys.__excepthook__
        self._previous_thread: Callable[..., Any] = threading.excepthook
        self._finalizer: Any = None

    def install(self) -> None:
        if self.pid == os.getpid():
            return
        from multiprocessing.util import Finalize

        if not self.pid:  # else: a forked child, which has inherited the hooks
            self.previous, sys.excepthook = sys.excepthook, self.on_error
            self._previous_thread, threading.excepthook = threading.excepthook, self.on_thread_error
        self.pid = os.getpid()
        self.channels.clear()
        self._finalizer = Finalize(None, self.on_end, exitpriority=_FIRST)

    def remove(self) -> None:
        """Leave everything as it was. Where others have put hooks over ours, ours stay below and do
        nothing.
        """
        if (
            self.pid != os.getpid()
            or sys.excepthook != self.on_error
            or threading.excepthook != self.on_thread_error
        ):
            return
        sys.excepthook, threading.excepthook = self.previous, self._previous_thread
        self._finalizer.cancel()
        self.pid = 0

    def on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        ends = _is_end_of_program()
        if ends and isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
            _blame_peers(error)
        publish_error(error, leaving=ends)
        try:
            self.previous(kind, error, trace)
        finally:
            if ends:
                _wait_for_readers()

    def on_thread_error(self, args: Any) -> None:
        if args.exc_value is not None and os.getpid() == self.pid:
            name = args.thread.name if args.thread is not None else "a thread"
            _say(f"{name} ended of an error:\n{format_error(args.exc_value)}", leaving=False)
        self._previous_thread(args)

    def on_end(self) -> None:
        error = sys.exception()
        if error is not None and not _is_good_end(error):
            publish_error(error)
            _wait_for_readers()


_hooks = _Hooks()


def _is_end_of_program() -> bool:
    """Whether the interpreter calls the hook because the program ends - not a prompt, nor the
    program itself.
    """
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe()
    while (
        frame is not None and frame.f_code.co_name != "<module>"
    ):  # a program that runs has a frame of this name
        frame = frame.f_back
    return frame is None
