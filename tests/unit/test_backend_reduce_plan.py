"""How a reduction between hosts is cut into blocks, slices and pieces."""

from __future__ import annotations

import pytest

from paceline.backend.hierarchical_reduce import ReducePlan

COUNTS = [1, 7, 2049, 65_536, 70_001, 262_144, 1_000_003, 16 << 20]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("lanes", "hosts"), [(1, 2), (2, 2), (3, 3), (8, 64)])
@pytest.mark.parametrize("element_bytes", [1, 2, 8, 16])
def test_slices_and_pieces_cover_everything_once(count, lanes, hosts, element_bytes):
    plan = ReducePlan.of(count, element_bytes, lanes, hosts)
    position = 0
    for block in range(plan.blocks):
        slices = plan.slices(block)
        assert len(slices) == lanes
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


def test_only_more_than_two_hosts_cut_slices_into_pieces():
    assert not ReducePlan.of(1 << 20, 4, 2, 2).in_pieces
    assert ReducePlan.of(1 << 20, 4, 2, 3).in_pieces
    assert not ReducePlan.of(4096, 4, 2, 3).in_pieces


def test_long_tensors_have_enough_blocks_to_overlap():
    assert ReducePlan.of(1, 4, 2, 2).is_short
    assert ReducePlan.of((1 << 20) // 4, 4, 2, 2).blocks == 2
    assert ReducePlan.of((64 << 20) // 4, 4, 2, 2).blocks == 32
