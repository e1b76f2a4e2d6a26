"""What a call on a group returns: torch's `Work`, done already or still in progress."""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from paceline._interpreter import NotifiesOnDrop
from paceline._torch_internals import Work, methods_not_compiled
from paceline.backend.engine import Ticket
from paceline.errors import CollectiveTimeout

__all__ = ["CallResult", "Completer", "DoneWork", "PendingWork", "timeout_to_ns"]

# The tensors a call wrote to; a list of lists for a gather of several tensors per process.
CallResult: TypeAlias = Any

_MAX_KEPT_WORKS = 1024
_SMALL_NUMEL = 4096


def timeout_to_ns(timeout: timedelta | None) -> int:
    """Nanoseconds, or -1 where torch means "the group's own": None, zero or a negative time."""
    if timeout is None:
        return -1
    ns = (timeout.days * 86_400 + timeout.seconds) * 1_000_000_000 + timeout.microseconds * 1000
    return ns if ns > 0 else -1


@methods_not_compiled("a call is waited for; the compiler cannot look into it")
class DoneWork(Work):
    """A call that has succeeded."""

    def __init__(self, result: CallResult) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None: ...

    def result(self) -> CallResult:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


@methods_not_compiled("a call is waited for; the compiler cannot look into it")
class PendingWork(NotifiesOnDrop, Work):
    """A call in progress. `finish` runs once, when it has succeeded, for example to copy a result
    back.
    """

    def __init__(
        self,
        ticket: Ticket,
        result: CallResult,
        completer: Completer,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._ticket = ticket
        self._result = result
        self._completer = completer
        self._finish = finish
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._await_end(timeout_to_ns(timeout)):
            raise CollectiveTimeout(
                f"the call did not complete within {timeout} (the limit given to wait()); it is "
                "still running"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended or (self._ticket.done() and self._await_end(-1))

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def result(self) -> CallResult:
        return self._result

    def source_rank(self) -> int:
        return self._ticket.source

    def _source_rank(self) -> int:
        return self._ticket.source

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if self.is_completed() or self._completer.is_current_thread():
            self.complete()
        else:
            self._completer.watch(self)
        return self._future

    def on_drop(self) -> None:
        # torch's C++ side may still hold this call (DDP's join does) and ask it to wait; without
        # its Python half it would wait for ever. So the object lives on for a while; large tensors
        # do not.
        if _numel_of(self._result) > _SMALL_NUMEL:
            self._result = []
        self._completer.keep(self)

    def _await_end(self, timeout_ns: int) -> bool:
        """Wait for the end and record the outcome; False if it did not come in time."""
        if self._ended:
            return True
        error: BaseException | None = None
        try:
            if not self._ticket.wait(timeout_ns):
                return False
        except Exception as failure:
            error = failure
        with self._lock:
            if not self._ended:
                self._error = error or self._finishing_error()
                self._ended = True
        return True

    def _finishing_error(self) -> Exception | None:
        """Run `finish`. An error must not end the thread that completes futures."""
        try:
            if self._finish is not None:
                self._finish()
        except Exception as failure:
            return failure
        return None

    def complete(self) -> None:
        """Wait, then set the future's result. Runs on the completer's thread."""
        self._await_end(-1)
        self._resolve()

    def _resolve(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)


def _numel_of(result: CallResult) -> int:
    numel = 0
    for entry in result:
        numel += _numel_of(entry) if isinstance(entry, list) else entry.numel()
    return numel


class Completer:
    """One thread per group that completes futures, in the order the calls were made. Started when
    first needed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[PendingWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._kept: collections.deque[PendingWork] = collections.deque(maxlen=_MAX_KEPT_WORKS)

    def keep(self, work: PendingWork) -> None:
        """Keep a call alive that nobody in Python refers to any more."""
        self._kept.append(work)

    def is_current_thread(self) -> bool:
        """Whether the caller is a callback of a future: it must not wait for this thread to
        complete another.
        """
        return threading.current_thread() is self._thread

    def watch(self, work: PendingWork) -> None:
        """Complete this work's future when it ends."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(work)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        self._kept.clear()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.complete()
