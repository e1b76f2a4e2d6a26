"""Creating a group: find out which ranks share this host, and join them."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from paceline._torch_internals import PrefixStore, ProcessGroupGloo, Store
from paceline.backend.device_backends import other_backends
from paceline.backend.engine import Engine
from paceline.backend.group_options import GroupOptions
from paceline.backend.host_engine import HostEngine
from paceline.backend.host_placement import Placement
from paceline.backend.process_group import PacelineGroup
from paceline.core import Communicator, host_identity, native_status, store_exchange
from paceline.core.store_exchange import AbandonableStore, exchange
from paceline.errors import ConfigError, MismatchError

__all__ = ["FormedGroup", "GroupWatch", "create_group", "form_group"]

_NO_CORE = "none"
_SPIN_NS_SEVERAL_HOSTS = 5_000


class FormedGroup:
    """A group whose ranks have met already; `torch.distributed.init_process_group` is given it as
    `pg_options`.
    """

    def __init__(self, group: PacelineGroup) -> None:
        self.group = group


@dataclasses.dataclass(frozen=True)
class GroupWatch:
    """What others know about a group. Both are asked again and again.

    `is_obsolete`: the group is not worth being formed any more. `is_broken`: it has lost ranks, and
    on several hosts nobody waits in its calls from then on; inside a host they notice by
    themselves.
    """

    is_obsolete: Callable[[], bool]
    is_broken: Callable[[], bool]


def form_group(
    store: Store, rank: int, size: int, timeout: timedelta, watch: GroupWatch
) -> FormedGroup:
    """Meet the other ranks of a group, unless it becomes obsolete before all have come.

    Raises:
        GroupAborted: `is_obsolete()` is true.
        PeerLost: a rank ended meanwhile.
        ConfigError: a rank has no native core.
    """
    group = _join(
        store,
        rank,
        size,
        timeout,
        GroupOptions(),
        watch,
    )
    if not isinstance(group, PacelineGroup):
        raise ConfigError(
            "a group that can be abandoned needs the native core on all ranks: "
            f"{native_status().reason or 'it is missing on another rank'}"
        )
    return FormedGroup(group)


def create_group(options: Any, backend_options: object) -> PacelineGroup | ProcessGroupGloo:
    """Called by torch.distributed for every group of backend `paceline`, on all its ranks."""
    others = other_backends(options)
    if isinstance(backend_options, FormedGroup):
        group: PacelineGroup | ProcessGroupGloo = backend_options.group
    else:
        ours = backend_options if isinstance(backend_options, GroupOptions) else GroupOptions()
        group = _join(options.store, options.group_rank, options.group_size, options.timeout, ours)
    if isinstance(group, PacelineGroup):
        for device, backend in others.items():
            group.add_backend(device, backend)
    return group


def _join(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_options: GroupOptions,
    watch: GroupWatch | None = None,
) -> PacelineGroup | ProcessGroupGloo:
    mine = _host()

    def pid_in(value: str) -> int | None:
        host, pid, _ = value.split()
        return int(pid) if host == mine else None

    answers = exchange(
        _meeting(store, watch),
        "host",
        rank,
        range(size),
        f"{mine} {os.getpid()} {group_options.wire_dtype}",
        timeout,
        pid_in=pid_in,
        prompt=True,
    )
    hosts = [answers[r].split()[0] for r in range(size)]
    _check_wire_dtypes({r: answers[r].split()[2] for r in range(size)})
    if _NO_CORE in hosts:
        return _gloo(store, rank, size, timeout)
    pids = {r: int(answers[r].split()[1]) for r in range(size)}
    engine = _engine(store, rank, hosts, pids, timeout, group_options, watch)
    split = functools.partial(_join_split, store, rank, group_options)
    return PacelineGroup(store, rank, size, engine, timeout, split)


def _meeting(store: Store, watch: GroupWatch | None) -> store_exchange.Store:
    """What ranks meet through."""
    return store if watch is None else AbandonableStore(store, watch.is_obsolete)


def _check_wire_dtypes(given: dict[int, str]) -> None:
    if len(set(given.values())) > 1:
        raise MismatchError(
            "the ranks gave this group different wire_dtypes: "
            + ", ".join(f"rank {rank} {dtype}" for rank, dtype in given.items())
            + "; give all of them the same GroupOptions",
            given,
        )


def _join_split(
    store: Store,
    rank: int,
    group_options: GroupOptions,
    ranks: Sequence[int],
    timeout: timedelta,
    name: str,
) -> PacelineGroup:
    own_store = PrefixStore(f"{name}/", store)
    group = _join(own_store, list(ranks).index(rank), len(ranks), timeout, group_options)
    assert isinstance(group, PacelineGroup)  # its parent has the core on all of these ranks
    return group


def _host() -> str:
    return host_identity() if native_status().available else _NO_CORE


def _engine(
    store: Store,
    rank: int,
    hosts: list[str],
    pids: dict[int, int],
    timeout: timedelta,
    group_options: GroupOptions,
    watch: GroupWatch | None,
) -> Engine:
    distinct = list(dict.fromkeys(hosts))
    local = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    local_store = PrefixStore(f"{distinct.index(hosts[rank])}/", store)
    comm = Communicator.join(
        _meeting(local_store, watch),
        rank,
        local,
        timeout,
        pids=pids,
        # Most waits then are for another host, and longer than it takes to wake up.
        spin_ns=_SPIN_NS_SEVERAL_HOSTS if len(distinct) > 1 else None,
    )
    if len(distinct) == 1:
        return HostEngine(comm)
    from paceline.backend.abandonable_links import connect_unless_obsolete
    from paceline.backend.multi_host_call import Links
    from paceline.backend.multi_host_engine import MultiHostEngine

    placement = Placement.of(rank, [distinct.index(host) for host in hosts])
    try:
        if watch is None:
            links = Links(store, placement, comm, timeout)
            return MultiHostEngine(store, links, timeout, group_options)
        links = connect_unless_obsolete(store, placement, comm, timeout, watch.is_obsolete)
        return MultiHostEngine(store, links, timeout, group_options, watch.is_broken)
    except BaseException:
        comm.leave()
        raise


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    _warn_once(native_status().reason or "another rank has no native core")
    return ProcessGroupGloo(store, rank, size, timeout=timeout)


@functools.cache
def _warn_once(reason: str) -> None:
    sys.stderr.write(f"paceline: using Gloo instead of shared memory: {reason}\n")
