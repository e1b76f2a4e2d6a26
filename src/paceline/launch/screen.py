"""The launcher's standard output and error, written by threads of their own.

Whoever reads them may stop reading for as long as it likes: a paused pager, Ctrl-S, a stuck log
collector. The launcher must go on meanwhile - it handles signals and notices ranks that end - so it
never writes itself: it leaves bytes here, and asks whether there is room before it reads more of
what ranks print. Ranks then block in their own writes, as they would without a launcher, and
nothing is lost.

Non-blocking writes would need no thread, but the mode belongs to the terminal or pipe itself, which
the launcher shares with the shell and other programs.
"""

from __future__ import annotations

import collections
import errno
import os
import select
import threading
import time
from collections.abc import Callable

__all__ = ["Screen"]

_ROOM_BYTES = 1 << 20
# When ranks are to end, their output is read even without room: up to here it is kept.
_MOST_BYTES = 64 << 20
_WRITE_BYTES = 1 << 14
# How long a reader may take nothing when the launcher was asked to end.
_PATIENCE_S = 1.0
_NAMES = {1: "standard output", 2: "standard error"}


class Screen:
    """Standard output and error, as far as they still exist. May be used from several threads."""

    def __init__(self) -> None:
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.colour = os.isatty(1) and os.isatty(2) and not is_plain
        self._on_broken_pipe: Callable[[], None] = lambda: None
        self._on_room: Callable[[], None] = lambda: None
        output = _Writer(self._on_error, self._notify_room)
        # Two threads that write to one file would tear each other's lines.
        is_shared = os.path.sameopenfile(1, 2)
        error = output if is_shared else _Writer(self._on_error, self._notify_room)
        self._writers = {1: output, 2: error}

    def connect(self, *, on_broken_pipe: Callable[[], None], on_room: Callable[[], None]) -> None:
        """What to call, from another thread, when nobody reads standard output any more, and when
        there is room again.
        """
        self._on_broken_pipe, self._on_room = on_broken_pipe, on_room

    def write(self, stream: int, data: bytes) -> None:
        """Show these bytes as soon as the reader takes them. Never waits."""
        self._writers[stream].add(stream, data)

    def has_room(self, stream: int) -> bool:
        """Whether more output should be read for this stream."""
        return self._writers[stream].pending_bytes < _ROOM_BYTES

    def report(self, text: str) -> None:
        """A line of the launcher's own."""
        self.show(f"paceline: {text}")

    def show(self, text: str) -> None:
        """Lines of the launcher's own."""
        self.write(2, f"{text}\n".encode(errors="replace"))

    @property
    def width(self) -> int | None:
        """How many columns standard error has; None if that is no terminal."""
        try:
            return os.get_terminal_size(2).columns or None
        except OSError:
            return None

    def flush(self, is_urgent: Callable[[], bool]) -> bool:
        """Wait until everything is written. Once it is urgent, no longer than the reader takes
        something; False if it did not take everything.
        """
        output, error = self._writers[1], self._writers[2]
        is_shown = output.wait(is_urgent)
        if not is_shown and error is not output:
            left = output.pending_bytes
            self.report(f"{left} bytes of output were not shown: nobody reads standard output")
        return (error is output or error.wait(is_urgent)) and is_shown

    def _notify_room(self) -> None:
        self._on_room()

    def _on_error(self, stream: int, error: OSError) -> None:
        # The terminal was closed, or `| head` has read enough: that needs no words.
        if error.errno == errno.EPIPE and stream == 1:
            self._on_broken_pipe()
        elif error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
            self.report(f"{_NAMES[stream]} is not written any more: {error.strerror}")


class _Writer:
    """Writes to one file, in a thread that starts with the first bytes."""

    def __init__(
        self, on_error: Callable[[int, OSError], None], on_room: Callable[[], None]
    ) -> None:
        self.pending_bytes = 0
        self._on_error = on_error
        self._on_room = on_room
        self._chunks: collections.deque[tuple[int, bytes]] = collections.deque()
        self._changed = threading.Condition()
        self._broken: set[int] = set()
        self._thread: threading.Thread | None = None

    def add(self, descriptor: int, data: bytes) -> None:
        with self._changed:
            if descriptor in self._broken or self.pending_bytes + len(data) > _MOST_BYTES:
                return
            self._chunks.append((descriptor, data))
            self.pending_bytes += len(data)
            self._changed.notify_all()
            if self._thread is None:
                # A daemon: it may stand in a write for good.
                self._thread = threading.Thread(
                    target=self._run, name="paceline-screen", daemon=True
                )
                self._thread.start()

    def wait(self, is_urgent: Callable[[], bool]) -> bool:
        """Until nothing is pending; False if it became urgent and nothing was taken for a while."""
        with self._changed:
            left, since = self.pending_bytes, time.monotonic()
            while self.pending_bytes:
                self._changed.wait(0.05)
                if self.pending_bytes != left or not is_urgent():
                    left, since = self.pending_bytes, time.monotonic()
                elif time.monotonic() - since > _PATIENCE_S:
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._chunks:
                    self._changed.wait()
                descriptor, data = self._chunks.popleft()
            while data:
                written = self._write(descriptor, data[:_WRITE_BYTES])
                data = data[written:]
                self._count_written(written)

    def _write(self, descriptor: int, data: bytes) -> int:
        """How many bytes are done with: written, or nobody will ever read them."""
        if descriptor in self._broken:
            return len(data)
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            # Somebody else has made the pipe non-blocking.
            select.select([], [descriptor], [])
            return 0
        except OSError as error:
            self._broken.add(descriptor)
            self._on_error(descriptor, error)
            return len(data)

    def _count_written(self, nbytes: int) -> None:
        with self._changed:
            was_full = self.pending_bytes >= _ROOM_BYTES
            self.pending_bytes -= nbytes
            is_full = self.pending_bytes >= _ROOM_BYTES
            self._changed.notify_all()
        if was_full and not is_full:
            self._on_room()
