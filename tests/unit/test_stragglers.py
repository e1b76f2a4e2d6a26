"""Stragglers: all waiting is attributed to the rank that arrived last, and to what made it late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.diagnostics.page_reader import SyncPoint
from paceline.diagnostics.stragglers import attribute_wait, find_straggler
from paceline.telemetry.status_page import PHASES, Phase

MS = 10**6


def sync_point(number, arrived, left, **spent):
    by_phase = [0] * len(PHASES)
    for name, ns in spent.items():
        by_phase[Phase[name.upper()]] = ns
    return SyncPoint(1, number, arrived, left, tuple(by_phase))


def run(slow_ms, phase, steps=20):
    """Rank 1 takes longer in one phase; both leave together."""
    points = {0: [], 1: []}
    now = 0
    for number in range(steps):
        base = {"loader": 2 * MS, "forward": 3 * MS, "backward": 5 * MS}
        late = {**base, phase: base[phase] + slow_ms * MS}
        last = now + sum(late.values())
        points[0].append(sync_point(number, now + sum(base.values()), last + MS, **base))
        points[1].append(sync_point(number, last, last + MS, **late))
        now = last + MS
    return points


def test_all_waiting_goes_to_the_slow_phase():
    for phase in ("loader", "forward", "backward"):
        waits = attribute_wait(run(50, phase))
        assert waits.share(1, Phase[phase.upper()]) == 1.0
        assert waits.waited_by_ns == {(0, 1): 20 * 50 * MS}
        slow = find_straggler(waits, 2)
        assert (slow.rank, slow.phase) == (1, Phase[phase.upper()])
        assert 0.7 < slow.share < 0.9
        assert slow.phase.describe() in slow.describe()


def test_ranks_that_are_late_in_turn_are_not_stragglers():
    turned = run(5, "forward", steps=1)
    second = run(5, "forward", steps=1)
    shift = 100 * MS
    for rank, other in ((0, 1), (1, 0)):
        point = second[other][0]
        turned[rank].append(
            SyncPoint(1, 1, point.arrived_ns + shift, point.left_ns + shift, point.spent_ns)
        )
    assert find_straggler(attribute_wait(turned), 2) is None


def test_nobody_waits_in_a_single_process_or_without_common_sync_points():
    assert attribute_wait({}).total_ns == 0
    assert find_straggler(attribute_wait({0: [sync_point(1, 0, 5)]}), 1) is None
    assert attribute_wait({0: [sync_point(1, 0, 5)], 1: [sync_point(2, 0, 5)]}).sync_points == 0


@given(
    st.integers(2, 5).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(0, 10**9), min_size=ranks, max_size=ranks), max_size=8
        )
    )
)
def test_attributed_waits_add_up_to_the_waiting(arrivals):
    ranks = len(arrivals[0]) if arrivals else 0
    points = {
        rank: [
            sync_point(n, row[rank], max(row), forward=row[rank]) for n, row in enumerate(arrivals)
        ]
        for rank in range(ranks)
    }
    waits = attribute_wait(points)
    waited = sum(max(row) - arrived for row in arrivals for arrived in row)
    assert sum(waits.waited_by_ns.values()) == waited
    assert abs(waits.total_ns - waited) <= len(PHASES) * max(1, len(arrivals))
