"""Who belongs to an elastic job: the rules, without processes, pipes or a clock of their own.

The fork server tells what happened - a process is ready, wants to leave, ended - and then asks what
is to be done:

    membership.ended(member, exitcode, now)      what happened: ended, ready, leaving, ...
    for order in membership.decide(now): ...     what to do: Start, Kill, Publish, ...

A process goes through these standings, never backwards:

    STARTING   it runs the script, and has not made its `Training` yet
    READY      it waits for a generation that has it
    MEMBER     it is in the newest generation
    LEFT_OUT   it wanted to leave, and the newest generation begins without it

What the rules keep:

- A generation differs from the one before, unless its ranks have lost their connections, and has at
  least `min_ranks` members. Only when training is over, or the job was asked to end, may those that
  are left be fewer.
- Whoever is not in a generation any more has ended before it begins, or left of its own accord.
- The state of training is not left behind: a rank that wants to leave stays until another member
  has it.
- There are at most `max_restarts` replacements for ranks that died. Three errors in a row, each of
  a process that was started after the one before, with no step completed meanwhile, end the job.

Hosts are the places where processes can be started: each has some slots. The first host is there
from the beginning and decides about the job; if it is lost, so is the job, and there is nothing to
decide. The end of any other host is the end of its processes, all at once.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import signal
from collections.abc import Iterator, Mapping

from paceline.errors import describe_exit
from paceline.launch.generation import Generation, Member
from paceline.launch.messages import ElasticConfig

__all__ = [
    "EndJob",
    "Fail",
    "FIRST_HOST",
    "Host",
    "Kill",
    "Membership",
    "Order",
    "Publish",
    "Release",
    "Start",
    "Tell",
    "Terminate",
    "Verdict",
]

FIRST_HOST = 0
_ERRORS_IN_A_ROW = 3
_REGROUPS_IN_A_ROW = 5
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
_LEAVE_S = 30.0  # what a rank may take to end once it was left out
_GIVE_UP_S = 5.0  # the same for one that was asked to leave before it had begun
_POLL_S = 0.05
# These come from outside, from a user or the kernel's shortage of memory: no error of the script.
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


@dataclasses.dataclass(frozen=True)
class Start:
    """Start a process; then call `started`."""

    member: Member


@dataclasses.dataclass(frozen=True)
class Terminate:
    """Ask a process to leave, with SIGTERM."""

    member_id: int


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kill a process. What becomes of it is decided when it has ended."""

    member_id: int


@dataclasses.dataclass(frozen=True)
class Publish:
    """A new generation begins."""

    generation: Generation


@dataclasses.dataclass(frozen=True)
class EndJob:
    """An error is ending this process, and ends the job."""

    member_id: int


