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

from paceline.data.argument_checks import check_whole_number
from paceline.errors import ConfigError
from paceline.rank_env import current_rank_and_world, find_rank_env

__all__ = [
    "Share",
    "share_of",
    "resolve_rank",
    "check_rank",
    "check_same_rank",
    "is_placed",
    "check_batch_size",
]


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's part of a global batch: samples `start` to `stop - 1` of its `size` samples."""

    start: int
    stop: int
    size: int
    world_size: int

    @property
    def count(self) -> int:
        """How many samples this rank has."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """The factor for a mean loss that makes a plain average over ranks the mean over the global
        batch.

        `paceline.DistributedDataParallel` weights by sample counts itself; this is for wrappers
        that average ranks.
        """
        return self.count * self.world_size / self.size if self.size else 0.0


def share_of(size: int, rank: int, world_size: int) -> Share:
    """The part of `size` samples that belongs to `rank`."""
    quotient, extra = divmod(size, world_size)
    start = rank * quotient + min(rank, extra)
    return Share(start, start + quotient + (rank < extra), size, world_size)


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, or discovered if neither is given.

    Discovery also works before `init_process_group`: a process that was started by a launcher but
    has not joined its group yet must not take itself for a single process, or every rank would load
    all of the data.

    Raises:
        ConfigError: only one of the two is given, the rank is not in the world, or the launcher's
            variables are incomplete.
    """
    if rank is None and world_size is None:
        return current_rank_and_world()
    if rank is None or world_size is None:
        raise ConfigError(
            "give both rank and world_size or neither, "
            f"found rank={rank} and world_size={world_size}"
        )
    return check_rank(rank, world_size)


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Both as ints, if the rank is in the world; raises `ConfigError` otherwise."""
    rank, world_size = (
        check_whole_number("rank", rank),
        check_whole_number("world_size", world_size),
    )
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, found {world_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"Invalid rank {rank}: the ranks of world_size={world_size} are 0..{world_size - 1}"
        )
    return rank, world_size


def is_placed() -> bool:
    """Whether a process group or a launcher says which rank this process is."""
    has_group = dist.is_available() and dist.is_initialized()
    return has_group or find_rank_env(os.environ) != find_rank_env({})


def check_same_rank(owner: object, rank: int, world_size: int) -> None:
    """Raise `ConfigError` if this process is not, or no longer, the rank that `owner` found itself
    on when it was made, perhaps before ranks were started: every rank would load the same samples.
    """
    now = current_rank_and_world()
    if is_placed() and now != (rank, world_size):
        raise ConfigError(
            f"this {type(owner).__name__} was made as rank {rank} of {world_size}, but is used as "
            f"rank {now[0]} of {now[1]}. Make it where it is used, after init_process_group, or "
            "give it its rank and the number of ranks"
        )


def check_batch_size(batch_size: int, world_size: int) -> int:
    """The batch size as an int, if every rank gets a sample; raises `ConfigError` otherwise."""
    batch_size = check_whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, found {batch_size}")
    if batch_size < world_size:
        raise ConfigError(
            f"batch_size={batch_size} is smaller than world_size={world_size}: some ranks would "
            "never get a sample. batch_size counts the samples of all ranks together; use at least "
            f"{world_size}, or fewer ranks"
        )
    return batch_size
