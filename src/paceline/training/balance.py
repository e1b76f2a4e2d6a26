"""How shards are dealt out to ranks of different speed; pure, and never a matter of bits.

At the end of a pass every rank tells the others how long its shards took. All of them draw the same
conclusions from the same numbers: shards are dealt out evenly, until another deal would have been
clearly faster for some passes in a row.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from paceline.training.shard_plan import Shard, deal

__all__ = ["Balance", "Pace", "counts_for"]

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
        self._passes = 0
        # What the deal was made for; equal numbers make an even one.
        self._dealt_for = [1.0] * ranks
        self.exchange_s = 0.0

    def deal(self, shards: Sequence[Shard]) -> list[Sequence[Shard]]:
        """Each rank's shards: contiguous, so that few sums have to be exchanged."""
        return deal(shards, counts_for(len(shards), self._dealt_for))

    def shard_s(self, rank: int) -> float | None:
        """How long a shard takes on a rank; None if that is not known yet."""
        measured = self._measured[rank]
        return statistics.median(measured) if measured else None

    def record(self, paces: Sequence[Pace]) -> None:
        """What all ranks have told at the end of a pass over a full batch."""
        # The last rank to come has not waited for any other.
        self.exchange_s = min(pace.exchange for pace in paces)
        for measured, pace in zip(self._measured, paces, strict=True):
            if pace.shard is not None:
                measured.append(pace.shard)
        self._passes += 1
        if self._follows_speed and self._passes >= _PASSES:
            self._follow()

    def _follow(self) -> None:
        seconds = [self.shard_s(rank) for rank in range(self._ranks)]
        known = [each for each in seconds if each is not None]
        if len(known) < self._ranks:
            return
        now, then = (
            max(count * each for count, each in zip(counts, known, strict=True))
            for counts in (
                counts_for(self._shards, self._dealt_for),
                counts_for(self._shards, known),
            )
        )
        if then < _WORTH_A_CHANGE * now:
            self._dealt_for, self._passes = known, 0


def counts_for(shards: int, seconds: Sequence[float]) -> list[int]:
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
