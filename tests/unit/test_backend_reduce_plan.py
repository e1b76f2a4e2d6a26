"""How a reduction between hosts is cut into blocks, slices and pieces."""

from __future__ import annotations

import pytest

from paceline.backend.hierarchical_reduce import ReducePlan, is_short
from paceline.backend.link_speed import LinkSpeed

FAST = LinkSpeed(latency_s=1e-4, bytes_per_s=3e9)
SLOW = LinkSpeed(latency_s=2e-3, bytes_per_s=12.5e6)
COUNTS = [1, 7, 2049, 65_536, 70_001, 262_144, 1_000_003, 16 << 20]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("lanes", "hosts"), [(1, 2), (2, 2), (3, 3), (8, 64)])
@pytest.mark.parametrize("element_bytes", [1, 2, 8, 16])
def test_slices_and_pieces_cover_everything_once(count, lanes, hosts, element_bytes):
    plan = ReducePlan.of(count, element_bytes, element_bytes, lanes, hosts, FAST)
    position = 0
    for block in range(plan.blocks):
        slices = plan.slices(block)
        assert len(slices) == plan.lanes
        assert plan.lanes == (1 if plan.is_short else lanes)
        for start, length in slices:
            assert start == position
            assert 0 <= length <= plan.slice_count
            position += length
            end = 0
            for piece_start, piece_length in plan.pieces(length):
                assert piece_start == end
                end += piece_length
            assert end == length
    assert position == count


def test_only_more_than_two_hosts_cut_slices_into_pieces_if_bytes_cost_more_than_a_step():
    assert not ReducePlan.of(1 << 20, 4, 4, 2, 2, SLOW).in_pieces
    assert ReducePlan.of(1 << 20, 4, 4, 2, 3, FAST).in_pieces
    assert not ReducePlan.of(17 << 10, 4, 4, 2, 3, FAST).in_pieces
    assert ReducePlan.of(17 << 10, 4, 4, 2, 3, SLOW).in_pieces


def test_what_is_rounded_does_not_depend_on_what_was_measured():
    for count in COUNTS:
        plans = [ReducePlan.of(count, 4, 2, 2, 5, link) for link in (FAST, SLOW)]
        assert len({(plan.is_short, plan.in_pieces) for plan in plans}) == 1


def test_blocks_are_long_enough_to_hide_what_they_cost():
    assert ReducePlan.of(1, 4, 4, 2, 2, None).is_short
    assert ReducePlan.of((1 << 20) // 4, 4, 4, 2, 2, FAST).blocks == 1
    assert ReducePlan.of((1 << 20) // 4, 4, 4, 2, 2, SLOW).blocks == 2
    assert ReducePlan.of((1 << 20) // 4, 4, 2, 2, 2, SLOW).blocks == 1
    assert ReducePlan.of((64 << 20) // 4, 4, 4, 2, 2, FAST).blocks == 32
    assert ReducePlan.of((64 << 20) // 4, 4, 4, 2, 2, SLOW).blocks == 32


def test_a_tensor_is_short_if_a_host_sends_little_in_all():
    assert is_short(128 << 10, hosts=2)
    assert not is_short((128 << 10) + 1, hosts=2)
    assert not is_short(128 << 10, hosts=3)
    assert is_short(8 << 10, hosts=1000)
