"""Evaluation among ranks that may change: who evaluates what is left when one of them is lost.

In an elastic job `paceline.Training` knows with whom this process works; it says so here, because
an `Evaluation` is told nothing about a training. The dataset is divided when the loop over it
begins, and the ranks exchange their parts when it ends: samples that nobody has then are evaluated
by those that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from paceline.data.shares import share_of

__all__ = [
    "ChangingRanks",
    "Span",
    "current_ranks",
    "gaps_between",
    "set_ranks",
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

    def own_share(self, samples: range) -> range:
        """What this rank evaluates of some samples."""

    def gather_parts(self, parts: list[_P]) -> list[_P] | None:
        """Every rank's parts; None if ranks were lost, and the others are to try again."""

    def count_evaluation(self) -> None:
        """This rank has the result."""


class _Current:
    ranks: ChangingRanks | None = None


def set_ranks(ranks: ChangingRanks | None) -> None:
    """From now on this process evaluates among these."""
    _Current.ranks = ranks


def current_ranks() -> ChangingRanks | None:
    """The ranks to evaluate among; None unless they may change."""
    return _Current.ranks


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


def share_of_range(samples: range, rank: int, world_size: int) -> range:
    """The part of some samples that belongs to a rank."""
    share = share_of(len(samples), rank, world_size)
    return range(samples.start + share.start, samples.start + share.stop)
