"""How rounds of a benchmark become a figure."""

from __future__ import annotations

import pytest

from paceline.bench.bench_tools import in_turn, medians, ratio_quartiles


def test_each_way_is_first_and_last_in_turn():
    rounds = [in_turn(["a", "b", "c"], number) for number in range(4)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_one_lucky_round_changes_no_figure():
    assert medians({"a": [10.0, 11.0, 12.0], "lucky": [1.0, 11.0, 12.0]}) == {
        "a": 11.0,
        "lucky": 11.0,
    }


def test_ratios_are_those_of_the_same_round():
    """A busy moment makes both sides of a round slower, and not their ratio."""
    ours = [10.0, 20.0, 10.0, 40.0, 10.0]
    assert ratio_quartiles([2 * seconds for seconds in ours], ours) == [2.0, 2.0, 2.0]
    low, middle, high = ratio_quartiles([9.0, 10.0, 11.0], [10.0, 10.0, 10.0])
    assert (low, middle, high) == pytest.approx((0.9, 1.0, 1.1))
    assert ratio_quartiles([3.0], [2.0]) == [1.5, 1.5, 1.5]
