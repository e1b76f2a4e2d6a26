"""Which rank the others waited for, and what made it late. Pure: from arrival times to waits.

All ranks of a host share a clock. At each sync point the waiting of all ranks is attributed to the
one that arrived last, and there to the phases in which it was slower than the others since the sync
point before, in proportion to the excess over their median.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from paceline.diagnostics.page_reader import SyncPoint
from paceline.telemetry.status_page import PHASES, Phase

__all__ = [
    "SLOWER_BY",
    "Straggler",
    "WaitAttribution",
    "attribute_wait",
    "find_late_rank",
    "find_straggler",
]

# From this share of the others' time on, a rank is named as a straggler.
SLOWER_BY = 0.1


@dataclasses.dataclass(frozen=True)
class WaitAttribution:
    """The waiting of all ranks over some sync points, by who caused it and in which phase.

    `waited_ns` is by (late rank, phase), `waited_by_ns` by (waiting rank, late rank). `span_ns`
    reaches from the first arrival to the last departure.
    """

    waited_ns: Mapping[tuple[int, Phase], int]
    waited_by_ns: Mapping[tuple[int, int], int]
    span_ns: int
    sync_points: int

    @property
    def total_ns(self) -> int:
        return sum(self.waited_ns.values())

    def share(self, rank: int, phase: Phase) -> float:
        """Which part of all waiting is attributed to a rank's phase."""
        return self.waited_ns.get((rank, phase), 0) / self.total_ns if self.total_ns else 0.0


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up, for a share of their time."""

    rank: int
    phase: Phase
    share: float

    def describe(self) -> str:
        return (
            f"rank {self.rank} is slower in {self.phase.describe()}: "
            f"the others wait {self.share:.0%} of the time"
        )


def attribute_wait(sync_points: Mapping[int, Sequence[SyncPoint]]) -> WaitAttribution:
    """Attribute all waiting. `sync_points` has the records of each rank; those that not all ranks
    have are left out.
    """
    by_rank = {
        rank: {(point.group, point.number): point for point in points}
        for rank, points in sync_points.items()
    }
    common = set.intersection(*(set(points) for points in by_rank.values())) if by_rank else set()
    waited: collections.Counter[tuple[int, Phase]] = collections.Counter()
    waited_by: collections.Counter[tuple[int, int]] = collections.Counter()
    for key in common:
        arrivals = {rank: points[key] for rank, points in by_rank.items()}
        _attribute_sync_point(arrivals, waited, waited_by)
    shared = [points[key] for key in common for points in by_rank.values()]
    span = 0
    if shared:
        span = max(point.left_ns for point in shared) - min(point.arrived_ns for point in shared)
    return WaitAttribution(dict(waited), dict(waited_by), span, len(common))


def _attribute_sync_point(
    arrivals: Mapping[int, SyncPoint],
    waited: collections.Counter[tuple[int, Phase]],
    waited_by: collections.Counter[tuple[int, int]],
) -> None:
    late = max(arrivals, key=lambda rank: arrivals[rank].arrived_ns)
    others = {rank: point for rank, point in arrivals.items() if rank != late}
    total = 0
    for rank, point in others.items():
        wait = arrivals[late].arrived_ns - point.arrived_ns
        waited_by[rank, late] += wait
        total += wait
    if not total:
        return
    excess = _excess(arrivals[late], list(others.values()))
    whole = sum(excess.values())
    if not whole:
        waited[late, Phase.OTHER] += total
    for phase, part in excess.items():
        waited[late, phase] += int(total * part / whole)


def _excess(late: SyncPoint, others: Sequence[SyncPoint]) -> dict[Phase, float]:
    """How much longer than the others' median the late rank was in each phase, where it was."""
    excess: dict[Phase, float] = {}
    for phase in PHASES:
        usual = statistics.median(point.spent_ns[phase] for point in others)
        if phase is not Phase.SYNCHRONISE and late.spent_ns[phase] > usual:
            excess[phase] = late.spent_ns[phase] - usual
    return excess


def find_straggler(
    waits: WaitAttribution, ranks: int, slower_by: float = SLOWER_BY
) -> Straggler | None:
    """The rank and phase behind most of the waiting, if that is a notable share of the time of the
    other ranks.
    """
    if not waits.waited_ns or waits.span_ns <= 0 or ranks < 2:
        return None
    by_rank: collections.Counter[int] = collections.Counter()
    for (rank, _), ns in waits.waited_ns.items():
        by_rank[rank] += ns
    rank, ns = by_rank.most_common(1)[0]
    # Ranks that hold each other up in turn are not slow, only uneven.
    net = ns - max((other_ns for other, other_ns in by_rank.items() if other != rank), default=0)
    share = net / (waits.span_ns * (ranks - 1))
    if share < slower_by:
        return None
    phase = max(
        (phase for late, phase in waits.waited_ns if late == rank),
        key=lambda phase: waits.waited_ns[rank, phase],
    )
    return Straggler(rank, phase, share)


def find_late_rank(
    spent: Mapping[int, Mapping[Phase, float]], slower_by: float = SLOWER_BY
) -> Straggler | None:
    """The rank that the others wait for, from the time that ranks have spent in each phase alone:
    the one that waits least. For whole runs, of which not every sync point is known.
    """
    whole = {rank: sum(by_phase.values()) for rank, by_phase in spent.items()}
    # A rank that was there for a small part of the run says little about it.
    known = [rank for rank in spent if 0 < whole[rank] >= max(whole.values()) / 2]
    if len(known) < 2:
        return None

    def share(rank: int, phase: Phase) -> float:
        return spent[rank].get(phase, 0) / whole[rank]

    late = min(known, key=lambda rank: share(rank, Phase.SYNCHRONISE))
    others = [rank for rank in known if rank != late]

    def excess(phase: Phase) -> float:
        return share(late, phase) - statistics.median(share(rank, phase) for rank in others)

    waits = -excess(Phase.SYNCHRONISE)
    if waits < slower_by:
        return None
    phase = max((each for each in PHASES if each is not Phase.SYNCHRONISE), key=excess)
    return Straggler(late, phase, waits)
