"""The weights of the exact average, without ranks."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.ddp.weighting import AverageRule, Contribution, SampleWindow, weights_of

COUNTS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=5)


def contributions(counts):
    found = []
    for rank in counts:
        window = SampleWindow()
        factors = [window.add(count) for count in rank]
        found.append((window.contribution(), factors))
    return found


@given(COUNTS)
def test_every_micro_batch_weighs_its_share_of_all_samples(counts):
    found = contributions(counts)
    samples = sum(map(sum, counts))
    longest = max(map(len, counts))
    for rank, (_, factors) in enumerate(found):
        weight = weights_of([one for one, _ in found], AverageRule())[rank]
        for count, factor in zip(counts[rank], factors, strict=True):
            exact = Fraction(count * longest, samples) if samples else 0
            assert weight * factor == pytest.approx(float(exact), rel=1e-14, abs=0)


@given(st.integers(1, 7), st.integers(1, 100), st.integers(1, 4))
def test_equal_counts_weigh_exactly_one_over_world(world, count, micro_batches):
    found = [one for one, _ in contributions([[count] * micro_batches] * world)]
    for rule in (AverageRule(), AverageRule(by_samples=False, divide_by_world=True)):
        assert weights_of(found, rule) == [1 / world] * world


def test_ranks_without_data():
    found = [Contribution(4, 4, 1), Contribution(), Contribution(4, 4, 1), Contribution()]
    assert weights_of(found, AverageRule()) == [0.5, 0.0, 0.5, 0.0]
    assert weights_of(found, AverageRule(divide_by_world=True)) == [0.25, 0.0, 0.25, 0.0]
    assert weights_of(found, AverageRule(by_samples=False)) == [0.5] * 4
    assert weights_of(found, AverageRule(by_samples=False, divide_by_world=True)) == [0.25] * 4


def test_no_samples_anywhere_is_zero_not_a_division_by_zero():
    found = [Contribution(0, 0, 1)] * 2
    assert weights_of(found, AverageRule()) == [0.0, 0.0]
