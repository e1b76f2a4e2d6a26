"""Who computes which shard: dealt by speed, claimed, audited; and every shard once."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.training import shard_queue
from paceline.training.audit import AuditPlan
from paceline.training.balance import Balance, Pace, counts_for
from paceline.training.shard_plan import ShardPlan
from paceline.training.shard_queue import (
    Backlog,
    NoClaims,
    RankClock,
    ShardQueue,
    TaskKind,
    shard_to_take,
)
from paceline.training.tree_sum import TreeSum, subtrees

SHARDS = ShardPlan(16, 8).cut(16).shards


def counts(deals):
    return [len(part) for part in deals]


# --- dealing by speed -------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.floats(0.001, 10), min_size=1, max_size=8))
def test_no_other_deal_would_be_over_earlier(shards, seconds):
    found = counts_for(shards, tuple(seconds))
    assert sum(found) == shards
    if shards < len(seconds):
        return
    assert min(found) >= 1
    last = max(count * each for count, each in zip(found, seconds, strict=True))
    # One more on any other rank would take at least as long, unless the last has one alone.
    for rank, count in enumerate(found):
        if count > 1 and count * seconds[rank] == last:
            assert all((n + 1) * s >= last for n, s in zip(found, seconds, strict=True))


def told(balance, seconds, passes=1, exchange=lambda sums: 0.0):
    """Ranks at this speed compute what they are dealt; an exchange takes its time."""
    for _ in range(passes):
        computed = [[shard.number for shard in part] for part in balance.deal(SHARDS)]
        exchange_s = exchange(balance._sums_before or 0)
        balance.record([Pace(each, exchange_s) for each in seconds], computed)


def test_a_slow_rank_is_dealt_fewer_shards_after_some_passes():
    balance = Balance(2, 8, follows_speed=True)
    told(balance, [1.0, 2.0], passes=4)
    assert counts(balance.deal(SHARDS)) == [4, 4]
    told(balance, [1.0, 2.0])
    assert counts(balance.deal(SHARDS)) == [6, 2]
    assert [shard.number for shard in balance.deal(SHARDS)[1]] == [6, 7]
    # Full speed again.
    told(balance, [1.0, 1.0], passes=5)
    assert counts(balance.deal(SHARDS)) == [4, 4]


def test_a_deal_that_makes_the_exchange_too_long_is_given_up():
    balance = Balance(2, 8, follows_speed=True)
    told(balance, [1.0, 2.0], passes=5, exchange=lambda sums: 0.5 * sums)
    assert counts(balance.deal(SHARDS)) == [6, 2]
    assert balance.extra_exchange_s(2) == 1.0
    told(balance, [1.0, 2.0], passes=5, exchange=lambda sums: 0.5 if sums <= 2 else 9.0)
    for _ in range(20):
        assert counts(balance.deal(SHARDS)) == [4, 4]
        assert balance.extra_exchange_s(1) > 7
        told(balance, [1.0, 2.0], exchange=lambda sums: 0.5 if sums <= 2 else 9.0)


def test_a_small_gain_or_a_single_slow_pass_changes_nothing():
    balance = Balance(2, 8, follows_speed=True)
    told(balance, [1.0, 1.3], passes=20)
    assert counts(balance.deal(SHARDS)) == [4, 4]
    told(balance, [1.0, 1.0], passes=5)
    told(balance, [1.0, 50.0], passes=2)
    told(balance, [1.0, 1.0], passes=5)
    assert counts(balance.deal(SHARDS)) == [4, 4]


def test_a_deal_that_does_not_follow_speed():
    balance = Balance(2, 8, follows_speed=False)
    told(balance, [1.0, 9.0], passes=9)
    assert counts(balance.deal(SHARDS)) == [4, 4]


def test_a_rank_without_dealt_shards_keeps_the_speed_it_had():
    balance = Balance(2, 8, follows_speed=True)
    told(balance, [1.0, 2.0], passes=4)
    told(balance, [1.0, None])
    assert balance.shard_s(1) == 2.0
    assert counts(balance.deal(SHARDS)) == [6, 2]


@given(st.integers(2, 5), st.lists(st.floats(0.01, 100), min_size=30, max_size=30))
def test_every_rank_makes_the_same_deal_of_the_same_numbers(ranks, numbers):
    one, other = (Balance(ranks, 8, follows_speed=True) for _ in range(2))
    for at in range(0, len(numbers) - ranks, ranks):
        for each in (one, other):
            told(each, numbers[at : at + ranks])
        assert one.deal(SHARDS) == other.deal(SHARDS)
        assert tuple(s for part in one.deal(SHARDS) for s in part) == SHARDS
        assert sum(counts(one.deal(SHARDS[:3]))) == 3


# --- what is worth taking over ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("backlogs", "cost", "taken"),
    [
        # A rank as fast as this one, with one shard left, is as soon through alone.
        ([Backlog(SHARDS[7:], 1.0)], 1.1, None),
        ([Backlog(SHARDS[6:], 1.0)], 1.1, 7),
        ([Backlog(SHARDS[7:], 2.0)], 1.1, 7),
        # Its last shard, from the rank that has the longest way to go.
        ([Backlog(SHARDS[2:4], 1.0), Backlog(SHARDS[5:6], 3.0)], 1.1, 5),
        ([Backlog(SHARDS[2:4], 2.0), Backlog(SHARDS[5:6], 3.0)], 1.1, 3),
        # Exchanging more sums would cost more than is won.
        ([Backlog(SHARDS[6:], 1.0)], 5.0, None),
    ],
)
def test_a_shard_is_taken_if_it_pays(backlogs, cost, taken):
    shard = shard_to_take(backlogs, cost)
    assert (None if shard is None else shard.number) == taken


def test_what_a_first_shard_cost_is_forgotten_by_and_by():
    clock = RankClock()
    clock.end_pass([1.0, 1.0], [11.0], 0.5)
    assert (clock.extra_s, clock.exchange_s) == (10.0, 0.5)
    for _ in range(20):
        clock.end_pass([1.0, 1.0], [], 0.5)
    assert clock.extra_s < 0.2


# --- the queue --------------------------------------------------------------------------------


class Claims(NoClaims):
    """Claims among the ranks of one process. All of them are always behind."""

    def __init__(self, claimed):
        self._claimed = claimed

    def claim(self, shard):
        if shard in self._claimed:
            return False
        self._claimed.add(shard)
        return True

    def unclaimed(self, shards):
        return [shard for shard in shards if shard not in self._claimed]


def queue_of(rank, deals, claims, audit=None):
    balance = Balance(len(deals), 8, follows_speed=True)
    return ShardQueue(deals, rank, audit, claims, balance, RankClock())


def test_shards_that_are_handed_over_come_last():
    queue = queue_of(0, [SHARDS[:2], SHARDS[2:]], NoClaims())
    assert [queue.next().shard.number for _ in range(2)] == [0, 1]
    assert queue.next() is None
    queue.hand_over(SHARDS[3:5])
    assert [(t.shard.number, t.kind) for t in (queue.next(), queue.next())] == [
        (3, TaskKind.HANDED_OVER),
        (4, TaskKind.HANDED_OVER),
    ]
    assert queue.next() is None


def test_a_rank_tells_how_long_its_dealt_shards_took(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 6.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = RankClock()
    queue = ShardQueue([SHARDS[:2]], 0, None, NoClaims(), Balance(1, 2, follows_speed=True), clock)
    assert queue.pace() == (None, 0.0)
    while queue.next() is not None:
        pass
    assert queue.pace() == (2.5, 0.0)
    queue.close()
    assert clock.exchange_s == 0.5


@st.composite
def passes(draw):
    """A batch, how it is dealt out, and who asks for the next shard when."""
    shards = draw(st.integers(1, 12))
    size = draw(st.integers(shards, 60))
    plan = ShardPlan(size, shards).cut(draw(st.integers(1, size)))
    ranks = draw(st.integers(1, 5))
    deals = [[] for _ in range(ranks)]
    for shard in draw(st.permutations(plan.shards)):
        deals[draw(st.integers(0, ranks - 1))].append(shard)
    audit = AuditPlan(1, 0).audit_of(draw(st.integers(0, 9)), deals)
    return plan, deals, audit, draw(st.lists(st.integers(0, ranks - 1), max_size=60))


@given(passes(), st.randoms(use_true_random=False))
def test_every_shard_is_computed_once_and_audited_by_another_rank(case, random):
    plan, deals, audit, turns = case
    ranks, claimed = range(len(deals)), set()

    def any_of_them(backlogs, cost_s):
        shards = [shard for backlog in backlogs for shard in backlog.shards]
        return random.choice(shards) if shards else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_queue, "shard_to_take", any_of_them)
        queues = [queue_of(rank, deals, Claims(claimed), audit) for rank in ranks]
        computed, audited = [[] for _ in ranks], []
        for rank in [*turns, *(rank for rank in ranks for _ in range(14))]:
            task = queues[rank].next()
            if task is not None and task.kind is TaskKind.AUDIT:
                audited.append((rank, task.shard))
            elif task is not None:
                computed[rank].append(task.shard)
    assert sorted(s.number for own in computed for s in own) == [s.number for s in plan.shards]
    assert audited == [(audit.auditor, audit.shard)]
    assert len(ranks) == 1 or audit.shard not in computed[audit.auditor]
    # And what they computed adds up to the same bits.
    values = torch.randn(12, generator=torch.Generator().manual_seed(len(turns)))
    assert sum_of(values, computed, plan).equal(sum_of(values, [plan.shards], plan))


def sum_of(values, computed, plan):
    leaves, together = len(plan.shards), TreeSum(len(plan.shards), torch.add)
    for shards in computed:
        own = TreeSum(leaves, torch.add)
        for shard in shards:
            own.add_leaf(shard.number, values[shard.number] * shard.weight)
        assert sorted(own.nodes) == sorted(subtrees(tuple(s.number for s in shards), leaves))
        for node, value in own.nodes.items():
            together.add_node(node, value)
    return together.root / plan.total_weight
