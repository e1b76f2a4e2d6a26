"""ShardedIterable: global batches from a dataset that can only be iterated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline._torch_internals import hidden_worker_info
from paceline.data.argument_checks import check_flag
from paceline.data.position import Position, check_state
from paceline.data.received_batches import BatchSource, ReceivedBatch
from paceline.data.rng import check_seed, derive_keys
from paceline.data.seeding import RngState, isolated_rng, sample_seeds, seed_all
from paceline.data.shares import check_batch_size, check_same_rank, resolve_rank, share_of
from paceline.errors import ConfigError

__all__ = ["LocalBatch", "ShardedIterable"]


class LocalBatch(list[Any]):
    """This rank's samples of one global batch.

    If there are none, `example` is a sample that shows what they look like. `seed` is for
    collating, `received` tells what they are of the global batch.
    """

    example: Any = None
    seed: int = 0
    received = ReceivedBatch(0, 0.0)


class ShardedIterable(IterableDataset[LocalBatch]):
    """Cuts a stream into global batches and yields this rank's share of each, for
    `paceline.DataLoader`.

    Global batch k is samples k * batch_size to (k + 1) * batch_size - 1 of the stream, at every
    world size and number of workers; every sample is used once, all ranks make the same number of
    steps, and a saved state continues at the precise batch on any world size.

    Every rank and worker reads the whole stream (nothing else is possible with an arbitrary
    iterable) but calls `transform` for its own samples only: let the source yield cheap records,
    and decode and augment in `transform`.

    Args:
        source: yields records, the same ones in the same order wherever it is iterated. It need
            not, and must not, divide them among ranks; `get_worker_info()` is None for it.
            `source.set_epoch(epoch)` is called if there is one, and `source.skip(n)`, returning a
            source without the first n records, makes resuming fast.
        batch_size: samples of all ranks together.
        transform: makes a sample from a record; random numbers in it are seeded for each sample by
            its place in the stream.
        seed: of those numbers, and of any that the source draws.
        drop_last: leave out the last global batch if it is not full.
        rank: this rank; both it and `world_size`, or neither to take them from the default group
            or the launcher's environment.
        world_size: the number of ranks.

    Raises:
        ConfigError: an argument is out of range, or `source` can be iterated only once.

    Example:
        ```python
        lines = paceline.ShardedIterable(range(100), batch_size=10, transform=lambda n: n * n)
        loader = paceline.DataLoader(lines, batch_size=None)
        ```
    """

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        *,
        transform: Callable[[Any], Any] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self._found_its_rank = rank is None
        self.batch_size = check_batch_size(batch_size, self.world_size)
        if isinstance(source, Iterator):
            raise ConfigError(
                f"{type(source).__name__} can be iterated once only: there would be no second "
                "epoch and no resuming. Give an object whose __iter__ starts from the beginning"
            )
        self.source, self.transform = source, transform
        self.seed, self.drop_last = check_seed(seed), check_flag("drop_last", drop_last)
        self.position = Position()
        self._source = BatchSource()
        # Epoch and first batch of the running pass. In shared memory, since workers can outlive a
        # pass.
        self._pass = torch.full((2,), -1, dtype=torch.int64)

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one if none is running."""
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch. Not needed: epochs advance by themselves."""
        self.position.set_epoch(epoch)

    def announce_pass(self, epoch: int, first: int) -> None:
        """Publish to worker processes, running or to come, which pass they load for."""
        self._check_same_rank()
        # Workers that are forked later inherit the mapping, persistent ones have it already.
        self._pass.share_memory_()
        self._pass.copy_(torch.tensor([epoch, first]))

    def __iter__(self) -> Iterator[LocalBatch]:
        if get_worker_info() is not None:
            yield from self.announced_batches()
            return
        self._check_same_rank()
        epoch, first = self.position.begin()
        self._source.begin()
        for number, batch in enumerate(self.batches(epoch, first), start=first):
            self.position.advance(epoch, number + 1)
            self._source.hand_out(batch.received)
            yield batch
        self.position.finish(epoch)
        self._source.finish()

    def batches(
        self, epoch: int, first: int = 0, offset: int = 0, step: int = 1
    ) -> Iterator[LocalBatch]:
        """This rank's shares of the global batches from `first` on, without moving the dataset's
        own position.

        With a `step`, only those of batches first + offset, first + offset + step, ...
        """
        # Every worker of every rank counts the same global batches, and skips those of others
        # without transforming them.
        start = first * self.batch_size
        records = _RecordReader(self.source, epoch, start, self.seed)
        for number in itertools.count(first):
            chunk = records.take(self.batch_size)
            if not chunk or (self.drop_last and len(chunk) < self.batch_size):
                return
            if (number - first) % step == offset:
                yield self._local_batch(chunk, epoch, start)
            start += len(chunk)

    def state_dict(self) -> dict[str, Any]:
        """The position of this dataset, for any world size."""
        return self.state_at(self.position.epoch, self.position.batch)

    def state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        """The state of having consumed `batch` global batches of `epoch`."""
        return {**self._identity(), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue after the last consumed global batch of `state`.

        Raises:
            ConfigError: the state was saved over other data.
        """
        self.position.seek(*check_state(state, self._identity(), None))

    def _check_same_rank(self) -> None:
        if self._found_its_rank:
            check_same_rank(self, self.rank, self.world_size)

    def _identity(self) -> dict[str, Any]:
        return {
            "version": 1,
            "order": "stream",
            "seed": self.seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def announced_batches(self) -> Iterator[LocalBatch]:
        """The announced pass. Worker w of n makes batches w, w + n, ...: torch's loader asks the
        workers in turn.

        Raises:
            ConfigError: no pass was announced, because the loader is torch's own.
        """
        worker = get_worker_info()
        epoch, first = self._pass.tolist()
        if epoch < 0:
            raise ConfigError(
                "ShardedIterable in a worker of torch's own DataLoader: workers would not learn "
                "the epoch. Use paceline.DataLoader, or num_workers=0"
            )
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.batches(epoch, first, offset, step)

    def _local_batch(self, chunk: list[Any], epoch: int, start: int) -> LocalBatch:
        """This rank's part of a global batch, `chunk`, whose first sample is number `start` of the
        stream.
        """
        share = share_of(len(chunk), self.rank, self.world_size)
        # Without samples of its own, a rank transforms the first one, as an example.
        wanted = slice(share.start, share.stop) if share.count else slice(0, 1)
        seeds = sample_seeds(self.seed, epoch, range(start + wanted.start, start + wanted.stop))
        samples = self._transformed(chunk[wanted], seeds)
        batch = LocalBatch(samples if share.count else [])
        batch.seed, batch.received = seeds[0], ReceivedBatch.of(share)
        batch.example = None if share.count else samples[0]
        return batch

    def _transformed(self, records: list[Any], seeds: list[int]) -> list[Any]:
        if self.transform is None:
            return records
        samples = []
        with isolated_rng():
            for record, seed in zip(records, seeds, strict=True):
                seed_all(seed)
                samples.append(self.transform(record))
        return samples


class _RecordReader:
    """Reads the stream as if there were one rank and no workers, with random numbers of its own.

    Ranks would read different streams if the source's random numbers depended on who transforms
    which sample, and samples would be lost if the source yielded only its worker's part.
    """

    def __init__(self, source: Any, epoch: int, skip: int, seed: int) -> None:
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        with isolated_rng(), hidden_worker_info():
            seed_all(int(derive_keys("stream", seed, epoch, 1)[0]))
            if skip and hasattr(source, "skip"):
                self._iterator = iter(source.skip(skip))
            else:
                self._iterator = iter(source)
                # Reads past the records without keeping them.
                next(itertools.islice(self._iterator, skip, skip), None)
            self._rng_state = RngState()

    def take(self, count: int) -> list[Any]:
        """The next `count` records, or as many as are left."""
        with isolated_rng(), hidden_worker_info():
            self._rng_state.restore()
            records = list(itertools.islice(self._iterator, count))
            self._rng_state = RngState()
        return records
