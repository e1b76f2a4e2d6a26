"""Shards, the tree and messages: pure, and the same for every way shards are dealt out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import ConfigError, StepError
from paceline.training.gradient_sums import add_gradients, merged_kinds
from paceline.training.metric_log import MetricLog, global_means
from paceline.training.shard_plan import ShardPlan, deal
from paceline.training.shard_random import ShardSeeds
from paceline.training.tensor_message import decode, encode
from paceline.training.tree_sum import TreeSum, subtrees


@st.composite
def batches(draw):
    """A plan and the number of samples of a batch."""
    shards = draw(st.integers(1, 20))
    size = draw(st.integers(shards, 200))
    return ShardPlan(size, shards), draw(st.integers(1, size))


@given(batches())
def test_shards_cover_a_batch_with_the_boundaries_of_a_full_one(case):
    plan, samples = case
    shards = plan.cut(samples).shards
    full = plan.cut(plan.batch_size).shards
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert [shard.start for shard in shards] == [full[s.number].start for s in shards]
    assert [shard.stop for shard in shards[:-1]] == [shard.start for shard in shards[1:]]
    assert shards[-1].stop == samples
    assert max(s.samples for s in full) - min(s.samples for s in full) <= 1


@given(batches())
def test_no_batch_ends_with_a_single_sample_that_could_join_the_shard_before(case):
    plan, samples = case
    shards = plan.cut(samples).shards
    if len(shards) > 1 and plan.batch_size >= 2 * plan.shards:
        assert min(shard.samples for shard in shards) > 1


@given(batches())
def test_weights_are_in_proportion_to_samples(case):
    plan, samples = case
    batch = plan.cut(samples)
    for shard in batch.shards:
        assert shard.weight * samples == shard.samples * batch.total_weight
    assert math.gcd(*(shard.weight for shard in batch.shards)) == 1


def test_shards_of_equal_size_weigh_one():
    assert {shard.weight for shard in ShardPlan(64, 8).cut(64).shards} == {1}


@given(batches(), st.integers(1, 25))
def test_every_shard_is_dealt_to_one_rank(case, world):
    plan, samples = case
    shards = plan.cut(samples).shards
    parts = deal(shards, world)
    assert tuple(shard for part in parts for shard in part) == shards
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("batch_size", "shards"), [(4, 0), (4, 5)])
def test_a_plan_that_cannot_be(batch_size, shards):
    with pytest.raises(ConfigError, match="shards"):
        ShardPlan(batch_size, shards)


@st.composite
def deals(draw):
    """Numbers for the leaves of a tree, and who computes which, in which order."""
    numbers = draw(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20
        )
    )
    world = draw(st.integers(1, 6))
    order = draw(st.permutations(range(len(numbers))))
    ranks = [[] for _ in range(world)]
    for leaf in order:
        ranks[draw(st.integers(0, world - 1))].append(leaf)
    return numbers, ranks


def add32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def tree_of(numbers, leaves):
    tree = TreeSum(len(numbers), add32)
    for leaf in leaves:
        tree.add_leaf(leaf, torch.tensor(numbers[leaf]))
    return tree


def bits(value: torch.Tensor) -> int:
    return int(value.view(torch.int32))


@given(deals())
def test_the_sum_does_not_know_who_added_what_and_when(case):
    numbers, ranks = case
    alone = tree_of(numbers, range(len(numbers)))
    together = TreeSum(len(numbers), add32)
    for leaves in ranks:
        part = tree_of(numbers, leaves)
        assert sorted(part.nodes) == sorted(subtrees(tuple(leaves), len(numbers)))
        for node, value in part.nodes.items():
            together.add_node(node, value)
    assert bits(together.root) == bits(alone.root)
    assert len(together.nodes) == 1


@given(deals())
def test_a_shard_that_is_left_loose_is_added_to_the_same_sum(case):
    numbers, ranks = case
    alone = tree_of(numbers, range(len(numbers)))
    together = TreeSum(len(numbers), add32)
    for leaves in ranks:
        *added, loose = leaves or [None]
        part = tree_of(numbers, added).nodes
        if loose is not None:
            part[0, loose] = torch.tensor(numbers[loose])
        assert sorted(part) == sorted(subtrees(tuple(leaves), len(numbers), loose))
        for node, value in part.items():
            together.add_node(node, value)
    assert bits(together.root) == bits(alone.root)


@given(st.integers(1, 64), st.integers(1, 8))
def test_contiguous_shards_become_few_sums(leaves, world):
    for part in deal(ShardPlan(leaves, leaves).cut(leaves).shards, world):
        assert len(subtrees(tuple(s.number for s in part), leaves)) <= 2 * max(
            1, leaves.bit_length()
        )


def test_the_tree_is_the_documented_one():
    texts = TreeSum(5, lambda left, right: f"({left}+{right})")
    for leaf in range(5):
        texts.add_leaf(leaf, str(leaf))
    assert texts.root == "(((0+1)+(2+3))+4)"


# --- sums of gradients ------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.none() | st.sampled_from([0.0, -0.0, 1.5, -2.25]), min_size=2, max_size=2),
        min_size=1,
        max_size=6,
    )
)
def test_a_parameter_that_a_shard_does_not_use_counts_as_zeros(leaves):
    """Also to the sign of zero: elsewhere the two shards may meet as zeros."""

    def total(value):
        tree = TreeSum(len(leaves), add_gradients)
        for number, leaf in enumerate(leaves):
            tree.add_leaf(number, [value(x) for x in leaf])
        return tree.root

    absent = total(lambda x: None if x is None else torch.tensor([x]))
    zeros = total(lambda x: torch.tensor([0.0 if x is None else x]))
    for mean, expected, column in zip(absent, zeros, zip(*leaves, strict=True), strict=True):
        if any(x is not None for x in column):
            assert bits(mean) == bits(expected)
        else:
            assert mean is None


def test_sparse_and_dense_gradients_of_one_parameter_are_refused():
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(StepError, match="sparse=False"):
        add_gradients([sparse], [torch.eye(2)])
    with pytest.raises(StepError, match="sparse=False"):
        merged_kinds(["d-s", "d-d"])
    assert merged_kinds(["d--", "-s-"]) == "ds-"


# --- messages, metrics, seeds -----------------------------------------------------------------


def test_a_message_carries_facts_and_tensors():
    tensors = [
        torch.arange(6).view(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.complex64),
        torch.randn(3, 4).t(),
        torch.tensor([True, False]),
    ]
    facts, received = decode(encode({"loss": [0.1, math.inf], "text": "é"}, tensors))
    assert facts == {"loss": [0.1, math.inf], "text": "é"}
    for one, other in zip(tensors, received, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_metrics_are_means_over_samples():
    first, second = MetricLog(3), MetricLog(1)
    first.add("loss", torch.tensor(2.0))
    second.add("loss", 6)
    first.add("correct", torch.tensor([1.0, 0.0, 1.0]))
    second.add("tokens", torch.tensor([[1.0, 2.0]]))
    means = global_means([first.sums(), second.sums()])
    assert means == {"correct": 2 / 3, "loss": 3.0, "tokens": 1.5}
    with pytest.raises(StepError, match="'loss' was logged twice"):
        first.add("loss", 1.0)


def test_seeds_differ_by_step_pass_and_shard():
    seeds = [
        ShardSeeds(0, step, number).of_shard(shard)
        for step in range(3)
        for number in range(2)
        for shard in range(4)
    ]
    after = [ShardSeeds(0, step, 0).after for step in range(3)]
    assert len({*seeds, *after}) == 27
    assert ShardSeeds(0, 2, 1).of_shard(3) == seeds[-1]
