"""`monitored_barrier`: a barrier that names the ranks which do not come, and leaves the group
usable.

Rank 0 waits for a signal of every rank and then answers all of them. Signals are no collective: a
collective that was given up cannot be taken back, a signal that never came can.
"""

from __future__ import annotations

import time

from paceline.backend.engine import Engine
from paceline.errors import CollectiveTimeout, GroupError

__all__ = ["monitored_barrier"]


def monitored_barrier(engine: Engine, call: int, timeout_ns: int, *, wait_all_ranks: bool) -> None:
    """All ranks reach rank 0 within the time limit; the error there names the first missing rank,
    or all of them.

    `call` counts a rank's monitored barriers: what is left of one that failed must not pass for the
    next.
    """
    if engine.rank == 0:
        _collect(engine, call, timeout_ns, wait_all_ranks)
    else:
        _report(engine, call, timeout_ns)


def _collect(engine: Engine, call: int, timeout_ns: int, wait_all_ranks: bool) -> None:
    start = time.monotonic_ns()
    limit_ms = timeout_ns // 1_000_000
    missing: list[int] = []
    for rank in range(1, engine.size):
        left = start + timeout_ns - time.monotonic_ns()
        if left <= 0 and not wait_all_ranks:
            raise CollectiveTimeout(
                f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms, before rank {rank} "
                "reported",
                missing=range(rank, engine.size),
            )
        if not _has_reported(engine, rank, call, max(left, 1_000_000)):
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise CollectiveTimeout(
            f"{who} failed to pass monitoredBarrier in {limit_ms} ms; see what they are doing "
            "instead",
            missing=missing,
        )
    for rank in range(1, engine.size):
        engine.post_signal(rank, call, timeout_ns)


def _has_reported(engine: Engine, rank: int, call: int, timeout_ns: int) -> bool:
    try:
        engine.await_signal(rank, call, timeout_ns)
    except GroupError:
        return False
    return True


def _report(engine: Engine, call: int, timeout_ns: int) -> None:
    try:
        engine.post_signal(0, call, timeout_ns)
        engine.await_signal(0, call, timeout_ns)
    except GroupError as error:
        raise CollectiveTimeout(
            f"Rank {engine.rank} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0; rank 0's error names the rank at fault "
            f"({error})"
        ) from error
