"""The fork server of an elastic job: starts ranks, and replacements for those that end, for as long
as the job runs.

    launcher --control-->  fork server  --fork-->  ranks, in slots 0 .. MAX - 1
                             |    ^  \\--fork-->   store process
                      job page    requests pipe
                    (generations) (ready, leaving, failing, scale)

What is to be done is decided in `launch/membership.py`; this module tells it what happens and does
what it orders. It must be able to fork at any moment and therefore starts no thread: the store,
whose server has threads, is served by a process of its own, which is forked first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from paceline._linux import catches_signal, die_with_parent, end_descendants, outlive_parent
from paceline.errors import describe_exit
from paceline.launch import rank_main
from paceline.launch.elastic_job import elastic_variable
from paceline.launch.generation import Member
from paceline.launch.job_page import JobPage, Word
from paceline.launch.membership import (
    EndJob,
    Kill,
    Membership,
    Order,
    Publish,
    Start,
    Tell,
    Terminate,
    Verdict,
)
from paceline.launch.messages import (
    ELASTIC,
    Announcement,
    Job,
    JobPlaced,
    MemberLost,
    MemberStarted,
    RankEnd,
    RankFailing,
    ServerMessage,
    Signal,
    Started,
    StartFailure,
)
from paceline.launch.rank_process import (
    LIMITS,
    CannotStart,
    ThisRank,
    become_rank,
    inherited_descriptors,
    role_variables,
    wake_on_child_change,
)
from paceline.telemetry.variables import RUN_ID

__all__ = ["ElasticServer"]

_LEFTOVERS_WAIT_S = 0.5
_LEFTOVERS_TERM_S = 2.0
_LONGEST_WAIT_S = 3600.0
_READ_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Forked:
    """In a rank that was just forked: where it reads its role."""

    member: Member
    role_fd: int


@dataclasses.dataclass(frozen=True)
class _Change:
    """What happened to a process that is not a request of its own."""

    member: Member
    pid: int
    status: int


class ElasticServer:
    """Serves one elastic job."""

    def __init__(self, job: Job, control: Connection) -> None:
        assert job.elastic is not None
        self._job = job
        self._control = control
        self._membership = Membership(job.elastic)
        self._running: dict[int, Member] = {}  # by pid
        self._pids: dict[int, int] = {}  # by the id of the member
        self._requests_read, self._requests_write = os.pipe()
        os.set_blocking(self._requests_read, False)
        self._unfinished_line = b""
        self._page = JobPage.create(
            job.environ.get(RUN_ID, ""),
            min_ranks=job.elastic.min_ranks,
            max_ranks=job.elastic.max_ranks,
        )
        self._page.words[Word.REQUESTS_FD] = self._requests_write
        with socket.socket(fileno=os.dup(job.rendezvous.listen_fd)) as listen_socket:
            self._address, self._port = listen_socket.getsockname()[:2]
        self._store_pid = self._start_store_process()

    def serve(self) -> ThisRank | int:
        """Until the job is over. Returns also in each rank, whenever that is forked."""
        outlive_parent()  # from here on a killed launcher is noticed as the end of the connection
        server = os.getpid()
        with wake_on_child_change() as wake:
            forked = None
            try:
                self._send(Started({}, server))
                self._send(JobPlaced(0, self._job.ranks))
                forked = self._loop(wake)
            except (BrokenPipeError, ConnectionResetError):
                self._kill_all()  # the launcher is gone
            except Exception as error:
                reason = str(error) if isinstance(error, CannotStart) else repr(error)
                with contextlib.suppress(OSError):
                    self._send(StartFailure(reason))
                self._kill_all()
            if forked is None:
                _kill(self._store_pid)
                end_descendants(server, wait_s=_LEFTOVERS_WAIT_S, term_s=_LEFTOVERS_TERM_S)
                return 0
        return self._become_rank(forked, server)

    def _send(self, message: ServerMessage) -> None:
        self._control.send(message)

    def _kill_all(self) -> None:
        for pid in self._running:
            _kill(pid)

    # -- processes ---------------------------------------------------------------------------------

    def _start_store_process(self) -> int:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            raise CannotStart(
                f"the store could not be started: {error.strerror}{LIMITS}", 2
            ) from None
        if pid == 0:
            die_with_parent(server)
            os.setpgid(0, 0)
            self._control.close()
            os.close(self._requests_read)
            os.close(self._requests_write)
            _serve_store(self._job, self._address, self._port)
        return pid

    def _start(self, member: Member) -> _Forked | None:
        """Fork a rank and send it its role; returns something in the rank only."""
        try:
            role_read, role_write = os.pipe()
            pid = os.fork()
        except OSError as error:
            raise CannotStart(
                f"rank {member.slot} could not be started: {error.strerror}{LIMITS}", 2
            ) from None
        if pid == 0:
            os.close(role_write)
            return _Forked(member, role_read)
        os.close(role_read)
        self._running[pid] = member
        self._pids[member.id] = pid
        self._page.seat(member.slot, member.id, pid)
        self._membership.started(member.id, pid)
        with contextlib.suppress(BrokenPipeError):  # it was killed before it began
            role = rank_main.Role(self._job.work, self._variables(member, pid))
            rank_main.send_frame(role_write, role)
        os.close(role_write)
        self._send(MemberStarted(member.slot, pid))
        return None

    def _variables(self, member: Member, pid: int) -> dict[str, str]:
        variables = role_variables(
            self._job,
            rank=member.slot,
            local_rank=member.slot,
            world_size=self._job.ranks,
            node=0,
            address=self._address,
            port=self._port,
        )
        variables[ELASTIC] = elastic_variable(
            pid=pid,
            page_fd=self._page.descriptor,
            requests_fd=self._requests_write,
            member=member.id,
            slot=member.slot,
        )
        return variables

    def _become_rank(self, forked: _Forked, server: int) -> ThisRank:
        die_with_parent(server)
        os.setpgid(0, 0)
        self._control.close()
        os.close(self._requests_read)
        kept = (self._page.descriptor, self._requests_write)
        return become_rank(self._job, forked.member.slot, forked.role_fd, kept)

    # -- the loop ----------------------------------------------------------------------------------

    def _loop(self, wake: socket.socket) -> _Forked | None:
        with selectors.DefaultSelector() as selector:
            for source in (self._control, wake, self._requests_read):
                selector.register(source, selectors.EVENT_READ)
            while True:
                self._page.words[Word.TARGET] = self._membership.target
                now = time.monotonic()
                forked = self._follow(self._membership.decide(now))
                if forked is not None or self._membership.is_over:
                    return forked
                pause_s = min(self._membership.wake_at(now) - now, _LONGEST_WAIT_S)
                for key, _ in selector.select(max(0.0, pause_s)):
                    if key.fileobj is wake:
                        wake.recv(4096)
                    elif key.fileobj is self._control:
                        self._follow_launcher()
                self._note_what_happened()

    def _follow(self, orders: Sequence[Order]) -> _Forked | None:
        for order in orders:
            match order:
                case Start():
                    if (forked := self._start(order.member)) is not None:
                        return forked
                case Terminate():
                    _signal(self._pids[order.member_id], signal.SIGTERM)
                case Kill():
                    _kill(self._pids[order.member_id])
                case Publish():
                    self._page.publish(order.generation)
                case EndJob():
                    self._send(RankFailing(self._running[self._pids[order.member_id]].slot))
                case Tell():
                    self._send(Announcement(order.text))
        return None

    def _follow_launcher(self) -> None:
        try:
            order = self._control.recv()
        except EOFError:
            raise BrokenPipeError from None
        if not isinstance(order, Signal):
            return
        if order.number != signal.SIGUSR1:
            # Ranks look at it when they get the signal.
            self._page.words[Word.IS_ENDING] = 1
            self._membership.stop()
        for pid, member in self._running.items():
            # A request to save must not end a rank that is still starting.
            is_heard = order.number != signal.SIGUSR1 or catches_signal(pid, signal.SIGUSR1)
            if member.slot != order.skip and is_heard:
                _signal(pid, order.number)

    def _note_what_happened(self) -> None:
        # In this order: what a process has asked for before it ended is read before its end counts.
        changes = self._collect_changes()
        for request in self._read_requests():
            self._note_request(request)
        self._membership.observe_steps(
            {member.id: self._page.step_in(member.slot) for member in self._running.values()}
        )
        for change in changes:
            self._note_change(change)

    def _collect_changes(self) -> list[_Change]:
        changes = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid == 0:
                    break
                if pid == self._store_pid and not os.WIFSTOPPED(status):
                    self._check_store_process(status)
                elif pid in self._running:  # else: an orphan that a rank left behind
                    changes.append(_Change(self._running[pid], pid, status))
        return changes

    def _check_store_process(self, status: int) -> None:
        if not os.WIFCONTINUED(status):
            how = describe_exit(os.waitstatus_to_exitcode(status))
            raise CannotStart(
                f"the process that serves the job's store (pid {self._store_pid}) {how}: ranks can "
                "no longer meet",
                1,
            )

    def _read_requests(self) -> list[dict[str, Any]]:
        data = self._unfinished_line
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._requests_read, _READ_BYTES):
                data += part
        *lines, self._unfinished_line = data.split(b"\n")
        requests = []
        for line in lines:
            with contextlib.suppress(ValueError):
                request = json.loads(line)
                if isinstance(request, dict):
                    requests.append(request)
        return requests

    def _note_request(self, request: dict[str, Any]) -> None:
        member = request.get("member", -1)
        match request.get("is"):
            case "ready":
                self._membership.ready(member)
            case "leaving":
                self._membership.leaving(member)
            case "failing":
                lost = bool(request.get("has_lost_peer"))
                self._membership.failing(member, has_lost_peer=lost)
            case "scale" if isinstance(request.get("ranks"), int):
                self._membership.scale(request["ranks"])

    def _note_change(self, change: _Change) -> None:
        member, status, now = change.member, change.status, time.monotonic()
        if os.WIFSTOPPED(status):
            self._membership.stopped(member.id, now)
        elif os.WIFCONTINUED(status):
            self._membership.continued(member.id)
        else:
            self._note_end(change.pid, member, os.waitstatus_to_exitcode(status), now)

    def _note_end(self, pid: int, member: Member, exitcode: int, now: float) -> None:
        del self._running[pid], self._pids[member.id]
        self._page.vacate(member.slot)
        verdict = self._membership.ended(member.id, exitcode, now)
        if verdict is Verdict.LOST:
            # What it has started, such as loader workers, has lost its purpose. Not SIGKILL:
            # multiprocessing's resource tracker ignores SIGTERM, and cleans up.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)
        if verdict in {Verdict.LOST, Verdict.LEFT}:
            self._send(MemberLost(member.slot, exitcode, now))
        else:
            self._send(RankEnd(member.slot, exitcode, now))
        if verdict is Verdict.FATAL and exitcode == 0:
            self._send(StartFailure(f"rank {member.slot} ended before it took part"))


def _serve_store(job: Job, address: str, port: int) -> NoReturn:
    """What the store process does, until it is killed. Torch is loaded when a rank connects."""
    for descriptor in inherited_descriptors(job):
        if descriptor != job.rendezvous.listen_fd:
            os.close(descriptor)
    with selectors.DefaultSelector() as selector:
        selector.register(job.rendezvous.listen_fd, selectors.EVENT_READ)
        selector.select()
    from paceline._torch_internals import TCPStore

    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=job.rendezvous.listen_fd,
    )
    with contextlib.nullcontext(store):  # served as long as it exists
        while True:
            signal.pause()


def _kill(pid: int) -> None:
    _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
