"""The fork server of an elastic job's first host: decides who belongs to the job, for as long as it
runs.

    launcher --control-->  fork server  --fork-->  ranks, in slots 0 .. MAX - 1
                             |    ^  \\--fork-->   store process
                      job page    requests pipe
                    (generations) (ready, settled, leaving, failing, disconnected, scale)

What is to be done is decided in `launch/membership.py`; this module tells it what happens and does
what it orders. It must be able to fork at any moment and therefore starts no thread: the store,
whose server has threads, is served by a process of its own, which is forked first.

Other hosts (`--rdzv-endpoint`) connect to this one. Their fork servers (`elastic_follower.py`) do
for their ranks what is ordered here, tell what happens to them, and show what is published here on
job pages of their own. So a rank need not know on which host it is.
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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from paceline._linux import die_with_parent, end_descendants, outlive_parent
from paceline.errors import describe_exit
from paceline.launch.elastic_ranks import (
    Change,
    ElasticRanks,
    Forked,
    HostPlace,
    Request,
    end_what_it_started,
    messages_of_end,
)
from paceline.launch.generation import Generation, Member
from paceline.launch.host_link import LinkMessage, parse_endpoint
from paceline.launch.job_page import JobPage, Word
from paceline.launch.membership import (
    FIRST_HOST,
    EndJob,
    Fail,
    Host,
    Kill,
    Membership,
    Order,
    Publish,
    Release,
    Start,
    Tell,
    Terminate,
    Verdict,
)
from paceline.launch.messages import (
    Announcement,
    GenerationBegan,
    Job,
    JobPlaced,
    MemberStarted,
    RankFailing,
    RemoteEnd,
    ServerMessage,
    Signal,
    Started,
    StartFailure,
)
from paceline.launch.rank_process import (
    LIMITS,
    CannotStart,
    ThisRank,
    inherited_descriptors,
    wake_on_child_change,
)
from paceline.launch.remote_hosts import Arrival, RemoteHost, RemoteHosts
from paceline.telemetry.variables import RUN_ID

__all__ = ["ElasticServer", "PROTOCOL", "SLOTS_ON_SEVERAL_HOSTS"]

PROTOCOL = 2  # of the messages between hosts
SLOTS_ON_SEVERAL_HOSTS = 1024
_LEFTOVERS_WAIT_S = 0.5
_LEFTOVERS_TERM_S = 2.0
_LONGEST_WAIT_S = 3600.0


class ElasticServer:
    """Serves one elastic job. `listener` is where other hosts come to; None if there are none."""

    def __init__(self, job: Job, control: Connection, listener: socket.socket | None) -> None:
        assert job.elastic is not None
        self._job, self._config = job, job.elastic
        self._control = control
        self._slots = range(job.ranks)
        self._membership = Membership(job.elastic, self._slots)
        self._hosts = RemoteHosts(listener, job.elastic.host_silence_s)
        self._next_host = FIRST_HOST + 1
        self._members: dict[int, Member] = {}  # all processes there are, by id
        self._host_deadline = time.monotonic() + job.rendezvous.timeout_s
        slots = job.ranks if listener is None else SLOTS_ON_SEVERAL_HOSTS
        job_id = job.environ.get(RUN_ID, "")
        self._page = JobPage.create(
            job_id,
            min_ranks=job.elastic.min_ranks,
            max_ranks=job.elastic.max_ranks,
            slots=slots,
        )
        self._store_socket = _store_socket(job, listener)
        address, port = self._store_socket.getsockname()[:2]
        if listener is not None:
            address = parse_endpoint(job.rendezvous.endpoint)[0]
        world_size = max(job.ranks, job.elastic.max_ranks)
        self._place = HostPlace(FIRST_HOST, self._slots, world_size, address, port, job_id)
        self._ranks = ElasticRanks(
            job, self._place, self._page, self._close_private, self._on_other_end
        )
        self._store_pid = self._start_store_process()

    def serve(self) -> ThisRank | int:
        """Until the job is over. Returns also in each rank, whenever that is forked."""
        outlive_parent()  # from here on a killed launcher is noticed as the end of the connection
        server = os.getpid()
        with wake_on_child_change() as wake:
            forked = None
            try:
                self._send(Started({}, server))
                self._send(JobPlaced(0, self._place.world_size))
                forked = self._loop(wake)
            except (BrokenPipeError, ConnectionResetError):
                self._ranks.kill_all()  # the launcher is gone
            except Exception as error:
                reason = str(error) if isinstance(error, CannotStart) else repr(error)
                self._hosts.tell("fail", reason=f"the first host failed: {reason}")
                with contextlib.suppress(OSError):
                    self._send(StartFailure(reason))
                self._ranks.kill_all()
            if forked is None:
                self._hosts.close()
                self._store_socket.close()
                _kill(self._store_pid)
                end_descendants(server, wait_s=_LEFTOVERS_WAIT_S, term_s=_LEFTOVERS_TERM_S)
                return 0
        return self._ranks.become_rank(forked)

    def _send(self, message: ServerMessage) -> None:
        self._control.send(message)

    def _close_private(self) -> None:
        """In a rank, and in the store process."""
        self._control.close()
        self._store_socket.close()
        self._hosts.close()

    # -- the store ---------------------------------------------------------------------------------

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
            self._serve_store()
        return pid

    def _serve_store(self) -> NoReturn:
        """What the store process does, until it is killed. Torch is loaded when a rank connects."""
        store_fd = os.dup(self._store_socket.fileno())
        self._ranks.close_in_child()
        for descriptor in inherited_descriptors(self._job):
            os.close(descriptor)
        with selectors.DefaultSelector() as selector:
            selector.register(store_fd, selectors.EVENT_READ)
            selector.select()
        from paceline._torch_internals import TCPStore

        store = TCPStore(
            self._place.address,
            self._place.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=store_fd,
        )
        with contextlib.nullcontext(store):  # served as long as it exists
            while True:
                signal.pause()

    def _on_other_end(self, pid: int, status: int) -> None:
        is_end = not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status)
        if pid == self._store_pid and is_end:
            how = describe_exit(os.waitstatus_to_exitcode(status))
            raise CannotStart(
                f"the process that serves the job's store (pid {pid}) {how}: ranks can no longer "
                "meet",
                1,
            )

    # -- the loop ----------------------------------------------------------------------------------

    def _loop(self, wake: socket.socket) -> Forked | None:
        with selectors.DefaultSelector() as selector:
            for source in (self._control, wake, self._ranks.requests_fd):
                selector.register(source, selectors.EVENT_READ)
            self._hosts.watch(selector)
            while True:
                self._show_target(self._membership.target)
                now = time.monotonic()
                self._check_hosts_come(now)
                forked = self._follow(self._membership.decide(now))
                if forked is not None:
                    return forked
                if self._membership.is_over:
                    self._hosts.tell("over")
                    return None
                wake_at = min(self._membership.wake_at(now), self._hosts.wake_at())
                pause_s = min(wake_at - now, _LONGEST_WAIT_S)
                if self._membership.missing_hosts:
                    pause_s = min(pause_s, self._host_deadline - now)
                for key, _ in selector.select(max(0.0, pause_s)):
                    if key.fileobj is wake:
                        wake.recv(4096)
                    elif key.fileobj is self._control:
                        self._follow_launcher()
                    elif key.fileobj is self._hosts.listener:
                        self._hosts.accept()
                self._note_what_happened()
                self._note_hosts(time.monotonic())

    def _show_target(self, ranks: int) -> None:
        if self._page.words[Word.TARGET] != ranks:
            self._page.words[Word.TARGET] = ranks
            self._hosts.tell("target", ranks=ranks)

    def _check_hosts_come(self, now: float) -> None:
        if self._membership.missing_hosts and now >= self._host_deadline:
            wanted = self._config.hosts
            raise CannotStart(
                f"{wanted - self._membership.missing_hosts} of {wanted} hosts (--nnodes) have come "
                f"within {self._job.rendezvous.timeout_s:g} s: start the same command on each host",
                1,
            )

    def _follow(self, orders: Sequence[Order]) -> Forked | None:
        for order in orders:
            match order:
                case Start():
                    if (forked := self._start(order.member)) is not None:
                        return forked
                case Terminate():
                    self._signal(order.member_id, signal.SIGTERM)
                case Kill():
                    self._signal(order.member_id, signal.SIGKILL)
                case Publish():
                    self._page.publish(order.generation)
                    self._send(GenerationBegan(order.generation.number))
                    self._hosts.tell("publish", None, **_as_message(order.generation))
                case EndJob():
                    self._end_because_of(order.member_id)
                case Fail():
                    self._fail_elsewhere(order.reason, FIRST_HOST)
                    self._send(StartFailure(order.reason))
                case Release():
                    self._release(order.host)
                case Tell():
                    self._send(Announcement(order.text))
                    self._hosts.tell("say", text=order.text)
        return None

    def _start(self, member: Member) -> Forked | None:
        self._members[member.id] = member
        if member.host != FIRST_HOST:
            self._hosts[member.host].link.send("start", slot=member.slot, member=member.id)
            return None
        started = self._ranks.start(member)
        if isinstance(started, Forked):
            return started
        self._note_start(member, started)
        self._send(MemberStarted(self._ranks.local_rank(member.slot), started))
        return None

    def _note_start(self, member: Member, pid: int) -> None:
        self._membership.started(member.id, pid)
        self._hosts.tell("seat", member.host, slot=member.slot, member=member.id, pid=pid)

    def _signal(self, member_id: int, number: int) -> None:
        host = self._members[member_id].host
        if host == FIRST_HOST:
            self._ranks.signal(member_id, number)
        else:
            self._hosts[host].link.send("signal", member=member_id, number=number)

    def _release(self, number: int) -> None:
        remote = self._hosts[number]
        remote.is_released = True
        remote.link.send("over")

    # -- the end -----------------------------------------------------------------------------------

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
            self._hosts.tell("stop", number=order.number)
        self._ranks.signal_all(order.number, order.skip)

    def _end_because_of(self, member_id: int) -> None:
        """An error is ending this rank, and so the job."""
        member = self._members[member_id]
        self._fail_elsewhere(f"rank {member.slot} failed{self._where(member)}", member.host)
        if member.host == FIRST_HOST:
            self._send(RankFailing(self._ranks.local_rank(member.slot)))
        else:
            self._hosts[member.host].link.send("failing", slot=member.slot)

    def _fail_elsewhere(self, reason: str, host: int) -> None:
        """Tell all hosts but one, which knows it, why the job ends."""
        if host != FIRST_HOST:
            self._send(StartFailure(reason))
        self._hosts.tell("fail", host, reason=reason)

    def _where(self, member: Member) -> str:
        host = "the first host" if member.host == FIRST_HOST else self._hosts[member.host].host
        return f" on {host}: see its output there"

    # -- what happened on this host ----------------------------------------------------------------

    def _note_what_happened(self) -> None:
        # In this order: what a process has asked for before it ended is read before its end counts.
        changes = self._ranks.collect_changes()
        for request in self._ranks.read_requests():
            self._note_request(request)
        self._membership.observe_steps(self._ranks.steps())
        for change in changes:
            self._note_change(change)

    def _note_request(self, request: Request) -> None:
        member = request.get("member", -1)
        match request.get("is"):
            case "ready":
                self._membership.ready(member)
            case "settled":
                self._membership.settled(request.get("generation", -1))
            case "leaving":
                self._membership.leaving(member)
            case "failing":
                lost = bool(request.get("has_lost_peer"))
                self._membership.failing(member, has_lost_peer=lost)
            case "disconnected":
                self._membership.disconnected(request.get("generation", -1))
            case "scale" if isinstance(request.get("ranks"), int):
                self._membership.scale(request["ranks"])

    def _note_change(self, change: Change) -> None:
        now = time.monotonic()
        if os.WIFSTOPPED(change.status):
            self._membership.stopped(change.member.id, now)
        elif os.WIFCONTINUED(change.status):
            self._membership.continued(change.member.id)
        else:
            self._ranks.forget(change)
            exitcode = os.waitstatus_to_exitcode(change.status)
            verdict = self._judge_end(change.member, exitcode, now)
            if verdict is Verdict.LOST:
                end_what_it_started(change.pid)
            slot = change.member.slot
            local_rank, page = self._ranks.local_rank(slot), self._ranks.last_page(change.pid)
            for message in messages_of_end(local_rank, slot, exitcode, verdict, page):
                self._send(message)

    def _judge_end(self, member: Member, exitcode: int, now: float) -> Verdict:
        """A rank has ended, on whichever host."""
        del self._members[member.id]
        self._hosts.tell("vacate", member.host, slot=member.slot)
        verdict = self._membership.ended(member.id, exitcode, now)
        if verdict is Verdict.FATAL:
            how = describe_exit(exitcode)
            reason = f"rank {member.slot} failed ({how}){self._where(member)}"
            self._fail_elsewhere(reason, member.host)
        return verdict

    # -- what happened on other hosts --------------------------------------------------------------

    def _note_hosts(self, now: float) -> None:
        for arrival, introduction in self._hosts.introductions(now):
            if (reason := self._why_not(introduction)) is not None:
                self._hosts.refuse(arrival, reason)
            else:
                self._admit(arrival, introduction, now)
        for remote, message in self._hosts.messages(now):
            try:
                self._note_message(remote, message, now)
            except (KeyError, TypeError, ValueError):
                remote.link.is_open = False  # it speaks another language
        for remote, how in self._hosts.take_lost(now):
            for member in self._membership.host_lost(remote.host.number, how):
                self._members.pop(member.id, None)
                self._page.vacate(member.slot)
                self._hosts.tell("vacate", slot=member.slot)

    def _why_not(self, introduction: LinkMessage) -> str | None:
        """Why a host cannot take part."""
        if introduction.get("protocol") != PROTOCOL:
            return "it runs another version of Paceline: use the same one on all hosts"
        expected = {
            "--rdzv-id": self._job.rendezvous.run_id,
            "--elastic": f"{self._config.min_ranks}:{self._config.max_ranks}",
        }
        for option, value in expected.items():
            if introduction.get(option) != value:
                return (
                    f"its {option} is {introduction.get(option)} and that of the job {value}: "
                    "start the same command on each host"
                )
        if not self._membership.is_open:
            return "the job is ending"
        ranks = introduction.get("ranks")
        if not isinstance(ranks, int) or ranks < 1 or self._free_slots(ranks) is None:
            return f"there is no room for {ranks} more ranks"
        return None

    def _free_slots(self, count: int) -> range | None:
        return self._hosts.free_slots(count, self._slots, SLOTS_ON_SEVERAL_HOSTS)

    def _admit(self, arrival: Arrival, introduction: LinkMessage, now: float) -> None:
        ranks = introduction["ranks"]
        slots = self._free_slots(ranks)
        assert slots is not None
        host = Host(self._next_host, slots, str(introduction.get("name", "")))
        self._next_host += 1
        link = self._hosts.admit(host, arrival, now).link
        link.send(
            "welcome",
            host=host.number,
            first_slot=slots.start,
            job=self._place.job,
            port=self._place.port,
            silence_s=self._config.host_silence_s,
            world_size=max(slots.stop, self._place.world_size),
        )
        # What the other pages show already.
        link.send("target", ranks=self._membership.target)
        for slot in range(self._page.slots):
            member, pid = self._page.member_in(slot), self._page.pid_in(slot)
            if member is not None:
                link.send("seat", slot=slot, member=member, pid=pid)
        for published in self._page.latest_published():
            link.send("publish", **_as_message(published.generation))
        self._membership.host_joined(host, ranks)

    def _note_message(self, remote: RemoteHost, message: LinkMessage, now: float) -> None:
        match message["is"]:
            case "ping":
                self._membership.observe_steps(dict(message["steps"]))
                remote.link.send("pong", number=message["number"])
            case "started":
                member = self._members[message["member"]]
                self._page.seat(member.slot, member.id, message["pid"])
                self._note_start(member, message["pid"])
            case "request":
                self._note_request(message["request"])
            case "stopped":
                self._membership.stopped(message["member"], now)
            case "continued":
                self._membership.continued(message["member"])
            case "ended":
                self._note_remote_end(remote, message, now)
            case "leave":
                self._membership.host_leaving(remote.host.number)

    def _note_remote_end(self, remote: RemoteHost, message: LinkMessage, now: float) -> None:
        self._membership.observe_steps(dict(message["steps"]))
        member = self._members[message["member"]]
        self._page.vacate(member.slot)
        verdict = self._judge_end(member, message["exitcode"], now)
        is_lost = verdict in {Verdict.LOST, Verdict.LEFT} and message["exitcode"] != 0
        page = zlib.decompress(base64.b64decode(message["page"]))
        self._send(RemoteEnd(member.slot, member.host, is_lost, page))
        remote.link.send(
            "verdict",
            slot=member.slot,
            pid=message["pid"],
            exitcode=message["exitcode"],
            verdict=verdict.name,
        )


def _store_socket(job: Job, listener: socket.socket | None) -> socket.socket:
    """Where the store is served: for the ranks of this host, or beside the endpoint for all."""
    if listener is None:
        return socket.socket(fileno=os.dup(job.rendezvous.listen_fd))
    where = (listener.getsockname()[0], 0)
    return socket.create_server(where, family=listener.family, backlog=SLOTS_ON_SEVERAL_HOSTS)


def _as_message(generation: Generation) -> dict[str, object]:
    members = [[each.slot, each.id, each.host] for each in generation.members]
    return {"number": generation.number, "members": members, "reason": generation.reason}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
