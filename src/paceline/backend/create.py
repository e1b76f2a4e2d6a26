"""Creating a group: find out which ranks share this host, and join them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from paceline.backend.device_backends import other_backends
from paceline.backend.engine import Engine
from paceline.backend.host_engine import HostEngine
from paceline.backend.process_group import PacelineGroup
from paceline.core import Communicator, host_identity, native_status
from paceline.core.store_exchange import exchange

__all__ = ["create_group"]

_NO_CORE = "none"


def create_group(options: Any, backend_options: Any) -> Any:
    """Called by torch.distributed for every group of backend `paceline`, on all its ranks."""
    others = other_backends(options)
    group = _join(options.store, options.group_rank, options.group_size, options.timeout)
    if isinstance(group, PacelineGroup):
        for device, backend in others.items():
            group.add_backend(device, backend)
    return group


def _join(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    mine = _place()

    def pid_in(value: str) -> int | None:
        place, pid = value.split()
        return int(pid) if place == mine else None

    told = exchange(
        store,
        "host",
        rank,
        range(size),
        f"{mine} {os.getpid()}",
        timeout,
        pid_in=pid_in,
        prompt=True,
    )
    places = [told[r].split()[0] for r in range(size)]
    if _NO_CORE in places:
        return _gloo(store, rank, size, timeout)
    pids = {r: int(told[r].split()[1]) for r in range(size)}
    engine = _engine(store, rank, places, pids, timeout)
    split = functools.partial(_join_split, store, rank)
    return PacelineGroup(store, rank, size, engine, timeout, split)


def _join_split(store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, name: str) -> Any:
    return _join(PrefixStore(f"{name}/", store), list(ranks).index(rank), len(ranks), timeout)


def _place() -> str:
    return host_identity() if native_status().available else _NO_CORE


def _engine(
    store: Any, rank: int, places: list[str], pids: dict[int, int], timeout: timedelta
) -> Engine:
    hosts = list(dict.fromkeys(places))
    local = [r for r, place in enumerate(places) if place == places[rank]]
    comm = Communicator.join(
        PrefixStore(f"{hosts.index(places[rank])}/", store), rank, local, timeout, pids=pids
    )
    if len(hosts) == 1:
        return HostEngine(comm)
    from paceline.backend.multi_host_engine import MultiHostEngine

    return MultiHostEngine(store, rank, [hosts.index(place) for place in places], comm, timeout)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    _say_once(native_status().reason or "another rank has no native core")
    return ProcessGroupGloo(store, rank, size, timeout=timeout)


@functools.cache
def _say_once(reason: str) -> None:
    sys.stderr.write(f"paceline: using Gloo instead of shared memory: {reason}\n")
