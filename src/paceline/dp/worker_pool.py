"""Worker processes, forked from the main one.

Forked, so that they have its module, lambdas and all, without pickling. A worker never outlives the
main process: the kernel kills it with its parent, and a thread in it watches the parent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from paceline._interpreter import freeze_garbage, without_collecting
from paceline._linux import die_with_parent
from paceline._torch_internals import forget_inherited_compile_threads
from paceline.dp.channel import CHANNEL_BYTES, Channel, Inbox, Message, MessageLayout, Outbox
from paceline.dp.protocol import Source
from paceline.errors import CollectiveTimeout, PeerLost, describe_exit

__all__ = ["WorkerHandle", "WorkerPool"]

# About an optimizer step of a small model: the worker is awake when it is over.
_SPIN_NS = 1_000_000
# With more processes than cores, whoever spins keeps a peer from running.
_SPIN_NS_OVERSUBSCRIBED = 2_000


class WorkerHandle:
    """The main process's end of the connection to one worker.

    One order at a time: `send`, then `receive`; anything else is refused.
    """

    def __init__(self, replica: int, channel: Channel, pid: int, timeout_s: float) -> None:
        self.replica = replica
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._outbox = Outbox(channel.orders, channel.order_notice)
        self._inbox = Inbox(pid, channel.answer_notice)
        self._answers = channel.answers
        self._spin_ns = channel.spin_ns
        self._timeout_s = timeout_s
        self._is_busy = False
        self.layout = self._outbox.layout
        self.tensors = self._inbox.tensors

    def seed(self, seed: int) -> None:
        """Let it seed its generators, for the order that follows. It does not answer."""
        self._refuse_if_busy()
        self._outbox.send_seed(seed)

    def send(
        self,
        values: tuple[Any, ...],
        call: int,
        layout: MessageLayout,
        sources: Sequence[Source] = (),
        objects: Sequence[Any] = (),
        is_repeatable: bool = False,
    ) -> None:
        """Send an order and wake the worker. See `Outbox.send`."""
        self._refuse_if_busy()
        self._outbox.send(values, call, layout, sources, objects, is_repeatable)
        self._is_busy = True

    def _refuse_if_busy(self) -> None:
        if self._is_busy:
            raise RuntimeError(
                f"internal error: replica {self.replica} of DataParallel: send() before the answer "
                "to the previous request was received"
            )

    @property
    def is_busy(self) -> bool:
        """Whether it was sent an order whose answer has not been received."""
        return self._is_busy

    def has_answered(self) -> bool:
        """Whether `receive` would return, or raise, at once: it answered, or ended."""
        return self._is_busy and self._answers.is_due(self.pidfd)

    def receive(self) -> Message:
        """Wait for the answer. Its tensors (`tensors(answer.layout)`) last until the next order."""
        if not self._is_busy:
            raise RuntimeError(
                f"internal error: replica {self.replica} of DataParallel: receive() without a "
                "pending request"
            )
        try:
            is_alive = self._answers.wait(self.pidfd, self._spin_ns, self._timeout_s)
        except TimeoutError:
            raise CollectiveTimeout(
                f"replica {self.replica} of DataParallel (pid {self.pid}) did not answer within "
                f"{self._timeout_s:g} s. See where it is stuck (py-spy dump --pid {self.pid}), or "
                "give it more time with timeout=",
                missing=[self.replica],
            ) from None
        if not is_alive:
            raise self._lost()
        self._is_busy = False
        return self._inbox.read()

    def _lost(self) -> PeerLost:
        code = self._reap()
        return PeerLost(
            f"replica {self.replica} of DataParallel (pid {self.pid}) ended unexpectedly "
            f"({describe_exit(code)}). Its own output, or the system's log if memory ran out, "
            "shows why. The step was not completed; the next forward starts new workers",
            rank=self.replica,
            pid=self.pid,
            exitcode=code,
        )

    def _reap(self) -> int | None:
        """Its exit code, once it ended; None if someone else has taken it."""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status)
        return None

    def end(self) -> None:
        """End it, now. It has nothing that would need to be put in order."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._reap()
        self._outbox.close()
        self._inbox.close()
        os.close(self.pidfd)


class WorkerPool:
    """The workers of one DataParallel.

    `serve(replica, channel, main_pid, main_pidfd)` is what each of them does.
    """

    def __init__(
        self, count: int, serve: Callable[[int, Channel, int, int], None], timeout_s: float
    ) -> None:
        oversubscribed = count + 1 > len(os.sched_getaffinity(0))
        spin_ns = _SPIN_NS_OVERSUBSCRIBED if oversubscribed else _SPIN_NS
        memory = mmap.mmap(-1, count * CHANNEL_BYTES)  # shared: both sides of a fork map it
        self._owner = os.getpid()
        self.workers: list[WorkerHandle] = []
        try:
            for index in range(count):
                channel = Channel(memory, index * CHANNEL_BYTES, spin_ns)
                pid = _fork(_bind(serve, index + 1, channel))
                self.workers.append(WorkerHandle(index + 1, channel, pid, timeout_s))
        except BaseException:
            self.end()
            raise
        self._finalizer = weakref.finalize(self, _end, self.workers, self._owner)

    @property
    def is_alive(self) -> bool:
        """Whether it can be used, by this process."""
        return bool(self.workers) and self._owner == os.getpid()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.pid for worker in self.workers]

    def end(self) -> None:
        """End all workers. May be called twice."""
        _end(self.workers, self._owner)


def _bind(
    serve: Callable[[int, Channel, int, int], None], replica: int, channel: Channel
) -> Callable[[int, int], None]:
    return lambda main_pid, main_pidfd: serve(replica, channel, main_pid, main_pidfd)


def _end(workers: list[WorkerHandle], owner: int) -> None:
    if os.getpid() != owner:
        return  # a process forked from the owner: they are not its workers
    while workers:
        workers.pop().end()


def _fork(serve: Callable[[int, int], None]) -> int:
    main_pid = os.getpid()
    main_pidfd = os.pidfd_open(main_pid)
    from_main_thread = threading.current_thread() is threading.main_thread()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # or the child would have a second copy to print
    try:
        with warnings.catch_warnings(), without_collecting():
            # Python 3.12 warns where other threads exist. The child touches none of what they may
            # hold: it runs torch single-threaded, or in a fresh thread, as torch's own DataLoader
            # workers do.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                freeze_garbage()
        if pid == 0:
            _run_worker(lambda: serve(main_pid, main_pidfd), main_pid, main_pidfd, from_main_thread)
        return pid
    finally:
        os.close(main_pidfd)


def _run_worker(
    serve: Callable[[], None], main_pid: int, main_pidfd: int, from_main_thread: bool
) -> None:
    """Never returns: nothing of the main program may run on in the child."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # a notebook's event loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The kernel's "parent" is the forking thread, which may end before its process; then only
        # the thread below watches.
        if from_main_thread:
            die_with_parent(main_pid)
        if os.getppid() != main_pid:
            os._exit(code)
        forget_inherited_compile_threads()
        threading.Thread(
            target=_exit_with, args=(main_pidfd,), name="paceline-parent", daemon=True
        ).start()
        serve()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_with(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)
