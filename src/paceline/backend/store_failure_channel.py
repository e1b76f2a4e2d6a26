"""How the peers of a group that is not ours hear a rank's last words: through the group's store."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.backend.host_engine import HostEngine
from paceline.backend.process_group import PacelineGroup
from paceline.errors import PeerLost
from paceline.failure_channel import peer_failed, register_channel, truncate

__all__ = ["StoreFailureChannel", "failure_channel_of"]

_LIMIT_S = 1.0  # what saying and lingering may cost a process that is about to end, each
_LOOK_EVERY_S = 0.05
_LONGEST_TEXT = 16 * 1024


class StoreFailureChannel:
    """Says and hears last words in a store. Silent, and without cost, until a rank fails."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        origin = _innermost(store)
        self._server = (origin.host, origin.port) if isinstance(origin, TCPStore) else None
        self._store = PrefixStore("paceline/last words", store)
        self._pid = os.getpid()
        self._said = False
        self._heard: tuple[int, int, str] | None = None

    def publish(self, text: str, *, leaving: bool) -> None:
        if leaving and os.getpid() == self._pid:
            self._said = True
            _at_most(_LIMIT_S, lambda: self._tell(text))

    def _tell(self, text: str) -> None:
        if not self._answers():
            return
        number = self._store.add("spoken", 1)
        told = truncate(text, _LONGEST_TEXT).decode(errors="replace")
        self._store.set(str(number), f"{self._rank} {self._pid}\n{told}")

    def wait_for_readers(self) -> None:
        """Rank 0 often serves the store: what it says is lost with it, so it lets the others read
        first.
        """
        if self._said and self._rank == 0 and self._server is not None:
            _at_most(_LIMIT_S, self._wait_for_readers)

    def _wait_for_readers(self) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while self._store.add("heard", 0) < self._world - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def lost_peer(self, patience_s: float = 0.0) -> PeerLost | None:
        """The error to raise if a peer has failed; it may be about to say so."""
        deadline = time.monotonic() + patience_s
        while self._heard is None and self._answers():
            self._hear()
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_EVERY_S)
        if self._heard is None or self._heard[0] == self._rank:
            return None
        return peer_failed(*self._heard, f"while rank {self._rank} waited for it")

    def _hear(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it whatever was said
            if self._store.check(["1"]):
                head, _, text = self._store.get("1").decode(errors="replace").partition("\n")
                rank, pid = map(int, head.split())
                self._heard = rank, pid, text  # of the rank that failed first
                self._store.add("heard", 1)

    def _answers(self) -> bool:
        """Whether there is a server to ask: torch's store prints pages on standard error when it is
        gone.
        """
        if self._server is None:
            return True
        try:
            socket.create_connection(self._server, timeout=_LIMIT_S).close()
        except OSError:
            return False
        return True


_channels: weakref.WeakKeyDictionary[Any, StoreFailureChannel] = weakref.WeakKeyDictionary()


def failure_channel_of(group: dist.ProcessGroup) -> StoreFailureChannel | None:
    """The channel of a group, the same for all that ask; None where shared memory serves, or there
    is no store.
    """
    if group.size() == 1 or (
        isinstance(group, PacelineGroup) and isinstance(group.engine, HostEngine)
    ):
        return None
    channel = _channels.get(group)
    if channel is None:
        _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
        if store is None:  # made by hand
            return None
        channel = _channels[group] = StoreFailureChannel(store, group.rank(), group.size())
        register_channel(channel)
    return channel


def _innermost(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _at_most(seconds: float, action: Callable[[], None]) -> None:
    """Run an action that may hang because a host is gone: the program ends all the same."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: there is nobody left to tell
            action()

    thread = threading.Thread(target=quietly, daemon=True, name="paceline-last-words")
    thread.start()
    thread.join(seconds)
