"""Which rank holds a job up, and why.

`diagnose` is pure: it takes what the status pages and the kernel report about the ranks of this
host and returns one sentence with the rank to blame, the cause and a cure. It starts from the rank
that has waited longest in a collective; nothing is wrong while that is within the limit. The
members of that collective then decide:

    a member is in no collective, or stopped, or gone  -> it is late: report what it does instead
    all are in collectives, but not in the same one    -> the ranks' calls differ: find the odd one
    all are in the same collective                     -> no rank is late: the data is stuck, or
                                                          the late rank is on another host

If no rank is in a collective, only a data loader that has been waiting too long is reported.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from paceline.diagnostics.page_reader import Call, StatusPage
from paceline.diagnostics.process_state import Activity
from paceline.errors import describe_exit
from paceline.telemetry.status_page import Phase

__all__ = ["Cause", "Diagnosis", "RankView", "diagnose"]

# The diagnosis comes before the group's own timeout ends the wait, and the evidence with it.
_SHARE_OF_TIMEOUT = 0.8


class Cause(enum.Enum):
    """Why a job makes no progress."""

    ENDED = "ended"
    STOPPED = "stopped"
    RUNNING = "running"
    SLEEPING = "sleeping"
    LOCK = "lock"
    INPUT = "input"
    IDLE = "idle"
    NO_PAGE = "no page"
    SKIPPED_BACKWARD = "skipped backward"
    EXTRA_COLLECTIVE = "extra collective"
    TRANSPORT = "transport"
    OTHER_HOST = "other host"
    LOADER = "loader"


@dataclasses.dataclass(frozen=True)
class RankView:
    """All that can be seen of one rank from outside. `line` is where its own code is, if its stack
    was read.
    """

    rank: int
    pid: int
    page: StatusPage | None = None
    activity: Activity = Activity.IDLE
    exitcode: int | None = None
    line: str = ""

    @property
    def call(self) -> Call | None:
        """The collective this rank is in."""
        if self.page is None or self.activity is Activity.ENDED:
            return None
        return self.page.call

    @property
    def phase_since_ns(self) -> int:
        return self.page.phase_since_ns if self.page is not None else 0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Why a job makes no progress: the ranks to blame, and a sentence with the facts and the cure.

    `waiting` has the ranks that wait and since when, which identifies the stall. The stacks of the
    ranks `stacks_of` show more.
    """

    blamed: tuple[int, ...]
    waiting: tuple[tuple[int, int], ...]
    cause: Cause
    sentence: str
    waited_ns: int
    stacks_of: tuple[int, ...] = ()

    @property
    def longest_wait(self) -> tuple[int, int]:
        """The rank that has waited longest, and since when."""
        return min(self.waiting, key=lambda wait: wait[1])

    def same_stall(self, other: Diagnosis | None) -> bool:
        """Whether some rank is still in the wait that another diagnosis was about."""
        return other is not None and bool(set(self.waiting) & set(other.waiting))


def diagnose(views: Sequence[RankView], now_ns: int, limit_ns: int) -> Diagnosis | None:
    """Diagnose a job whose ranks on this host are `views`; None while no rank waits too long."""
    waiting = [(view.call.since_ns, view) for view in views if view.call is not None]
    if not waiting:
        return _diagnose_loaders(views, now_ns, limit_ns)
    since_ns, longest = min(waiting, key=lambda entry: entry[0])
    call, page = longest.call, longest.page
    assert call is not None
    assert page is not None
    if now_ns - since_ns < _limit_ns(page, limit_ns):
        return None
    members = [view for view in views if not call.members or view.rank in call.members]
    stall = _Stall(now_ns, call, page.world, members, list(views))
    if late := stall.late():
        return _blame_late(late, stall)
    if any(view.call is not None and view.call.key != call.key for view in members):
        return _blame_difference(stall)
    return _blame_transport(stall)