@dataclasses.dataclass(frozen=True)
class Fail:
    """The job ends, for a reason that is no error of a process."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Release:
    """A host that wanted to leave has no process any more, and will get none."""

    host: int


@dataclasses.dataclass(frozen=True)
class Tell:
    """A line for the user."""

    text: str


Order = Start | Terminate | Kill | Publish | EndJob | Fail | Release | Tell


@dataclasses.dataclass(frozen=True)
class Host:
    """A place for processes: its slots are its own. `name` is what the user calls it."""

    number: int
    slots: range
    name: str = ""

    def __str__(self) -> str:
        return f"host {self.number} ({self.name})" if self.name else f"host {self.number}"


class Verdict(enum.Enum):
    """What the end of a process means to the job."""

    FINISHED = enum.auto()  # its part of the job is done
    LOST = enum.auto()  # the job goes on, with a replacement if there may be one
    LEFT = enum.auto()  # it was asked to, or announced it
    FATAL = enum.auto()  # the job ends because of it
    ENDING = enum.auto()  # the job had been asked to end


class _Standing(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    MEMBER = enum.auto()
    LEFT_OUT = enum.auto()


class _Phase(enum.Enum):
    TRAINING = enum.auto()
    FINISHING = enum.auto()  # a rank has exited with status 0: nobody joins any more
    ENDING = enum.auto()  # the job was asked to end, or a rank has failed


@dataclasses.dataclass
class _Process:
    """One life in a slot."""

    member: Member
    is_initial: bool
    pid: int | None = None
    standing: _Standing = _Standing.STARTING
    joined: int | None = None  # the first generation that has it
    has_state: bool = False  # of training
    is_leaving: bool = False
    is_failing: bool = False
    has_time_limit: bool = False  # to end, after it was asked to leave
    kill_at: float = math.inf
    kill_reason: str = ""

    @property
    def name(self) -> str:
        pid = "" if self.pid is None else f" (pid {self.pid})"
        return f"rank {self.member.slot}{pid}"

    def how_it_ended(self, exitcode: int) -> str:
        """ "was killed by SIGKILL", "exited with code 3"."""
        if self.kill_reason:
            return self.kill_reason
        how = describe_exit(exitcode)
        return f"was {how}" if exitcode < 0 else how

    @property
    def is_member(self) -> bool:
        return self.standing is _Standing.MEMBER

    @property
    def stays(self) -> bool:
        """Whether it counts towards the size that the job is meant to have."""
        return not self.is_leaving


@dataclasses.dataclass
class _HostState:
    """What becomes of a host."""

    host: Host
    to_begin: int  # how many processes it has still to start for the first generation
    is_leaving: bool = False


class Membership:
    """The members of one job, from its start to its end. `slots` are those of the first host: by
    default as many as there may be ranks.
    """

    def __init__(self, config: ElasticConfig, slots: range | None = None) -> None:
        self._config = config
        self._target = 0
        self._phase = _Phase.TRAINING
        self._hosts: dict[int, _HostState] = {}
        self._processes: dict[int, _Process] = {}
        self._next_id = 0
        self._newest = Generation(-1, ())
        self._news: list[str] = []  # what happened since the newest generation began
        self._notices: list[str] = []  # further lines for the user
        self._told = 0  # how much of the news the user knows
        self._failed: int | None = None
        self._restarts = 0
        self._failed_starts = 0
        self._start_at = -math.inf
        self._job_step = -1
        self._blame = _Blame()
        self._failure: str | None = None
        self._regroups = 0  # since a step was completed
        self._has_to_regroup = False
        first = Host(FIRST_HOST, range(config.max_ranks) if slots is None else slots)
        self.host_joined(first, config.start_ranks)

    @property
    def target(self) -> int:
        """How many ranks the job is meant to have."""
        return self._target

    @property
    def missing_hosts(self) -> int:
        """How many hosts the job still waits for before it begins."""
        if self._newest.number >= 0 or not self.is_open:
            return 0
        return max(0, self._config.hosts - len(self._hosts))

    @property
    def is_open(self) -> bool:
        """Whether hosts and ranks may still join."""
        return self._phase is _Phase.TRAINING

    @property
    def is_over(self) -> bool:
        """Whether no process runs and none will be started."""
        return not self._processes and self._phase is not _Phase.TRAINING

    # -- what happened to hosts --------------------------------------------------------------------

    def host_joined(self, host: Host, ranks: int) -> None:
        """A host has come, with so many ranks to run."""
        has_begun = self._newest.number >= 0
        self._hosts[host.number] = _HostState(host, 0 if has_begun else ranks)
        staying = sum(process.stays for process in self._processes.values())
        expected = staying if has_begun else self._target
        self._target = max(self._target, min(expected + ranks, self._config.max_ranks))
        if has_begun:
            self._notices.append(f"{host} joins the job")

    def host_leaving(self, number: int) -> None:
        """A host was asked to leave: its ranks leave, and it gets no others."""
        if number in self._hosts and not self._hosts[number].is_leaving:
            self._hosts[number].is_leaving = True
            self._notices.append(f"{self._hosts[number].host} leaves the job")

    def host_lost(self, number: int, reason: str) -> list[Member]:
        """A host is gone, and every process on it. Returns those there were."""
        host = self._hosts.pop(number).host
        lost = [
            process for process in self._processes.values() if process.member.slot in host.slots
        ]
        for process in lost:
            del self._processes[process.member.id]
        slots = ", ".join(str(process.member.slot) for process in lost) or "none"
        what = f"{host} with ranks {slots} was lost ({reason})"
        if any(process.is_member for process in lost):
            at_step = f" at step {self._job_step}" if self._job_step >= 0 else ""
            self._news.append(f"{what}{at_step}")
        else:
            self._notices.append(what)
        if lost and self._phase is _Phase.FINISHING:
            self._failure = f"{what} when training was over: nobody can take their place any more"
        return [process.member for process in lost]

    # -- what happened to processes ----------------------------------------------------------------

    def started(self, member_id: int, pid: int) -> None:
        """A process that was ordered exists now."""
        self._processes[member_id].pid = pid

    def ready(self, member_id: int) -> None:
        """A process can be counted in."""
        process = self._processes.get(member_id)
        if process is not None and process.standing is _Standing.STARTING:
            process.standing = _Standing.READY

    def settled(self, generation: int) -> None:
        """The ranks of a generation train together: all of them have the state of training.

        Any of them tells so. How far a rank is may be heard late, after the end of others that have
        trained with it; but what they have told before their end is heard before it.
        """
        for process in self._processes.values():
            if process.joined is not None and process.joined <= generation:
                self._note_state(process)

    def leaving(self, member_id: int) -> None:
        """A process was asked to leave, by whomever."""
        process = self._processes.get(member_id)
        if process is not None and process.stays:
            process.is_leaving = True

    def failing(self, member_id: int, *, has_lost_peer: bool) -> None:
        """An error that nobody handled is ending a process."""
        process = self._processes.get(member_id)
        if process is None:
            return
        process.is_failing = not has_lost_peer
        if process.is_failing and not self._config.restart_on_error:
            self._failed = member_id

    def stopped(self, member_id: int, now: float) -> None:
        """A process was stopped, for example by SIGSTOP."""
        process = self._processes.get(member_id)
        if process is not None:
            process.kill_at = min(process.kill_at, now + self._config.stopped_s)
            process.kill_reason = f"was stopped for {self._config.stopped_s:g} s"

    def continued(self, member_id: int) -> None:
        """A process that was stopped runs again."""
        process = self._processes.get(member_id)
        if process is not None and not process.has_time_limit:
            process.kill_at, process.kill_reason = math.inf, ""

    def scale(self, ranks: int) -> None:
        """The user wants so many ranks; as many as there may be, if that is out of range."""
        target = min(max(ranks, self._config.min_ranks), self._config.max_ranks)
        if target != self._target:
            self._notices.append(f"scaled from {self._target} to {target} ranks")
            self._target = target

    def disconnected(self, generation: int) -> None:
        """Ranks of a generation have lost their connections, though none has ended: they need
        another one, be it of the same members.
        """
        if generation != self._newest.number or self._has_to_regroup:
            return
        self._regroups += 1
        if self._regroups > _REGROUPS_IN_A_ROW and self._phase is _Phase.TRAINING:
            self._failure = (
                "giving up: ranks on different hosts cannot reach each other, though the first "
                f"host reaches all of them ({_REGROUPS_IN_A_ROW} attempts without a step)"
            )
            return
        self._has_to_regroup = True
        self._news.append("connections between hosts were lost")

    def stop(self) -> None:
        """The whole job was asked to end."""
        self._phase = _Phase.ENDING

    def observe_steps(self, steps: Mapping[int, int | None]) -> None:
        """How far members have come, by id."""
        for member_id, step in steps.items():
            if step is not None and member_id in self._processes:
                self._note_state(self._processes[member_id])
                if step > self._job_step:
                    self._job_step, self._regroups = step, 0

    def _note_state(self, process: _Process) -> None:
        if not process.has_state:
            process.has_state = True
            self._failed_starts = 0

    def ended(self, member_id: int, exitcode: int, now: float) -> Verdict:
        """A process has ended."""
        process = self._processes.pop(member_id)
        verdict = self._judge(process, exitcode)
        what = f"{process.name} {process.how_it_ended(exitcode)}"
        if verdict is Verdict.FINISHED:
            self._phase = _Phase.FINISHING
            what = f"{process.name} is done"
        elif verdict is Verdict.FATAL:
            self._phase = _Phase.ENDING
        elif verdict is Verdict.LOST:
            self._count_loss(process, now)
            if not process.is_member:
                self._notices.append(f"{what} before it had joined")
        if process.is_member:
            at_step = f" at step {self._job_step}" if self._job_step >= 0 else ""
            self._news.append(f"{what}{at_step}")
        return verdict

    def _judge(self, process: _Process, exitcode: int) -> Verdict:
        if self._phase is _Phase.ENDING:
            return Verdict.ENDING
        if process.is_leaving:
            return Verdict.LEFT
        if exitcode == 0 and not self._is_premature(process):
            return Verdict.FINISHED
        return Verdict.FATAL if self._is_fatal(process, exitcode) else Verdict.LOST

    def _is_premature(self, process: _Process) -> bool:
        """Whether a replacement has ended before it took part, while others train."""
        others_train = any(other.has_state for other in self._processes.values())
        return not process.is_initial and not process.has_state and others_train

    def _is_fatal(self, process: _Process, exitcode: int) -> bool:
        """Whether the job cannot go on without this process."""
        if self._failed == process.member.id:
            return True
        if self._phase is _Phase.FINISHING:
            self._notices.append(
                f"{process.name} {process.how_it_ended(exitcode)} when training was over: nobody "
                "can take its place any more"
            )
            return True
        is_error = process.is_failing or exitcode not in _FROM_OUTSIDE
        if is_error and self._blame.count(process.member.id, self._next_id, self._job_step):
            self._notices.append(
                f"giving up: {_ERRORS_IN_A_ROW} errors in a row, and no step completed in between"
            )
            return True
        if self._restarts == self._config.max_restarts and self._target == self._config.min_ranks:
            self._notices.append(
                f"giving up: {self._restarts} ranks have been replaced, which is the limit "
                f"(--max-restarts), and at least {self._config.min_ranks} are needed (--elastic)"
            )
            return True
        return False

    def _count_loss(self, process: _Process, now: float) -> None:
        if self._restarts == self._config.max_restarts:
            # No replacement any more: go on with those that are left.
            self._target -= 1
            return
        self._restarts += 1
        if not process.has_state:
            # It died before it was of any use, and the next one may do the same.
            back_off_s = min(_FIRST_BACK_OFF_S * 2**self._failed_starts, _LONGEST_BACK_OFF_S)
            self._failed_starts += 1
            self._start_at = now + back_off_s

    # -- what to do --------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Order]:
        """What is to be done now, in this order."""
        return [
            *self._tell_notices(),
            *self._end_after_failure(),
            *self._leave_hosts(),
            *self._kill_unneeded(),
            *self._shrink(),
            *self._kill_due(now),
            *self._publish(now),
            *self._grow(now),
        ]

    def wake_at(self, now: float) -> float:
        """When to call `decide` again at the latest."""
        moments = [process.kill_at for process in self._processes.values()]
        if self._phase is _Phase.TRAINING and self._lacking > 0 and self._free_slots():
            moments.append(self._start_at)
        if any(process.is_leaving and process.is_member for process in self._processes.values()):
            moments.append(now + _POLL_S)  # until another member has the state
        return min(moments, default=math.inf)

    def _tell_notices(self) -> Iterator[Order]:
        while self._notices:
            yield Tell(self._notices.pop(0))

    def _leave_hosts(self) -> Iterator[Order]:
        for state in [state for state in self._hosts.values() if state.is_leaving]:
            here = [
                process
                for process in self._processes.values()
                if process.member.slot in state.host.slots
            ]
            for process in here:
                if process.stays and self._phase is _Phase.TRAINING:
                    self.leaving(process.member.id)
                    yield Terminate(process.member.id)
            if not here:
                del self._hosts[state.host.number]
                yield Release(state.host.number)

    def _end_after_failure(self) -> Iterator[Order]:
        if self._failure is not None and self._phase is not _Phase.ENDING:
            self._phase = _Phase.ENDING
            yield Fail(self._failure)
        if self._failed in self._processes and self._phase is not _Phase.ENDING:
            self._phase = _Phase.ENDING
            yield EndJob(self._failed)

    def _kill_due(self, now: float) -> Iterator[Order]:
        for process in self._processes.values():
            has_not_begun = process.standing in {_Standing.STARTING, _Standing.READY}
            if process.is_leaving and has_not_begun and not process.has_time_limit:
                process.kill_at, process.has_time_limit = now + _GIVE_UP_S, True
            if process.kill_at <= now:
                process.kill_at = math.inf
                yield Kill(process.member.id)

    def _kill_unneeded(self) -> Iterator[Order]:
        """Training is over, and nobody will give its state to those that have come late."""
        if self._phase is not _Phase.FINISHING:
            return
        for process in self._processes.values():
            if not process.is_initial and not process.has_state and process.stays:
                process.is_leaving = True
                yield Kill(process.member.id)

    def _shrink(self) -> Iterator[Order]:
        if self._phase is not _Phase.TRAINING or self._lacking >= 0:
            return
        # Those that lose least: without the state of training first, then the highest slots.
        staying = sorted(
            (process for process in self._processes.values() if process.stays),
            key=lambda process: (process.has_state, -process.member.slot),
        )
        for process in staying[: -self._lacking]:
            self.leaving(process.member.id)
            yield Terminate(process.member.id)

    def _grow(self, now: float) -> Iterator[Order]:
        if self._phase is not _Phase.TRAINING or now < self._start_at:
            return
        for slot, state in self._free_slots()[: max(0, self._lacking)]:
            member = Member(slot, self._next_id, state.host.number)
            self._processes[member.id] = _Process(member, is_initial=state.to_begin > 0)
            state.to_begin = max(0, state.to_begin - 1)
            self._next_id += 1
            yield Start(member)

    @property
    def _lacking(self) -> int:
        return self._target - sum(process.stays for process in self._processes.values())

    def _free_slots(self) -> list[tuple[int, _HostState]]:
        """In the order in which they are filled: hosts with the fewest processes first."""
        taken = {process.member.slot for process in self._processes.values()}
        found = []
        for state in self._hosts.values():
            free = [slot for slot in state.host.slots if slot not in taken]
            used = len(state.host.slots) - len(free)
            if not state.is_leaving:
                found += [(used + index, slot, state) for index, slot in enumerate(free)]
        return [(slot, state) for _, slot, state in sorted(found, key=lambda each: each[:2])]

    # -- generations -------------------------------------------------------------------------------

    def _publish(self, now: float) -> Iterator[Order]:
        chosen = self._choose_members()
        members = tuple(sorted(process.member for process in chosen))
        if members == self._newest.members and not self._has_to_regroup:
            return
        least = self._config.min_ranks if self._phase is _Phase.TRAINING else 1
        if len(members) < least or self._waits_for_start():
            yield from self._tell_about_wait(len(members))
            return
        for process in self._processes.values():
            if process.is_member and process not in chosen:
                process.standing = _Standing.LEFT_OUT
                # One that is stopped is killed sooner: the others wait for it.
                process.kill_at = min(process.kill_at, now + _LEAVE_S)
                process.has_time_limit = True
                self._news.append(f"{process.name} leaves")
        number = self._newest.number + 1
        for process in chosen:
            if not process.is_member:
                process.standing, process.joined = _Standing.MEMBER, number
                if self._newest.number >= 0:
                    self._news.append(f"{process.name} joins")
        reason = "; ".join(self._news) or "the job begins"
        self._newest = Generation(number, members, reason)
        self._has_to_regroup = False
        untold = "; ".join(self._news[self._told :])
        self._news, self._told = [], 0
        yield Publish(self._newest)
        if self._newest.number > 0 and self._phase is _Phase.TRAINING:
            plural = "rank goes" if len(members) == 1 else "ranks go"
            yield Tell(f"{untold}: {len(members)} {plural} on (generation {self._newest.number})")

    def _choose_members(self) -> list[_Process]:
        """Who should be in the next generation."""
        is_open = self._phase is _Phase.TRAINING

        def may_join(process: _Process) -> bool:
            # One of the first may have ended without training, and the others want to.
            return is_open or (process.is_initial and self._phase is _Phase.FINISHING)

        staying = [
            process
            for process in self._processes.values()
            if process.stays
            and (process.is_member or (process.standing is _Standing.READY and may_join(process)))
        ]
        leaving = [
            process
            for process in self._processes.values()
            if process.is_leaving and process.is_member
        ]
        is_enough = len(staying) >= self._config.min_ranks or not is_open
        has_state = any(process.has_state for process in staying)
        would_lose_state = not has_state and any(process.has_state for process in leaving)
        if is_enough and not would_lose_state:
            return staying
        # Those that are to take the place of one that still has to stay wait for it.
        surplus = max(0, len(staying) + len(leaving) - self._config.max_ranks)
        waiting = [process for process in staying if not process.is_member][:surplus]
        return [process for process in [*staying, *leaving] if process not in waiting]

    def _waits_for_start(self) -> bool:
        """The first generation waits for all that the job was started with."""
        if self._newest.number >= 0:
            return False
        next_slots = self._free_slots()[: max(0, self._lacking)]
        is_to_start = self.is_open and any(state.to_begin > 0 for _, state in next_slots)
        is_starting = any(
            process.is_initial and process.standing is _Standing.STARTING
            for process in self._processes.values()
        )
        return self.missing_hosts > 0 or is_to_start or is_starting

    def _tell_about_wait(self, count: int) -> Iterator[Order]:
        untold = "; ".join(self._news[self._told :])
        if not untold or self._newest.number < 0 or self._phase is not _Phase.TRAINING:
            return
        self._told = len(self._news)
        if count == 0:
            yield Tell(
                f"{untold}: no rank is left; new ones begin, from a checkpoint if there is one"
            )
        else:
            least = self._config.min_ranks
            yield Tell(f"{untold}: {count} of at least {least} ranks left; they wait for new ones")


@dataclasses.dataclass
class _Blame:
    """Counts errors that follow each other without a step in between. Processes that were running
    at the time of the first may fall with it; a second needs a process that was started later.
    """

    errors: int = 0
    step: int = -1
    next_id: int = 0  # of the process that would have been started next, at the latest error

    def count(self, member_id: int, next_id: int, job_step: int) -> bool:
        """Count an error; whether it is one too many."""
        if job_step > self.step:
            self.errors, self.step, self.next_id = 0, job_step, 0
        if self.errors == 0 or member_id >= self.next_id:
            self.errors, self.next_id = self.errors + 1, next_id
        return self.errors >= _ERRORS_IN_A_ROW
