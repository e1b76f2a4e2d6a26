"""The ranks of an elastic job on one host: their processes, the job page they look at, and the pipe
that they write requests to.

Belongs to a fork server, that of the first host (`elastic_server.py`) or of another one
(`elastic_follower.py`). It decides nothing: it starts and signals, and tells what happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from paceline._linux import catches_signal, die_with_parent
from paceline.launch import rank_main
from paceline.launch.elastic_job import elastic_variable
from paceline.launch.generation import Member
from paceline.launch.job_page import JobPage, Word
from paceline.launch.membership import Verdict
from paceline.launch.messages import (
    ELASTIC,
    Job,
    MemberLost,
    RankEnd,
    ServerMessage,
    StartFailure,
)
from paceline.launch.rank_process import (
    LIMITS,
    CannotStart,
    ThisRank,
    become_rank,
    role_variables,
)
from paceline.telemetry.status_page import new_page, read_and_close
from paceline.telemetry.variables import RUN_ID

__all__ = [
    "Change",
    "Forked",
    "HostPlace",
    "ElasticRanks",
    "Request",
    "end_what_it_started",
    "messages_of_end",
]

_READ_BYTES = 1 << 16

Request = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """Where this host is in its job, and where the job's store is served."""

    host: int
    slots: range
    world_size: int
    address: str
    port: int
    job: str  # the id of the job


@dataclasses.dataclass(frozen=True)
class Forked:
    """In a rank that was just forked: where it reads its role."""

    member: Member
    role_fd: int
    page_fd: int  # its status page


@dataclasses.dataclass(frozen=True)
class Change:
    """What happened to a process that is not a request of its own."""

    member: Member
    pid: int
    status: int