def _limit_ns(page: StatusPage, limit_ns: int) -> float:
    if page.timeout_ns <= 0:
        return limit_ns
    return min(limit_ns, page.timeout_ns * _SHARE_OF_TIMEOUT)


@dataclasses.dataclass(frozen=True)
class _Stall:
    """What the sentences are made of: the call that has lasted longest, and who is in it."""

    now_ns: int
    call: Call
    world: int
    members: list[RankView]
    all_views: list[RankView]

    @property
    def waited_ns(self) -> int:
        return self.now_ns - self.call.since_ns

    @property
    def at_call(self) -> list[RankView]:
        return [
            view
            for view in self.members
            if view.call is not None and view.call.key == self.call.key
        ]

    def late(self) -> list[RankView]:
        """Members that are in no collective, or cannot go on in one: worst first."""
        order = {Activity.ENDED: 0, Activity.STOPPED: 1}
        late = [
            view for view in self.members if view.call is None or view.activity is Activity.STOPPED
        ]
        return sorted(late, key=lambda view: (order.get(view.activity, 2), view.phase_since_ns))

    def seconds_since(self, since_ns: int) -> str:
        return _seconds(self.now_ns - since_ns)

    def diagnosis(
        self,
        blamed: Sequence[RankView],
        cause: Cause,
        sentence: str,
        more_stacks: Sequence[RankView] = (),
    ) -> Diagnosis:
        waiting = tuple(
            (view.rank, view.call.since_ns) for view in self.all_views if view.call is not None
        )
        ranks = tuple(view.rank for view in blamed)
        stacks_of = tuple(dict.fromkeys((*ranks, *(view.rank for view in more_stacks))))
        return Diagnosis(ranks, waiting, cause, sentence, self.waited_ns, stacks_of)


# ------------------------------------------------------------------------------------- a late rank


@dataclasses.dataclass(frozen=True)
class _Explanation:
    """Why a rank is late: what it does instead, and what to do about it."""

    cause: Cause
    reason: str
    cure: str


def _blame_late(late: Sequence[RankView], stall: _Stall) -> Diagnosis:
    view = late[0]
    explanation = _explain(view, stall)
    if view.call is None:
        missing = f"rank {view.rank} has not reached {stall.call.describe()}"
    else:
        missing = f"rank {view.rank} is stuck in {view.call.describe()}"
    others = [other for other in stall.at_call if other.rank != view.rank]
    sentence = f"{missing}: {explanation.reason}. "
    if others:
        have = _has_or_have(others)
        waited = _seconds(stall.waited_ns)
        sentence += f"{_ranks(others).capitalize()} {have} been waiting for it for {waited}. "
    return stall.diagnosis(late, explanation.cause, sentence + explanation.cure)


def _explain(view: RankView, stall: _Stall) -> _Explanation:
    page = view.page
    if view.activity is Activity.ENDED:
        return _Explanation(
            Cause.ENDED,
            f"its process is gone ({describe_exit(view.exitcode)})",
            "Check its last output; every rank must make the same number of steps",
        )
    if view.activity is Activity.STOPPED:
        return _Explanation(
            Cause.STOPPED,
            "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)",
            f"Resume it with: kill -CONT {view.pid}",
        )
    if page is None:
        return _Explanation(
            Cause.NO_PAGE,
            "it has no status page",
            "It may not have called paceline.init_process_group() yet",
        )
    in_phase = f"has been in {page.phase.describe()} for {stall.seconds_since(page.phase_since_ns)}"
    at = f" at {view.line}" if view.line else ""
    if _skipped_backward(view, stall):
        counts = _skipped_counts(page, stall.at_call)
        reason = f"it has skipped a backward ({counts}) and {in_phase}{at}"
        return _Explanation(Cause.SKIPPED_BACKWARD, reason, _CURE_SKIPPED)
    doing = _DOING[view.activity]
    in_loader = page.phase is Phase.LOADER and view.activity is not Activity.RUNNING
    cure = _CURE_LOADER if in_loader else doing.cure
    return _Explanation(doing.cause, f"it {in_phase}, {doing.reason}{at}", cure)


