"""`init_process_group()` with no arguments, right everywhere - and the questions a script asks
about its rank.

Joining goes in these steps: read the rank from the environment, open the store, agree on the
placement with all ranks, set threads and device, create torch's default group, and enter a
`ProcessContext`, which is all that this process remembers of it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.core import host_identity, native_status
from paceline.errors import ConfigError
from paceline.launch.backend_choice import (
    BackendChoice,
    accelerator_backend,
    choose_backend,
    known_backends,
)
from paceline.launch.elastic_group import ElasticGroup
from paceline.launch.elastic_job import ElasticJob, current_elastic_job
from paceline.launch.placement import (
    Placement,
    RankResources,
    agree_on_placement,
    placement_from,
)
from paceline.launch.process_context import (
    ProcessContext,
    current_context,
    drop_context,
    enter_context,
)
from paceline.launch.resources import allowed_cores, cpu_quota
from paceline.launch.store import open_group_store, open_store
from paceline.rank_env import RankEnv, current_rank_and_world, find_rank_env
from paceline.telemetry.collective_recorder import joining

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from paceline._torch_internals import Store

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

_logger = logging.getLogger("paceline")

_JOIN_TIMEOUT_S = 300.0
_LONG_WAIT_S = 30.0  # until a line says whom this rank waits for
_LONGEST_TIMEOUT_S = 1e8  # some years: more than a store or a clock takes is a mistake


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    threads: int | None = None,
    quiet: bool = False,
) -> None:
    """Join the job this process was started for, wherever that was.

    Takes the arguments of `torch.distributed.init_process_group`; all can be left out. In an
    elastic job (`paceline run --elastic`) it forms no group: `paceline.Training` does, anew
    whenever ranks come or go.

    Args:
        backend: chosen for this machine by default: shared memory for CPU tensors, and the vendor's
            library for an accelerator.
        init_method: with it, or `store`, ranks meet there and only the backend is chosen here.
        timeout: of each collective, and of joining if that is less than five minutes.
        world_size: the number of ranks; checked against the environment if there is one.
        rank: of this process, likewise.
        store: an open store that all ranks share.
        group_name: torch's, for messages.
        pg_options: `paceline.GroupOptions`, or those of another backend.
        device_id: torch's, for backends of accelerators.
        threads: of torch's CPU operators. By default PACELINE_THREADS, OMP_NUM_THREADS, else the
            host's allowed cores divided by its ranks.
        quiet: do not log what was found, which rank 0 does in one line on standard error.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself or the arguments.
        CollectiveTimeout: not all ranks joined; names those that did not.

    Example:
        ```python
        paceline.init_process_group()
        print(f"rank {paceline.rank()} of {paceline.world_size()}")
        ```
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigError(
            f"rank {dist.get_rank()} already joined a group ({dist.get_backend()}, world size "
            f"{dist.get_world_size()}). Call init_process_group once, or destroy_process_group() "
            "first"
        )
    _check_types(timeout, world_size, rank, device_id, threads)
    choice = choose_backend(
        backend, os.environ, native_status(), accelerator_backend(), known_backends()
    )
    options: dict[str, Any] = {
        "group_name": group_name,
        "pg_options": pg_options,
        "device_id": device_id,
    }
    if timeout is not None:
        options["timeout"] = timeout
    if init_method is None and store is None and (job := current_elastic_job()) is not None:
        enter_context(_prepare_elastic(job, choice, threads, timeout))
        atexit.register(_leave_at_exit, os.getpid())
        return
    if init_method is not None or store is not None:
        dist.init_process_group(
            choice.backend, init_method, world_size=world_size, rank=rank, store=store, **options
        )
        context = ProcessContext()
    else:
        env = _check_arguments(find_rank_env(os.environ), world_size, rank)
        context = _join(env, choice, threads, _join_timeout(timeout), options)
    enter_context(context)
    context.observe_default_group(timeout)
    atexit.register(_leave_at_exit, os.getpid())
    if context.placement is not None and context.placement.rank == 0 and not quiet:
        _log_summary(context.placement, choice)


