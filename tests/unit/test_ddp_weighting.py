"""The weights of the exact average, without ranks."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.data.shares import share_of
from paceline.ddp.signals import Call, Signal, weights_by_signals
from paceline.ddp.weighting import (
    NO_SAMPLES,
    AverageRule,
    Basis,
    Contribution,
    SampleCount,
    SampleWindow,
    combined,
    weights_of,
)

COUNTS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=5)


def contributions(counts):
    found = []
    for rank in counts:
        window = SampleWindow()
        factors = [window.add(SampleCount(float(count))) for count in rank]
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
    for rule in (AverageRule(), AverageRule(by_ranks=True, divide_by_world=True)):
        assert weights_of(found, rule) == [1 / world] * world


def test_ranks_without_data():
    found = [Contribution(4, 4, 1), Contribution(), Contribution(4, 4, 1), Contribution()]
    assert weights_of(found, AverageRule()) == [0.5, 0.0, 0.5, 0.0]
    assert weights_of(found, AverageRule(divide_by_world=True)) == [0.25, 0.0, 0.25, 0.0]
    assert weights_of(found, AverageRule(by_ranks=True)) == [0.5] * 4
    assert weights_of(found, AverageRule(by_ranks=True, divide_by_world=True)) == [0.25] * 4


def test_no_samples_anywhere_is_zero_not_a_division_by_zero():
    found = [Contribution(0, 0, 1)] * 2
    assert weights_of(found, AverageRule()) == [0.0, 0.0]


def weights_in_step(shares, batch_sizes):
    """What micro-batch i of rank r weighs in the average over ranks: `shares[r][i]` samples of a
    global batch of `batch_sizes[i]`.
    """
    world = len(shares)
    windows = [SampleWindow() for _ in shares]
    factors = [
        [
            window.add(SampleCount(count * world / size, Basis.SHARE))
            for count, size in zip(counts, batch_sizes, strict=True)
        ]
        for window, counts in zip(windows, shares, strict=True)
    ]
    weights = weights_of([window.contribution() for window in windows], AverageRule())
    return [
        [weight * factor for factor in row] for weight, row in zip(weights, factors, strict=True)
    ]


@given(st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_share_weighs_its_part_of_its_global_batch(world, batch_sizes):
    """Whatever the sizes of several accumulated batches: as in one process, each counts once."""
    shares = [[share_of(size, rank, world).count for size in batch_sizes] for rank in range(world)]
    found = weights_in_step(shares, batch_sizes)
    for rank in range(world):
        for micro_batch, size in enumerate(batch_sizes):
            exact = Fraction(shares[rank][micro_batch], size)
            # Each micro-batch is divided by their number by the caller, as in one process.
            assert found[rank][micro_batch] == pytest.approx(float(exact), rel=1e-12, abs=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 4))
def test_even_shares_of_any_size_leave_torchs_bits(sizes, world):
    shares = [sizes] * world
    found = weights_in_step(shares, [size * world for size in sizes])
    assert found == [[1 / world] * len(sizes)] * world


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=5))
def test_unknown_counts_average_ranks_and_leave_micro_batches_alone(leading):
    windows = [SampleWindow() for _ in leading]
    for window, sizes in zip(windows, leading, strict=True):
        for size in sizes:
            assert window.add(SampleCount(1.0, Basis.RANK, size)) == 1.0
    found = [window.contribution() for window in windows]
    assert weights_of(found, AverageRule()) == [1 / len(leading)] * len(leading)
    assert [contribution.leading for contribution in found] == [sum(sizes) for sizes in leading]


def test_an_empty_batch_contributes_nothing_where_no_count_is_known():
    window = SampleWindow()
    assert window.add(NO_SAMPLES) == 0.0
    some = Contribution(1.0, 1.0, 1, Basis.RANK, 5.0)
    found = [some, window.contribution(), some]
    assert weights_of(found, AverageRule()) == [0.5, 0.0, 0.5]
    joined = AverageRule(divide_ranks_by_world=True)
    assert weights_of(found, joined) == [1 / 3, 0.0, 1 / 3]
    known = [Contribution(1.0, 1.0, 1, Basis.SHARE), Contribution(), Contribution()]
    assert weights_of(known, joined) == [1.0, 0.0, 0.0]


def test_what_several_forwards_of_one_backward_weigh():
    def stated(count):
        return SampleCount(count)

    half = SampleCount(0.5, Basis.SHARE)
    unknown = SampleCount(1.0, Basis.RANK, 7.0)
    assert combined(stated(3.0), stated(4.0)) == stated(7.0)
    assert combined(half, half) == half
    assert combined(unknown, half) == combined(half, unknown) == half._replace(leading=7.0)
    assert combined(NO_SAMPLES, half) == combined(half, NO_SAMPLES) == half
    assert combined(half, SampleCount(2.0, Basis.SHARE)).basis is Basis.RANK


STATED, UNSTATED = (Contribution(2.0, 2.0, 1, basis) for basis in (Basis.SAMPLES, Basis.RANK))


@pytest.mark.parametrize(
    ("signals", "weights"),
    [
        ([Signal(Call.BACKWARD, STATED)] * 2, [0.5, 0.5]),
        ([Signal(Call.BACKWARD, STATED), Signal(Call.ANSWER)], [1.0, 0.0]),
        ([Signal(Call.BACKWARD, STATED, failed=True), Signal(Call.BACKWARD, STATED)], None),
        ([Signal(Call.BACKWARD, STATED), Signal(Call.ANSWER, failed=True)], None),
        ([Signal(Call.BACKWARD, STATED), Signal(Call.FORWARD)], None),
        ([Signal(Call.FORWARD)] * 2, None),
        ([Signal(Call.ANSWER)] * 2, None),
        ([Signal(Call.BACKWARD, STATED), Signal(Call.BACKWARD, UNSTATED)], None),
    ],
)
def test_signals_weigh_a_step_or_refuse_it(signals, weights):
    assert weights_by_signals(signals, AverageRule()) == weights
