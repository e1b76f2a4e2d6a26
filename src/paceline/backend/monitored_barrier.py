"""`monitored_barrier`: a barrier that names the ranks which do not come, and leaves the group
usable.

Rank 0 hears from every rank and then answers all of them. It uses messages, not a collective: a
collective that was given up cannot be taken back, a message that never came can.
"""

from __future__ import annotations

import time

import torch

from paceline.backend.host_engine import Engine
from paceline.errors import CollectiveTimeout, GroupError

__all__ = ["monitored_barrier"]

_TAG = 0x70616365  # far from the tags that users choose


def monitored_barrier(engine: Engine, call: int, timeout_ns: int, *, wait_all_ranks: bool) -> None:
    """Meet at rank 0 within the time limit; the error there names the first missing rank, or all of
    them.

    `call` counts a rank's monitored barriers: what is left of one that failed must not pass for the
    next.
    """
    if engine.rank == 0:
        _collect(engine, call, timeout_ns, wait_all_ranks)
    else:
        _report(engine, call, timeout_ns)


def _tell(engine: Engine, rank: int, call: int, timeout_ns: int) -> None:
    engine.send(torch.tensor([call]), rank, _TAG, timeout_ns=timeout_ns).wait()


def _hear(engine: Engine, rank: int, call: int, timeout_ns: int) -> None:
    heard = torch.tensor([-1])
    deadline = time.monotonic_ns() + timeout_ns
    while heard.item() < call:
        engine.recv(heard, rank, _TAG, timeout_ns=max(deadline - time.monotonic_ns(), 1)).wait()


def _collect(engine: Engine, call: int, timeout_ns: int, wait_all_ranks: bool) -> None:
    start = time.monotonic_ns()
    missing: list[int] = []
    for rank in range(1, engine.size):
        left = start + timeout_ns - time.monotonic_ns()
        if left <= 0 and not wait_all_ranks:
            raise CollectiveTimeout(
                f"Rank 0 timed out in monitoredBarrier after {timeout_ns // 1_000_000} ms, before hearing rank {rank}",
                missing=range(rank, engine.size),
            )
        if not _heard_from(engine, rank, call, max(left, 1_000_000)):
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise CollectiveTimeout(
            f"{who} failed to pass monitoredBarrier in {timeout_ns // 1_000_000} ms; see what they are doing instead",
            missing=missing,
        )
    for rank in range(1, engine.size):
        _tell(engine, rank, call, timeout_ns)


def _heard_from(engine: Engine, rank: int, call: int, timeout_ns: int) -> bool:
    try:
        _hear(engine, rank, call, timeout_ns)
    except GroupError:
        return False
    return True


def _report(engine: Engine, call: int, timeout_ns: int) -> None:
    try:
        _tell(engine, 0, call, timeout_ns)
        _hear(engine, 0, call, timeout_ns)
    except GroupError as error:
        raise CollectiveTimeout(
            f"Rank {engine.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0; rank 0's error names the rank at fault ({error})"
        ) from error
