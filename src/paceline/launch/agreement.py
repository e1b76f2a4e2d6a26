"""Ranks tell each other something small through the group's store, within a time limit, and learn who did not come.

Not for the hot path - a store is a TCP server - but it works before a group exists and when some ranks never call,
which a collective does not survive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import CollectiveTimeout, PeerLost

__all__ = ["exchange", "wait_for_key"]

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1


def exchange(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    value: str,
    *,
    timeout_s: float,
    complain: Callable[[list[int]], str],
) -> list[str]:
    """Every rank's `value`, in rank order. All ranks call it with the same `name`, used once.

    Rank 0 collects and publishes, so that N ranks cost 2N messages. On the deadline raises `CollectiveTimeout` with
    the text `complain(missing ranks)`; if the store is gone, `PeerLost`.
    """
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    keys = [f"{name}/{r}" for r in range(world_size)]
    deadline = time.monotonic() + timeout_s
    try:
        store.set(keys[rank], value)
        if rank == 0:
            return _collect(store, name, keys, deadline, complain)
        return _hear(store, name, keys, deadline, complain)
    except dist.DistError as error:
        raise PeerLost(
            f"rank {rank} lost the store through which ranks meet: the process that serves it - rank 0 or the launcher "
            f"- ended ({str(error).strip().partition(chr(10))[0]}). Look at its output first"
        ) from error


def _collect(
    store: Any, name: str, keys: list[str], deadline: float, complain: Callable[[list[int]], str]
) -> list[str]:
    """Rank 0's part: wait for all, tell all - or tell who is missing, so that all give the same answer."""
    if all(wait_for_key(store, key, deadline) for key in keys):
        values = [store.get(key).decode() for key in keys]
        store.set(f"{name}/all", json.dumps(values))
        return values
    missing = [r for r, key in enumerate(keys) if not store.check([key])]
    store.set(f"{name}/missing", json.dumps(missing))
    time.sleep(3 * _LONGEST_PAUSE_S)  # this process may serve the store, and the error may end it
    raise CollectiveTimeout(complain(missing), missing)


def _hear(store: Any, name: str, keys: list[str], deadline: float, complain: Callable[[list[int]], str]) -> list[str]:
    """The part of the others."""
    grace_s = 10 * _LONGEST_PAUSE_S  # rank 0's clock started at another time
    if wait_for_key(store, f"{name}/all", deadline + grace_s, unless=f"{name}/missing"):
        return list(json.loads(store.get(f"{name}/all")))
    if store.check([f"{name}/missing"]):
        missing = list(json.loads(store.get(f"{name}/missing")))
    else:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
    raise CollectiveTimeout(complain(missing), missing)


def wait_for_key(store: Any, key: str, deadline: float, unless: str | None = None) -> bool:
    """Wait until the store has `key`; False when it has `unless`, or the deadline (time.monotonic) passed first.

    Asks again and again instead of `store.wait`, which sees no Ctrl-C and logs a warning each time it runs out.
    """
    pause = _FIRST_PAUSE_S
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0 or (unless is not None and store.check([unless])):
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
