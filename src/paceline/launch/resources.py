"""What one host offers its ranks: allowed cores, a CPU quota - and threads per rank that follow."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Collection, Sequence

__all__ = ["allowed_cores", "cpu_quota", "usable_cores", "threads_per_rank"]

_CGROUP = pathlib.Path("/sys/fs/cgroup")


def allowed_cores() -> frozenset[int]:
    """The cores this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def cpu_quota(root: pathlib.Path = _CGROUP) -> float | None:
    """Cores' worth of time the container may use, or None without a limit (cgroup v2, then v1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if limit < 0 else limit / int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity, limited by the container's quota."""
    cores, quota = len(allowed_cores()), cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def threads_per_rank(
    mine: Collection[int], others: Sequence[Collection[int]], quota: float | None = None
) -> int:
    """Threads for a rank allowed on the cores `mine`, beside ranks of its host allowed on `others`.

    Ranks that share cores divide them; ranks that were bound to cores of their own keep them all.
    """
    cores = set(mine)
    sharing = 1 + sum(1 for other in others if cores & set(other))
    threads = len(cores) / sharing
    if quota is not None:
        threads = min(threads, quota / (1 + len(others)))
    return max(1, int(threads + 1e-9))
