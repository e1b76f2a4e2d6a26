"""Making one batch: in a worker process or in this one, with random numbers that belong to its
samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from paceline.data.empty_batch import empty_batch
from paceline.data.seeding import collate_seed, own_randomness, seed_all
from paceline.data.sharded_iterable import ShardedIterable

__all__ = ["Request", "CollateSpec", "BatchMaker", "StreamMaker", "draws_nothing", "as_it_is"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to make a batch of. `seeds` has one for each sample, or is None if none are wanted.

    `empty` asks for a batch of zero samples that looks like the one `indices` would make.
    """

    indices: list[Any]
    seeds: list[int] | None
    empty: bool = False


@dataclasses.dataclass(frozen=True)
class CollateSpec:
    """How samples become a batch, also when there are none of them."""

    collate: Callable[[Any], Any]
    empty_batch: Callable[[Any], Any] | None  # from a batch of one sample

    def empty(self, sample: Any) -> Any:
        """A batch of zero samples that are like this one."""
        if self.empty_batch is not None:
            return self.empty_batch(self.collate([sample]))
        return empty_batch(self.collate([sample]), self.collate([sample, sample]))


class BatchMaker(Dataset[Any]):
    """A map-style dataset seen as one that is indexed by requests and holds collated batches."""

    def __init__(self, dataset: Any, recipe: CollateSpec, *, collates: bool) -> None:
        self._dataset, self._recipe, self._collates = dataset, recipe, collates
        self._whole_batches = _fetches_whole_batches(dataset)

    def __getitem__(self, request: Request) -> Any:
        with contextlib.nullcontext() if request.seeds is None else own_randomness():
            samples = self._samples(request)
            if request.seeds is not None:
                seed_all(collate_seed(request.seeds[0]))
            if request.empty:
                return self._recipe.empty(samples[0])
            return self._recipe.collate(samples if self._collates else samples[0])

    def _samples(self, request: Request) -> list[Any]:
        if request.seeds is None:
            if self._whole_batches:
                return self._dataset.__getitems__(request.indices)  # type: ignore[no-any-return]  # a user's dataset
            return [self._dataset[index] for index in request.indices]
        if self._whole_batches:
            # It makes all samples in one call, which can be seeded only as a whole.
            seed_all(request.seeds[0])
            return self._dataset.__getitems__(request.indices)  # type: ignore[no-any-return]  # a user's dataset
        samples = []
        for index, seed in zip(request.indices, request.seeds, strict=True):
            seed_all(seed)
            samples.append(self._dataset[index])
        return samples


class StreamMaker(IterableDataset[Any]):
    """Collates what a `ShardedIterable` yields."""

    def __init__(self, stream: ShardedIterable, recipe: CollateSpec) -> None:
        self._stream, self._recipe = stream, recipe

    def __iter__(self) -> Iterator[Any]:
        for portion in self._stream.announced_batches():
            with own_randomness():
                seed_all(collate_seed(portion.seed))
                batch = (
                    self._recipe.collate(list(portion))
                    if portion
                    else self._recipe.empty(portion.stand_in)
                )
            yield batch


def draws_nothing(dataset: Any, collate_fn: Callable[[Any], Any]) -> bool:
    """Whether it is known that no random numbers are drawn here, so that seeding would be wasted
    time.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate_fn in (default_collate, default_convert)


def as_it_is(batch: Any) -> Any:
    """Stands where torch wants a collate_fn, for batches that are collated already."""
    return batch


def _fetches_whole_batches(dataset: Any) -> bool:
    # Every Subset has __getitems__, and falls back to a loop if what it is a subset of has none.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
