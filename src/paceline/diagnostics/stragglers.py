"""Who waited for whom, and what made the late one late. Pure: from arrival times to waits.

All ranks of a host share a clock. At each sync_point the last to arrive is charged with the time
the others waited; the attribute_wait goes to the phases in which it was slower than the others
since the sync_point before, in proportion.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from paceline.telemetry.status_page import PHASES, Phase, SyncPoint

__all__ = ["SLOWER_BY", "WaitAttribution", "Straggler", "attribute_wait", "find_straggler"]

SLOWER_BY = 0.1  # named from this share of the time on


@dataclasses.dataclass(frozen=True)
class WaitAttribution:
    """The waiting of all ranks over some sync_points, by who caused it and in which phase."""

    waited_ns: Mapping[tuple[int, Phase], int]  # (late rank, phase) -> waiting of the others
    waited_by_ns: Mapping[tuple[int, int], int]  # (waiting rank, late rank)
    span_ns: int  # from the first arrival to the last departure
    sync_points: int

    @property
    def total_ns(self) -> int:
        return sum(self.waited_ns.values())

    def share(self, rank: int, phase: Phase) -> float:
        """Which part of all waiting is charged to a rank's phase."""
        return self.waited_ns.get((rank, phase), 0) / self.total_ns if self.total_ns else 0.0


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    phase: Phase
    share: float  # of the others' time

    @property
    def words(self) -> str:
        return f"rank {self.rank} is slower in {self.phase.words}: the others wait {self.share:.0%} of the time"


def attribute_wait(sync_points: Mapping[int, Sequence[SyncPoint]]) -> WaitAttribution:
    """Charge all waiting. `sync_points` has each rank's own records; those that not all ranks have
    are left out.
    """
    by_rank = {
        rank: {(one.group, one.number): one for one in found} for rank, found in sync_points.items()
    }
    common = set.intersection(*(set(found) for found in by_rank.values())) if by_rank else set()
    waited: collections.Counter[tuple[int, Phase]] = collections.Counter()
    waited_by: collections.Counter[tuple[int, int]] = collections.Counter()
    for key in common:
        _attribute_one({rank: found[key] for rank, found in by_rank.items()}, waited, waited_by)
    times = [
        (found[key].arrived_ns, found[key].left_ns) for key in common for found in by_rank.values()
    ]
    span = max(left for _, left in times) - min(arrived for arrived, _ in times) if times else 0
    return WaitAttribution(dict(waited), dict(waited_by), span, len(common))


def _attribute_one(
    records: Mapping[int, SyncPoint],
    waited: collections.Counter[tuple[int, Phase]],
    waited_by: collections.Counter[tuple[int, int]],
) -> None:
    late = max(records, key=lambda rank: records[rank].arrived_ns)
    last = records[late].arrived_ns
    total = 0
    for rank, one in records.items():
        if rank != late:
            waited_by[rank, late] += last - one.arrived_ns
            total += last - one.arrived_ns
    others = [one.spent_ns for rank, one in records.items() if rank != late]
    if not total or not others:
        return
    excess = {}
    for phase in PHASES:
        usual = statistics.median(spent[phase] for spent in others)
        if phase is not Phase.SYNCHRONISE and records[late].spent_ns[phase] > usual:
            excess[phase] = records[late].spent_ns[phase] - usual
    whole = sum(excess.values())
    if not whole:
        waited[late, Phase.OTHER] += total
        return
    for phase, part in excess.items():
        waited[late, phase] += int(total * part / whole)


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
    # Ranks that hold each other up in turn are not slow, they are only uneven.
    net = ns - max((other for one, other in by_rank.items() if one != rank), default=0)
    share = net / (waits.span_ns * (ranks - 1))
    if share < slower_by:
        return None
    phase = max(
        (phase for one, phase in waits.waited_ns if one == rank),
        key=lambda p: waits.waited_ns[rank, p],
    )
    return Straggler(rank, phase, share)