_DOING = {
    Activity.RUNNING: _Explanation(
        Cause.RUNNING,
        "running code",
        "This is an endless loop, or more work than on the other ranks: check the stack, and raise "
        "--stall-after if it is expected to take this long",
    ),
    Activity.SLEEPING: _Explanation(
        Cause.SLEEPING,
        "sleeping",
        "Remove the sleep, or raise --stall-after if it is meant to last this long",
    ),
    Activity.LOCK: _Explanation(
        Cause.LOCK,
        "waiting for a lock (or another thread)",
        "Find out what holds it: the stack shows where it is requested. A lock that is taken "
        "twice, or held across a fork, is never released",
    ),
    Activity.INPUT: _Explanation(
        Cause.INPUT,
        "waiting for input or output",
        "Check what it reads from: a worker, a file system, a network",
    ),
    Activity.IDLE: _Explanation(Cause.IDLE, "waiting", "Check the stack"),
}
_CURE_LOADER = (
    "Check the dataset and its storage, use more workers (num_workers), or raise --stall-after if "
    "loading is expected to take this long"
)
_CURE_SKIPPED = (
    "Call backward on every rank in every step: a rank without data can pass an empty batch, and a "
    "`continue` or an `if` that only some ranks take must not skip it"
)


def _skipped_backward(view: RankView, stall: _Stall) -> bool:
    """Whether it went on after a forward without its backward, and the others did not."""
    page = view.page
    others = [
        other.page for other in stall.members if other.page is not None and other.rank != view.rank
    ]
    if page is None or not others:
        return False
    behind = page.backwards < max(other.backwards for other in others)
    # Some models run several forwards for one backward: compare with what the others do.
    usual = max(other.forwards - other.backwards for other in others)
    return behind and page.concluded_forwards - page.backwards > usual


def _skipped_counts(page: StatusPage, others: Sequence[RankView]) -> str:
    """ "8 forwards, 7 backwards; rank 0: 8 and 8"."""
    own = f"{page.forwards} forwards, {page.backwards} backwards"
    pages = [view.page for view in others if view.page is not None]
    counts = [f"rank {other.rank}: {other.forwards} and {other.backwards}" for other in pages[:4]]
    return "; ".join([own, *counts])


# --------------------------------------------------------------------------------- different calls


def _blame_difference(stall: _Stall) -> Diagnosis:
    """Every member is in a collective, but not in the same: find the rank whose calls differ."""
    inside = [view for view in stall.members if view.call is not None]
    skipped = [view for view in inside if _skipped_backward(view, stall)]
    if skipped:
        sentence = _describe_skipped(skipped[0], inside, stall)
        return stall.diagnosis(skipped, Cause.SKIPPED_BACKWARD, sentence, inside)
    odd = _odd_rank(inside)
    sentence = _describe_extra_call(odd, inside, stall)
    return stall.diagnosis([odd], Cause.EXTRA_COLLECTIVE, sentence, inside)


def _describe_skipped(view: RankView, inside: Sequence[RankView], stall: _Stall) -> str:
    assert view.call is not None
    assert view.page is not None
    others = [other for other in inside if other.rank != view.rank]
    return (
        f"rank {view.rank} has not reached {_other_call(view.call, others)}: it has skipped a "
        f"backward ({_skipped_counts(view.page, others)}) and has been in "
        f"{view.call.describe()} for {stall.seconds_since(view.call.since_ns)}. {_CURE_SKIPPED}"
    )


