"""Which batches a pass of the loader consists of, as one `BatchRequest` after the other.

torch's loader iterates over these objects as its sampler and sends each request to a worker, which
builds the batch (`batch_builder`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from paceline.data.global_batch_sampler import GlobalBatchSampler
from paceline.data.position import Position
from paceline.data.received_batches import ReceivedBatch
from paceline.data.rng import Int64s
from paceline.data.seeding import sample_seeds
from paceline.data.sharded_iterable import ShardedIterable

__all__ = [
    "BatchRange",
    "BatchRequest",
    "BatchRequests",
    "GlobalBatchRequests",
    "SamplerRequests",
    "StreamRequests",
]


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """The samples of one batch. `seeds` has one for each sample, or is None to leave the random
    number generators alone.

    `empty` asks for a batch of zero samples with the structure of the one `indices` would make.
    `received` is what the batch is of its global batch, where there is one.
    """

    indices: list[Any]
    seeds: list[int] | None
    empty: bool = False
    received: ReceivedBatch | None = None


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """Samples `start` to `stop - 1` of a global batch, whichever rank's share they belong to."""

    epoch: int
    batch: int
    start: int
    stop: int


class BatchRequests:
    """The requests of one pass, from `begin()` on. Whoever receives the batches advances
    `position`.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self.epoch, self.first = 0, 0

    def begin(self) -> tuple[int, int]:
        """Start a pass; returns its epoch and its first batch."""
        self.epoch, self.first = self.position.begin()
        return self.epoch, self.first

    def __iter__(self) -> Iterator[BatchRequest]:
        raise NotImplementedError


class GlobalBatchRequests(BatchRequests):
    """This rank's shares of global batches."""

    def __init__(self, sampler: GlobalBatchSampler, seed: int | None) -> None:
        super().__init__(sampler.position)
        self._sampler, self._seed = sampler, seed

    def begin(self) -> tuple[int, int]:
        self._sampler.check_same_rank()
        return super().begin()

    def __iter__(self) -> Iterator[BatchRequest]:
        epoch, first = self.epoch, self.first
        for batch, indices in enumerate(self._sampler.batches(epoch, first), start=first):
            received = ReceivedBatch.of(self._sampler.share(batch))
            if indices:
                seeds = self._seeds(epoch, indices, self._sampler.order_positions(batch))
                yield BatchRequest(indices, seeds, received=received)
            else:
                # The first sample of the global batch serves as the example: it exists, and it is
                # the same one at every world size.
                example = self._sampler.global_batch(epoch, batch)[:1]
                seeds = None if self._seed is None else sample_seeds(self._seed, epoch, example)
                yield BatchRequest(example, seeds, empty=True, received=received)

    def request(self, wanted: BatchRange) -> BatchRequest:
        """The request for any range of a global batch, with the seeds its samples always have."""
        indices = self._sampler.samples(wanted.epoch, wanted.batch, wanted.start, wanted.stop)
        if self._seed is None:
            return BatchRequest(indices, None)
        first = wanted.batch * self._sampler.batch_size
        positions = np.arange(first + wanted.start, first + wanted.stop, dtype=np.int64)
        return BatchRequest(indices, self._seeds(wanted.epoch, indices, positions))

    def _seeds(self, epoch: int, indices: list[int], positions: Int64s) -> list[int] | None:
        if self._seed is None:
            return None
        # With replacement, the position in the order distinguishes repeated draws of a sample, so
        # that each is augmented differently.
        draws = positions.astype(np.uint64) if self._sampler.repeats else None
        return sample_seeds(self._seed, epoch, indices, draws)


class SamplerRequests(BatchRequests):
    """The batches of any other sampler or batch sampler."""

    def __init__(
        self, indices: Iterable[Any], sampler: object, seed: int | None, *, batched: bool
    ) -> None:
        super().__init__(Position())
        self._indices, self._sampler, self._seed, self._batched = indices, sampler, seed, batched

    def __iter__(self) -> Iterator[BatchRequest]:
        # A sampler with an epoch knows best: after a restart it is set where the loader has only
        # counted passes.
        epoch = getattr(self._indices, "epoch", getattr(self._sampler, "epoch", self.epoch))
        for item in self._indices:
            indices = list(item) if self._batched else [item]
            seeds = None if self._seed is None else sample_seeds(self._seed, epoch, indices)
            yield BatchRequest(indices, seeds)


class StreamRequests(BatchRequests):
    """A stream takes no requests; its workers only learn where a pass starts."""

    def __init__(self, stream: ShardedIterable | None) -> None:
        super().__init__(Position() if stream is None else stream.position)
        self._stream = stream

    def begin(self) -> tuple[int, int]:
        epoch, first = super().begin()
        if self._stream is not None:
            self._stream.announce_pass(epoch, first)
        return epoch, first
