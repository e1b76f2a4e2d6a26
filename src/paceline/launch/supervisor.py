"""Runs one job from outside: starts the fork server, moves the ranks' output, decides when to stop,
and reports how the job ended.

Imports no torch, so the process that owns the screen and the signals stays light and cannot crash
with a rank. A job goes through these phases, never backwards:

    STARTING   the fork server loads torch; no rank has a process yet
    RUNNING    every rank has a process
    STOPPING   a rank failed or a signal came: ranks are asked to end, and a deadline is set
    KILLED     the deadline passed, or a second Ctrl-C came: ranks were sent SIGKILL
    OVER       the fork server closed its connection: nothing of the job runs any more

`Supervisor` is what callers see and what a signal handler may call at any time; `_JobRun` is the
job between the start of its processes and the end of the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from paceline._interpreter import interpreter_flags
from paceline._linux import end_descendants
from paceline.errors import describe_exit
from paceline.launch.messages import (
    Announcement,
    ElasticConfig,
    ElasticMessage,
    Function,
    GenerationBegan,
    Job,
    JobPlaced,
    MemberLost,
    MemberStarted,
    RankEnd,
    RankFailing,
    RankPipes,
    RemoteEnd,
    RendezvousConfig,
    Report,
    ReportKind,
    Script,
    ServerMessage,
    Signal,
    Started,
    StartFailure,
    StopRequested,
)
from paceline.launch.output import Output
from paceline.launch.resources import allow_open_files
from paceline.telemetry.variables import WATCHED

if TYPE_CHECKING:
    from paceline.diagnostics.diagnosis import RankView
    from paceline.diagnostics.page_reader import StatusPage
    from paceline.diagnostics.stall_watcher import StallWatch

__all__ = ["Failure", "JobHistory", "JobResult", "LeftPage", "Plan", "Supervisor"]

_STOP_AFTER_FAILURE_S = 5.0  # ranks whose peer is gone have nothing to finish
_DRAIN_S = 1.0
_LONGEST_WAIT_S = 3600.0  # the kernel takes no timeout of many days
_FORK_SERVER_END_S = 30.0
_READ_BYTES = 1 << 16
_STREAMS = {"stdout": 1, "stderr": 2}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to start. `Job` is the same with descriptors in it."""

    work: Script | Function
    ranks: int  # in an elastic job: the most there may be on this host
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
    elastic: ElasticConfig | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    when: float
    exitcode: int
    report: Report | None

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure caused this one: then that is the first, whichever was
        reported earlier.
        """
        return self.report is not None and self.report.caused_by is not None


@dataclasses.dataclass(frozen=True)
class LeftPage:
    """What is left of a process that was this rank: a copy of its status page."""

    rank: int
    page: bytes
    is_lost: bool  # it died, and the job went on
    host: int = 0  # 0 is this one: the others' clocks are not ours


@dataclasses.dataclass
class JobHistory:
    """What is left of the job's ranks, and how many generations an elastic job had."""

    pages: list[LeftPage] = dataclasses.field(default_factory=list)
    generations: int = 0

    def add_end(self, end: RankEnd | MemberLost) -> None:
        is_lost = isinstance(end, MemberLost) and end.exitcode != 0
        self.pages.append(LeftPage(end.rank, end.page, is_lost))


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How the job ended."""

    reports: list[Report | None]
    failures: list[Failure]  # the first in time first
    succeeded: frozenset[int]  # ranks that exited with status 0
    first_rank: int
    stopped_by: int | None  # the signal this launcher was sent
    start_failure: StartFailure | None
    pids: Mapping[int, int]
    seconds: float
    history: JobHistory


class Supervisor:
    """One job. `run()` blocks until it is over; `ask_to_stop` may be called from a signal handler
    meanwhile.
    """

    def __init__(self, plan: Plan, output: Output) -> None:
        self._plan = plan
        self._output = output
        self._requests = _StopRequests()

    def ask_to_stop(self, number: int) -> None:
        """Pass a signal on to the ranks and see that they end. A second Ctrl-C does not wait any
        longer.
        """
        self._requests.add(number)

    @property
    def stop_signal(self) -> int | None:
        """The first signal that asked for the end of the job, also after it was over."""
        return self._requests.stop_signal

    def wake(self) -> None:
        """There is room for output again. May be called from any thread."""
        self._requests.wake()

    def run(self) -> JobResult:
        began = time.monotonic()
        try:
            allow_open_files(self._plan.ranks)
            run = _JobRun(self._plan, self._output, self._requests)
            try:
                run.until_over()
            finally:
                run.close()
        finally:
            self._requests.close()
        return run.result(time.monotonic() - began)


class _StopRequests:
    """Signals to handle: put here by a signal handler, which may do little else, or by a thread."""

    def __init__(self) -> None:
        # A signal handler runs in the thread that it interrupts, which may hold the lock.
        self._lock = threading.RLock()
        self._signals: list[int] = []
        self.stop_signal: int | None = None
        self.descriptor, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, number: int) -> None:
        self._signals.append(number)
        if number != signal.SIGUSR1 and self.stop_signal is None:
            self.stop_signal = number
        self.wake()

    def wake(self) -> None:
        # A full pipe wakes the reader as well; a closed one has none.
        with self._lock, contextlib.suppress(OSError):
            os.write(self._write_end, b"\0")

    def clear_wake_up(self) -> None:
        os.read(self.descriptor, 4096)

    def take(self) -> Iterator[int]:
        while self._signals:
            yield self._signals.pop(0)

    def close(self) -> None:
        # The handler may still be called: it must not write to whatever gets the number next.
        with self._lock:
            write_end, self._write_end = self._write_end, -1
        os.close(write_end)
        os.close(self.descriptor)


class _Phase(enum.Enum):
    """See the module's docstring."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    KILLED = enum.auto()
    OVER = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Stop:
    """How the job was asked to end. The default is that it was not."""

    ranks: frozenset[int] = frozenset()  # those that were sent a signal
    deadline: float = math.inf
    requested_by: int | None = None  # the signal this launcher was sent


