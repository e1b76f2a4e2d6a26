"""What one host offers its ranks - cores, a CPU quota, accelerators - and what follows from it: how
many ranks to start, and the threads each gets.

Imports no torch: the launcher uses it too.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import re
import resource
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from paceline.errors import ConfigError

__all__ = [
    "MOST_RANKS",
    "allow_open_files",
    "allowed_cores",
    "count_accelerators",
    "count_ranks",
    "cpu_quota",
    "threads_for",
    "threads_per_rank",
    "usable_cores",
]

MOST_RANKS = 1024
_FILES_PER_RANK = 7  # three pipes, of which the launcher has both ends at first, and a log
_OTHER_FILES = 32
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


def count_ranks(requested: str) -> int:
    """A number, or "auto": one rank per accelerator, else one per usable core."""
    if requested == "auto":
        return count_accelerators() or usable_cores()
    try:
        number = int(requested)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"the number of ranks should be 1 or more, or auto, but is {requested!r}")
    if number > MOST_RANKS:
        raise ConfigError(
            f"the number of ranks on one host should be at most {MOST_RANKS} but is {number}"
        )
    return number


def allow_open_files(ranks: int) -> None:
    """See that the launcher may open the pipes of so many ranks: raise its limit, as far as the
    system lets it.
    """
    already_open = len(os.listdir("/proc/self/fd"))
    needed = already_open + _FILES_PER_RANK * ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{ranks} ranks need {needed} open files, but only {hard} are allowed (ulimit -n): "
            "start fewer ranks, or raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def count_accelerators() -> int:
    """Devices of the accelerator torch was built for; asked in a child, since asking may start a
    driver for good.
    """
    if not _built_for_an_accelerator():
        return 0
    code = "import torch; print(torch.accelerator.device_count())"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return int(child.stdout) if child.returncode == 0 and child.stdout.strip().isdigit() else 0


def _built_for_an_accelerator() -> bool:
    """Read from torch's version file: importing torch takes a second, and the launcher can do
    without.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("torch is not installed")
    text = pathlib.Path(spec.origin).with_name("version.py").read_text()
    built_for = re.findall(r"^(?:cuda|hip|xpu)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return any(value.strip() != "None" for value in built_for) or sys.platform == "darwin"


def threads_for(ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads per rank: what the user set, else the usable cores divided."""
    for name in ("PACELINE_THREADS", "OMP_NUM_THREADS"):
        if text := environ.get(name):
            if not text.isdigit() or int(text) < 1:
                raise ConfigError(f"{name} should be a number of threads but is {text!r}")
            return int(text)
    return max(1, usable_cores() // ranks)
