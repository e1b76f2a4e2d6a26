"""The bucket plan is pure: every gradient in exactly one bucket, kinds apart, torch's assignment
bit for bit.
"""

from __future__ import annotations

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given

from paceline.ddp.plan import (
    MIB,
    UNLIMITED,
    BucketLimits,
    GradientSpec,
    first_plan,
    limit_for,
    plan_buckets,
    plan_order,
)

SPECS = st.lists(
    st.builds(
        GradientSpec,
        nbytes=st.integers(1, 3 * MIB),
        kind=st.sampled_from(["float32", "float64"]),
        sparse=st.booleans(),
    ),
    min_size=1,
    max_size=40,
)
LIMITS = st.lists(st.integers(1, 2 * MIB), min_size=1, max_size=3).map(
    lambda sizes: BucketLimits(tuple(sizes))
)


@given(SPECS, LIMITS, st.randoms())
def test_every_gradient_is_in_one_bucket_of_its_kind(specs, limits, random):
    order = list(range(len(specs)))
    random.shuffle(order)
    plan = plan_buckets(specs, limits, order)
    assert sorted(i for bucket in plan.buckets for i in bucket) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert len({specs[i].kind for i in bucket}) == 1
        assert len(bucket) == 1 or not any(specs[i].sparse for i in bucket)
        assert list(bucket) == sorted(bucket, key=order.index)


@given(SPECS, LIMITS)
def test_a_bucket_is_closed_by_the_gradient_that_fills_it(specs, limits):
    plan = plan_buckets(specs, limits, range(len(specs)))
    for bucket in plan.buckets:
        assert sum(specs[i].nbytes for i in bucket[:-1]) < max(limits.bytes)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), LIMITS)
def test_same_buckets_as_torch(sizes, limits):
    tensors = [
        torch.empty(size, dtype=torch.float32 if size % 3 else torch.float64) for size in sizes
    ]
    specs = [GradientSpec(one.numel() * one.element_size(), one.dtype) for one in tensors]
    expected, _ = dist._compute_bucket_assignment_by_size(
        tensors, list(limits.bytes), [False] * len(tensors)
    )
    assert [list(bucket) for bucket in first_plan(specs, limits).buckets] == list(
        reversed(expected)
    )


def test_unlimited_is_one_bucket_per_kind():
    specs = [GradientSpec(10 * MIB, kind) for kind in "aabab"]
    assert first_plan(specs, BucketLimits((UNLIMITED,))).buckets == ((2, 4), (0, 1, 3))


def test_limits_from_arguments():
    assert BucketLimits.create(None, None).bytes == (MIB, 25 * MIB)
    assert BucketLimits.create(4, None).bytes == (4 * MIB,)
    assert BucketLimits.create(4, [1, 2.5]).bytes == (MIB, int(2.5 * MIB))


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))))
def test_order_is_a_permutation_with_the_silent_last(case):
    total, arrived = case
    order = plan_order(arrived, total)
    assert sorted(order) == list(range(total))
    assert set(order[: len(set(arrived))]) == set(arrived)


def test_a_parameter_that_arrived_twice_counts_when_it_was_complete():
    assert plan_order([0, 1, 0, 2], 4) == [1, 0, 2, 3]


@given(st.floats(1e-9, 1.0), st.floats(1e6, 1e12))
def test_a_measured_limit_is_a_power_of_two_in_bounds(seconds, rate):
    limit = limit_for(seconds, rate)
    assert limit & (limit - 1) == 0
    assert MIB <= limit <= 64 * MIB
    assert limit_for(seconds * 2, rate) >= limit
