"""`CallThread`: runs the calls of one group, one after the other, in the order they were made.

Gloo's waits cannot be interrupted, a wait for another thread can: so calls that wait for Gloo run
here, and a program that waits for one of them still gets its signals. For the same reason a call
can be given up that waits for a rank which others know to be lost. Other calls may run on the
thread that makes them, if it is their turn.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable

from paceline.backend.process_end import Order, before_process_ends
from paceline.core.abi import ANY_SOURCE
from paceline.errors import GroupAborted

__all__ = ["CallThread", "CallTicket", "GivingUp"]

# For how long a call that is to be given up is continued all the same.
_UNDER_WAY_S = 0.1
# How long it may take to end, and how long at the end of the process.
_GIVE_UP_S = 0.5
_GIVE_UP_AT_EXIT_S = 2.0


@dataclasses.dataclass
class GivingUp:
    """When those who wait for a call give it up.

    Args:
        reason: asked again and again while somebody waits: the error to raise, or None.
        end_calls: makes the call end, if it can.
        look_s: how often is asked.
    """

    reason: Callable[[], Exception | None]
    end_calls: Callable[[], None]
    look_s: float = 0.02
    # Whether a call could not be ended: its thread is still in it.
    has_left_call: bool = False


class CallTicket:
    """A call that waits for its turn, runs, or has ended. It ends by itself at its deadline.

    Args:
        step: what it does.
        giving_up: when and how, if ever, those who wait for it give it up.
    """

    source = ANY_SOURCE

    def __init__(self, step: Callable[[], object], giving_up: GivingUp | None = None) -> None:
        self._step: Callable[[], object] | None = step
        self._giving_up = giving_up
        self._error: BaseException | None = None
        self._has_ended = False
        # Held until the call has ended; afterwards for a moment by each of those who waited for it.
        self._running = threading.Lock()
        self._running.acquire()

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
        self._has_ended = True
        self._running.release()

    def wait(self, timeout_ns: int = -1) -> bool:
        """Signals are handled meanwhile: what a handler raises is raised here."""
        within_s = -1 if timeout_ns < 0 else timeout_ns / 1e9
        if self._giving_up is not None:
            self._wait_unless_given_up(self._giving_up, within_s)
            within_s = 0
        if not self.has_ended(within_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _wait_unless_given_up(self, giving_up: GivingUp, within_s: float) -> None:
        deadline = math.inf if within_s < 0 else time.monotonic() + within_s
        while not self.has_ended(max(0.0, min(giving_up.look_s, deadline - time.monotonic()))):
            if (error := giving_up.reason()) is not None:
                # What a rank has sent before it ended may be under way.
                if not self.has_ended(_UNDER_WAY_S):
                    giving_up.end_calls()
                    giving_up.has_left_call = not self.has_ended(_GIVE_UP_S)
                    raise error
            elif time.monotonic() >= deadline:
                return

    def has_ended(self, within_s: float) -> bool:
        """Whether it ends within that time, well or not; a negative time is no limit."""
        if not self._has_ended and self._running.acquire(timeout=within_s):
            self._running.release()
        return self._has_ended

    def done(self) -> bool:
        return self._has_ended


class CallThread:
    """Started by the first call. `giving_up`: see `CallTicket`. `runs_here`: calls may run on the
    thread that makes them, where they are not given up.
    """

    def __init__(
        self, name: str, giving_up: GivingUp | None = None, *, runs_here: bool = True
    ) -> None:
        self._name, self._giving_up, self._runs_here = name, giving_up, runs_here
        self._queue: queue.SimpleQueue[CallTicket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._stay_at_exit: Callable[[], object] = lambda: None
        self._turn = threading.Lock()  # held while a call runs
        self._unfinished = 0  # calls that wait for their turn or run; changed with the lock held

    def run_here(self, step: Callable[[], object]) -> bool:
        """Run `step` on this thread, unless another call comes first or it may not: then False."""
        if not self._runs_here:
            return False
        with self._lock:
            if self._unfinished or self._closing:
                return False
            self._unfinished = 1
        try:
            with self._turn:
                step()
        finally:
            self._finish()
        return True

    def _finish(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def start(self, step: Callable[[], object]) -> CallTicket:
        """Run `step` when it is its turn."""
        ticket = CallTicket(step, self._giving_up)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                self._stay_at_exit = before_process_ends(self._end_at_exit, Order.END_CALLS)
            self._unfinished += 1
            self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """End the thread once the call that is running has ended; those behind it are cancelled."""
        self._closing = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._stay_at_exit()
            self._queue.put(None)
            if self._giving_up is None or not self._giving_up.has_left_call:
                thread.join()

    def _end_at_exit(self) -> None:
        """End the call that is running, if one is. A thread that came back from Gloo to an
        interpreter that is ending would abort the process: a rank that failed would seem to have
        crashed.
        """
        thread, giving_up = self._thread, self._giving_up
        if thread is not None and giving_up is not None and self._unfinished:
            self._closing = True
            giving_up.end_calls()
            self._queue.put(None)
            thread.join(_GIVE_UP_AT_EXIT_S)

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            with self._turn:
                if self._closing:
                    ticket.cancel()
                else:
                    ticket.run()
            self._finish()
            del ticket  # a thread that waits for the next call keeps nothing of the last
