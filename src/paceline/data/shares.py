"""How a global batch is divided among ranks, and how much each rank's part weighs.

With size = q * world_size + e, ranks below e hold q + 1 samples and the others q, one after the
other: rank r starts at r * q + min(r, e). Rank r stops where rank r + 1 starts, rank 0 starts at 0
and the last rank stops at `size`; so the shares are disjoint and complete, for any sizes, and
differ by at most one sample. Rank 0 is never empty while another rank holds something.
"""

from __future__ import annotations

import dataclasses
import os

import torch.distributed as dist

from paceline.errors import ConfigError

__all__ = ["Share", "share_of", "find_rank", "check_rank", "check_batch_size"]


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's part of a global batch: `start` and `stop` count within the batch of `size`
    samples.
    """

    start: int
    stop: int
    size: int
    world_size: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """What to multiply a mean loss with, so that a plain average over ranks is the mean over
        the global batch.

        `paceline.DistributedDataParallel` weighs by sample counts itself; this is for wrappers that
        average ranks.
        """
        return self.count * self.world_size / self.size if self.size else 0.0


def share_of(size: int, rank: int, world_size: int) -> Share:
    """The part of `size` samples that belongs to `rank`."""
    quotient, extra = divmod(size, world_size)
    start = rank * quotient + min(rank, extra)
    return Share(start, start + quotient + (rank < extra), size, world_size)


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, or of the default group, or of the launcher's environment, or 0
    of 1.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"give both rank and world_size or neither, found rank={rank} and world_size={world_size}"
        )
    if rank is not None and world_size is not None:
        return check_rank(rank, world_size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    # Started by a launcher but not yet in a group: assuming one rank would give every rank all of
    # the data.
    environment = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    try:
        return check_rank(int(environment[0] or 0), int(environment[1] or 1))
    except ValueError as error:
        raise ConfigError(
            f"RANK={environment[0]!r} and WORLD_SIZE={environment[1]!r} do not fit: {error}"
        ) from None


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, found {world_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"Invalid rank {rank}: the ranks of world_size={world_size} are 0..{world_size - 1}"
        )
    return rank, world_size


def check_batch_size(batch_size: int, world_size: int) -> int:
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, found {batch_size}")
    if batch_size < world_size:
        raise ConfigError(
            f"batch_size={batch_size} is smaller than world_size={world_size}: some ranks would never get a sample. "
            f"batch_size counts the samples of all ranks together; use at least {world_size}, or fewer ranks"
        )
    return batch_size
