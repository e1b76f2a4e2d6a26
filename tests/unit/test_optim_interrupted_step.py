"""What is written down of a step that was interrupted, given how far everybody got."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.journal import StepProgress
from paceline.optim.interrupted_step import UpdatedArray, record_parts, record_whole

# 4, 1 and 2 lines of 16 floats.
ARRAYS = [UpdatedArray("a", 64, 4), UpdatedArray("b", 3, 4), UpdatedArray("c", 20, 4)]


def reached(made=0, begun=0, lines=()):
    return StepProgress(1, made, begun, tuple(lines), has_ended=True)


def test_nobody_has_begun():
    record = record_parts([ARRAYS], [None, reached()])
    assert record.is_before
    assert not record.is_after
    assert "as before" in str(record)


def test_everybody_is_through():
    record = record_parts([ARRAYS], [reached(1, 1), reached(1, 1)])
    assert record.is_after
    assert not record.is_before
    assert "complete" in str(record)


def test_one_is_through_and_one_was_lost():
    # Seven lines: the first part is lines 0 to 2, the second 3 to 6; of these two are made.
    record = record_parts([ARRAYS], [reached(1, 1), reached(0, 1, [range(3, 5)])])
    assert record.parameters["a"].after == (range(64),)
    assert record.parameters["b"].is_after
    assert record.parameters["c"].is_before
    assert "2 of 3 parameters are as after it, 1 as before it (" in str(record)


def test_threads_leave_gaps():
    record = record_parts([ARRAYS], [reached(0, 1, [range(1), range(2, 3), range(5, 6)])])
    assert record.parameters["a"].after == (range(16), range(32, 48))
    assert record.parameters["c"].after == (range(16),)
    assert "a, c partly" in str(record)


def test_updates_follow_each_other():
    record = record_parts([[ARRAYS[0]], [ARRAYS[1]], [ARRAYS[2]]], [reached(1, 2, [range(1)])])
    assert record.parameters["a"].is_after
    assert record.parameters["b"].is_after
    assert record.parameters["c"].is_before


def test_of_a_rank_that_may_go_on_nothing_is_known():
    record = record_parts([ARRAYS], [reached(1, 1), reached(0, 1, [range(3, 4)])], unsettled=[1])
    assert record.torn == ("a", "b", "c")
    assert record.parameters["a"].torn == (range(48, 64),)
    assert record.parameters["a"].after == (range(48),)


def test_whole_parameters():
    record = record_whole(
        {"a": 4, "b": 5, "c": 6, "d": 7},
        {"a": 0, "b": 1, "c": 2, "d": 3},
        {0: reached(1, 1), 1: reached(0, 1), 2: reached(), 3: None},
    )
    assert record.parameters["a"].is_after
    assert record.torn == ("b",)
    assert record.parameters["c"].is_before
    assert record.parameters["d"].is_before
    assert "b may have any value" in str(record)


@given(
    elements=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    element_bytes=st.sampled_from([2, 4, 8]),
    parts=st.integers(1, 5),
)
def test_parts_that_are_all_made_cover_every_element(elements, element_bytes, parts):
    arrays = [UpdatedArray(str(i), count, element_bytes) for i, count in enumerate(elements)]
    record = record_parts([arrays], [reached(1, 1)] * parts)
    assert record.is_after
    assert all(len(each.after) == 1 for each in record.parameters.values())
