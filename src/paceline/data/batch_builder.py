"""Building one batch, in a worker process or in this one, with random numbers that belong to its
samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from paceline.data.batch_requests import BatchRequest
from paceline.data.empty_batch import empty_batch
from paceline.data.received_batches import ReceivedBatch
from paceline.data.seeding import collate_seed, isolated_rng, seed_all
from paceline.data.sharded_iterable import ShardedIterable

__all__ = [
    "BuiltBatch",
    "CollateSpec",
    "MapBatchBuilder",
    "StreamBatchBuilder",
    "draws_no_random_numbers",
    "keep_batch",
]


@dataclasses.dataclass(frozen=True)
class CollateSpec:
    """How samples become a batch, also when there are none of them.

    `make_empty`, if given, turns a batch of one sample into a batch of zero samples.
    """

    collate: Callable[[Any], Any]
    make_empty: Callable[[Any], Any] | None

    def empty_like(self, sample: object) -> Any:
        """A batch of zero samples that are like this one."""
        if self.make_empty is not None:
            return self.make_empty(self.collate([sample]))
        return empty_batch(self.collate([sample]), self.collate([sample, sample]))


class BuiltBatch(NamedTuple):
    """A batch on its way from a worker, with what it is of its global batch."""

    batch: Any
    received: ReceivedBatch


class MapBatchBuilder(Dataset[Any]):
    """A map-style dataset seen as one that is indexed by requests and holds collated batches: each
    a `BuiltBatch` if it is a share of a global batch.
    """

    def __init__(self, dataset: Any, spec: CollateSpec, *, batched: bool) -> None:
        self._dataset, self._spec, self._batched = dataset, spec, batched
        self._fetches_batches = _fetches_batches(dataset)

    def __getitem__(self, request: BatchRequest) -> Any:
        batch = self._build(request)
        return batch if request.received is None else BuiltBatch(batch, request.received)

    def _build(self, request: BatchRequest) -> Any:
        if request.seeds is None:
            return self._collated(request, self._samples(request))
        with isolated_rng():
            samples = self._samples(request)
            # How many numbers the samples drew must not show in what collate_fn draws.
            seed_all(collate_seed(request.seeds[0]))
            return self._collated(request, samples)

    def _collated(self, request: BatchRequest, samples: list[Any]) -> Any:
        if request.empty:
            return self._spec.empty_like(samples[0])
        return self._spec.collate(samples if self._batched else samples[0])

    def _samples(self, request: BatchRequest) -> list[Any]:
        if self._fetches_batches:
            # All samples come from one call, which can be seeded only as a whole.
            if request.seeds is not None:
                seed_all(request.seeds[0])
            fetched: list[Any] = self._dataset.__getitems__(request.indices)
            return fetched
        if request.seeds is None:
            return [self._dataset[index] for index in request.indices]
        samples = []
        for index, seed in zip(request.indices, request.seeds, strict=True):
            seed_all(seed)
            samples.append(self._dataset[index])
        return samples


class StreamBatchBuilder(IterableDataset[Any]):
    """Collates what a `ShardedIterable` yields, each time to a `BuiltBatch`."""

    def __init__(self, stream: ShardedIterable, spec: CollateSpec) -> None:
        self._stream, self._spec = stream, spec

    def __iter__(self) -> Iterator[Any]:
        for samples in self._stream.announced_batches():
            with isolated_rng():
                seed_all(collate_seed(samples.seed))
                if samples:
                    batch = self._spec.collate(list(samples))
                else:
                    batch = self._spec.empty_like(samples.example)
            yield BuiltBatch(batch, samples.received)


def draws_no_random_numbers(dataset: object, collate_fn: Callable[[Any], Any]) -> bool:
    """Whether loading is known to draw no random numbers, so that seeding would be wasted time."""
    dataset = _without_subsets(dataset)
    return type(dataset) is TensorDataset and collate_fn in (default_collate, default_convert)


def keep_batch(batch: Any) -> Any:
    """The `collate_fn` for batches that are collated already."""
    return batch


def _fetches_batches(dataset: object) -> bool:
    # Every Subset has __getitems__, and falls back to a loop if what it is a subset of has none.
    return callable(getattr(_without_subsets(dataset), "__getitems__", None))


def _without_subsets(dataset: object) -> object:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset
