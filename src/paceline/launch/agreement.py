"""Ranks tell each other something small through the group's store, within a time limit, and learn
who did not come.

Not for the hot path - a store is a TCP server - but it works before a group exists and when some
ranks never call, which a collective does not survive.
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
    unless: str | None = None,
) -> list[str] | None:
    """Every rank's `value`, in rank order. All ranks call it with the same `name`, used once.

    Rank 0 collects and publishes, so that N ranks cost 2N messages. On the deadline raises
    `CollectiveTimeout` with the text `complain(missing ranks)`; if the store is gone, `PeerLost`.
    Returns None when the key `unless` appears before all have come.
    """
    if world_size == 1:
        return [value]
    import torch.distributed as dist

    talk = _Talk(store, name, world_size, time.monotonic() + timeout_s, unless)
    try:
        store.set(talk.keys[rank], value)
        answer = talk.collect() if rank == 0 else talk.hear()
    except dist.DistError as error:
        raise PeerLost(
            f"rank {rank} lost the store through which ranks meet: the process that serves it - rank 0 or the launcher "
            f"- ended ({str(error).strip().splitlines()[0]}). Look at its output first"
        ) from error
    if talk.missing:
        raise CollectiveTimeout(complain(talk.missing), talk.missing)
    return answer


class _Talk:
    """One exchange: what is said under which key, and who was missing."""

    def __init__(
        self, store: Any, name: str, world_size: int, deadline: float, unless: str | None
    ) -> None:
        self.keys = [f"{name}/{rank}" for rank in range(world_size)]
        self.missing: list[int] = []
        self._store, self._deadline, self._unless = store, deadline, unless
        self._all, self._missing_key = f"{name}/all", f"{name}/missing"

    def collect(self) -> list[str] | None:
        """Rank 0's part: wait for all, tell all - or tell who is missing, so that all give the same
        answer.
        """
        if all(wait_for_key(self._store, key, self._deadline, self._unless) for key in self.keys):
            values = [self._store.get(key).decode() for key in self.keys]
            self._store.set(self._all, json.dumps(values))
            return values
        if not self._called_off():
            self.missing = self._absent()
            self._store.set(self._missing_key, json.dumps(self.missing))
            time.sleep(
                3 * _LONGEST_PAUSE_S
            )  # this process may serve the store, and the error may end it
        return None

    def hear(self) -> list[str] | None:
        """The part of the others."""
        deadline = self._deadline + 10 * _LONGEST_PAUSE_S  # rank 0's clock started at another time
        stops = [key for key in (self._missing_key, self._unless) if key is not None]
        if wait_for_key(self._store, self._all, deadline, *stops):
            return list(json.loads(self._store.get(self._all)))
        if self._store.check([self._missing_key]):
            self.missing = list(json.loads(self._store.get(self._missing_key)))
        elif not self._called_off():
            self.missing = self._absent()
        return None

    def _called_off(self) -> bool:
        return self._unless is not None and bool(self._store.check([self._unless]))

    def _absent(self) -> list[int]:
        return [rank for rank, key in enumerate(self.keys) if not self._store.check([key])]


def wait_for_key(store: Any, key: str, deadline: float, *unless: str | None) -> bool:
    """Wait until the store has `key`; False when it has one of `unless`, or the deadline
    (time.monotonic) passed first.

    Asks again and again instead of `store.wait`, which sees no Ctrl-C and logs a warning each time
    it runs out.
    """
    pause = _FIRST_PAUSE_S
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0 or any(stop is not None and store.check([stop]) for stop in unless):
            return bool(store.check([key]))  # it may have come in between, and then it counts
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
