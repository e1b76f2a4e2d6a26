"""What a test may not leave behind: a child process, a thread, an environment variable, shared memory."""

from __future__ import annotations

import os
import pathlib
import threading
import time

# Set by libraries on first use, once per process: not a test's doing.
_TOLERATED_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TORCH_", "HYPOTHESIS_", "COLUMNS", "LINES")
_SHM = pathlib.Path("/dev/shm")
GRACE_S = 2.0


def snapshot() -> dict[str, set[str]]:
    """Everything a leak could be, by kind."""
    return {
        "child process": _children(),
        "thread": {f"{t.name} ({t.ident})" for t in threading.enumerate()},
        "environment variable": {f"{k}={v}" for k, v in os.environ.items() if not _tolerated(k)},
        "shared memory object": _shared_memory(),
    }


def leaks(before: dict[str, set[str]]) -> list[str]:
    """What is there now and was not before, after a short grace for things that are just ending."""
    deadline = time.monotonic() + GRACE_S
    while True:
        found = [f"{kind}: {item}" for kind, now in snapshot().items() for item in sorted(now - before[kind])]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _tolerated(name: str) -> bool:
    return name.startswith(_TOLERATED_VARIABLES)


def _children() -> set[str]:
    """Children of this process, zombies included, but for multiprocessing's own two servants."""
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "multiprocessing.forkserver" not in command and "multiprocessing.resource_tracker" not in command:
                found.add(f"{pid} {command.strip() or '(zombie)'}")
    return found


def _shared_memory() -> set[str]:
    files = {str(path) for path in _SHM.iterdir()} if _SHM.exists() else set()
    descriptors = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("/memfd:paceline"):
            descriptors.add(f"{target} as descriptor {entry.name}")
    return files | descriptors
