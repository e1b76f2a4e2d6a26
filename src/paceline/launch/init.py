"""`init_process_group()` with no arguments, right everywhere - and the questions a script asks
about its rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

from paceline.core import native_status
from paceline.diagnostics import session
from paceline.errors import ConfigError
from paceline.launch import save_request
from paceline.launch.agreement import wait_for_key
from paceline.launch.backend_choice import Choice, accelerator_backend, choose_backend
from paceline.launch.placement import Placement, open_store, place
from paceline.rank_env import RankEnv, find_rank_env
from paceline.telemetry.collective_recorder import joining
from paceline.telemetry.variables import RUN_ID

if TYPE_CHECKING:
    import torch

__all__ = [
    "init_process_group",
    "destroy_process_group",
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "is_main",
    "placement",
]

_JOIN_TIMEOUT_S = 300.0
_LEAVE_TIMEOUT_S = 10.0


class _Joined:
    """What this process knows about its default group: process-wide, as torch's default group is."""

    placement: Placement | None = None
    store: Any = None
    serves_store = False  # whether the others lose the store when this process leaves
    generation = (
        0  # groups joined so far; the same on every rank, so it keeps their keys in a store apart
    )


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    threads: int | None = None,
    quiet: bool = False,
) -> None:
    """Join the job this process was started for, wherever that was.

    Takes the arguments of `torch.distributed.init_process_group`; all can be left out. With
    `init_method` or `store` the meeting place is the caller's and only the backend is chosen here.
    `threads` is for torch's CPU operators (default: PACELINE_THREADS, OMP_NUM_THREADS, else the
    host's allowed cores divided by its ranks). Rank 0 says in one line on stderr what was found,
    unless `quiet` or PACELINE_QUIET=1.

    Raises `ConfigError` for a half-set or contradictory environment and `CollectiveTimeout` naming
    ranks that never came.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigError(
            f"rank {dist.get_rank()} already joined a group ({dist.get_backend()}, world of {dist.get_world_size()}). "
            "Call init_process_group once, or destroy_process_group() first"
        )
    choice = choose_backend(backend, os.environ, native_status(), accelerator_backend())
    options: dict[str, Any] = {
        "group_name": group_name,
        "pg_options": pg_options,
        "device_id": device_id,
    }
    if timeout is not None:
        options["timeout"] = timeout
    if init_method is not None or store is not None:
        dist.init_process_group(
            choice.backend, init_method, world_size=world_size, rank=rank, store=store, **options
        )
        _be_observed(timeout)
        atexit.register(_leave_quietly)
        return

    env = _given(find_rank_env(os.environ), world_size, rank)
    limit_s = _join_timeout(timeout)
    meeting = open_store(env, os.environ, limit_s)
    with joining():
        place_here, group_store = place(env, meeting, _Joined.generation, limit_s)
    _Joined.generation += 1
    _use_threads(place_here, threads)
    _use_device(place_here)
    dist.init_process_group(
        choice.backend, store=group_store, rank=env.rank, world_size=env.world_size, **options
    )
    _Joined.placement, _Joined.store, _Joined.serves_store = (
        place_here,
        group_store,
        meeting.served_here,
    )
    _be_observed(timeout)
    atexit.register(_leave_quietly)
    if env.rank == 0 and not quiet and os.environ.get("PACELINE_QUIET") != "1":
        sys.stderr.write(_summary(place_here, choice) + "\n")


def _be_observed(timeout: datetime.timedelta | None) -> None:
    """Show what this rank does. The job's name is the launcher's, or one that the ranks agree on in
    their store.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout

    rank, world = dist.get_rank(), dist.get_world_size()
    _be_heard()
    job = os.environ.get(RUN_ID)
    if job is None:
        key, name = "paceline/job", uuid.uuid4().hex
        job = _get_default_store().compare_set(key, "", name).decode() if world > 1 else name
    limit = timeout or default_pg_timeout
    session.joined(rank, world, job=job, timeout_s=limit.total_seconds())


def _be_heard() -> None:
    """An error that ends this rank is told to the others. A group of ours sees to that itself."""
    import torch.distributed as dist

    from paceline.backend.store_failure_channel import failure_channel_of

    group = dist.group.WORLD
    assert group is not None
    failure_channel_of(group)


