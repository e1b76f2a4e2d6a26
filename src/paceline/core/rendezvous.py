"""Gives the ranks of one host a descriptor of the same anonymous file, which they map as their
shared memory.

The file (memfd) belongs to the first rank. The others open it through that process's descriptor
table, `/proc/<pid>/fd/<n>`, which the kernel allows only to processes of the same user. A random
nonce, published in the store and kept in the segment, makes sure it is the right one. No name in
any file system is involved, so nothing is left when the processes end, however they end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

from paceline._linux import anonymous_memory, open_descriptor_of
from paceline.core.store_exchange import Store, exchange, format_ranks, wait_for_peer
from paceline.errors import NativeError

__all__ = ["SumOverRanks", "agreed_descriptor", "open_peer_descriptor", "shared_descriptor"]

# Adds up a few integers of every rank of the host, through memory the ranks share already.
SumOverRanks = Callable[[Sequence[int]], Sequence[int]]


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
            created = _create_segment()
            prepare(created, nonce)
            store.set(f"{topic}/segment", f"{os.getpid()} {created} {nonce[0]} {nonce[1]}")
        purpose = f"the shared-memory segment that rank {leader} creates"
        segment = wait_for_peer(
            store, f"{topic}/segment", rank, leader, timeout, pids or {}, purpose
        )
        pid, number, first, second = map(int, segment.split())
        with (
            _failing_on_all_ranks(store, topic, rank, ranks, timeout, pids),
            _open_segment(created, pid, number) as descriptor,
        ):
            yield descriptor, (first, second)
    finally:
        if created >= 0:
            os.close(created)


@contextlib.contextmanager
def agreed_descriptor(
    sum_over_ranks: SumOverRanks, rank: int, size: int, prepare: Callable[[int], None]
) -> Iterator[int]:
    """The same for ranks that have a communicator, whose sums replace the store."""
    created = -1
    error: Exception | None = None
    try:
        if rank == 0:
            created = _create_segment()
            try:
                prepare(created)
            except Exception as raised:
                # Raised below, when the other ranks know.
                error = raised
        is_owner = rank == 0 and error is None
        pid, number = sum_over_ranks([os.getpid(), created] if is_owner else [0, 0])
        if pid == 0:
            raise error or NativeError(
                "the first rank of this host could not create the shared-memory segment; see its "
                "error"
            )
        with (
            _failing_on_all_summed(sum_over_ranks, rank, size),
            _open_segment(created, pid, number) as descriptor,
        ):
            yield descriptor
    finally:
        if created >= 0:
            os.close(created)


def _create_segment() -> int:
    descriptor = anonymous_memory("paceline")
    os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def _open_segment(created: int, pid: int, number: int) -> Iterator[int]:
    """The file this rank has created (-1: none), or else the one that process `pid` holds as
    `number`.
    """
    descriptor = os.dup(created) if created >= 0 else open_peer_descriptor(pid, number)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failing_on_all_summed(sum_over_ranks: SumOverRanks, rank: int, size: int) -> Iterator[None]:
    """Run a step on every rank; if it fails on one, all ranks raise."""
    failed = [0] * size
    try:
        yield
    except Exception:
        failed[rank] = 1
        sum_over_ranks(failed)
        raise
    failed_ranks = [other for other, count in enumerate(sum_over_ranks(failed)) if count]
    if failed_ranks:
        raise NativeError(
            f"{format_ranks(failed_ranks)} of this host could not map the shared-memory segment; "
            f"see {'its error' if len(failed_ranks) == 1 else 'their errors'}"
        )


def open_peer_descriptor(pid: int, number: int) -> int:
    """Open another process's descriptor; the kernel asks for the same user."""
    try:
        return open_descriptor_of(pid, number)
    except OSError as error:
        raise NativeError(
            f"process {os.getpid()} may not open the shared memory of process {pid}: "
            f"{error.strerror}. Both must run as the same user in the same pid namespace, with "
            "/proc mounted"
        ) from error


@contextlib.contextmanager
def _failing_on_all_ranks(
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
            exchange(store, f"{topic}/joined", rank, ranks, line, timeout, pids=pids, prompt=True)
        raise
    answers = exchange(store, f"{topic}/joined", rank, ranks, "ok", timeout, pids=pids, prompt=True)
    failed = [answer for answer in answers.values() if answer != "ok"]
    if failed:
        raise NativeError(
            "a peer could not join the shared memory of this host: " + "; ".join(failed)
        )
