"""DataLoader: torch's, with global batches, a seed for each sample, a position to save and device
prefetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from paceline.data.argument_checks import check_flag, check_whole_number
from paceline.data.batch_builder import (
    BuiltBatch,
    CollateSpec,
    MapBatchBuilder,
    StreamBatchBuilder,
    draws_no_random_numbers,
    keep_batch,
)
from paceline.data.batch_requests import (
    BatchRange,
    BatchRequest,
    BatchRequests,
    GlobalBatchRequests,
    SamplerRequests,
    StreamRequests,
)
from paceline.data.device_prefetch import is_accelerator, prefetch_to_device, resolve_device
from paceline.data.global_batch_sampler import GlobalBatchSampler
from paceline.data.received_batches import BatchSource
from paceline.data.rng import check_seed
from paceline.data.sharded_iterable import ShardedIterable
from paceline.data.shares import Share
from paceline.errors import ConfigError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase

__all__ = ["DataLoader", "RangeLoader", "SupportsNoMoreData"]

_T = TypeVar("_T")
_LOADER = int(Phase.LOADER)


class SupportsNoMoreData(Protocol):
    """A model that must know when its rank has run out of data, so that other ranks can go on."""

    def no_more_data(self, optimizer: Any = ..., /) -> object:
        """Take part in the other ranks' steps until they have run out of data as well."""


