"""GlobalBatchSampler: global batches that are the same at every world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from paceline.data.argument_checks import check_flag, check_whole_number
from paceline.data.order import (
    Order,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
    WeightedOrder,
)
from paceline.data.position import Position, check_state
from paceline.data.received_batches import BatchSource, ReceivedBatch
from paceline.data.rng import Int64s, check_seed
from paceline.data.sample_choice import chosen_samples, one_dimensional
from paceline.data.shares import (
    Share,
    check_batch_size,
    check_same_rank,
    resolve_rank,
    share_of,
)
from paceline.errors import ConfigError

__all__ = ["GlobalBatchSampler"]

# Indices computed at a time, over as many batches as that makes.
_BLOCK = 1 << 13
_MAX_LENGTH = 2**62

_Weights: TypeAlias = Sequence[float] | torch.Tensor | npt.NDArray[np.floating]
_Indices: TypeAlias = Sequence[int] | torch.Tensor | npt.NDArray[np.integer | np.bool_]


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler whose batches are defined, ordered and counted globally.

    Global batch k of an epoch holds the same samples in the same order at every world size; each
    rank takes its contiguous share of it. An epoch visits every sample once: nothing is padded,
    nothing is dropped unless `drop_last` asks for it, and the last batch may be smaller, down to an
    empty share on some ranks (`paceline.DataLoader` turns that into a batch of zero samples).

    Args:
        dataset_or_length: the dataset, or its length.
        batch_size: samples of all ranks together; 64 on 4 ranks is 16 each, 65 is 17, 16, 16 and
            16.
        shuffle: a new order in each epoch; False keeps the dataset's.
        seed: of the shuffle, equal on all ranks.
        drop_last: leave out the last global batch if it is not full.
        rank: this rank; both it and `world_size`, or neither to take them from the default group
            or the launcher's environment.
        world_size: the number of ranks.
        weights: draw samples in proportion to these instead of visiting each once.
        num_samples: with `weights`, how many draws make an epoch (as many as there are weights).
        indices: use only these samples of the dataset, or those where a mask of the dataset's
            length is True; `weights` then belong to them, one each.

    Raises:
        ConfigError: an argument is out of range, arguments contradict one another, or the dataset
            has no length.

    Example:
        ```python
        sampler = paceline.GlobalBatchSampler(dataset, batch_size=16)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        ```
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        weights: _Weights | None = None,
        num_samples: int | None = None,
        indices: _Indices | None = None,
    ) -> None:
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self._found_its_rank = rank is None
        self.batch_size = check_batch_size(batch_size, self.world_size)
        self.dataset_length = _length(dataset_or_length)
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed, self.drop_last = check_seed(seed), check_flag("drop_last", drop_last)
        self._order = self._make_order(weights, num_samples, indices)
        self.position = Position()
        self._source = BatchSource(keeps_all=True)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch, of all ranks together."""
        return len(self) * self.batch_size if self.drop_last else self._order.length

    @property
    def repeats(self) -> bool:
        """Whether one sample can come several times in an epoch (it can with `weights`)."""
        return self._order.repeats

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one if none is running."""
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch. Not needed: epochs advance by themselves."""
        self.position.set_epoch(epoch)

    def __len__(self) -> int:
        """Global batches in an epoch: the same on every rank."""
        full, rest = divmod(self._order.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing happens before the first `next`: torch's loader calls iter()
        # once too often.
        self.check_same_rank()
        epoch, first = self.position.begin()
        self._source.begin()
        for number, batch in enumerate(self.batches(epoch, first), start=first):
            self.position.advance(epoch, number + 1)
            self._source.hand_out(ReceivedBatch.of(self.share(number)))
            yield batch
        self.position.finish(epoch)

    def check_same_rank(self) -> None:
        """Raise `ConfigError` if this process is not the rank that the sampler found itself on when
        it was made.
        """
        if self._found_its_rank:
            check_same_rank(self, self.rank, self.world_size)

    def share(self, batch: int) -> Share:
        """This rank's share of global batch `batch`, with the weight that keeps gradients exact.

        Raises:
            ConfigError: an epoch has no such batch.
        """
        if not 0 <= batch < len(self):
            raise ConfigError(
                f"batch {batch} is outside of 0..{len(self) - 1}, the batches of an epoch"
            )
        size = min(self.batch_size, self._order.length - batch * self.batch_size)
        return share_of(size, self.rank, self.world_size)

    def batches(self, epoch: int, first: int = 0) -> Iterator[list[int]]:
        """This rank's shares from global batch `first` of `epoch` on, without moving the sampler's
        own position.
        """
        # All full batches have the same share, so the indices of many batches are computed in one
        # call, as rows of a matrix. A last batch that is not full is divided on its own.
        full = self._order.length // self.batch_size
        share = share_of(self.batch_size, self.rank, self.world_size)
        at_once = max(1, _BLOCK // share.count)
        for start in range(first, full, at_once):
            stop = min(start + at_once, full)
            offsets = np.arange(start, stop, dtype=np.int64)[:, None] * self.batch_size
            positions = offsets + np.arange(share.start, share.stop, dtype=np.int64)
            indices = self._order.at(epoch, positions.ravel()).reshape(stop - start, share.count)
            yield from indices.tolist()
        if first <= full < len(self):
            yield self._order.at(epoch, self.order_positions(full)).tolist()

    def order_positions(self, batch: int) -> Int64s:
        """The positions in the epoch's order of this rank's share of a global batch."""
        share = self.share(batch)
        return np.arange(share.start, share.stop, dtype=np.int64) + batch * self.batch_size

    def global_batch(self, epoch: int, batch: int) -> list[int]:
        """All samples of one global batch, of all ranks, in order."""
        return self.samples(epoch, batch, 0, self.share(batch).size)

    def samples(self, epoch: int, batch: int, start: int, stop: int) -> list[int]:
        """Samples `start` to `stop - 1` of a global batch, whichever rank's they are."""
        first = batch * self.batch_size
        positions = np.arange(first + start, first + stop, dtype=np.int64)
        indices: list[int] = self._order.at(epoch, positions).tolist()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The position of this sampler, for any world size.

        With torch's own DataLoader and workers, that is ahead of training by what is prefetched;
        `paceline.DataLoader` keeps it at what the training loop has received.
        """
        return self.state_at(self.position.epoch, self.position.batch)

    def state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        """The state of having consumed `batch` global batches of `epoch`."""
        return {**self._identity(), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass continue after the last consumed global batch of `state`.

        Raises:
            ConfigError: the state was saved over other data or another order.
        """
        self.position.seek(*check_state(state, self._identity(), len(self)))

    # What a saved state must have in common with the sampler it is loaded into. Rank and world size
    # are missing on purpose.
    def _identity(self) -> dict[str, Any]:
        return {
            "version": 1,
            "order": self._order.name,
            "seed": self.seed,
            "length": self.dataset_length,
            "num_samples": self._order.length,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def _make_order(
        self, weights: _Weights | None, num_samples: int | None, indices: _Indices | None
    ) -> Order:
        chosen = None if indices is None else chosen_samples(indices, self.dataset_length)
        length = self.dataset_length if chosen is None else len(chosen)
        order: Order
        if weights is not None:
            order = self._weighted(weights, num_samples, length)
        elif num_samples is not None:
            raise ConfigError(f"num_samples={num_samples} goes with weights, but weights is None")
        else:
            order = ShuffledOrder(length, self.seed) if self.shuffle else SequentialOrder(length)
        return order if chosen is None else SubsetOrder(order, chosen)

    def _weighted(self, weights: _Weights, num_samples: int | None, length: int) -> Order:
        values = one_dimensional("weights", weights)
        if len(values) != length:
            raise ConfigError(
                f"found {len(values)} weights for {length} samples: one for each is needed"
            )
        if not self.shuffle:
            raise ConfigError("weights draw at random, but shuffle is False: leave shuffle at True")
        draws = length if num_samples is None else check_whole_number("num_samples", num_samples)
        if not 0 <= draws <= _MAX_LENGTH:
            raise ConfigError(f"num_samples must be from 0 to 2**62, found {draws}")
        return WeightedOrder(values, draws, self.seed)


def _length(dataset_or_length: Sized | int) -> int:
    length = (
        check_whole_number("the dataset's length", dataset_or_length)
        if isinstance(dataset_or_length, int | float | np.generic)
        else _len(dataset_or_length)
    )
    if not 0 <= length <= _MAX_LENGTH:
        raise ConfigError(f"the dataset's length must be from 0 to 2**62, found {length}")
    return length


def _len(dataset: Sized) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so its order cannot be planned. "
            "Wrap an iterable dataset in paceline.ShardedIterable"
        ) from None
