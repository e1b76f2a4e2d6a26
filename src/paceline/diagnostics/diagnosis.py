"""Who holds a job up, and why. Pure: from what the pages and the kernel say to one sentence of
blame.

a rank waits longer than the limit
  some rank it waits for is in no collective          -> that rank is late: say what it does instead
  all of those wait, too, but in other collectives    -> the ranks' calls differ: say whose
  all of those wait in the same one                   -> nobody is late: the transport does not move
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from paceline.diagnostics.process_state import Activity
from paceline.errors import describe_exit
from paceline.telemetry.status_page import Call, Phase, StatusPage

__all__ = ["RankView", "Diagnosis", "diagnose"]

# The diagnosis comes before the group's own time-out ends the wait, and the evidence with it.
_SHARE_OF_TIMEOUT = 0.8


@dataclasses.dataclass(frozen=True)
class RankView:
    """All there is to know about one rank from outside."""

    rank: int
    pid: int
    page: StatusPage | None = None
    activity: Activity = Activity.IDLE
    exitcode: int | None = None
    line: str = ""  # where its own code is, if its stack was asked for

    @property
    def call(self) -> Call | None:
        return (
            self.page.call
            if self.page is not None and self.activity is not Activity.ENDED
            else None
        )


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The outcome: the ranks to blame, the ranks whose stacks tell more, the sentence."""

    blamed: tuple[int, ...]
    waiting: tuple[tuple[int, int], ...]  # (rank, since when) of those that wait
    cause: str  # one word, for programs
    sentence: str
    waited_ns: int
    stacks_of: tuple[int, ...] = ()

    def told_by(self, views: Sequence[RankView]) -> bool:
        """Whether a rank has told of it already."""
        return bool(
            {since for _, since in self.waiting}
            & {view.page.told_ns for view in views if view.page}
        )

    def same_stall(self, other: Diagnosis | None) -> bool:
        """Whether some rank is still in the wait that another diagnosis was about."""
        return other is not None and bool(set(self.waiting) & set(other.waiting))


