"""How the ranks of one host come to share a segment: through torch's store, without names in any
file system.

The segment is an anonymous file (memfd) of the first rank. The others open it through that
process's descriptor table, `/proc/<pid>/fd/<n>`, which the kernel allows only to processes of the
same user. A random nonce, told through the store and kept in the segment, makes sure it is the
right one. Nothing is left when the processes end, however they end. The store carries short text,
never pickles.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from paceline._linux import exit_code_of, is_running
from paceline.errors import CollectiveTimeout, NativeError, PeerLost, describe_exit

__all__ = [
    "Store",
    "Total",
    "agreed_descriptor",
    "exchange",
    "open_peer_descriptor",
    "shared_descriptor",
]

# The sum over the ranks of a host of a few integers each: what ranks that share memory already can
# do quickest.
Total = Callable[[Sequence[int]], Sequence[int]]


class Store(Protocol):
    """What we use of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


def exchange(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    value: str,
    timeout: timedelta,
    *,
    pids: Mapping[int, int] | None = None,
    pid_in: Callable[[str], int | None] | None = None,
) -> dict[int, str]:
    """Tell the others one line and hear theirs. If some never speak, the error names them.

    The first rank collects and tells all: n look-ups in all where everyone asking everyone would
    make n squared. Ranks whose process is known - from `pids`, or because `pid_in` finds it in what
    they say - are watched: if one ends before all have spoken, the others raise `PeerLost` within
    about a second instead of waiting for the time limit.
    """
    store.set(f"{topic}/{rank}", value)
    keys = {other: f"{topic}/{other}" for other in ranks}
    collected = f"{topic}/all"
    peers = _Peers(store, rank, keys, pids or {}, pid_in)
    try:
        if rank == ranks[0]:
            _tell_all(store, keys, collected, peers, timeout)
        _wait(store, [collected], timeout, lambda: peers.look([ranks[0]], unless=collected))
    except _TimeIsUp as error:
        missing = [other for other, key in keys.items() if not _has(store, key)]
        if not missing:
            raise error.cause from None
        raise CollectiveTimeout(
            f"rank {rank} waited {timeout.total_seconds():g} s for {_ranks(missing)} of {len(ranks)} to join the "
            f"group: they never came. Look at their output; were all {len(ranks)} ranks started?",
            missing=missing,
        ) from error.cause
    answer = store.get(collected).decode()
    if answer.startswith(_LOST):
        raise _peer_lost(rank, *map(int, answer.removeprefix(_LOST).split()))
    return dict(zip(ranks, answer.split("\n"), strict=True))


_LOST = "\0lost "
_SLICE_S = 0.5


class _TimeIsUp(Exception):
    """The time limit passed; `cause` is what the store made of it (each has its own type)."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


def _wait(store: Store, keys: list[str], timeout: timedelta, look: Callable[[], None]) -> None:
    """Wait for keys in slices, and look around between them."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        start = time.monotonic()
        slice_s = max(0.001, min(_SLICE_S, deadline - start))
        try:
            return store.wait(keys, timedelta(seconds=slice_s))
        except Exception as error:  # each store has its own type for a time-out
            now = time.monotonic()
            if now >= deadline:
                raise _TimeIsUp(error) from error
            if now - start < slice_s / 2:  # no time-out: the store itself is gone
                raise
        look()


def _tell_all(
    store: Store, keys: dict[int, str], collected: str, peers: _Peers, timeout: timedelta
) -> None:
    try:
        _wait(store, list(keys.values()), timeout, lambda: peers.look(list(keys)))
    except PeerLost as error:
        store.set(collected, f"{_LOST}{error.rank} {error.pid}")
        raise
    store.set(collected, "\n".join(store.get(key).decode() for key in keys.values()))


class _Peers:
    """The processes of those we wait for, as far as they are known."""

    def __init__(
        self,
        store: Store,
        rank: int,
        keys: dict[int, str],
        pids: Mapping[int, int],
        pid_in: Callable[[str], int | None] | None,
    ) -> None:
        self._store, self._rank, self._keys, self._pid_in = store, rank, keys, pid_in
        self._pids: dict[int, int | None] = dict(pids)

    def look(self, ranks: Sequence[int], unless: str | None = None) -> None:
        """Raise if one of these ranks has ended, unless a key says that it had done its part
        before.
        """
        for other in ranks:
            pid = self._pid_of(other)
            if pid is None or other == self._rank or is_running(pid):
                continue
            if unless is None or not _has(self._store, unless):
                raise _peer_lost(self._rank, other, pid)

    def _pid_of(self, other: int) -> int | None:
        key = self._keys[other]
        if other not in self._pids and self._pid_in is not None and _has(self._store, key):
            self._pids[other] = self._pid_in(self._store.get(key).decode())
        return self._pids.get(other)