def _join(
    env: RankEnv,
    choice: BackendChoice,
    threads: int | None,
    timeout_s: float,
    options: dict[str, Any],
) -> ProcessContext:
    """Meet the ranks that the environment describes, and create the default group with them."""
    import torch.distributed as dist

    with _telling_of_a_long_wait(env, timeout_s):
        job_store = open_store(env, os.environ, timeout_s)
        try:
            with joining(), open_group_store(job_store) as store:
                placement = agree_on_placement(env, store, timeout_s)
        finally:
            job_store.remove_port_file()
    _use_threads(placement, threads)
    _use_device(placement)
    dist.init_process_group(
        choice.backend, store=store, rank=env.rank, world_size=env.world_size, **options
    )
    return ProcessContext(placement, store, serves_store=job_store.served_here)


@contextlib.contextmanager
def _telling_of_a_long_wait(env: RankEnv, timeout_s: float) -> Iterator[None]:
    """Variables that an earlier job has left in a shell make a script wait for ranks that nobody
    has started.
    """

    def tell() -> None:
        _logger.warning(
            "rank %d of %d (%s) has waited %g s for the others to join. Start them; or, to run "
            "alone, remove the variables that say so. It gives up after %g s.",
            env.rank,
            env.world_size,
            env.source,
            _LONG_WAIT_S,
            timeout_s,
        )

    timer = threading.Timer(_LONG_WAIT_S, tell)
    timer.daemon = True
    if env.world_size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _prepare_elastic(
    job: ElasticJob,
    choice: BackendChoice,
    threads: int | None,
    timeout: datetime.timedelta | None,
) -> ProcessContext:
    """Be ready to enter generations. Forms no group: ranks that train cannot meet a replacement
    before their next batch.
    """
    if choice.backend != "paceline":
        raise ConfigError(
            f"an elastic job needs the backend paceline, but {choice.backend} was chosen"
            f"{f' ({choice.note})' if choice.note else ''}: leave the backend out, or start the "
            "job without --elastic"
        )
    env = find_rank_env(os.environ)
    wait_s = _join_timeout(timeout)
    mine = RankResources(host_identity(), sorted(allowed_cores()))
    placement = placement_from(env, [mine] * env.world_size, cpu_quota())
    _use_threads(placement, threads)
    _use_device(placement)
    store = open_store(env, os.environ, wait_s).store
    return ProcessContext(placement, elastic=ElasticGroup(job, store, timeout, wait_s))


def _check_types(timeout: Any, world_size: Any, rank: Any, device_id: Any, threads: Any) -> None:
    import torch

    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"timeout should be a datetime.timedelta but is {timeout!r}")
    for name, number in (("world_size", world_size), ("rank", rank)):
        if not isinstance(number, int):
            raise TypeError(f"{name} should be a whole number but is {number!r}")
    if threads is not None and (not isinstance(threads, int) or threads < 0):
        raise ConfigError(f"threads should be a number of threads but is {threads!r}")
    if device_id is not None and not isinstance(device_id, int | torch.device):
        raise TypeError(f"device_id should be a number or a torch.device but is {device_id!r}")


def _check_arguments(env: RankEnv, world_size: int, rank: int) -> RankEnv:
    """The environment's rank and world, checked against those the caller named."""
    if (world_size, rank) in {(-1, -1), (env.world_size, env.rank)}:
        return env
    if env.source == "alone" and (world_size, rank) != (-1, -1):
        missing = [
            name for name, value in (("world_size", world_size), ("rank", rank)) if value < 0
        ]
        address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if world_size == 0 or rank >= world_size > 0:
            raise ConfigError(
                f"init_process_group(world_size={world_size}, rank={rank}): a rank is one of "
                "0..world_size - 1"
            )
        if missing or None in address or not str(address[1]).isdigit():
            raise ConfigError(
                f"init_process_group(world_size={world_size}, rank={rank}) needs both numbers and "
                f"an address to meet at: MASTER_ADDR={address[0]}, MASTER_PORT={address[1]}, or "
                "init_method=... or store=..."
            )
        return RankEnv("arguments", rank, world_size, None, None, address[0], int(str(address[1])))
    raise ConfigError(
        f"init_process_group(world_size={world_size}, rank={rank}) contradicts {env.source}, which "
        f"gives rank {env.rank} of {env.world_size}. Leave the arguments out"
    )


def _join_timeout(timeout: datetime.timedelta | None) -> float:
    if text := os.environ.get("PACELINE_JOIN_TIMEOUT"):
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= _LONGEST_TIMEOUT_S:
            raise ConfigError(
                f"PACELINE_JOIN_TIMEOUT should be a number of seconds but is {text!r}"
            )
        return seconds
    return _JOIN_TIMEOUT_S if timeout is None else min(_JOIN_TIMEOUT_S, timeout.total_seconds())


