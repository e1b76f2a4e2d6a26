"""How shards are dealt out to ranks of different speed; pure, and never a matter of bits.

At the end of a pass every rank tells the others how long its shards took. All of them draw the same
conclusions from the same numbers: shards are dealt out evenly, until another deal would have been
clearly faster over some passes.
"""

from __future__ import annotations

import collections
import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from paceline.training.shard_plan import Shard, deal_counts
from paceline.training.tree_sum import subtrees

__all__ = ["Balance", "Pace", "counts_for", "sums_held"]

_PASSES = 5
# Another deal must be better by a tenth: measured times are never the same twice, and a change
# costs inputs that were loaded for the deal before.
_WORTH_A_CHANGE = 0.9


class Pace(NamedTuple):
    """What a rank tells the others at the end of a pass, in seconds.

    `shard`: the mean of its dealt shards, None if it had none. `exchange`: from its last shard to
    the end of the pass before this one.
    """

    shard: float | None
    exchange: float


class Balance:
    """Deals out shards by what the ranks have told of their speed.

    Args:
        ranks: how many there are.
        shards: of a full batch.
        follows_speed: False deals out evenly, whatever is measured.
    """

    def __init__(self, ranks: int, shards: int, *, follows_speed: bool) -> None:
        self._ranks, self._shards, self._follows_speed = ranks, shards, follows_speed
        self._measured: list[collections.deque[float]] = [
            collections.deque(maxlen=_PASSES) for _ in range(ranks)
        ]
        self._exchanges = _ExchangeTimes()
        self._sums_before: int | None = None
        self._passes = 0
        # What the deal was made for; equal numbers make an even one.
        self._dealt_for = self._even = (1.0,) * ranks
        self._last_deal: tuple[Sequence[Shard], list[Sequence[Shard]]] = ((), [])

    def deal(self, shards: Sequence[Shard]) -> list[Sequence[Shard]]:
        """Each rank's shards."""
        dealt, deals = self._last_deal
        if dealt is not shards:
            deals = deal_counts(shards, counts_for(len(shards), self._dealt_for))
            self._last_deal = (shards, deals)
        return deals

    def shard_s(self, rank: int) -> float | None:
        """How long a shard takes on a rank; None if that is not known yet."""
        measured = self._measured[rank]
        return statistics.median(measured) if measured else None

    def extra_exchange_s(self, more: int) -> float:
        """How much longer an exchange takes with so many more sums than the deal makes."""
        sums = self._sums_of(self._dealt_for)
        return max(0.0, self._exchanges.estimate(sums + more) - self._exchanges.estimate(sums))

    def record(self, paces: Sequence[Pace], computed: Sequence[Sequence[int]]) -> None:
        """What all ranks have told at the end of a pass over a full batch, and which shards each of
        them has computed.
        """
        # The last rank to come has not waited for any other.
        if self._sums_before is not None:
            self._exchanges.record(self._sums_before, min(pace.exchange for pace in paces))
        self._sums_before = sums_held(tuple(map(tuple, computed)), self._shards)
        for measured, pace in zip(self._measured, paces, strict=True):
            if pace.shard is not None:
                measured.append(pace.shard)
        self._passes += 1
        if self._follows_speed and self._passes % _PASSES == 0:
            self._follow()

    def _follow(self) -> None:
        seconds = [self.shard_s(rank) for rank in range(self._ranks)]
        known = tuple(each for each in seconds if each is not None)
        if len(known) < self._ranks:
            return
        now = self._step_s(self._dealt_for, known)
        best = min(known, self._even, key=lambda dealt_for: self._step_s(dealt_for, known))
        if self._step_s(best, known) < _WORTH_A_CHANGE * now:
            self._dealt_for, self._last_deal = best, ((), [])

    def _step_s(self, dealt_for: tuple[float, ...], seconds: tuple[float, ...]) -> float:
        """How long a pass takes with the deal for these speeds, at the ranks' real ones."""
        counts = counts_for(self._shards, dealt_for)
        last = max(count * each for count, each in zip(counts, seconds, strict=True))
        return last + self._exchanges.estimate(self._sums_of(dealt_for))

    def _sums_of(self, dealt_for: tuple[float, ...]) -> int:
        return _sums_dealt(self._shards, dealt_for)


class _ExchangeTimes:
    """How long exchanges take, by the number of sums that the ranks hold together."""

    def __init__(self) -> None:
        self._measured: dict[int, collections.deque[float]] = {}

    def record(self, sums: int, seconds: float) -> None:
        self._measured.setdefault(sums, collections.deque(maxlen=_PASSES)).append(seconds)

    def estimate(self, sums: int) -> float:
        """The best time of late; in proportion to another number of sums if this one is new."""
        if not self._measured:
            return 0.0
        nearest = min(self._measured, key=lambda known: abs(known - sums))
        return min(self._measured[nearest]) * sums / nearest


@functools.lru_cache(maxsize=64)
def counts_for(shards: int, seconds: tuple[float, ...]) -> list[int]:
    """How many shards each rank gets if one takes it so long: the last rank is through as early as
    possible. Every rank gets one while there are enough, or its speed would not be known any more.
    """
    counts = [0] * len(seconds)
    if shards >= len(seconds):
        counts = [1] * len(seconds)
    for _ in range(shards - sum(counts)):
        through = [(count + 1) * each for count, each in zip(counts, seconds, strict=True)]
        counts[through.index(min(through))] += 1
    return counts


@functools.lru_cache(maxsize=64)
def _sums_dealt(shards: int, seconds: tuple[float, ...]) -> int:
    """How many sums have to be exchanged with the deal for ranks of these speeds."""
    counts = counts_for(shards, seconds)
    stops = itertools.accumulate(counts)
    dealt = [tuple(range(s - n, s)) for s, n in zip(stops, counts, strict=True)]
    return sums_held(tuple(dealt), shards)


@functools.lru_cache(maxsize=1024)
def sums_held(computed: tuple[tuple[int, ...], ...], shards: int) -> int:
    """How many sums have to be exchanged when ranks have computed these shards."""
    return sum(len(subtrees(numbers, shards)) for numbers in computed)
