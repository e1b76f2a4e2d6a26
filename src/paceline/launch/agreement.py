"""Ranks tell each other something small through the group's store, within a time limit, and learn who did not come.

Not for the hot path - a store is a TCP server - but it works before a group exists and when some ranks never call,
which a collective does not survive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import CollectiveTimeout

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
    the text `complain(missing ranks)`.
    """
    if world_size == 1:
        return [value]
    keys = [f"{name}/{r}" for r in range(world_size)]
    deadline = time.monotonic() + timeout_s
    store.set(keys[rank], value)
    if rank == 0:
        came = all(wait_for_key(store, key, deadline) for key in keys)
        if came:
            values = [store.get(key).decode() for key in keys]
            store.set(f"{name}/all", json.dumps(values))
            return values
    elif wait_for_key(store, f"{name}/all", deadline):
        return list(json.loads(store.get(f"{name}/all")))
    missing = [r for r, key in enumerate(keys) if not store.check([key])]
    raise CollectiveTimeout(complain(missing), missing)


def wait_for_key(store: Any, key: str, deadline: float) -> bool:
    """Wait until the store has `key`; False when the deadline (time.monotonic) passed first.

    Asks again and again instead of `store.wait`, which sees no Ctrl-C and logs a warning each time it runs out.
    """
    pause = _FIRST_PAUSE_S
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
