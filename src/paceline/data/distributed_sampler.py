"""DistributedSampler: torch's, index for index, without a Python list of the whole dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

from paceline._interpreter import find_caller, stacklevel_outside
from paceline.data.argument_checks import check_flag, check_whole_number
from paceline.data.shares import check_rank, check_same_rank, is_placed
from paceline.errors import ConfigError
from paceline.rank_env import current_rank_and_world

__all__ = ["DistributedSampler"]

# Indices turned into Python integers at a time.
_BLOCK = 1 << 13


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """Drop-in for `torch.utils.data.DistributedSampler`: same arguments, attributes and indices.

    It holds one rank's share as a tensor instead of everybody's as a list, takes its rank from the
    launcher's environment where torch's needs a process group, and warns once if training repeats
    an order because `set_epoch` is forgotten. (`paceline.GlobalBatchSampler` pads nothing and needs
    no `set_epoch`.)

    Args:
        dataset: map-style; only its length matters.
        num_replicas: number of ranks; None for the default group's, or the launcher's.
        rank: of this process; None likewise.
        shuffle: a new order in each epoch.
        seed: of the shuffle, equal on all ranks.
        drop_last: drop the uneven end instead of padding it.

    Raises:
        ConfigError: the rank is not in the world, or neither a process group nor a launcher
            completes what was not given.

    Example:
        ```python
        sampler = paceline.DistributedSampler(dataset, num_replicas=2, rank=0)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                ...
        ```
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._found_its_rank = rank is None and num_replicas is None
        rank, num_replicas = _complete(rank, num_replicas)
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed = check_whole_number("seed", seed)
        self.drop_last = check_flag("drop_last", drop_last)
        self.epoch = 0
        self.num_samples = _samples_per_rank(self._length(), num_replicas, drop_last)
        self.total_size = self.num_samples * num_replicas
        self._repetition = _Repetition()

    def __iter__(self) -> Iterator[int]:
        # A generator, so that nothing happens before the first `next`: torch's loader calls iter()
        # once too often.
        if self._found_its_rank:
            check_same_rank(self, self.rank, self.num_replicas)
        seed, epoch = self.seed, self.epoch
        share = self._share(seed + epoch)
        # In blocks: one tolist() of everything would hold every index as a Python integer.
        for start in range(0, self.num_samples, _BLOCK):
            yield from share[start : start + _BLOCK].tolist()
        if self.shuffle and self._repetition.found_after_pass(seed, epoch):
            self._warn_of_repetition(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which chooses the order when shuffling."""
        self.epoch = check_whole_number("epoch", epoch)
        self._repetition.set_epoch_called()

    def _share(self, seed: int) -> torch.Tensor:
        """This rank's indices: every num_replicas-th of the order, which starts again where it is
        too short.
        """
        length = self._length()
        if self.num_samples == 0:
            return torch.empty(0, dtype=torch.int64)
        if length == 0:
            raise ConfigError(
                f"the dataset is empty, but had {self.num_samples} samples for each rank before"
            )
        # Only this rank's positions are made into a tensor; torch's sampler turns the whole order
        # into a list first, on every rank.
        positions = torch.arange(self.rank, self.total_size, self.num_replicas)
        positions %= length
        if not self.shuffle:
            return positions
        generator = torch.Generator()
        generator.manual_seed(seed)
        return torch.randperm(length, generator=generator)[positions]

    def _length(self) -> int:
        try:
            # torch's Dataset declares no __len__; its own sampler needs one too.
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(
                f"DistributedSampler needs a dataset with a length, found {self.dataset!r}"
            ) from error

    def _warn_of_repetition(self, epoch: int) -> None:
        warnings.warn(
            f"a second pass over DistributedSampler({type(self.dataset).__name__} of "
            f"{self._length()} samples, rank {self.rank} of {self.num_replicas}) had the order of "
            f"the first, that of epoch {epoch}: set_epoch() was not called in between. Call "
            "sampler.set_epoch(epoch) before each epoch, or use paceline.GlobalBatchSampler, whose "
            "epochs advance by themselves.",
            stacklevel=stacklevel_outside("paceline", "torch"),
        )


class _Repetition:
    """Finds out whether a program has forgotten `set_epoch`, once.

    It has if two whole passes of training had one order. A program that has called `set_epoch`
    twice has not, whatever it does between the calls.
    """

    def __init__(self) -> None:
        self._calls = 0
        # (seed, epoch) of the last pass since set_epoch.
        self._last_order: tuple[int, int] | None = None
        self._found = False

    def set_epoch_called(self) -> None:
        self._calls += 1
        self._last_order = None

    def found_after_pass(self, seed: int, epoch: int) -> bool:
        """Whether the pass that has just come to its end is the first repetition."""
        if self._found or self._calls > 1 or not _is_training() or _is_prefetching():
            return False
        self._found = self._last_order == (seed, epoch)
        self._last_order = (seed, epoch)
        return self._found


def _is_training() -> bool:
    """Whether the pass may be one of training. Evaluation does not care for the order."""
    return torch.is_grad_enabled()


def _is_prefetching() -> bool:
    """Whether torch's loader asks for indices before anybody has asked it for a batch. A pass that
    ends so may be a look at the first batch of a small dataset.
    """
    return find_caller("_reset") is not None


def _complete(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Rank and world size, with what is None taken from the default group or the launcher.

    Unlike `GlobalBatchSampler`, it does not assume a single process when neither a group nor a
    launcher is there: torch's sampler raises, too, and a forgotten init_process_group would train
    every rank on everything.
    """
    if rank is not None and num_replicas is not None:
        return check_rank(rank, check_whole_number("num_replicas", num_replicas))
    if not is_placed():
        raise ConfigError(
            f"found num_replicas={num_replicas}, rank={rank} and no process group or launcher to "
            "complete them from. Call init_process_group first, or give both"
        )
    current_rank, world_size = current_rank_and_world()
    return check_rank(
        current_rank if rank is None else rank,
        world_size if num_replicas is None else check_whole_number("num_replicas", num_replicas),
    )


def _samples_per_rank(length: int, num_replicas: int, drop_last: bool) -> int:
    """Only an uneven end is dropped, so a dataset that divides evenly loses nothing."""
    return length // num_replicas if drop_last else -(-length // num_replicas)
