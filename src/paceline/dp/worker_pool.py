"""Worker processes: forked from the main one, so that they have its module, lambdas and all,
without pickling.

A worker never outlives the main process: the kernel kills it with its parent, and a thread in it
watches the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

from paceline.core.wakeup import FLAG_BYTES, Flag
from paceline.dp.channel import NOTICE_BYTES, Inbox, Message, Outbox
from paceline.errors import CollectiveTimeout, PeerLost, describe_exit

__all__ = ["WorkerPool", "Link", "Worker"]

_PER_WORKER = 2 * FLAG_BYTES + 2 * NOTICE_BYTES
_SPIN_NS = 1_000_000  # an optimizer step of a small model: the worker is awake when it is over
_SPIN_NS_CROWDED = 2_000  # more processes than cores: whoever spins keeps a peer from running
_PR_SET_PDEATHSIG = 1


class Link:
    """What the two ends of one main-to-worker connection share; made before the fork."""

    def __init__(self, memory: mmap.mmap, offset: int, spin_ns: int) -> None:
        view = memoryview(memory)
        self.go = Flag(memory, offset)
        self.done = Flag(memory, offset + FLAG_BYTES)
        notices = offset + 2 * FLAG_BYTES
        self.to_worker = view[notices : notices + NOTICE_BYTES]
        self.to_main = view[notices + NOTICE_BYTES : notices + 2 * NOTICE_BYTES]
        self.spin_ns = spin_ns


class Worker:
    """The main process's end."""

    def __init__(self, replica: int, link: Link, pid: int, timeout_s: float) -> None:
        self.replica = replica
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.outbox = Outbox(link.to_worker)
        self.inbox = Inbox(pid, link.to_main)
        self.busy = False
        self._raised = 0
        self._link = link
        self._timeout_s = timeout_s

    def seed(self, seed: int) -> None:
        """Let it seed its generators, for the message that follows. It does not answer."""
        assert not self.busy
        self._raised = (self._raised + 1) & 0xFFFFFFFF
        self.outbox.write_seed(self._raised, seed)
        self._link.go.raise_()

    def start(self) -> None:
        """Let it look at the message in its box."""
        assert not self.busy
        self.busy = True
        self._raised = (self._raised + 1) & 0xFFFFFFFF
        self._link.go.raise_()

    def has_answered(self) -> bool:
        """Whether `answer` need not wait: it answered, or ended."""
        return self._link.done.is_raised() or bool(select.select([self.pidfd], [], [], 0)[0])

    def answer(self) -> Message:
        """Wait for its answer."""
        try:
            alive = self._link.done.wait(self.pidfd, self._link.spin_ns, self._timeout_s)
        except TimeoutError:
            raise CollectiveTimeout(
                f"replica {self.replica} of DataParallel (pid {self.pid}) did not answer within {self._timeout_s:g} s. "
                f"See where it is stuck (py-spy dump --pid {self.pid}), or give it more time with timeout=",
                missing=[self.replica],
            ) from None
        if not alive:
            raise self._lost()
        self.busy = False
        return self.inbox.read()

    def _lost(self) -> PeerLost:
        code = self.reap()
        return PeerLost(
            f"replica {self.replica} of DataParallel (pid {self.pid}) was lost: it {describe_exit(code)}. Its own "
            "output, or the system's log if memory ran out, tells why. The step did not happen; the next forward "
            "starts new workers",
            rank=self.replica,
            pid=self.pid,
            exitcode=code,
        )

    def reap(self) -> int | None:
        """Its exit code, once it ended; None if someone else has taken it."""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status)
        return None

    def end(self) -> None:
        """End it, now. It has nothing that would need to be put in order."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.reap()
        self.outbox.close()
        self.inbox.close()
        os.close(self.pidfd)


class WorkerPool:
    """The workers of one DataParallel. `serve(replica, link, main_pid, main_pidfd)` is what each of
    them does.
    """

    def __init__(
        self, count: int, serve: Callable[[int, Link, int, int], None], timeout_s: float
    ) -> None:
        crowded = count + 1 > len(os.sched_getaffinity(0))
        memory = mmap.mmap(
            -1, count * _PER_WORKER
        )  # anonymous and shared: both ends of a fork have it
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        try:
            for index in range(count):
                link = Link(memory, index * _PER_WORKER, _SPIN_NS_CROWDED if crowded else _SPIN_NS)
                pid = _fork(lambda main, pidfd, n=index + 1, link=link: serve(n, link, main, pidfd))  # type: ignore[misc]  # mypy does not infer defaults of lambdas
                self.workers.append(Worker(index + 1, link, pid, timeout_s))
        except BaseException:
            self.end()
            raise
        self._finalizer = weakref.finalize(self, _end, self.workers, self.owner)

    @property
    def is_alive(self) -> bool:
        """Whether it can be used, by this process."""
        return bool(self.workers) and self.owner == os.getpid()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.pid for worker in self.workers]

    def end(self) -> None:
        """End all workers. May be called twice."""
        _end(self.workers, self.owner)


def _end(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a process forked from the owner: they are not its workers
    while workers:
        workers.pop().end()


def _fork(serve: Callable[[int, int], None]) -> int:
    main = os.getpid()
    watched = os.pidfd_open(main)
    from_main_thread = threading.current_thread() is threading.main_thread()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # or the child would have a second copy to print
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns where other threads exist. The child touches none of what they may
            # hold: it runs torch single-threaded, or in a fresh thread, as torch's own DataLoader
            # workers do.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = _fork_without_garbage()
        if pid == 0:
            _live_as_worker(lambda: serve(main, watched), main, watched, from_main_thread)
        return pid
    finally:
        os.close(watched)


def _fork_without_garbage() -> int:
    """What the main process has not collected yet, a child must not: it may own threads that the
    child has not.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
        return pid
    finally:
        if collects:
            gc.enable()


def _live_as_worker(
    serve: Callable[[], None], main: int, watched: int, from_main_thread: bool
) -> None:
    """Never returns: nothing of the main program may run on in the child."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # a notebook's event loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (
            from_main_thread
        ):  # the kernel's "parent" is the thread: another one may end before its process
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != main:
            os._exit(code)
        threading.Thread(
            target=_end_with, args=(watched,), name="paceline-parent", daemon=True
        ).start()
        serve()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _end_with(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)