class _Rank:
    """The launcher's side of one rank."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid: int | None = None
        self.report: Report | None = None
        self.end: RankEnd | None = None
        self._frame = bytearray()

    def feed_report(self, data: bytes) -> Report | None:
        """Bytes of the report; returns it when it has become complete."""
        self._frame += data
        size = int.from_bytes(self._frame[:8], "little")
        if self.report is not None or len(self._frame) < 8 + size:
            return None
        self.report = pickle.loads(self._frame[8 : 8 + size])
        del self._frame[: 8 + size]
        return self.report

    @property
    def own_report(self) -> Report | None:
        """The report, if it is not that of the process that has taken its place meanwhile."""
        report = self.report
        return None if report is not None and self.pid not in {None, report.pid} else report

    def next_life(self) -> _Rank:
        """For the process that takes its place. What that has written may have been read already;
        half a message of this one is dropped.
        """
        rank = _Rank(self.index)
        if self.own_report is not None:
            rank.feed_report(bytes(self._frame))
        elif self.report is not None:
            rank.report, rank._frame = self.report, self._frame
        return rank

    def failure(self, was_stopped: bool) -> Failure | None:
        """How it failed by itself, if it did; a rank that ended because it was asked to did not."""
        ended_by_us = self.end is None or (
            was_stopped and self.end.exitcode in _EXIT_CODES_WHEN_STOPPED
        )
        if self.report is not None and self.report.kind in {ReportKind.ERROR, ReportKind.EXIT}:
            # It failed, and was still ending when the others, and so it too, were asked to end.
            exitcode = (
                self.report.exitcode if self.end is None or ended_by_us else self.end.exitcode
            )
            return Failure(self.index, self.report.when, exitcode, self.report)
        if self.end is None or self.end.exitcode == 0 or ended_by_us:
            return None
        return Failure(self.index, self.end.when, self.end.exitcode, self.report)


_EXIT_CODES_WHEN_STOPPED = {-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, 130}


class _ForkServer:
    """The fork server, and the connection over which it takes orders. `process` is its reaper,
    which ends as the fork server does, after everything below it.
    """

    def __init__(self, job: Job, inherited: list[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {list(job.path)!r}; "
                "from paceline.launch.fork_server import main; "
                f"sys.exit(main({theirs.fileno()}))"
            )
            command = [sys.executable, *interpreter_flags(), "-c", code]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *inherited])
        self.connection = Connection(ours.detach())
        self.send(job)

    def send(self, message: Job | Signal) -> None:
        # That it is gone is noticed as the end of the connection.
        if not self.connection.closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send(message)

    def has_message(self) -> bool:
        """Whether there is more to receive now, be it that there is no more."""
        return not self.connection.closed and self.connection.poll(0)

    def receive(self) -> ServerMessage | None:
        """Its next message; None when there is no more, and the connection is closed."""
        try:
            message: ServerMessage = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        return message


class _JobRun:
    """The job from the start of its processes to the end of the last one."""

    def __init__(self, plan: Plan, output: Output, requests: _StopRequests) -> None:
        self._plan = plan
        self._output = output
        self._requests = requests
        self._ranks = [_Rank(index) for index in range(plan.ranks)]
        self._phase = _Phase.STARTING
        self._stop = _Stop()
        self._start_failure: StartFailure | None = None
        self._first_rank = 0
        self._server_pid: int | None = None
        # Pipes that are not read for want of room, by stream: descriptor -> rank.
        self._paused: dict[str, dict[int, int]] = {stream: {} for stream in _STREAMS}
        self._history = JobHistory()
        self._pages: dict[int, StatusPage] = {}  # as the stall watcher last saw them
        reading, writing = _make_pipes(plan.ranks)
        try:
            self._fork_server = _start_fork_server(plan, writing)
        except BaseException:
            _close_pipes(reading)
            raise
        finally:
            _close_pipes(writing)
        self._selector = self._watch(reading)

    def _watch(self, reading: list[RankPipes]) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        selector.register(self._fork_server.connection, selectors.EVENT_READ, ("control", 0))
        selector.register(self._requests.descriptor, selectors.EVENT_READ, ("wake", 0))
        for rank, pipes in enumerate(reading):
            for descriptor, kind in zip(pipes.all(), ("stdout", "stderr", "report"), strict=True):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ, (kind, rank))
        return selector

    # -- run ---------------------------------------------------------------------------------------

    def until_over(self) -> None:
        stall_watch = self._start_stall_watch()
        try:
            while self._phase is not _Phase.OVER:
                self._step()
        finally:
            stall_watch.stop()

    def _start_stall_watch(self) -> StallWatch:
        # Imported now that the fork server loads torch: there is time for it.
        from paceline.diagnostics.stall_watcher import StallWatch

        watch = StallWatch(self._views_of_ranks, self._report_stall, self._plan.stall_after_s)
        watch.start()
        return watch

    def _views_of_ranks(self) -> list[RankView]:
        """What the stall watcher sees; runs in its thread."""
        from paceline.diagnostics.stall_watcher import look_at_processes

        if self._phase not in {_Phase.STARTING, _Phase.RUNNING}:
            return []
        first = self._first_rank
        pids = {first + rank.index: rank.pid for rank in self._ranks if rank.pid is not None}
        ended = {
            first + rank.index: rank.end.exitcode for rank in self._ranks if rank.end is not None
        }
        return look_at_processes(pids, ended, self._pages)

    def _report_stall(self, text: str) -> None:
        self._output.report_job(f"paceline: {text}")

    def _step(self) -> None:
        """Handle what is ready. Messages of the fork server go first: they contain the
        numbers with which the ranks' output is labelled.
        """
        self._choose_pipes()
        timeout = max(0.0, self._stop.deadline - time.monotonic())
        ready = self._selector.select(
            None if timeout == math.inf else min(timeout, _LONGEST_WAIT_S)
        )
        for key, _ in sorted(ready, key=lambda item: item[0].data[0] != "control"):
            kind, rank = key.data
            if kind == "control":
                self._on_messages()
            elif kind == "wake":
                self._requests.clear_wake_up()
            else:
                self._on_pipe(key.fd, kind, rank)
        for number in self._requests.take():
            self._on_request(number)
        if self._phase is _Phase.STOPPING and time.monotonic() >= self._stop.deadline:
            self._kill()

    def _choose_pipes(self) -> None:
        """Read what ranks print as long as it can be shown; without room they wait, as they would
        for a reader of their own. When they are to end, they must not have to.
        """
        is_ending = self._phase not in {_Phase.STARTING, _Phase.RUNNING}
        for stream, paused in self._paused.items():
            if is_ending or self._output.has_room(_STREAMS[stream]):
                while paused:
                    descriptor, rank = paused.popitem()
                    self._selector.register(descriptor, selectors.EVENT_READ, (stream, rank))
            elif not paused:
                for key in [*self._selector.get_map().values()]:
                    if key.data[0] == stream:
                        self._selector.unregister(key.fd)
                        paused[key.fd] = key.data[1]

    def _on_messages(self) -> None:
        """All there are: a rank's pipes are read when it is known whose they are."""
        self._on_message(self._fork_server.receive())
        while self._fork_server.has_message():
            self._on_message(self._fork_server.receive())

    def _on_message(self, message: ServerMessage | None) -> None:
        match message:
            case None:
                self._phase = _Phase.OVER
                self._close_connection()
            case Started():
                if self._phase is _Phase.STARTING:
                    self._phase = _Phase.RUNNING
                self._server_pid = message.server_pid
                for rank, pid in message.pids.items():
                    self._ranks[rank].pid = pid
            case JobPlaced():
                self._first_rank = message.first_rank
                self._output.number_ranks_from(message.first_rank)
            case RankEnd():
                self._ranks[message.rank].end = message
                self._history.add_end(message)
                if message.exitcode != 0:
                    self._begin_stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S)
            case StartFailure():
                self._start_failure = self._start_failure or message
                self._begin_stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S)
            case _:
                self._on_elastic_message(message)

    def _on_elastic_message(self, message: ElasticMessage) -> None:
        match message:
            case MemberStarted():
                self._ranks[message.rank].pid = message.pid
            case MemberLost():
                self._forget_life(self._ranks[message.rank])
                self._history.add_end(message)
            case RemoteEnd():
                rank = message.slot - self._first_rank
                left = LeftPage(rank, message.page, message.is_lost, message.host)
                self._history.pages.append(left)
            case GenerationBegan():
                self._history.generations = message.number + 1
                self._output.begin_generation(message.number)
            case RankFailing():
                self._begin_stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S, spare=message.rank)
            case StopRequested():
                self._on_request(message.number)
            case Announcement():
                self._output.report_job(f"paceline: {message.text}")

    def _forget_life(self, rank: _Rank) -> None:
        """A rank has ended, and the job goes on. Another process may write to its pipes from now
        on, if it has not begun to: what this one has written is read before.
        """
        for key in [*self._selector.get_map().values()]:
            if _is_pipe(key) and key.data[1] == rank.index:
                while self._on_pipe(key.fd, *key.data):
                    pass
        self._output.end(rank.index)
        if (report := rank.own_report) is not None and report.kind is ReportKind.ERROR:
            self._output.report(rank.index, report.text)
        self._ranks[rank.index] = rank.next_life()

    def _on_pipe(self, descriptor: int, kind: str, rank: int) -> bool:
        """Read from a pipe; whether there was anything."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        elif kind == "report":
            self._on_report(self._ranks[rank], data)
        else:
            self._output.feed(rank, _STREAMS[kind], data)
        return bool(data)

    def _on_report(self, rank: _Rank, data: bytes) -> None:
        report = rank.feed_report(data)
        # A rank that failed will end by itself. The others need not wait for that, nor for it to
        # hang in its clean-up. One that only passes on another's error leaves that rank time to
        # report its own. In an elastic job the fork server decides what an error means.
        if self._plan.elastic is not None:
            return
        if report is not None and report.kind is ReportKind.ERROR and report.caused_by is None:
            self._begin_stop(signal.SIGTERM, _STOP_AFTER_FAILURE_S, spare=rank.index)

    # -- stop --------------------------------------------------------------------------------------

    def _on_request(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._fork_server.send(Signal(number))
            return
        if self._phase is _Phase.STARTING:
            # Still importing: there is no rank that could be asked.
            self._fork_server.process.terminate()
        if self._phase in {_Phase.STARTING, _Phase.RUNNING}:
            passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._begin_stop(passed_on, self._plan.grace_s, requested_by=number)
        elif number == signal.SIGINT:
            self._kill()

    def _begin_stop(
        self,
        number: int,
        grace_s: float,
        *,
        spare: int | None = None,
        requested_by: int | None = None,
    ) -> None:
        """Ask all ranks to end, but for one that is ending anyway. Only the first reason counts."""
        # A failing job produces many reasons at once: ranks that were asked to stop exit with an
        # error, their peers report a lost connection. Later ones must neither extend the deadline
        # nor replace the signal the user sent.
        if self._phase not in {_Phase.STARTING, _Phase.RUNNING}:
            return
        self._phase = _Phase.STOPPING
        asked = (rank.index for rank in self._ranks if rank.end is None and rank.index != spare)
        self._stop = _Stop(frozenset(asked), time.monotonic() + grace_s, requested_by)
        self._fork_server.send(Signal(number, skip=spare))
        if self._plan.elastic is None and all(rank.end is not None for rank in self._ranks):
            # The fork server waits for other nodes, and does not listen any more.
            self._fork_server.process.terminate()

    def _kill(self) -> None:
        if self._phase is _Phase.STOPPING:
            self._phase = _Phase.KILLED
            # Also a rank that was ending by itself, and took too long.
            left = frozenset(rank.index for rank in self._ranks if rank.end is None)
            self._stop = dataclasses.replace(
                self._stop, deadline=math.inf, ranks=self._stop.ranks | left
            )
            self._fork_server.send(Signal(signal.SIGKILL))

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Also after an exception here: no process, no descriptor stays."""
        # If the job is not over, the fork server takes this as the death of its launcher and ends
        # the ranks.
        self._phase = _Phase.OVER
        self._choose_pipes()
        self._close_connection()
        self._wait_for_fork_server()
        # A process that a rank detached may hold a pipe open for as long as it likes, so reading
        # to the end of every pipe could take forever: what has been written is read, with a limit.
        end = time.monotonic() + _DRAIN_S
        while self._open_pipes() and time.monotonic() < end and self._drain():
            pass
        for rank in self._ranks:
            self._output.end(rank.index)
        for descriptor in self._open_pipes():
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._selector.close()

    def _close_connection(self) -> None:
        connection = self._fork_server.connection
        if not connection.closed:
            self._selector.unregister(connection)
            connection.close()

    def _wait_for_fork_server(self) -> None:
        process = self._fork_server.process
        deadline = time.monotonic() + self._plan.rendezvous.timeout_s + _FORK_SERVER_END_S
        while process.poll() is None:
            # A rank that ends may still have much to write, and blocks when its pipe is full.
            self._drain()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
            if time.monotonic() > deadline:
                process.kill()
        is_unfinished = any(rank.end is None for rank in self._ranks)
        if process.returncode != 0 and self._start_failure is None and is_unfinished:
            self._start_failure = StartFailure(
                f"the fork server (pid {self._server_pid or process.pid}) failed "
                f"({describe_exit(process.returncode)})",
                process.returncode,
            )
        if self._plan.owns_process:
            # There are none, unless the fork server was killed.
            end_descendants(os.getpid(), wait_s=0.5, term_s=1.0)

    def _drain(self) -> bool:
        """Read what ranks have written; whether there was anything."""
        ready = [key for key, _ in self._selector.select(0.0) if _is_pipe(key)]
        for key in ready:
            self._on_pipe(key.fd, *key.data)
        return bool(ready)

    def _open_pipes(self) -> list[int]:
        return [key.fd for key in self._selector.get_map().values() if _is_pipe(key)]

    def result(self, seconds: float) -> JobResult:
        failures = [rank.failure(rank.index in self._stop.ranks) for rank in self._ranks]
        return JobResult(
            reports=[rank.report for rank in self._ranks],
            failures=sorted(
                (failure for failure in failures if failure is not None),
                key=lambda failure: (failure.is_consequence, failure.when),
            ),
            succeeded=frozenset(
                rank.index
                for rank in self._ranks
                if rank.end is not None and rank.end.exitcode == 0
            ),
            first_rank=self._first_rank,
            stopped_by=self._stop.requested_by,
            start_failure=self._start_failure,
            pids={rank.index: rank.pid for rank in self._ranks if rank.pid is not None},
            seconds=seconds,
            history=self._history,
        )