def diagnose(views: Sequence[RankView], now_ns: int, limit_ns: int) -> Diagnosis | None:
    """The diagnosis on a job whose ranks of this host are `views`; None while nobody waits for too
    long.
    """
    known = [view for view in views if view.page is not None]
    waiting = [view for view in known if view.call is not None]
    longest = min(waiting, key=_since, default=None)
    if longest is None or now_ns - _since(longest) < _limit(longest, limit_ns):
        return _diagnose_loaders(known, now_ns, limit_ns) if longest is None else None
    call = longest.call
    assert call is not None
    members = [view for view in views if not call.members or view.rank in call.members]
    facts = _Facts(now_ns, now_ns - _since(longest), call, longest, members, list(views))
    late = _late(facts)
    if late:
        return facts.diagnosis(late, *_blame_late(late[0], facts))
    elsewhere = [view for view in members if view.call is not None and view.call.key != call.key]
    if elsewhere:
        return _blame_difference(facts)
    return _blame_transport(facts)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the sentences are made of."""

    now_ns: int
    waited_ns: int
    call: Call
    longest: RankView
    members: list[RankView]
    everybody: list[RankView]

    def diagnosis(
        self, blamed: Sequence[RankView], cause: str, sentence: str, also: Sequence[RankView] = ()
    ) -> Diagnosis:
        waiting = tuple(
            (view.rank, view.call.since_ns) for view in self.everybody if view.call is not None
        )
        ranks = tuple(view.rank for view in blamed)
        stacks = tuple(dict.fromkeys((*ranks, *(view.rank for view in also))))
        return Diagnosis(ranks, waiting, cause, sentence, self.waited_ns, stacks)

    @property
    def at_call(self) -> list[RankView]:
        return [
            view
            for view in self.members
            if view.call is not None and view.call.key == self.call.key
        ]


def _since(view: RankView) -> int:
    assert view.call is not None
    return view.call.since_ns


def _limit(view: RankView, limit_ns: int) -> float:
    assert view.page is not None
    own = view.page.timeout_ns
    return min(limit_ns, own * _SHARE_OF_TIMEOUT) if own > 0 else limit_ns


# ---------------------------------------------------------------------------------------------- a late rank


def _late(facts: _Facts) -> list[RankView]:
    """Members that are in no collective, or cannot go on in one: worst first."""
    late = [
        view for view in facts.members if view.call is None or view.activity is Activity.STOPPED
    ]
    order = {Activity.ENDED: 0, Activity.STOPPED: 1}
    return sorted(late, key=lambda view: (order.get(view.activity, 2), _phase_since(view)))


def _phase_since(view: RankView) -> int:
    return view.page.phase_since_ns if view.page is not None else 0


def _blame_late(view: RankView, facts: _Facts) -> tuple[str, str]:
    cause, reason, cure = _why_late(view, facts)
    others = _ranks([one for one in facts.at_call if one.rank != view.rank]).capitalize()
    call = facts.call.words
    missing = f"rank {view.rank} has not reached {call}"
    if view.call is not None:
        missing = f"rank {view.rank} does not go on in {view.call.words}"
    waits = f"{others} {'waits' if len(facts.at_call) == 1 else 'wait'} for it since {_seconds(facts.waited_ns)}"
    return cause, f"{missing}; {reason}. {waits}. {cure}"


def _why_late(view: RankView, facts: _Facts) -> tuple[str, str, str]:
    """(cause, what it does instead, what to do about it)."""
    page = view.page
    if view.activity is Activity.ENDED:
        how = describe_exit(view.exitcode) if view.exitcode is not None else "its process is gone"
        return (
            "ended",
            f"it has ended ({how})",
            "Look at its last output; every rank must make the same steps",
        )
    if view.activity is Activity.STOPPED:
        reason = "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        return "stopped", reason, f"Let it go on with: kill -CONT {view.pid}"
    if page is None:
        return (
            "unknown",
            "it has no status page",
            "It may not have called paceline.init_process_group() yet",
        )
    where = f"it is in {page.phase.words} since {_seconds(facts.now_ns - page.phase_since_ns)}"
    at = f" at {view.line}" if view.line else ""
    if _skipped_backward(view, facts):
        reason = (
            f"it has skipped a backward ({page.forwards} forwards, {page.backwards} backwards; "
            f"{_counts(facts.at_call)}) and {where.removeprefix('it ')}{at}"
        )
        return "skipped backward", reason, _CURE_SKIPPED
    kind, doing, cure = _DOING[view.activity]
    if page.phase is Phase.LOADER and view.activity is not Activity.RUNNING:
        cure = (
            "Look at the data set and the storage, use more workers (num_workers), or raise --stall-after if loading "
            "may take so long"
        )
    return kind, f"{where}, {doing}{at}", cure


_DOING = {
    Activity.RUNNING: (
        "running",
        "running code",
        "An endless loop, or more work than on the other ranks: look at the stack; raise --stall-after if it may take "
        "so long",
    ),
    Activity.SLEEPING: (
        "sleeping",
        "sleeping",
        "Take the sleep out, or raise --stall-after if it is meant to be so long",
    ),
    Activity.LOCK: (
        "lock",
        "waiting for a lock (or another thread)",
        "Find who holds it: the stack shows where it is wanted. A lock taken twice, or held across a fork, never opens",
    ),
    Activity.INPUT: (
        "input",
        "waiting for input or output",
        "Look at what it reads from: a worker, a file system, a network",
    ),
    Activity.IDLE: ("idle", "waiting", "Look at the stack"),
}
_CURE_SKIPPED = (
    "Call backward on every rank in every step: a rank without data can pass an empty batch, and a `continue` or an "
    "`if` that only some ranks take must not jump over it"
)


def _skipped_backward(view: RankView, facts: _Facts) -> bool:
    """It went on past a forward without its backward, and the others did not."""
    page = view.page
    others = [one.page for one in facts.members if one.page is not None and one.rank != view.rank]
    if page is None or not others:
        return False
    behind = page.backwards < max(one.backwards for one in others)
    return behind and page.moved_on - page.backwards > max(
        one.forwards - one.backwards for one in others
    )


def _counts(views: Sequence[RankView]) -> str:
    pages = [view.page for view in views if view.page is not None]
    return "; ".join(
        f"rank {page.rank}: {page.forwards} and {page.backwards}" for page in pages[:4]
    )


# ---------------------------------------------------------------------------------------------- different calls


def _blame_difference(facts: _Facts) -> Diagnosis:
    """Everybody waits, in different collectives: find the rank whose calls differ."""
    inside = [view for view in facts.members if view.call is not None]
    skipped = [view for view in inside if _skipped_backward(view, facts)]
    if skipped:
        view, page = skipped[0], skipped[0].page
        assert view.call is not None
        assert page is not None
        others = [one for one in inside if one.rank != view.rank]
        sentence = (
            f"rank {view.rank} has not reached {_other_call(view, others)}: it has skipped a backward "
            f"({page.forwards} forwards, {page.backwards} backwards; {_counts(others)}) and is in {view.call.words} "
            f"since {_seconds(facts.now_ns - view.call.since_ns)}. {_CURE_SKIPPED}"
        )
        return facts.diagnosis(skipped, "skipped backward", sentence, inside)
    odd = _odd_one(inside)
    assert odd.call is not None
    others = [one for one in inside if one.call is not None and one.call.key != odd.call.key]
    sentence = (
        f"rank {odd.rank} is in {odd.call.words} since {_seconds(facts.now_ns - odd.call.since_ns)}, which "
        f"{_ranks(others)} did not call: {'it is' if len(others) == 1 else 'they are'} in {_other_call(odd, others)}. "
        f"Rank {odd.rank} makes a collective call that the others do not make here (calls so far: "
        f"{_call_counts(inside)}). "
        "Every rank must make the same calls in the same order: look for a call inside `if rank == ...`, or a loop of "
        "another length"
    )
    return facts.diagnosis([odd], "extra collective", sentence, inside)


def _odd_one(inside: Sequence[RankView]) -> RankView:
    """The rank in the call that fewest share; between two, the one with more calls, or with the
    more unusual one.

    A loop makes the same calls again and again; what only one rank does has rarely been done
    before.
    """
    shares = collections.Counter(view.call.key for view in inside if view.call is not None)

    def oddness(view: RankView) -> tuple[int, int, int, int]:
        assert view.call is not None
        assert view.page is not None
        return (shares[view.call.key], -view.page.calls, view.page.same_kind, view.rank)

    return min(inside, key=oddness)


def _other_call(view: RankView, others: Sequence[RankView]) -> str:
    assert view.call is not None
    for other in others:
        if other.call is not None and other.call.key != view.call.key:
            return other.call.words
    return "their call"


def _call_counts(views: Sequence[RankView]) -> str:
    return ", ".join(
        f"rank {view.rank}: {view.page.calls}" for view in views[:8] if view.page is not None
    )


# ---------------------------------------------------------------------------------------------- nobody late


def _blame_transport(facts: _Facts) -> Diagnosis:
    world = facts.longest.page.world if facts.longest.page is not None else len(facts.everybody)
    expected = len(facts.call.members) or world
    call, waited = facts.call.words, _seconds(facts.waited_ns)
    if len(facts.members) < expected:
        sentence = (
            f"all {len(facts.members)} ranks of this host wait in {call} since {waited}: the rank that is late is one "
            f"of the {expected - len(facts.members)} on other hosts. Look at the launcher's output there, or run "
            "`paceline ps` there"
        )
        return facts.diagnosis([], "other host", sentence)
    sentence = (
        f"all ranks have reached {call} and wait in it since {waited}: nobody is late, the data does not move. Look at "
        "the network between the hosts (interface, firewall), or at the device"
    )
    return facts.diagnosis([], "transport", sentence, facts.members)


def _diagnose_loaders(known: Sequence[RankView], now_ns: int, limit_ns: int) -> Diagnosis | None:
    """Nobody waits for a peer, but a data loader may wait for its workers."""
    stuck = [
        view
        for view in known
        if view.page is not None
        and view.page.phase is Phase.LOADER
        and now_ns - view.page.phase_since_ns >= limit_ns
        and view.activity is not Activity.ENDED
    ]
    if not stuck:
        return None
    view = min(stuck, key=_phase_since)
    waited = now_ns - _phase_since(view)
    _, doing, cure = _DOING.get(view.activity, _DOING[Activity.IDLE])
    if view.activity is Activity.STOPPED:
        doing, cure = "stopped", f"Let it go on with: kill -CONT {view.pid}"
    at = f" at {view.line}" if view.line else ""
    sentence = (
        f"{_ranks(stuck)} {'is' if len(stuck) == 1 else 'are'} in the data loader since {_seconds(waited)}, "
        f"{doing}{at}. {cure}"
    )
    ranks = tuple(one.rank for one in stuck)
    return Diagnosis(
        ranks,
        tuple((one.rank, _phase_since(one)) for one in stuck),
        "loader",
        sentence,
        waited,
        ranks,
    )


def _ranks(views: Sequence[RankView]) -> str:
    ranks = [view.rank for view in views]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s" if ns < 10**10 else f"{ns / 1e9:.0f} s"