def _given(env: RankEnv, world_size: int, rank: int) -> RankEnv:
    """The environment's place, checked against the one the caller named."""
    if (world_size, rank) in {(-1, -1), (env.world_size, env.rank)}:
        return env
    if env.source == "alone" and (world_size, rank) != (-1, -1):
        missing = [
            name for name, value in (("world_size", world_size), ("rank", rank)) if value < 0
        ]
        address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if missing or None in address or not str(address[1]).isdigit():
            raise ConfigError(
                f"init_process_group(world_size={world_size}, rank={rank}) needs both numbers and a place to meet: "
                f"MASTER_ADDR={address[0]}, MASTER_PORT={address[1]}, or init_method=... or store=..."
            )
        return RankEnv("arguments", rank, world_size, None, None, address[0], int(str(address[1])))
    raise ConfigError(
        f"init_process_group(world_size={world_size}, rank={rank}) contradicts {env.source}, which says rank "
        f"{env.rank} of {env.world_size}. Leave the arguments out"
    )


def _join_timeout(timeout: datetime.timedelta | None) -> float:
    if text := os.environ.get("PACELINE_JOIN_TIMEOUT"):
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            raise ConfigError(
                f"PACELINE_JOIN_TIMEOUT should be a number of seconds but is {text!r}"
            )
        return seconds
    return _JOIN_TIMEOUT_S if timeout is None else min(_JOIN_TIMEOUT_S, timeout.total_seconds())


def _use_threads(here: Placement, wish: int | None) -> None:
    import torch

    torch.set_num_threads(wish or _threads_from_environment(here) or here.threads)


def _threads_from_environment(here: Placement) -> int | None:
    if mine := os.environ.get("PACELINE_THREADS"):
        if not mine.isdigit() or int(mine) < 1:
            raise ConfigError(f"PACELINE_THREADS should be a number of threads but is {mine!r}")
        return int(mine)
    openmp = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 by itself whatever the machine: not a wish of the user's.
    if openmp.isdigit() and int(openmp) > 0 and not (here.source == "torchrun" and openmp == "1"):
        return int(openmp)
    return None


def _use_device(here: Placement) -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(here.local_rank % torch.accelerator.device_count())


def _summary(here: Placement, choice: Choice) -> str:
    import torch

    threads = torch.get_num_threads()
    ranks = "a world of one" if here.world_size == 1 else f"{here.world_size} ranks"
    hosts = "" if here.hosts == 1 else f" on {here.hosts} hosts"
    note = f" ({choice.note})" if choice.note else ""
    plural = "" if threads == 1 else "s"
    return f"paceline: {ranks}{hosts} ({here.source}), {choice.backend}{note}, {threads} thread{plural} per rank"


def destroy_process_group(group: Any = None) -> None:
    """Leave a group, by default all of them. Unlike torch's function it may be called when there is
    none.
    """
    import torch.distributed as dist

    if group is None:
        session.end()
        save_request.stop_listening()
        atexit.unregister(_leave_quietly)
        _let_the_others_leave()
        _Joined.placement, _Joined.store, _Joined.serves_store = None, None, False
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _let_the_others_leave() -> None:
    """Rank 0 may serve the store that others still read: it goes last, unless they do not come - or
    it has failed.
    """
    here, store = _Joined.placement, _Joined.store
    if here is None or here.world_size == 1:
        return
    with contextlib.suppress(RuntimeError):  # the server is gone already
        store.set(f"left/{here.rank}", "1")
        if _Joined.serves_store and not hasattr(sys, "last_value"):
            deadline = time.monotonic() + _LEAVE_TIMEOUT_S
            for rank in range(here.world_size):
                wait_for_key(store, f"left/{rank}", deadline)


def _leave_quietly() -> None:
    """At interpreter exit: a group that is still open is no reason for warnings, nor for a second
    error.
    """
    with contextlib.suppress(Exception):
        destroy_process_group()


def placement() -> Placement | None:
    """Where this rank is, once it has joined through `init_process_group()`."""
    return _Joined.placement


def rank() -> int:
    """This process's rank: of the default group, or before there is one, as the environment says."""
    dist = _distributed()
    return int(dist.get_rank()) if dist else find_rank_env(os.environ).rank


def world_size() -> int:
    """The number of ranks: of the default group, or before there is one, as the environment says."""
    dist = _distributed()
    return int(dist.get_world_size()) if dist else find_rank_env(os.environ).world_size


def local_rank() -> int:
    """This rank's index among the ranks of its host."""
    if _Joined.placement is not None:
        return _Joined.placement.local_rank
    found = find_rank_env(os.environ).local_rank
    if found is None:
        raise ConfigError(
            "the environment does not say the local rank; it is known after init_process_group()"
        )
    return found


def local_world_size() -> int:
    """The number of ranks on this host."""
    if _Joined.placement is not None:
        return _Joined.placement.local_world_size
    found = find_rank_env(os.environ).local_world_size
    if found is None:
        raise ConfigError(
            "the environment does not say how many ranks are here; it is known after init_process_group()"
        )
    return found


def is_main() -> bool:
    """Whether this is rank 0: the one that prints and writes."""
    return rank() == 0


def _distributed() -> Any:
    """torch.distributed if a default group exists, without importing torch for the question."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