class ElasticRanks:
    """The processes that this fork server has started as ranks.

    Args:
        job: what they run.
        place: of this host in the job.
        page: that ranks look at.
        close_private: closes, in a rank, what belongs to the fork server alone.
        on_other_end: called with pid and status when a child that is no rank has changed.
    """

    def __init__(
        self,
        job: Job,
        place: HostPlace,
        page: JobPage,
        close_private: Callable[[], None],
        on_other_end: Callable[[int, int], None] = lambda pid, status: None,
    ) -> None:
        self._job, self._place, self._page = job, place, page
        self._close_private, self._on_other_end = close_private, on_other_end
        self._server = os.getpid()
        self._running: dict[int, Member] = {}  # by pid
        self._pids: dict[int, int] = {}  # by the id of the member
        self._status_pages: dict[int, int] = {}  # their descriptors, by pid
        self.requests_fd, self._requests_write = os.pipe()
        os.set_blocking(self.requests_fd, False)
        self._unfinished_line = b""
        page.words[Word.REQUESTS_FD] = self._requests_write

    def local_rank(self, slot: int) -> int:
        """The index of a slot among those of this host."""
        return slot - self._place.slots.start

    # -- start -------------------------------------------------------------------------------------

    def start(self, member: Member) -> Forked | int:
        """Fork a rank and send it its role. Returns the pid, and in the rank what it needs."""
        try:
            role_read, role_write = os.pipe()
            page_fd = new_page()
            pid = os.fork()
        except OSError as error:
            raise CannotStart(
                f"rank {member.slot} could not be started: {error.strerror}{LIMITS}", 2
            ) from None
        if pid == 0:
            os.close(role_write)
            return Forked(member, role_read, page_fd)
        os.close(role_read)
        self._running[pid] = member
        self._status_pages[pid] = page_fd
        self._pids[member.id] = pid
        self._page.seat(member.slot, member.id, pid)
        with contextlib.suppress(BrokenPipeError):  # it was killed before it began
            role = rank_main.Role(self._job.work, self._variables(member, pid))
            rank_main.send_frame(role_write, role)
        os.close(role_write)
        return pid

    def _variables(self, member: Member, pid: int) -> dict[str, str]:
        place = self._place
        variables = role_variables(
            self._job,
            rank=member.slot,
            local_rank=self.local_rank(member.slot),
            world_size=place.world_size,
            node=place.host,
            address=place.address,
            port=place.port,
        )
        variables[RUN_ID] = place.job
        variables[ELASTIC] = elastic_variable(
            pid=pid,
            page_fd=self._page.descriptor,
            requests_fd=self._requests_write,
            member=member.id,
            slot=member.slot,
        )
        return variables

    def become_rank(self, forked: Forked) -> ThisRank:
        """In the rank."""
        die_with_parent(self._server)
        os.setpgid(0, 0)
        self.close_in_child()
        kept = (self._page.descriptor, self._requests_write)
        rank = self.local_rank(forked.member.slot)
        return become_rank(self._job, rank, forked.role_fd, forked.page_fd, kept)

    def close_in_child(self) -> None:
        """A copy of a descriptor would hide its end from the other side."""
        os.close(self.requests_fd)
        for descriptor in self._status_pages.values():
            os.close(descriptor)
        self._close_private()

    # -- signals -----------------------------------------------------------------------------------

    def signal(self, member_id: int, number: int) -> None:
        """Signal one rank, if it still runs."""
        if member_id in self._pids:
            _signal(self._pids[member_id], number)

    def signal_all(self, number: int, skip: int | None = None) -> None:
        """Signal all ranks but one, given by its index on this host."""
        for pid, member in self._running.items():
            # A request to save must not end a rank that is still starting.
            is_heard = number != signal.SIGUSR1 or catches_signal(pid, signal.SIGUSR1)
            if self.local_rank(member.slot) != skip and is_heard:
                _signal(pid, number)

    def kill_all(self) -> None:
        self.signal_all(signal.SIGKILL)

    # -- what happened -----------------------------------------------------------------------------

    def collect_changes(self) -> list[Change]:
        """Ranks that have ended, were stopped or go on. Read requests afterwards: then those that a
        process has made before its end are among them.
        """
        changes = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if pid == 0:
                    break
                if pid in self._running:
                    changes.append(Change(self._running[pid], pid, status))
                else:  # also an orphan that a rank left behind
                    self._on_other_end(pid, status)
        return changes

    def read_requests(self) -> list[Request]:
        """What ranks, and `paceline scale`, have asked for."""
        data = self._unfinished_line
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.requests_fd, _READ_BYTES):
                data += part
        *lines, self._unfinished_line = data.split(b"\n")
        requests = []
        for line in lines:
            with contextlib.suppress(ValueError):
                request = json.loads(line)
                if isinstance(request, dict):
                    requests.append(request)
        return requests

    def steps(self) -> dict[int, int | None]:
        """How far ranks have come, by the id of the member."""
        return {member.id: self._page.step_in(member.slot) for member in self._running.values()}

    def forget(self, change: Change) -> None:
        """A rank has ended."""
        del self._running[change.pid], self._pids[change.member.id]
        self._page.vacate(change.member.slot)

    def last_page(self, pid: int) -> bytes:
        """What the status page of a rank showed when it ended; only once."""
        return read_and_close(self._status_pages.pop(pid))


def end_what_it_started(pid: int) -> None:
    """What a lost rank has started, such as loader workers, has lost its purpose. Not SIGKILL:
    multiprocessing's resource tracker ignores SIGTERM, and cleans up.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def messages_of_end(
    rank: int, slot: int, exitcode: int, verdict: Verdict, page: bytes
) -> list[ServerMessage]:
    """What the launcher is told about the end of a rank."""
    now = time.monotonic()
    if verdict in {Verdict.LOST, Verdict.LEFT}:
        return [MemberLost(rank, exitcode, now, page)]
    messages: list[ServerMessage] = [RankEnd(rank, exitcode, now, page)]
    if verdict is Verdict.FATAL and exitcode == 0:
        messages.append(StartFailure(f"rank {slot} ended before it took part"))
    return messages


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
