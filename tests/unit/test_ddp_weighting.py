"""The weights of the exact average, without ranks."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.ddp.weighting import Contribution, SampleWindow, weight_of

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
        weight = weight_of(rank, [one for one, _ in found], by_samples=True, divide_by_world=False)
        for count, factor in zip(counts[rank], factors, strict=True):
            exact = Fraction(count * longest, samples) if samples else 0
            assert weight * factor == pytest.approx(float(exact), rel=1e-14, abs=0)


@given(st.integers(1, 7), st.integers(1, 100), st.integers(1, 4))
def test_equal_counts_weigh_exactly_one_over_world(world, count, micro_batches):
    found = [one for one, _ in contributions([[count] * micro_batches] * world)]
    for rank in range(world):
        assert weight_of(rank, found, by_samples=True, divide_by_world=False) == 1 / world
        assert weight_of(rank, found, by_samples=False, divide_by_world=True) == 1 / world


def test_ranks_without_data():
    found = [Contribution(4, 4, 1), Contribution(), Contribution(4, 4, 1), Contribution()]
    assert weight_of(0, found, by_samples=True, divide_by_world=False) == 0.5
    assert weight_of(1, found, by_samples=True, divide_by_world=False) == 0.0
    assert weight_of(0, found, by_samples=True, divide_by_world=True) == 0.25
    assert weight_of(0, found, by_samples=False, divide_by_world=False) == 0.5
    assert weight_of(0, found, by_samples=False, divide_by_world=True) == 0.25


def test_no_samples_anywhere_is_zero_not_a_division_by_zero():
    found = [Contribution(0, 0, 1)] * 2
    assert weight_of(0, found, by_samples=True, divide_by_world=False) == 0.0
