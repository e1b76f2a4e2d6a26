"""The failure channel of a group that does not share one host's memory: the group's store.

Keys, below `paceline/failure`:

    published   how many ranks have published an error
    1, 2, ...   "<rank> <pid>", a line break, the error's text; 1 is the rank that failed first
    read        how many ranks have read the first of them
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

from paceline._torch_internals import PrefixStore, Store, TCPStore, store_of
from paceline.backend.host_engine import HostEngine
from paceline.backend.process_group import PacelineGroup
from paceline.errors import PeerLost
from paceline.failure_channel import (
    peer_failed,
    register_channel,
    registered_channels,
    truncate,
    unregister_channel,
)

__all__ = ["StoreFailureChannel", "failure_channel_of"]

# What publishing and waiting for readers may cost a process that is about to end, each.
_TIME_LIMIT_S = 1.0
_POLL_S = 0.05
_LONGEST_TEXT_BYTES = 16 * 1024


class StoreFailureChannel:
    """Publishes errors in a store and reads those of peers. Costs nothing until a rank fails."""

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group = weakref.ref(group)
        self._rank, self._world_size = group.rank(), group.size()
        origin = _innermost(store)
        self._server = (origin.host, origin.port) if isinstance(origin, TCPStore) else None
        self._store = PrefixStore("paceline/failure", store)
        self._pid = os.getpid()
        self._has_published = False
        self._first_failure: tuple[int, int, str] | None = None  # rank, pid, the error's text

    def belongs_to(self, group: dist.ProcessGroup) -> bool:
        return self._group() is group

    def publish(self, text: str, *, leaving: bool) -> None:
        if leaving and os.getpid() == self._pid:
            self._has_published = True
            _run_at_most(_TIME_LIMIT_S, lambda: self._publish(text))

    def _publish(self, text: str) -> None:
        if not self._store_answers():
            return
        number = self._store.add("published", 1)
        shortened = truncate(text, _LONGEST_TEXT_BYTES).decode(errors="replace")
        self._store.set(str(number), f"{self._rank} {self._pid}\n{shortened}")

    def wait_for_readers(self) -> None:
        """Rank 0 often serves the store: what it published is lost with it, so the others get time
        to read.
        """
        if self._has_published and self._rank == 0 and self._server is not None:
            _run_at_most(_TIME_LIMIT_S, self._wait_for_readers)

    def _wait_for_readers(self) -> None:
        deadline = time.monotonic() + _TIME_LIMIT_S
        while self._store.add("read", 0) < self._world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def lost_peer(self, wait_s: float = 0.0) -> PeerLost | None:
        """The error to raise if a peer has failed; waits a moment for one that is about to publish
        it.
        """
        deadline = time.monotonic() + wait_s
        while self._first_failure is None and self._store_answers():
            self._read()
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        if self._first_failure is None or self._first_failure[0] == self._rank:
            return None
        return peer_failed(*self._first_failure, f"while rank {self._rank} waited for it")

    def _read(self) -> None:
        # If the store is gone, whatever was published is gone with it.
        with contextlib.suppress(RuntimeError):
            if self._store.check(["1"]):
                head, _, text = self._store.get("1").decode(errors="replace").partition("\n")
                rank, pid = map(int, head.split())
                self._first_failure = rank, pid, text
                self._store.add("read", 1)

    def _store_answers(self) -> bool:
        """Whether there is a server to ask: torch's store prints pages on standard error when it is
        gone.
        """
        if self._server is None:
            return True
        try:
            socket.create_connection(self._server, timeout=_TIME_LIMIT_S).close()
        except OSError:
            return False
        return True


def failure_channel_of(group: dist.ProcessGroup) -> StoreFailureChannel | None:
    """The channel of a group, made for the first that asks and kept while the group lives; None
    where shared memory serves, or there is no store.
    """
    if group.size() == 1:
        return None
    if isinstance(group, PacelineGroup) and isinstance(group.engine, HostEngine):
        return None
    for channel in registered_channels():
        if isinstance(channel, StoreFailureChannel) and channel.belongs_to(group):
            return channel
    store = store_of(group)
    if store is None:  # made by hand
        return None
    channel = StoreFailureChannel(group, store)
    register_channel(channel)
    # Not at exit: the error that ends the program is published later than that.
    weakref.finalize(group, unregister_channel, channel).atexit = False
    return channel


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _run_at_most(seconds: float, action: Callable[[], None]) -> None:
    """Run an action that may hang because a host is gone: the program ends all the same."""

    def quietly() -> None:
        # If the store is gone, there is nobody left to read it.
        with contextlib.suppress(RuntimeError):
            action()

    thread = threading.Thread(target=quietly, daemon=True, name="paceline-failure-channel")
    thread.start()
    thread.join(seconds)
