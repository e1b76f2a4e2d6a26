"""DistributedSampler: torch's, index for index, without a Python list of the whole dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils.data import Dataset

from paceline.data.shares import check_rank
from paceline.errors import ConfigError

__all__ = ["DistributedSampler"]

_BLOCK = 1 << 13  # indices turned into Python integers at a time


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """Drop-in for `torch.utils.data.DistributedSampler`: same arguments, attributes and indices.

    It holds one rank's share as a tensor instead of everybody's as a list, and warns once if
    `set_epoch` is forgotten, which otherwise silently repeats one order for ever.
    (`paceline.GlobalBatchSampler` pads nothing and needs no `set_epoch`.)
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
        if (num_replicas is None or rank is None) and not (
            dist.is_available() and dist.is_initialized()
        ):
            raise ConfigError(
                f"found num_replicas={num_replicas}, rank={rank} and no process group to complete them from. "
                "Call init_process_group first, or give both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        check_rank(rank, num_replicas)
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        length = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; stock needs one too
        self.num_samples = _share_of(length, num_replicas, drop_last)
        self.total_size = self.num_samples * num_replicas
        self._finished: tuple[int, int] | None = (
            None  # (seed, epoch) of a whole pass since the last set_epoch
        )
        self._warned = False

    def __iter__(self) -> Iterator[int]:
        # A generator, so that nothing happens before the first `next`: torch's loader calls iter()
        # once too often.
        self._warn_if_repeated()
        order = seed, epoch = self.seed, self.epoch
        share = self._share(seed + epoch)
        for start in range(0, self.num_samples, _BLOCK):
            yield from share[start : start + _BLOCK].tolist()
        self._finished = order

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which chooses the order when shuffling."""
        self.epoch = epoch
        self._finished = None

    def _share(self, seed: int) -> torch.Tensor:
        """This rank's indices: every num_replicas-th of the order, which starts over where it is
        too short.
        """
        length = len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__; stock needs one too
        if self.num_samples == 0:
            return torch.empty(0, dtype=torch.int64)
        if length == 0:
            raise ConfigError(
                f"the dataset is empty, but had {self.num_samples} samples for each rank before"
            )
        positions = torch.arange(self.rank, self.total_size, self.num_replicas)
        positions %= length
        if not self.shuffle:
            return positions
        generator = torch.Generator()
        generator.manual_seed(seed)
        return torch.randperm(length, generator=generator)[positions]

    def _warn_if_repeated(self) -> None:
        if self.shuffle and not self._warned and self._finished == (self.seed, self.epoch):
            self._warned = True
            warnings.warn(
                f"DistributedSampler starts another pass with the order of epoch {self.epoch}: set_epoch was not "
                "called. Call sampler.set_epoch(epoch) before each epoch, or use paceline.GlobalBatchSampler, whose "
                "epochs advance by themselves.",
                stacklevel=3,
            )


def _share_of(length: int, num_replicas: int, drop_last: bool) -> int:
    """Samples per rank. Only an uneven end is dropped, so a dataset that divides evenly loses
    nothing.
    """
    return length // num_replicas if drop_last else -(-length // num_replicas)
