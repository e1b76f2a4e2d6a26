"""What the kernel says a rank's main thread is doing: running, sleeping, waiting for a lock,
stopped, gone.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import platform

__all__ = ["Activity", "activity_of"]

# System calls by number, for kernels that do not name where a thread waits.
_SYSCALLS = {
    "x86_64": {
        230: "nanosleep",
        35: "nanosleep",
        202: "futex",
        0: "read",
        7: "poll",
        23: "poll",
        232: "poll",
    },
    "aarch64": {
        115: "nanosleep",
        101: "nanosleep",
        98: "futex",
        63: "read",
        73: "poll",
        22: "poll",
    },
}.get(platform.machine(), {})
_INPUT = (
    "poll",
    "pipe",
    "read",
    "recv",
    "select",
    "wait_woken",
    "do_wait",
    "unix_stream",
    "sk_wait",
)


class Activity(enum.Enum):
    """One word for the state column."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    LOCK = "lock"  # or another thread, a condition, a queue
    INPUT = "input"  # a pipe, a socket, a file, a child
    IDLE = "idle"  # it waits, and the kernel does not say for what
    STOPPED = "stopped"
    ENDED = "ended"


def activity_of(pid: int, tid: int) -> Activity:
    """What the thread does at this moment."""
    state = _state(f"/proc/{pid}/stat")
    if state is None or state in "ZX":
        return Activity.ENDED
    if state in "Tt":
        return Activity.STOPPED
    if _state(f"/proc/{pid}/task/{tid}/stat") == "R":
        return Activity.RUNNING
    return _kind_of_wait(_place_of_wait(f"/proc/{pid}/task/{tid}"))


def _state(path: str) -> str | None:
    with contextlib.suppress(OSError, IndexError):
        return pathlib.Path(path).read_text().rpartition(")")[2].split()[0]
    return None


def _place_of_wait(task: str) -> str:
    with contextlib.suppress(OSError):
        place = pathlib.Path(task, "wchan").read_text().strip()
        if place not in ("", "0"):
            return place
    with contextlib.suppress(OSError, ValueError, IndexError):
        number = pathlib.Path(task, "syscall").read_text().split()[0]
        return _SYSCALLS.get(int(number), "")
    return ""


def _kind_of_wait(place: str) -> Activity:
    if "nanosleep" in place:
        return Activity.SLEEPING
    if "futex" in place:
        return Activity.LOCK
    return Activity.INPUT if any(name in place for name in _INPUT) else Activity.IDLE
