"""Evaluation among ranks that may change: who evaluates what is left when one of them is lost.

In an elastic job `paceline.Training` knows with whom this process works, and says so in its
`EvaluationSetting`. The dataset is divided when the loop over it begins, and the ranks exchange
their parts when it ends: samples that nobody has then are evaluated by those that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from paceline.data.shares import share_of

__all__ = [
    "ChangingRanks",
    "Span",
    "gaps_between",
    "share_of_range",
    "without_overlaps",
]


class Span(Protocol):
    """Some consecutive samples."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


_S = TypeVar("_S", bound=Span)
_P = TypeVar("_P")


class ChangingRanks(Protocol):
    """The ranks that evaluate together at the moment."""

    def own_share(self, batches: range) -> range:
        """Which of some batches this rank evaluates."""

    def gather_parts(self, parts: list[_P]) -> list[_P] | None:
        """Every rank's parts; None if ranks were lost, and the others are to try again."""

    def count_evaluation(self) -> None:
        """This rank has the result."""


def without_overlaps(parts: Iterable[_S]) -> list[_S]:
    """Parts that have no sample in common, in the order of samples; the longer one of two that
    begin together.
    """
    chosen: list[_S] = []
    covered = 0
    for part in sorted(parts, key=lambda each: (each.start, -each.stop)):
        if part.start >= covered and part.stop > part.start:
            chosen.append(part)
            covered = part.stop
    return chosen


def gaps_between(parts: Sequence[Span], length: int) -> list[range]:
    """The samples that are in none of these parts, which are in order."""
    starts = [0, *(part.stop for part in parts)]
    stops = [*(part.start for part in parts), length]
    return [range(one, other) for one, other in zip(starts, stops, strict=True) if one < other]


def share_of_range(numbers: range, rank: int, world_size: int) -> range:
    """The part of some consecutive numbers that belongs to a rank."""
    share = share_of(len(numbers), rank, world_size)
    return range(numbers.start + share.start, numbers.start + share.stop)
