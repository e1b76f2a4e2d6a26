"""The fork server of a further host of an elastic job: starts and ends ranks as the first host
orders, tells it what happens to them, and shows on its own job page what that publishes.

    first host  <--host link-->  fork server  --fork-->  ranks of this host
                                   |    ^
                            job page    requests pipe, passed on

It runs ranks only while it has a lease (`host_link.py`): if the first host does not answer, it ends
them before that goes on without them. It does not come back by itself; the same command, started
again, joins the job anew.
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import time
import zlib
from multiprocessing.connection import Connection

from paceline._linux import end_descendants, outlive_parent
from paceline.launch.elastic_ranks import (
    Change,
    ElasticRanks,
    Forked,
    HostPlace,
    end_what_it_started,
    messages_of_end,
)
from paceline.launch.elastic_server import PROTOCOL, SLOTS_ON_SEVERAL_HOSTS
from paceline.launch.generation import Generation, Member
from paceline.launch.host_link import HostLink, Lease, LinkMessage, connect, parse_endpoint
from paceline.launch.job_page import JobPage, Word
from paceline.launch.membership import Verdict
from paceline.launch.messages import (
    Announcement,
    GenerationBegan,
    Job,
    JobPlaced,
    MemberStarted,
    RankEnd,
    RankFailing,
    ServerMessage,
    Signal,
    Started,
    StartFailure,
    StopRequested,
)
from paceline.launch.rank_process import CannotStart, ThisRank, wake_on_child_change

__all__ = ["ElasticFollower", "join_job"]

_PINGS_PER_LEASE = 10
_LONGEST_PING_S = 0.5
_KNOCK_S = 0.2  # between two attempts to reach the first host
_LEFTOVERS_WAIT_S = 0.5
_LEFTOVERS_TERM_S = 2.0
_CONNECT_S = 5.0


class _FirstHostLost(Exception):
    """The first host is gone, or cannot be reached."""


def join_job(job: Job) -> tuple[HostLink, LinkMessage, float]:
    """Ask the first host to be let in; waits for it to be there. Returns the connection, what the
    host was told, and when it had asked.

    Raises:
        CannotStart: there is nobody, or this host was refused.
    """
    endpoint, limit_s = job.rendezvous.endpoint, job.rendezvous.timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        asked_at = time.monotonic()
        try:
            link = connect(endpoint, _CONNECT_S)
        except OSError as error:
            if asked_at > deadline:
                raise CannotStart(
                    f"the first host of the job could not be reached at {endpoint} "
                    f"(--rdzv-endpoint) within {limit_s:g} s: {error.strerror or error}",
                    1,
                ) from None
            time.sleep(_KNOCK_S)
            continue
        asked_at = time.monotonic()
        answer = _introduce(link, job, deadline)
        # One that took long was good for a lease that is nearly over.
        if answer is not None and time.monotonic() - asked_at < answer["silence_s"] / 2:
            return link, answer, asked_at
        link.close()
        time.sleep(_KNOCK_S)


def _introduce(link: HostLink, job: Job, deadline: float) -> LinkMessage | None:
    """What the first host answers; None if it ended the connection."""
    assert job.elastic is not None
    details = {
        "protocol": PROTOCOL,
        "--rdzv-id": job.rendezvous.run_id,
        "--elastic": f"{job.elastic.min_ranks}:{job.elastic.max_ranks}",
        "ranks": job.ranks,
        "name": socket.gethostname(),
    }
    link.send("hello", **details)
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.select(max(0.0, deadline - time.monotonic()))
    answer = link.receive_one()
    if answer is None:
        return None
    if answer["is"] == "refused":
        raise CannotStart(
            f"the job at {job.rendezvous.endpoint} does not take this host: {answer['reason']}", 1
        )
    return answer


class ElasticFollower:
    """Serves the part of one elastic job that runs on this host."""

    def __init__(self, job: Job, control: Connection) -> None:
        assert job.elastic is not None
        self._job, self._control = job, control
        self._link, welcome, asked_at = join_job(job)
        first = welcome["first_slot"]
        self._place = HostPlace(
            host=welcome["host"],
            slots=range(first, first + job.ranks),
            world_size=welcome["world_size"],
            address=parse_endpoint(job.rendezvous.endpoint)[0],
            port=welcome["port"],
            job=welcome["job"],
        )
        self._page = JobPage.create(
            self._place.job,
            min_ranks=job.elastic.min_ranks,
            max_ranks=job.elastic.max_ranks,
            slots=SLOTS_ON_SEVERAL_HOSTS,
        )
        self._ranks = ElasticRanks(job, self._place, self._page, self._close_private)
        silence_s = welcome["silence_s"]
        self._lease = Lease(silence_s, asked_at)
        self._show_lease()
        self._silence_s = silence_s
        self._ping_s = min(_LONGEST_PING_S, silence_s / _PINGS_PER_LEASE)
        self._ping_at = asked_at
        self._last_pages: dict[int, bytes] = {}  # of ranks that have ended, by pid
        self._is_leaving = False  # this host was asked to leave
        self._is_ending = False  # the whole job ends
        self._is_over = False

    def serve(self) -> ThisRank | int:
        """Until the job is over for this host. Returns also in each rank, whenever that is
        forked.
        """
        outlive_parent()  # from here on a killed launcher is noticed as the end of the connection
        server = os.getpid()
        with wake_on_child_change() as wake:
            forked = None
            try:
                self._send(Started({}, server))
                self._send(JobPlaced(self._place.slots.start, self._place.world_size))
                forked = self._loop(wake)
            except (BrokenPipeError, ConnectionResetError):
                self._ranks.kill_all()  # the launcher is gone
            except Exception as error:
                self._ranks.kill_all()
                is_known = isinstance(error, CannotStart | _FirstHostLost)
                with contextlib.suppress(OSError):
                    self._send(StartFailure(str(error) if is_known else repr(error)))
            if forked is None:
                self._link.close()
                end_descendants(server, wait_s=_LEFTOVERS_WAIT_S, term_s=_LEFTOVERS_TERM_S)
                return 0
        return self._ranks.become_rank(forked)

    def _send(self, message: ServerMessage) -> None:
        self._control.send(message)

    def _close_private(self) -> None:
        """In a rank."""
        self._control.close()
        self._link.close()

    # -- the loop ----------------------------------------------------------------------------------

    def _loop(self, wake: socket.socket) -> Forked | None:
        with selectors.DefaultSelector() as selector:
            for source in (self._control, wake, self._ranks.requests_fd, self._link):
                selector.register(source, selectors.EVENT_READ)
            while True:
                if (forked := self._follow_first_host()) is not None or self._is_over:
                    return forked
                now = time.monotonic()
                self._keep_lease(now)
                pause_s = min(self._ping_at, self._lease.ends_at) - now
                for key, _ in selector.select(max(0.0, pause_s)):
                    if key.fileobj is wake:
                        wake.recv(4096)
                    elif key.fileobj is self._control:
                        self._follow_launcher()
                self._tell_what_happened()

    def _keep_lease(self, now: float) -> None:
        if now >= self._lease.ends_at:
            raise _FirstHostLost(
                f"{self._first_host} was not heard for {self._silence_s:g} s: the ranks of this "
                "host were ended. If the job goes on there, start the same command here again to "
                "join it; if not, start it again on all hosts, and it goes on from its last "
                "checkpoint"
            )
        if now >= self._ping_at:
            self._ping_at = now + self._ping_s
            self._link.send("ping", number=self._lease.ping(now), steps=self._steps())
        self._link.flush()

    @property
    def _first_host(self) -> str:
        return f"the first host of the job ({self._job.rendezvous.endpoint})"

    def _steps(self) -> list[tuple[int, int | None]]:
        return list(self._ranks.steps().items())

    def _follow_launcher(self) -> None:
        try:
            order = self._control.recv()
        except EOFError:
            raise BrokenPipeError from None
        if not isinstance(order, Signal):
            return
        is_request_to_end = order.number in {signal.SIGTERM, signal.SIGINT}
        if is_request_to_end and not self._is_ending:
            # This host alone: the others go on.
            self._is_leaving = True
            self._link.send("leave")
        else:
            self._ranks.signal_all(order.number, order.skip)

    def _tell_what_happened(self) -> None:
        # In this order: what a process has asked for before it ended counts before its end.
        changes = self._ranks.collect_changes()
        for request in self._ranks.read_requests():
            self._link.send("request", request=request)
        for change in changes:
            self._tell_change(change)

    def _tell_change(self, change: Change) -> None:
        member = change.member.id
        if os.WIFSTOPPED(change.status):
            self._link.send("stopped", member=member)
        elif os.WIFCONTINUED(change.status):
            self._link.send("continued", member=member)
        else:
            steps, exitcode = self._steps(), os.waitstatus_to_exitcode(change.status)
            self._ranks.forget(change)
            page = self._last_pages[change.pid] = self._ranks.last_page(change.pid)
            self._link.send(
                "ended",
                member=member,
                pid=change.pid,
                exitcode=exitcode,
                steps=steps,
                page=base64.b64encode(zlib.compress(page)).decode(),
            )

    # -- orders of the first host ------------------------------------------------------------------

    def _follow_first_host(self) -> Forked | None:
        for message in self._link.receive():
            if (forked := self._follow(message)) is not None:
                return forked
        if not self._link.is_open and not self._is_over:
            raise _FirstHostLost(
                f"{self._first_host}, which decides about its ranks and serves its store, is gone: "
                "the job has ended. Start it again on all hosts: it goes on from its last "
                "checkpoint"
            )
        return None

    def _follow(self, message: LinkMessage) -> Forked | None:
        match message["is"]:
            case "start":
                return self._start(message["slot"], message["member"])
            case "signal":
                self._ranks.signal(message["member"], message["number"])
            case "verdict":
                self._note_verdict(message)
            case "over":
                self._is_over = True
            case "stop" | "fail" | "failing":
                self._end(message)
            case _:
                self._show(message)
        return None

    def _show(self, message: LinkMessage) -> None:
        """What ranks and users of this host are to see."""
        match message["is"]:
            case "pong":
                self._lease.answered(message["number"])
                self._show_lease()
            case "target":
                self._page.words[Word.TARGET] = message["ranks"]
            case "seat":
                self._page.seat(message["slot"], message["member"], message["pid"])
            case "vacate":
                self._page.vacate(message["slot"])
            case "publish":
                members = tuple(Member(*each) for each in message["members"])
                self._page.publish(Generation(message["number"], members, message["reason"]))
                self._send(GenerationBegan(message["number"]))
            case "say":
                self._send(Announcement(message["text"]))

    def _show_lease(self) -> None:
        self._page.words[Word.LEASE_ENDS] = int(1e9 * self._lease.ranks_end_at)

    def _start(self, slot: int, member_id: int) -> Forked | None:
        started = self._ranks.start(Member(slot, member_id, self._place.host))
        if isinstance(started, Forked):
            return started
        self._link.send("started", member=member_id, pid=started)
        self._send(MemberStarted(self._ranks.local_rank(slot), started))
        return None

    def _note_verdict(self, message: LinkMessage) -> None:
        """The first host has decided what the end of a rank means."""
        slot, exitcode = message["slot"], message["exitcode"]
        verdict, page = Verdict[message["verdict"]], self._last_pages.pop(message["pid"])
        rank = self._ranks.local_rank(slot)
        if verdict is Verdict.LOST:
            end_what_it_started(message["pid"])
        if verdict is Verdict.LEFT and self._is_leaving:
            # Nobody follows it here: it has done its part.
            self._send(RankEnd(rank, exitcode, time.monotonic(), page))
            return
        for each in messages_of_end(rank, slot, exitcode, verdict, page):
            self._send(each)

    def _end(self, message: LinkMessage) -> None:
        """The job ends. The launcher is told why, and asks for the signals to be sent."""
        if message.get("number") == signal.SIGKILL:
            self._ranks.kill_all()
        if self._is_ending:
            return
        self._is_ending = True
        self._page.words[Word.IS_ENDING] = 1  # ranks look at it when they get a signal
        match message["is"]:
            case "stop":
                self._send(StopRequested(message["number"]))
            case "fail":
                self._send(StartFailure(message["reason"]))
            case "failing":
                self._send(RankFailing(self._ranks.local_rank(message["slot"])))
