"""Runs one job from outside: starts the fork server, moves output, decides when to stop, says how
it ended.

Imports no torch, so the process that owns the screen and the signals stays light and cannot crash
with a rank.

    RUNNING --a rank fails, a signal--> STOPPING (asked to end, deadline set) --deadline--> KILLED
    --> over
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from paceline.launch.child_processes import end_descendants
from paceline.launch.messages import (
    Function,
    Job,
    JobPlaced,
    RankEnd,
    RankPipes,
    RendezvousConfig,
    Report,
    Script,
    Signal,
    Started,
    StartFailure,
)
from paceline.launch.output import Output
from paceline.telemetry.variables import WATCHED

if TYPE_CHECKING:
    from paceline.diagnostics.diagnosis import RankView
    from paceline.diagnostics.page_reader import StatusPage
    from paceline.diagnostics.stall_watcher import StallWatch

__all__ = ["Plan", "Failure", "JobResult", "Supervisor"]

_STOP_AFTER_FAILURE_S = 5.0  # ranks whose peer is gone have nothing to finish
_DRAIN_S = 1.0
_FORK_SERVER_END_S = 30.0
_READ = 1 << 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start. `Job` is the same with descriptors in it."""

    work: Script | Function
    ranks: int
    threads: int
    launcher: str
    path: tuple[str, ...]
    rendezvous: RendezvousConfig = dataclasses.field(default_factory=RendezvousConfig)
    start_method: str = "fork"
    preload: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    grace_s: float = 30.0
    owns_process: bool = False  # whether every child of this process is the job's
    stall_after_s: float = 30.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    when: float
    exitcode: int | None  # None: it reported an error and had to be killed while ending
    report: Report | None

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure made this one: then that is the first, whoever tells
        earlier.
        """
        return self.report is not None and self.report.caused_by is not None


@dataclasses.dataclass
class JobResult:
    """How the job ended."""

    reports: list[Report | None]
    failures: list[Failure]  # the first in time first
    clean: frozenset[int] = frozenset()  # ranks that ended with code 0
    first_rank: int = 0
    stopped_by: int | None = None  # the signal this launcher was sent
    unable: StartFailure | None = None
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class _Rank:
    """The launcher's side of one rank."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid: int | None = None
        self.report: Report | None = None
        self.end: RankEnd | None = None
        self.frame = bytearray()  # of a report, as it arrives

    def failure(self, stopped: bool) -> Failure | None:
        """How it failed by itself, if it did; a rank that ended because it was told to did not."""
        if self.report is not None and self.report.kind in {"error", "exit"}:
            return Failure(
                self.index, self.report.when, self.end.exitcode if self.end else None, self.report
            )
        if self.end is None or self.end.exitcode == 0:
            return None
        asked = {-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, 130}
        if stopped and self.end.exitcode in asked:
            return None
        return Failure(self.index, self.end.when, self.end.exitcode, self.report)