def _is_pipe(key: selectors.SelectorKey) -> bool:
    return key.data[0] not in {"control", "wake"}


def _make_pipes(ranks: int) -> tuple[list[RankPipes], list[RankPipes]]:
    """For each rank, the ends of its pipes that we read and those that it writes to."""
    reading, writing = [], []
    for _ in range(ranks):
        ends = [os.pipe() for _ in range(3)]
        reading.append(RankPipes(*(read for read, _ in ends)))
        writing.append(RankPipes(*(write for _, write in ends)))
    return reading, writing


def _close_pipes(ends: list[RankPipes]) -> None:
    for pipes in ends:
        for descriptor in pipes.all():
            os.close(descriptor)


def _start_fork_server(plan: Plan, pipes: list[RankPipes]) -> _ForkServer:
    inherited = [descriptor for rank_pipes in pipes for descriptor in rank_pipes.all()]
    with contextlib.ExitStack() as stack:
        rendezvous = plan.rendezvous
        if rendezvous.nodes == 1 and not rendezvous.endpoint:
            # A port the system chooses, open before any rank looks for it: nothing to collide with,
            # nothing to wait for.
            listen_socket = stack.enter_context(
                socket.create_server(("127.0.0.1", 0), backlog=plan.ranks + 64)
            )
            rendezvous = dataclasses.replace(rendezvous, listen_fd=listen_socket.fileno())
            inherited.append(listen_socket.fileno())
        job = Job(
            work=plan.work,
            ranks=plan.ranks,
            pipes=tuple(pipes),
            rendezvous=rendezvous,
            threads=plan.threads,
            launcher=plan.launcher,
            launcher_pid=os.getpid(),
            start_method=plan.start_method,
            preload=plan.preload,
            path=plan.path,
            environ={**plan.environ, WATCHED: "1"},
            elastic=plan.elastic,
        )
        return _ForkServer(job, inherited)
