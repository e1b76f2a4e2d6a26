"""`CallThread`: runs the calls of one group, one after the other, in the order they were made.

Gloo's waits cannot be interrupted, a wait for another thread can: so all calls run here, and a
program that waits for one of them still gets its signals.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paceline.core.abi import ANY_SOURCE
from paceline.errors import GroupAborted

__all__ = ["CallThread", "CallTicket"]


class CallTicket:
    """A call that waits for its turn, runs, or has ended. It ends by itself at its deadline."""

    source = ANY_SOURCE

    def __init__(self, step: Callable[[], None]) -> None:
        self._step: Callable[[], None] | None = step
        self._error: BaseException | None = None
        self._ended = threading.Lock()  # held until the call has ended
        self._ended.acquire()

    def run(self) -> None:
        """Run the call and keep what it raises for those who wait. On the thread."""
        assert self._step is not None
        try:
            self._step()
        except BaseException as error:
            self._error = error
        self._end()

    def cancel(self) -> None:
        """End it without running it."""
        self._error = GroupAborted(
            "the process group was destroyed before this call had its turn; wait for asynchronous "
            "calls before destroy_process_group()"
        )
        self._end()

    def _end(self) -> None:
        self._step = None  # and the tensors it holds
        self._ended.release()

    def wait(self, timeout_ns: int = -1) -> bool:
        """Signals are handled meanwhile: what a handler raises is raised here."""
        if not self.has_ended(-1 if timeout_ns < 0 else timeout_ns / 1e9):
            return False
        if self._error is not None:
            raise self._error
        return True

    def has_ended(self, within_s: float) -> bool:
        """Whether it ends within that time, well or not; a negative time is no limit."""
        if not self._ended.acquire(timeout=within_s):
            return False
        self._ended.release()
        return True

    def done(self) -> bool:
        return not self._ended.locked()


class CallThread:
    """Started by the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[CallTicket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False

    def start(self, step: Callable[[], None]) -> CallTicket:
        """Run `step` when it is its turn."""
        ticket = CallTicket(step)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """End the thread once the call that is running has ended; those behind it are cancelled."""
        self._closing = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            if self._closing:
                ticket.cancel()
            else:
                ticket.run()
            del ticket  # a thread that waits for the next call keeps nothing of the last