def _peer_lost(rank: int, other: int, pid: int) -> PeerLost:
    code = exit_code_of(pid, -1)
    return PeerLost(
        f"rank {other} (pid {pid}) was lost before the group was ready; rank {rank} waited for it: it "
        f"{describe_exit(code)}. Its own output tells why",
        rank=other,
        pid=pid,
        exitcode=code,
    )


def _has(store: Store, key: str) -> bool:
    with contextlib.suppress(Exception):
        return store.check([key])
    return False


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@contextlib.contextmanager
def shared_descriptor(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    prepare: Callable[[int, tuple[int, int]], None],
    timeout: timedelta,
    pids: Mapping[int, int] | None = None,
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Give every rank of this host a descriptor of one anonymous file, and its nonce.

    The first rank makes it and calls `prepare(descriptor, nonce)`. The descriptor is closed when
    the block ends, which all ranks leave only when all have mapped it.
    """
    leader = ranks[0]
    created = -1
    try:
        if rank == leader:
            nonce = (secrets.randbits(63), secrets.randbits(63))
            created = _anonymous_file()
            prepare(created, nonce)
            store.set(f"{topic}/segment", f"{os.getpid()} {created} {nonce[0]} {nonce[1]}")
        _wait_for_segment(store, topic, rank, leader, timeout, pids or {})
        pid, number, first, second = map(int, store.get(f"{topic}/segment").split())
        with (
            _told_to_all(store, topic, rank, ranks, timeout, pids),
            _held(created, pid, number) as descriptor,
        ):
            yield descriptor, (first, second)
    finally:
        if created >= 0:
            os.close(created)


@contextlib.contextmanager
def agreed_descriptor(
    total: Total, rank: int, size: int, prepare: Callable[[int], None]
) -> Iterator[int]:
    """The same for ranks that have a communicator: they tell each other through it, not through the
    store.
    """
    created = -1
    refused: Exception | None = None
    try:
        if rank == 0:
            created = _anonymous_file()
            try:
                prepare(created)
            except Exception as error:  # told to all below
                refused = error
        mine = rank == 0 and refused is None
        pid, number = total([os.getpid() if mine else 0, created if mine else 0])
        if pid == 0:
            raise refused or NativeError(
                "the first rank of this host could not make shared memory; its error says why"
            )
        with _summed_up(total, rank, size), _held(created, pid, number) as descriptor:
            yield descriptor
    finally:
        if created >= 0:
            os.close(created)


def _anonymous_file() -> int:
    created = os.memfd_create("paceline", os.MFD_CLOEXEC)
    os.fchmod(created, 0o600)
    return created


@contextlib.contextmanager
def _held(created: int, pid: int, number: int) -> Iterator[int]:
    """The file this rank has created (-1: none), or else the one that process `pid` holds as
    `number`.
    """
    descriptor = os.dup(created) if created >= 0 else open_peer_descriptor(pid, number)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _summed_up(total: Total, rank: int, size: int) -> Iterator[None]:
    """Run a step on every rank; if it fails on one, all ranks raise."""
    failed = [0] * size
    try:
        yield
    except Exception:
        failed[rank] = 1
        total(failed)
        raise
    who = [one for one, count in enumerate(total(failed)) if count]
    if who:
        raise NativeError(
            f"{_ranks(who)} of this host could not map the shared memory; their errors say why"
        )


def _wait_for_segment(
    store: Store, topic: str, rank: int, leader: int, timeout: timedelta, pids: Mapping[int, int]
) -> None:
    key = f"{topic}/segment"
    peers = _Peers(store, rank, {leader: key}, pids, None)
    try:
        _wait(store, [key], timeout, lambda: peers.look([leader], unless=key))
    except _TimeIsUp as error:
        raise CollectiveTimeout(
            f"rank {rank} waited {timeout.total_seconds():g} s for the shared memory that rank {leader} makes",
            missing=[leader],
        ) from error.cause


def open_peer_descriptor(pid: int, number: int) -> int:
    """Open another process's descriptor; the kernel asks for the same user."""
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NativeError(
            f"process {os.getpid()} may not open the shared memory of process {pid}: {error.strerror}. "
            "Both must run as the same user in the same pid namespace, with /proc mounted"
        ) from error


@contextlib.contextmanager
def _told_to_all(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    pids: Mapping[int, int] | None,
) -> Iterator[None]:
    """Run a step on every rank; if it fails on one, all ranks raise."""
    try:
        yield
    except Exception as error:
        line = f"rank {rank}: {error}".replace("\n", " ")
        with contextlib.suppress(Exception):  # the error at hand is the one to raise
            exchange(store, f"{topic}/joined", rank, ranks, line, timeout, pids=pids)
        raise
    answers = exchange(store, f"{topic}/joined", rank, ranks, "ok", timeout, pids=pids)
    failed = [answer for answer in answers.values() if answer != "ok"]
    if failed:
        raise NativeError(
            "a peer could not join the shared memory of this host: " + "; ".join(failed)
        )