def _describe_extra_call(odd: RankView, inside: Sequence[RankView], stall: _Stall) -> str:
    call = odd.call
    assert call is not None
    others = [view for view in inside if view.call is not None and view.call.key != call.key]
    they_are = "it is" if len(others) == 1 else "they are"
    return (
        f"rank {odd.rank} has been in {call.describe()} for {stall.seconds_since(call.since_ns)}, "
        f"which {_ranks(others)} {_has_or_have(others)} not called: {they_are} in "
        f"{_other_call(call, others)}. Rank {odd.rank} makes a collective call that the others do "
        f"not make here (calls so far: {_call_counts(inside)}). Every rank must make the same "
        "calls in the same order: look for a call inside `if rank == ...`, or a loop of a "
        "different length"
    )


def _odd_rank(inside: Sequence[RankView]) -> RankView:
    """The rank in the call that fewest share; between two, the one with more calls, or with the
    more unusual one.

    A loop makes the same calls again and again; what only one rank does has rarely been done
    before.
    """
    shares = collections.Counter(view.call.key for view in inside if view.call is not None)

    def oddness(view: RankView) -> tuple[int, int, int, int]:
        assert view.call is not None
        assert view.page is not None
        return (shares[view.call.key], -view.page.calls, view.page.calls_of_kind, view.rank)

    return min(inside, key=oddness)


def _other_call(call: Call, others: Sequence[RankView]) -> str:
    for other in others:
        if other.call is not None and other.call.key != call.key:
            return other.call.describe()
    return "their call"


def _call_counts(views: Sequence[RankView]) -> str:
    return ", ".join(
        f"rank {view.rank}: {view.page.calls}" for view in views[:8] if view.page is not None
    )


# ------------------------------------------------------------------------------------ no late rank


def _blame_transport(stall: _Stall) -> Diagnosis:
    expected = len(stall.call.members) or stall.world
    call, waited = stall.call.describe(), _seconds(stall.waited_ns)
    if len(stall.members) < expected:
        sentence = (
            f"all {len(stall.members)} ranks of this host have been waiting in {call} for "
            f"{waited}: the late rank is one of the {expected - len(stall.members)} on other "
            "hosts. Check the launcher's output there, or run `paceline ps` there"
        )
        return stall.diagnosis([], Cause.OTHER_HOST, sentence)
    sentence = (
        f"all ranks have reached {call} and have been waiting in it for {waited}: no rank is late, "
        "but the data does not move. Check the network between the hosts (interface, firewall), or "
        "the device"
    )
    return stall.diagnosis([], Cause.TRANSPORT, sentence, stall.members)


def _diagnose_loaders(views: Sequence[RankView], now_ns: int, limit_ns: int) -> Diagnosis | None:
    """No rank waits for a peer, but a data loader may be waiting for its workers."""
    stuck = [
        view
        for view in views
        if view.page is not None
        and view.page.phase is Phase.LOADER
        and now_ns - view.phase_since_ns >= limit_ns
        and view.activity is not Activity.ENDED
    ]
    if not stuck:
        return None
    view = min(stuck, key=lambda view: view.phase_since_ns)
    waited_ns = now_ns - view.phase_since_ns
    doing = _DOING.get(view.activity, _DOING[Activity.IDLE])
    reason, cure = doing.reason, doing.cure
    if view.activity is Activity.STOPPED:
        reason, cure = "stopped", f"Resume it with: kill -CONT {view.pid}"
    at = f" at {view.line}" if view.line else ""
    sentence = (
        f"{_ranks(stuck)} {_has_or_have(stuck)} been in the data loader for "
        f"{_seconds(waited_ns)}, {reason}{at}. {cure}"
    )
    ranks = tuple(view.rank for view in stuck)
    waiting = tuple((view.rank, view.phase_since_ns) for view in stuck)
    return Diagnosis(ranks, waiting, Cause.LOADER, sentence, waited_ns, ranks)


def _ranks(views: Sequence[RankView]) -> str:
    ranks = [view.rank for view in views]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _has_or_have(views: Sequence[RankView]) -> str:
    return "has" if len(views) == 1 else "have"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s" if ns < 10**10 else f"{ns / 1e9:.0f} s"