class DataLoader(torch.utils.data.DataLoader[_T]):
    """`torch.utils.data.DataLoader` for training on many ranks.

    Without a sampler, `batch_size` counts the samples of all ranks together, each rank loads its
    own share of every global batch (see `GlobalBatchSampler`; an iterable dataset goes through
    `ShardedIterable`), and epochs advance by themselves. With `sampler` or `batch_sampler` the
    arguments mean what they mean to torch.

    - Random numbers drawn while a sample is made (Python's, numpy's, torch's) depend on `seed`, the
      epoch and the sample's index alone: the same at every world size and number of workers. The
      training loop's own are untouched.
    - `state_dict()` is the position after the batch that the training loop received last, whatever
      is prefetched. Load it into a loader of any world size and number of workers.
    - A rank whose share of the last global batch is empty gets a batch of zero samples with the
      structure, shapes and types of the others, so that all ranks make the same number of steps.

    How it works: `BatchRequests` lists the batches of a pass, `MapBatchBuilder` turns one request
    into one collated batch, and an inner loader of torch's moves requests to its workers and
    batches back. This class only counts what the training loop has received.

    Args beyond torch's:
        seed: of the order and of the samples' random numbers; the sampler's, or 0.
        device: move batches there; on an accelerator, one step ahead. "auto" is this rank's
            accelerator.
        model: its `no_more_data()` is called when an epoch's data has come to its end. For samplers
            that give ranks different numbers of batches; global batches end on all ranks at once.
        optimizer: passed on, `model.no_more_data(optimizer)`, to take part in the other ranks' last
            steps.
        rank, world_size: both, or neither to take them from the default group or the launcher's
            environment.
        seed_samples: False saves the time for seeding, if loading draws no random numbers.
        empty_batch: makes a batch of zero samples from a batch of one. Needed only for batches that
            are neither tensors nor lists, tuples and mappings of them.
        pin_memory: None, the default, pins when `device` is an accelerator.

    Raises:
        ConfigError: an argument is out of range, or arguments contradict one another.

    Example:
        ```python
        loader = paceline.DataLoader(dataset, batch_size=16, shuffle=True)  # 16 of all ranks
        for x, y in loader:
            ...
        ```
    """

    def __init__(
        self,
        dataset: Dataset[_T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[_T]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        in_order: bool = True,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        model: SupportsNoMoreData | None = None,
        optimizer: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed_samples: bool = True,
        empty_batch: Callable[[Any], Any] | None = None,
    ) -> None:
        self.device = resolve_device(device)
        self.model, self.optimizer = _check_model(model), optimizer
        num_workers = check_whole_number("num_workers", num_workers)
        shuffle = None if shuffle is None else check_flag("shuffle", shuffle)
        seed = None if seed is None else check_seed(seed)
        # Without a sampler, batches are global: by a sampler for datasets with a length, by a
        # wrapper for those without. A sampler that was given is passed on to torch as it is.
        own_batches = sampler is None and batch_sampler is None and batch_size is not None
        source: Any = dataset
        if own_batches and not isinstance(source, ShardedIterable):
            assert batch_size is not None
            if isinstance(source, IterableDataset):
                source = ShardedIterable(
                    source,
                    batch_size,
                    seed=seed or 0,
                    drop_last=drop_last,
                    rank=rank,
                    world_size=world_size,
                )
            else:
                batch_sampler = GlobalBatchSampler(
                    source, batch_size, bool(shuffle), seed or 0, drop_last, rank, world_size
                )
                # How torch wants to hear that the batch sampler decides everything.
                batch_size, shuffle, drop_last = 1, None, False
        elif rank is not None or world_size is not None:
            raise ConfigError(
                f"found rank={rank} and world_size={world_size} next to a sampler, a "
                "ShardedIterable or batch_size=None, which divide the data themselves: give rank "
                "and world_size to those"
            )
        if isinstance(source, ShardedIterable):
            # It makes the batches itself.
            batch_size, drop_last = None, False
            collate_fn = collate_fn or default_collate
        super().__init__(
            source,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            is_accelerator(self.device) if pin_memory is None else pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            # torch draws the workers' base seed from it; otherwise every pass would advance the
            # global generator.
            torch.Generator().manual_seed((seed or 0) % 2**63) if generator is None else generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            in_order=in_order,
        )
        self.seed_samples, self.empty_batch = seed_samples, empty_batch
        self._requests = self._make_requests(seed)
        self._inner: torch.utils.data.DataLoader[Any] | None = None
        self._source = BatchSource()

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one if none is running."""
        return self._requests.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch. Not needed: epochs advance by themselves."""
        self._requests.position.set_epoch(epoch)

    # torch declares a private class of its own as the iterator's type.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, first = self._requests.begin()
        return self._pass(iter(self._inner_loader()), epoch, first)

    @property
    def share(self) -> Share:
        """This rank's share of the global batch that was received last, with its count and weight.

        Raises:
            ConfigError: the batches are not those of a `GlobalBatchSampler`.
        """
        if not isinstance(self.batch_sampler, GlobalBatchSampler):
            raise ConfigError(
                f"the sizes of global batches are not known to "
                f"{type(self.batch_sampler or self.dataset).__name__}: "
                "use a paceline.GlobalBatchSampler"
            )
        return self.batch_sampler.share(self._requests.position.batch - 1)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was received last, for a loader of any world size.

        Raises:
            ConfigError: the order cannot be resumed: it is that of another sampler, or
                `in_order=False`.
        """
        return self._resumable().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue after the batch that was received last when `state` was saved.

        Raises:
            ConfigError: the order cannot be resumed, or the state was saved over other data.
        """
        self._resumable().load_state_dict(state)

    def range_loader(self) -> RangeLoader:
        """Loads ranges of global batches instead of this rank's shares, each collated on its own.

        The loader's own position does not move.

        Raises:
            ConfigError: there are no global batches, or their order is not kept.
        """
        sampler = self._resumable()
        if not isinstance(self._requests, GlobalBatchRequests):
            raise ConfigError(
                f"{type(sampler).__name__} is a stream, of which no range can be loaded by itself: "
                "use a dataset with a length"
            )
        return RangeLoader(self, self._requests)

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self.device is None else prefetch_to_device(batches, self.device)

    def _pass(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        position = self._requests.position
        batches = self._on_device(batches)
        # The position moves when the training loop receives a batch. Workers and the device
        # prefetch run ahead of it, and what they have fetched is lost on a restart.
        self._source.begin()
        for number, batch in enumerate(_in_loader_phase(batches), start=first):
            position.advance(epoch, number + 1)
            if isinstance(batch, BuiltBatch):
                self._source.hand_out(batch.received)
                yield batch.batch
            else:
                yield batch
        position.finish(epoch)
        self._source.finish()
        self._notify_model()

    def _notify_model(self) -> None:
        if self.model is not None and self.optimizer is not None:
            self.model.no_more_data(self.optimizer)
        elif self.model is not None:
            self.model.no_more_data()

    def _make_requests(self, seed: int | None) -> BatchRequests:
        if isinstance(self.dataset, IterableDataset):
            stream = self.dataset if isinstance(self.dataset, ShardedIterable) else None
            return StreamRequests(stream)
        seeded = self.seed_samples and not draws_no_random_numbers(self.dataset, self.collate_fn)
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            seed = self.batch_sampler.seed if seed is None else seed
            return GlobalBatchRequests(self.batch_sampler, seed if seeded else None)
        batched = self.batch_sampler is not None
        indices: Any = self.batch_sampler if batched else self.sampler
        seed = (seed or 0) if seeded else None
        return SamplerRequests(indices, self.sampler, seed, batched=batched)

    def _inner_loader(self) -> torch.utils.data.DataLoader[Any]:
        """torch's loader, which does the work. Its workers get one request for each batch."""
        # A new inner loader for each pass, unless workers shall stay: then they belong to it.
        if self._inner is None or not self.persistent_workers:
            self._inner = self._new_inner_loader(self._requests)
        return self._inner

    def _new_inner_loader(
        self, requests: Iterable[BatchRequest] | None, *, on_demand: bool = False
    ) -> torch.utils.data.DataLoader[Any]:
        """`on_demand`: passes are over a request or two, and the next follows soon."""
        workers, generator = self.num_workers, self.generator
        if on_demand:
            # A generator of its own: every pass draws a seed from it.
            workers, generator = min(1, workers), torch.Generator()
        dataset: Any = self.dataset
        collate: Callable[[Any], Any] = keep_batch
        spec = CollateSpec(self.collate_fn, self.empty_batch)
        if isinstance(dataset, ShardedIterable):
            dataset, requests = StreamBatchBuilder(dataset, spec), None
        elif isinstance(dataset, IterableDataset):
            collate, requests = self.collate_fn, None
        else:
            dataset = MapBatchBuilder(dataset, spec, batched=self.batch_sampler is not None)
        return torch.utils.data.DataLoader(
            dataset,
            sampler=requests,
            collate_fn=collate,
            batch_size=None,
            num_workers=workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=workers > 0 if on_demand else self.persistent_workers,
            in_order=self.in_order,
        )

    def _resumable(self) -> GlobalBatchSampler | ShardedIterable:
        if not self.in_order:
            raise ConfigError(
                "in_order=False yields batches in any order: there is no position to save or load"
            )
        for source in (self.dataset, self.batch_sampler):
            if isinstance(source, GlobalBatchSampler | ShardedIterable):
                return source
        raise ConfigError(
            f"the order of {type(self.sampler).__name__} cannot be resumed. Give the loader a "
            "dataset and a batch_size only, or a paceline.GlobalBatchSampler as batch_sampler"
        )


class RangeLoader:
    """Batches of any ranges of global batches, through the workers and the device prefetch of a
    `DataLoader`: many of them ahead of their use, or a single one now. How a range is loaded has no
    influence on its bytes.
    """

    def __init__(self, loader: DataLoader[Any], requests: GlobalBatchRequests) -> None:
        self._loader = loader
        self._ahead, self._single = _RangeRequests(requests), _RangeRequests(requests)
        self._inner: torch.utils.data.DataLoader[Any] | None = None
        self._single_inner: torch.utils.data.DataLoader[Any] | None = None
        # Without workers torch's loader only fetches one item after the other, in five times the
        # time that a small batch takes.
        self._builder: MapBatchBuilder | None = None
        if loader.num_workers == 0 and not loader.pin_memory:
            spec = CollateSpec(loader.collate_fn, loader.empty_batch)
            self._builder = MapBatchBuilder(loader.dataset, spec, batched=True)
        # Whether a batch is loaded when it is asked for, so that there is nothing to load ahead.
        self.loads_on_demand = self._builder is not None and loader.device is None

    def load_ahead(self, ranges: Iterable[BatchRange]) -> Iterator[Any]:
        """The batches of these ranges, in order. Ends the pass before, if one is running."""
        self._ahead.begin(ranges)
        return _in_loader_phase(self._loader._on_device(self._batches()))

    def _batches(self) -> Iterator[Any]:
        if self._builder is not None:
            return map(self._builder.__getitem__, self._ahead)
        if self._inner is None or not self._loader.persistent_workers:
            self._inner = self._loader._new_inner_loader(self._ahead)
        return iter(self._inner)

    def load(self, wanted: BatchRange) -> Any:
        """The batch of one range, now.

        A loader with workers gets one more for this, because a dataset may be at home in workers
        only; it stays until `release()`.
        """
        if self._builder is not None and self.loads_on_demand:
            before = recorder.current
            recorder.phase(_LOADER)
            try:
                return self._builder[self._single.request(wanted)]
            finally:
                recorder.phase(before, again=True)
        self._single.begin([wanted])
        (batch,) = _in_loader_phase(self._loader._on_device(self._single_batch()))
        return batch

    def _single_batch(self) -> Iterator[Any]:
        if self._builder is not None:
            return map(self._builder.__getitem__, self._single)
        if self._single_inner is None:
            self._single_inner = self._loader._new_inner_loader(self._single, on_demand=True)
        return iter(self._single_inner)

    def release(self) -> None:
        """A pass is over: let the worker for single ranges go, unless workers shall stay."""
        if not self._loader.persistent_workers:
            self._single_inner = None


class _RangeRequests:
    """The requests for some ranges: others in every pass."""

    def __init__(self, requests: GlobalBatchRequests) -> None:
        self._requests = requests
        self._ranges: Iterable[BatchRange] = ()

    def begin(self, ranges: Iterable[BatchRange]) -> None:
        """Let the next pass be over these ranges."""
        self._ranges = ranges

    def request(self, wanted: BatchRange) -> BatchRequest:
        """The request for one range."""
        return self._requests.request(wanted)

    def __iter__(self) -> Iterator[BatchRequest]:
        return map(self.request, self._ranges)


def _in_loader_phase(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; the status page shows the loader's phase while one is waited for."""
    # Not a `for` loop: the phase must end before the batch is yielded, or the step that uses it
    # would count as loading.
    while True:
        before = recorder.current
        recorder.phase(_LOADER)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            recorder.phase(before, again=True)
        yield batch


def _check_model(model: SupportsNoMoreData | None) -> SupportsNoMoreData | None:
    if model is not None and not callable(getattr(model, "no_more_data", None)):
        raise ConfigError(
            f"model={type(model).__name__} has no method no_more_data() to call at the end of the "
            "data. Give the wrapped model (paceline.DistributedDataParallel has one), or leave it "
            "out"
        )
    return model
