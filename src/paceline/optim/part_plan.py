"""Which elements of a row of arrays are whose, and in which portions they travel. Pure.

Arrays lie in a row, each beginning a new line of 64 bytes; a rank's part is a range of lines. That
is where the core cuts an update as well: an element's result does not depend on the cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Piece", "Portion", "plan_parts", "plan_portions", "without_long_pieces"]

_LINE_BYTES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of one array, and where they are among those of their rank."""

    array: int
    begin: int
    end: int
    at: int

    @property
    def elements(self) -> slice:
        return slice(self.begin, self.end)

    def place(self, offset: int = 0) -> slice:
        """Where it is among its rank's, if those begin at `offset`."""
        return slice(offset + self.at, offset + self.at + self.end - self.begin)


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """What is exchanged at once: as many elements of every rank's part."""

    length: int
    pieces: tuple[tuple[Piece, ...], ...]  # of each rank


def plan_parts(
    counts: Sequence[int], element_bytes: int, ranks: int
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank, given the arrays' numbers of elements."""
    per_line = _LINE_BYTES // element_bytes
    lines = [-(-count // per_line) for count in counts]
    ends = list(accumulate(lines))
    total = ends[-1] if ends else 0

    def part(rank: int) -> tuple[Piece, ...]:
        first, last = total * rank // ranks, total * (rank + 1) // ranks
        pieces = []
        for array, end in enumerate(ends):
            start = end - lines[array]
            low, high = max(first, start), min(last, end)
            if low < high:
                begin = (low - start) * per_line
                until = min((high - start) * per_line, counts[array])
                pieces.append(Piece(array, begin, until, (low - first) * per_line))
        return tuple(pieces)

    return tuple(part(rank) for rank in range(ranks))


def plan_portions(parts: Sequence[Sequence[Piece]], longest: int) -> list[Portion]:
    """Cut all parts into portions of at most `longest` elements."""
    length = max((piece.place().stop for part in parts for piece in part), default=0)
    return [
        Portion(
            min(longest, length - start),
            tuple(tuple(_cut(part, start, start + longest)) for part in parts),
        )
        for start in range(0, length, longest)
    ]


def without_long_pieces(
    parts: Sequence[Sequence[Piece]], shortest: int
) -> tuple[list[tuple[int, Piece]], list[list[Piece]]]:
    """Pieces of at least `shortest` elements, each with its rank; and the parts without them, moved
    together.
    """
    long, rest = [], []
    for rank, part in enumerate(parts):
        at, kept = 0, []
        for piece in part:
            length = piece.end - piece.begin
            if length >= shortest:
                long.append((rank, piece))
            else:
                kept.append(dataclasses.replace(piece, at=at))
                at += length
        rest.append(kept)
    return long, rest


def _cut(part: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    cut = []
    for piece in part:
        place = piece.place()
        low, high = max(place.start, start), min(place.stop, stop)
        if low < high:
            begin = piece.begin + low - place.start
            cut.append(Piece(piece.array, begin, begin + high - low, low - start))
    return cut
