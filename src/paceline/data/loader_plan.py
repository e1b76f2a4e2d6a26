"""Which batches a pass of the loader makes, one `Request` after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from paceline.data.batch_builder import Request
from paceline.data.global_batch_sampler import GlobalBatchSampler
from paceline.data.position import Progress
from paceline.data.seeding import sample_seeds
from paceline.data.sharded_iterable import ShardedIterable

__all__ = ["Plan", "GlobalPlan", "SamplerPlan", "StreamPlan"]


class Plan:
    """A pass from `begin()` on: iterating gives its requests. `progress` is moved by whoever
    receives the batches.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.epoch, self.first = 0, 0

    def begin(self) -> tuple[int, int]:
        self.epoch, self.first = self.progress.begin()
        return self.epoch, self.first

    def __iter__(self) -> Iterator[Request]:
        raise NotImplementedError


class GlobalPlan(Plan):
    """This rank's shares of global batches."""

    def __init__(self, sampler: GlobalBatchSampler, seed: int | None) -> None:
        super().__init__(sampler.progress)
        self._sampler, self._seed = sampler, seed

    def __iter__(self) -> Iterator[Request]:
        epoch, first = self.epoch, self.first
        for number, indices in enumerate(self._sampler.batches(epoch, first), start=first):
            if indices:
                yield Request(indices, self._seeds(epoch, number, indices))
            else:
                model = self._sampler.global_batch(epoch, number)[:1]
                yield Request(
                    model,
                    None if self._seed is None else sample_seeds(self._seed, epoch, model),
                    empty=True,
                )

    def _seeds(self, epoch: int, number: int, indices: list[int]) -> list[int] | None:
        if self._seed is None:
            return None
        draws = self._sampler.positions(number).astype(np.uint64) if self._sampler.repeats else None
        return sample_seeds(self._seed, epoch, indices, draws)


class SamplerPlan(Plan):
    """What any other sampler or batch sampler says."""

    def __init__(
        self, indices: Iterable[Any], sampler: Any, seed: int | None, *, batched: bool
    ) -> None:
        super().__init__(Progress())
        self._indices, self._sampler, self._seed, self._batched = indices, sampler, seed, batched

    def __iter__(self) -> Iterator[Request]:
        # A sampler with an epoch knows best: after a restart it is set where the loader has only
        # counted passes.
        epoch = getattr(self._indices, "epoch", getattr(self._sampler, "epoch", self.epoch))
        for chosen in self._indices:
            indices = list(chosen) if self._batched else [chosen]
            yield Request(
                indices, None if self._seed is None else sample_seeds(self._seed, epoch, indices)
            )


class StreamPlan(Plan):
    """A stream that needs no requests, only to be told where a pass starts."""

    def __init__(self, stream: ShardedIterable | None) -> None:
        super().__init__(Progress() if stream is None else stream.progress)
        self._stream = stream

    def begin(self) -> tuple[int, int]:
        epoch, first = super().begin()
        if self._stream is not None:
            self._stream.announce(epoch, first)
        return epoch, first