class Supervisor:
    """One job. `run()` blocks until it is over; `ask_to_stop` may be called from a signal handler
    meanwhile.
    """

    def __init__(self, plan: Plan, output: Output) -> None:
        self._plan = plan
        self._output = output
        self._ranks = [_Rank(index) for index in range(plan.ranks)]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._requests: list[int] = []
        self._stopping: frozenset[int] | None = None  # ranks that had not ended when the stop began
        self._deadline: float | None = None
        self._stopped_by: int | None = None
        self._unable: StartFailure | None = None
        self._control: Connection | None = None
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._placed = JobPlaced(0, plan.ranks)
        self._pages: dict[int, StatusPage] = {}  # as they were last seen

    def ask_to_stop(self, number: int) -> None:
        """Pass a signal on to the ranks and see that they end. A second Ctrl-C does not wait any
        longer.
        """
        self._requests.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def run(self) -> JobResult:
        began = time.monotonic()
        watch: StallWatch | None = None
        try:
            self._start()
            watch = self._start_watch()
            self._loop()
        finally:
            if watch is not None:
                watch.stop()
            self._clean_up()
        ending = self._ending()
        ending.seconds = time.monotonic() - began
        return ending

    def _start_watch(self) -> StallWatch:
        # now that the fork server loads torch, there is time for it
        from paceline.diagnostics.stall_watcher import StallWatch

        watch = StallWatch(self._look, self._tell_stall, self._plan.stall_after_s)
        watch.start()
        return watch

    def _look(self) -> list[RankView]:
        """What the stall watch sees; runs in its thread."""
        from paceline.diagnostics.stall_watcher import look_at_processes

        first = self._placed.first_rank
        pids = {first + rank.index: rank.pid for rank in self._ranks if rank.pid is not None}
        ended = {
            first + rank.index: rank.end.exitcode for rank in self._ranks if rank.end is not None
        }
        return look_at_processes(pids, ended, self._pages) if self._stopping is None else []

    def _tell_stall(self, text: str) -> None:
        self._output.tell_all(f"paceline: {text}")

    # -- start -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = self._make_pipes()
        listen, rendezvous = _listen(self._plan)
        job = Job(
            work=self._plan.work,
            ranks=self._plan.ranks,
            pipes=tuple(writing),
            rendezvous=rendezvous,
            threads=self._plan.threads,
            launcher=self._plan.launcher,
            launcher_pid=os.getpid(),
            start_method=self._plan.start_method,
            preload=self._plan.preload,
            path=self._plan.path,
            environ={**self._plan.environ, WATCHED: "1"},
        )
        passed = [theirs.fileno(), *(fd for pipes in writing for fd in pipes.all())]
        if listen is not None:
            passed.append(listen.fileno())
        code = (
            f"import sys; sys.path[:] = {list(self._plan.path)!r}; from paceline.launch.fork_server import main; "
            f"sys.exit(main({theirs.fileno()}))"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing uses it, too
        self._fork_server = subprocess.Popen([sys.executable, *flags, "-c", code], pass_fds=passed)
        theirs.close()
        if listen is not None:
            listen.close()
        for pipes in writing:
            for descriptor in pipes.all():
                os.close(descriptor)
        self._control = Connection(ours.detach())
        self._watch(reading)
        # it is noticed as the end of the pipe
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(job)

    def _make_pipes(self) -> tuple[list[RankPipes], list[RankPipes]]:
        reading, writing = [], []
        for _ in range(self._plan.ranks):
            ends = [os.pipe() for _ in range(3)]
            reading.append(RankPipes(*(read for read, _ in ends)))
            writing.append(RankPipes(*(write for _, write in ends)))
        return reading, writing

    def _watch(self, reading: list[RankPipes]) -> None:
        assert self._control is not None
        self._selector.register(self._control, selectors.EVENT_READ, ("control", 0))
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", 0))
        for rank, pipes in enumerate(reading):
            for descriptor, kind in zip(pipes.all(), ("stdout", "stderr", "report"), strict=True):
                os.set_blocking(descriptor, False)
                self._selector.register(descriptor, selectors.EVENT_READ, (kind, rank))

    # -- run -------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._control is not None:
            self._step(self._until_deadline())

    def _step(self, timeout: float | None) -> bool:
        """Handle what is ready. The control pipe goes first: it says which rank the output belongs
        to.
        """
        ready = sorted(
            self._selector.select(timeout), key=lambda item: item[0].data[0] != "control"
        )
        for key, _ in ready:
            kind, rank = key.data
            if kind == "control":
                self._on_control()
            elif kind == "wake":
                os.read(self._wake_read, 4096)
            else:
                self._on_pipe(key.fd, kind, rank)
        while self._requests:
            self._on_request(self._requests.pop(0))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._send(Signal(signal.SIGKILL))
        return bool(ready)

    def _until_deadline(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            message: Any = self._control.recv()
        except (EOFError, ConnectionResetError):
            self._selector.unregister(self._control)
            self._control.close()
            self._control = None
            return
        match message:
            case [*started]:
                for item in started:
                    assert isinstance(item, Started)
                    self._ranks[item.rank].pid = item.pid
            case JobPlaced():
                self._placed = message
                self._output.first_rank = message.first_rank
            case RankEnd():
                self._ranks[message.rank].end = message
                if message.exitcode != 0:
                    self._stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S)
            case StartFailure():
                self._unable = self._unable or message
                self._stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S)

    def _on_pipe(self, descriptor: int, kind: str, rank: int) -> None:
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        elif kind == "report":
            self._on_report(self._ranks[rank], data)
        else:
            self._output.feed(rank, 1 if kind == "stdout" else 2, data)

    def _on_report(self, rank: _Rank, data: bytes) -> None:
        rank.frame += data
        size = int.from_bytes(rank.frame[:8], "little")
        if rank.report is None and len(rank.frame) >= 8 + size:
            rank.report = pickle.loads(rank.frame[8 : 8 + size])
            if (
                rank.report is not None
                and rank.report.kind == "error"
                and rank.report.caused_by is None
            ):
                # It will end by itself; the others need not wait for that, nor for it to hang in
                # its clean-up. One that only passes on another's error leaves that rank time to
                # tell its own.
                self._stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S, spare=rank.index)

    # -- stop ------------------------------------------------------------------------------------------------------

    def _on_request(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._send(Signal(number))
        elif self._stopping is None:
            self._stopped_by = number
            grace = self._plan.grace_s
            self._stop(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, grace)
        elif number == signal.SIGINT:
            self._deadline = time.monotonic()
        if (
            self._ranks[0].pid is None
            and number != signal.SIGUSR1
            and self._fork_server is not None
        ):
            self._fork_server.kill()  # still importing: there is no rank to be asked

    def _stop(self, number: int, grace_s: float, spare: int | None = None) -> None:
        if self._stopping is not None:
            return
        self._stopping = frozenset(
            rank.index for rank in self._ranks if rank.end is None and rank.index != spare
        )
        self._deadline = time.monotonic() + grace_s
        self._send(Signal(number), skip=spare)

    def _send(self, order: Signal, skip: int | None = None) -> None:
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._control.send(dataclasses.replace(order, skip=skip))

    # -- end -------------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Also after an exception here: no process, no descriptor stays."""
        if self._control is not None:
            # the fork server takes it as the death of its launcher, and ends the ranks
            self._control.close()
            self._control = None
        if self._fork_server is not None:
            self._wait_for_fork_server(self._fork_server)
        end = time.monotonic() + _DRAIN_S
        while self._open_pipes() and time.monotonic() < end and self._drain():
            pass
        for rank in self._ranks:
            self._output.end(rank.index)
        for descriptor in self._open_pipes():
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wait_for_fork_server(self, fork_server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._plan.rendezvous.timeout_s + _FORK_SERVER_END_S
        while fork_server.poll() is None:
            self._drain()  # a rank that ends may still have much to say
            with contextlib.suppress(subprocess.TimeoutExpired):
                fork_server.wait(0.02)
            if time.monotonic() > deadline:
                fork_server.kill()
        if (
            fork_server.returncode != 0
            and self._unable is None
            and any(rank.end is None for rank in self._ranks)
        ):
            self._unable = StartFailure(
                f"the fork server (pid {fork_server.pid}) ended with code {fork_server.returncode}",
                fork_server.returncode,
            )
        if self._plan.owns_process:
            # none, unless the fork server was killed
            end_descendants(os.getpid(), wait_s=0.5, term_s=1.0)

    def _drain(self) -> bool:
        ready = [
            key for key, _ in self._selector.select(0.0) if key.data[0] not in {"control", "wake"}
        ]
        for key in ready:
            self._on_pipe(key.fd, *key.data)
        return bool(ready)

    def _open_pipes(self) -> list[int]:
        return [
            key.fd
            for key in self._selector.get_map().values()
            if key.data[0] not in {"control", "wake"}
        ]

    def _ending(self) -> JobResult:
        found = (
            rank.failure(self._stopping is not None and rank.index in self._stopping)
            for rank in self._ranks
        )
        return JobResult(
            reports=[rank.report for rank in self._ranks],
            failures=sorted(
                (f for f in found if f is not None), key=lambda f: (f.is_consequence, f.when)
            ),
            clean=frozenset(
                rank.index
                for rank in self._ranks
                if rank.end is not None and rank.end.exitcode == 0
            ),
            first_rank=self._placed.first_rank,
            stopped_by=self._stopped_by,
            unable=self._unable,
            pids={rank.index: rank.pid for rank in self._ranks if rank.pid is not None},
        )


def _listen(plan: Plan) -> tuple[socket.socket | None, RendezvousConfig]:
    """A port the system chooses, open before any rank looks for it: nothing to collide with,
    nothing to wait for.
    """
    if plan.rendezvous.nodes > 1:
        return None, plan.rendezvous
    listen = socket.create_server(("127.0.0.1", 0), backlog=plan.ranks + 64)
    return listen, dataclasses.replace(plan.rendezvous, listen_fd=listen.fileno())
