"""Parts and portions of a row of arrays: everything is somebody's, once."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from paceline.optim.part_plan import plan_parts, plan_portions, without_long_pieces


@hypothesis.given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    element_bytes=st.sampled_from([2, 4, 8]),
    ranks=st.integers(1, 5),
    longest=st.integers(1, 200),
)
def test_every_element_is_in_one_piece_of_one_portion(counts, element_bytes, ranks, longest):
    parts = plan_parts(counts, element_bytes, ranks)
    assert len(parts) == ranks
    owners = [[None] * count for count in counts]
    for rank, part in enumerate(parts):
        for piece in part:
            assert piece.begin * element_bytes % 64 == 0
            for element in range(piece.begin, piece.end):
                assert owners[piece.array][element] is None
                owners[piece.array][element] = rank
    assert all(owner is not None for array in owners for owner in array)

    sent = [[0] * count for count in counts]
    for portion in plan_portions(parts, longest):
        assert 0 < portion.length <= longest
        for rank, pieces in enumerate(portion.pieces):
            taken = [False] * portion.length
            for piece in pieces:
                for element, place in zip(
                    range(piece.begin, piece.end),
                    range(piece.place().start, piece.place().stop),
                    strict=True,
                ):
                    assert owners[piece.array][element] == rank
                    assert not taken[place]
                    taken[place] = True
                    sent[piece.array][element] += 1
    assert all(times == 1 for array in sent for times in array)


@hypothesis.given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    ranks=st.integers(1, 5),
    shortest=st.integers(1, 200),
)
def test_long_pieces_leave_the_others_without_gaps(counts, ranks, shortest):
    parts = plan_parts(counts, 4, ranks)
    long, rest = without_long_pieces(parts, shortest)
    ranges = [(rank, p.array, p.begin, p.end) for rank, part in enumerate(parts) for p in part]
    kept = [(rank, p) for rank, part in enumerate(rest) for p in part]
    assert sorted((r, p.array, p.begin, p.end) for r, p in [*long, *kept]) == sorted(ranges)
    assert all(piece.end - piece.begin >= shortest for _, piece in long)
    for part in rest:
        at = 0
        for piece in part:
            assert piece.end - piece.begin < shortest
            assert piece.place().start == at
            at = piece.place().stop


def test_parts_are_even_to_a_line():
    parts = plan_parts([992, 32, 16], 4, 3)
    lengths = [sum(piece.end - piece.begin for piece in part) for part in parts]
    assert sum(lengths) == 1040
    assert max(lengths) - min(lengths) <= 16