def _use_threads(placement: Placement, requested: int | None) -> None:
    import torch

    torch.set_num_threads(requested or _threads_from_environment(placement) or placement.threads)


def _threads_from_environment(placement: Placement) -> int | None:
    if text := os.environ.get("PACELINE_THREADS"):
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"PACELINE_THREADS should be a number of threads but is {text!r}")
        return int(text)
    openmp = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 by itself whatever the machine: that is not the user's choice.
    is_torchruns = placement.source == "torchrun" and openmp == "1"
    if openmp.isdigit() and int(openmp) > 0 and not is_torchruns:
        return int(openmp)
    return None


def _use_device(placement: Placement) -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(placement.local_rank % torch.accelerator.device_count())


def _log_summary(placement: Placement, choice: BackendChoice) -> None:
    if os.environ.get("PACELINE_QUIET") == "1":
        return
    import torch

    threads = torch.get_num_threads()
    world = placement.world_size
    ranks = "single process" if world == 1 else f"{world} ranks"
    hosts = "" if placement.hosts == 1 else f" on {placement.hosts} hosts"
    note = f" ({choice.note})" if choice.note else ""
    plural = "" if threads == 1 else "s"
    sys.stderr.write(
        f"paceline: {ranks}{hosts} ({placement.source}), {choice.backend}{note}, "
        f"{threads} thread{plural} per rank\n"
    )


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Leave a group. Unlike torch's function it may be called when there is none, and it may be
    left out.

    Args:
        group: the group to leave; all of them by default.

    Example:
        ```python
        paceline.init_process_group()
        paceline.destroy_process_group()
        ```
    """
    import torch.distributed as dist

    if group is None:
        atexit.unregister(_leave_at_exit)
        drop_context()
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _leave_at_exit(pid: int) -> None:
    """A group that is still open at exit is no reason for warnings, nor for a second error. A
    forked child inherits this handler, but not the membership.
    """
    if os.getpid() == pid:
        with contextlib.suppress(Exception):
            destroy_process_group()


def placement() -> Placement | None:
    """Where this rank is, once it has joined through `init_process_group()`."""
    context = current_context()
    return None if context is None else context.placement


def rank() -> int:
    """This process's rank.

    Returns:
        That of the default group, else the one from the environment, else that of a process alone.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself.

    Example:
        ```python
        torch.manual_seed(paceline.rank())
        ```
    """
    return current_rank_and_world()[0]


def world_size() -> int:
    """The number of ranks.

    Returns:
        That of the default group, else the one from the environment, else that of a process alone.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself.

    Example:
        ```python
        samples_per_rank = 64 // paceline.world_size()
        ```
    """
    return current_rank_and_world()[1]


def local_rank() -> int:
    """This rank's index among the ranks of its host.

    Returns:
        A number from 0, different for each rank of one host.

    Raises:
        ConfigError: there is no process group, and no launcher has told.

    Example:
        ```python
        print(f"GPU {paceline.local_rank()} is mine")
        ```
    """
    if (agreed := placement()) is not None:
        return agreed.local_rank
    from_environment = find_rank_env(os.environ).local_rank
    if from_environment is None:
        raise ConfigError(
            "the environment does not define the local rank; it is known after init_process_group()"
        )
    return from_environment


def local_world_size() -> int:
    """The number of ranks on this host.

    Returns:
        As the job was placed, or as the environment says.

    Raises:
        ConfigError: there is no process group, and no launcher has told.

    Example:
        ```python
        cores_per_rank = os.cpu_count() // paceline.local_world_size()
        ```
    """
    if (agreed := placement()) is not None:
        return agreed.local_world_size
    from_environment = find_rank_env(os.environ).local_world_size
    if from_environment is None:
        raise ConfigError(
            "the environment does not define how many ranks are on this host; it is known after "
            "init_process_group()"
        )
    return from_environment


def is_main() -> bool:
    """Whether this rank is the one that prints and writes.

    Returns:
        True on rank 0. Never on a rank that has left an elastic job, which goes on without it.

    Example:
        ```python
        if paceline.is_main():
            print("done")
        ```
    """
    context = current_context()
    has_left = context is not None and context.elastic is not None and context.elastic.has_left
    return rank() == 0 and not has_left
