"""Who is where: every rank publishes its host and cores, and each derives its placement from all of
them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from typing import TYPE_CHECKING

from paceline.core import host_identity
from paceline.core.store_exchange import exchange, format_ranks
from paceline.errors import ConfigError
from paceline.launch.resources import allowed_cores, cpu_quota, threads_per_rank
from paceline.rank_env import RankEnv

if TYPE_CHECKING:
    from paceline._torch_internals import Store

__all__ = ["Placement", "RankResources", "agree_on_placement", "placement_from"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a rank is, agreed with all others."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int
    threads: int


@dataclasses.dataclass(frozen=True)
class RankResources:
    """What one rank publishes about itself."""

    host: str
    cores: list[int]
    pid: int = 0


def agree_on_placement(env: RankEnv, store: Store, timeout_s: float) -> Placement:
    """Meet all ranks at the store; returns this rank's placement.

    Raises `CollectiveTimeout` naming the ranks that did not join, and `PeerLost` if one of this
    host joined and ended before the others did.
    """
    _claim_rank(env, store)
    mine = RankResources(host_identity(), sorted(allowed_cores()), os.getpid())

    def pid_in(value: str) -> int | None:
        other = RankResources(**json.loads(value))
        return other.pid if other.host == mine.host else None

    values = exchange(
        store,
        "placement",
        env.rank,
        range(env.world_size),
        json.dumps(dataclasses.asdict(mine)),
        datetime.timedelta(seconds=timeout_s),
        pid_in=pid_in,
        describe_missing=lambda missing: (
            f"rank {env.rank} waited {timeout_s:g} s for a world of {env.world_size} "
            f"({env.source}), but {format_ranks(missing)} did not join. Check that every missing "
            "rank was started and see its output; PACELINE_JOIN_TIMEOUT=<seconds> sets a longer "
            "wait"
        ),
    )
    resources = [RankResources(**json.loads(value)) for value in values.values()]
    return placement_from(env, resources, cpu_quota())


def _claim_rank(env: RankEnv, store: Store) -> None:
    owner = f"pid {os.getpid()} on {socket.gethostname()}"
    if store.add(f"claim/{env.rank}", 1) > 1:
        other = store.get(f"claimed_by/{env.rank}").decode()
        raise ConfigError(
            f"two processes claim to be rank {env.rank} of {env.world_size}: {other}, and this "
            f"one, {owner}. Each needs a RANK of its own; two jobs need different MASTER_PORTs"
        )
    store.set(f"claimed_by/{env.rank}", owner)


def placement_from(env: RankEnv, resources: list[RankResources], quota: float | None) -> Placement:
    """This rank's placement, from what every rank published."""
    mine = resources[env.rank]
    neighbours = [rank for rank, other in enumerate(resources) if other.host == mine.host]
    others = [resources[rank].cores for rank in neighbours if rank != env.rank]
    local_rank = env.local_rank if env.local_rank is not None else neighbours.index(env.rank)
    return Placement(
        source=env.source,
        rank=env.rank,
        world_size=env.world_size,
        local_rank=local_rank,
        local_world_size=env.local_world_size or max(len(neighbours), local_rank + 1),
        hosts=len({other.host for other in resources}),
        threads=threads_per_rank(mine.cores, others, quota),
    )
