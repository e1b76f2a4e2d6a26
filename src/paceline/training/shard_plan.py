"""How a global batch is cut into shards, and which rank computes which of them; pure.

The boundaries are those of a full batch, whatever the number of ranks: its shards have the same
number of samples, the first ones one more where it does not divide. A batch of fewer samples, the
last one of an epoch, keeps these boundaries and ends earlier, so that shapes recur. Where it would
end with a shard of a single sample, of which BatchNorm can make nothing, that sample joins the
shard before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from paceline.data.shares import share_of
from paceline.errors import ConfigError

__all__ = ["BatchPlan", "Shard", "ShardPlan", "deal", "deal_counts"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Samples `start` to `stop - 1` of a global batch, and their weight in its gradient."""

    number: int
    start: int
    stop: int
    weight: int

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The shards of one global batch: those that have samples, which are always the first ones.

    A shard's weight is its number of samples, divided by the greatest divisor that all of them
    share: shards of equal size weigh 1, and nothing needs to be multiplied.
    """

    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        """How many samples the global batch has."""
        return self.shards[-1].stop

    @property
    def total_weight(self) -> int:
        """What the sum of the weighted gradients is divided by."""
        return sum(shard.weight for shard in self.shards)


class ShardPlan:
    """Cuts global batches of up to `batch_size` samples into at most `shards` shards."""

    def __init__(self, batch_size: int, shards: int) -> None:
        if shards < 1:
            raise ConfigError(f"shards must be at least 1, found {shards}")
        if batch_size < shards:
            raise ConfigError(
                f"a global batch of {batch_size} samples cannot be cut into shards={shards}: use "
                f"at most {batch_size} shards, or a larger batch_size"
            )
        self.batch_size, self.shards = batch_size, shards
        self._plans: dict[int, BatchPlan] = {}

    def cut(self, samples: int) -> BatchPlan:
        """The shards of a global batch of so many samples."""
        # An epoch has two sizes at most.
        if samples not in self._plans:
            self._plans[samples] = self._new_plan(samples)
        return self._plans[samples]

    def _new_plan(self, samples: int) -> BatchPlan:
        full = [share_of(self.batch_size, number, self.shards) for number in range(self.shards)]
        bounds = [(part.start, min(part.stop, samples)) for part in full if part.start < samples]
        if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1 < full[len(bounds) - 1].count:
            bounds[-2:] = [(bounds[-2][0], samples)]
        divisor = math.gcd(*(stop - start for start, stop in bounds))
        return BatchPlan(
            tuple(
                Shard(number, start, stop, (stop - start) // divisor)
                for number, (start, stop) in enumerate(bounds)
            )
        )


def deal(shards: Sequence[Shard], world_size: int) -> list[Sequence[Shard]]:
    """Each rank's shards, as even as it goes. Any other way would give the same bits."""
    return deal_counts(
        shards, [share_of(len(shards), rank, world_size).count for rank in range(world_size)]
    )


def deal_counts(shards: Sequence[Shard], counts: Sequence[int]) -> list[Sequence[Shard]]:
    """Each rank's shards, given how many it gets: contiguous, so that few sums have to be
    exchanged.
    """
    stops = itertools.accumulate(counts)
    return [shards[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
