"""What a rank's main thread is doing, according to the kernel: running, sleeping, waiting for a
lock, stopped, gone.

A waiting thread has a function of the kernel that it waits in (`wchan`), or at least a system call
that it is in; either distinguishes a sleep from a lock and from input.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import platform

from paceline._linux import read_stat

__all__ = ["Activity", "activity_of"]

# System calls by number, for kernels that do not show `wchan`.
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
# Parts of the kernel's function names in which a thread waits for input or output.
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
    """What a thread is doing, as the state column of a table shows it."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    # Or for another thread, a condition, a queue.
    LOCK = "lock"
    # A pipe, a socket, a file, a child.
    INPUT = "input"
    # It waits, and the kernel does not show for what.
    IDLE = "idle"
    STOPPED = "stopped"
    ENDED = "ended"


def activity_of(pid: int, tid: int) -> Activity:
    """What a thread is doing at this moment."""
    process = read_stat(pid)
    if process is None or process.has_ended:
        return Activity.ENDED
    if process.is_stopped:
        return Activity.STOPPED
    thread = read_stat(pid, tid)
    if thread is not None and thread.state == "R":
        return Activity.RUNNING
    return _activity_in(_kernel_function(f"/proc/{pid}/task/{tid}"))


def _kernel_function(task: str) -> str:
    """Where in the kernel a thread waits: a function's name, or a system call's; "" if unknown."""
    with contextlib.suppress(OSError):
        name = pathlib.Path(task, "wchan").read_text().strip()
        if name not in ("", "0"):
            return name
    with contextlib.suppress(OSError, ValueError, IndexError):
        number = pathlib.Path(task, "syscall").read_text().split()[0]
        return _SYSCALLS.get(int(number), "")
    return ""


def _activity_in(kernel_function: str) -> Activity:
    if "nanosleep" in kernel_function:
        return Activity.SLEEPING
    if "futex" in kernel_function:
        return Activity.LOCK
    if any(name in kernel_function for name in _INPUT):
        return Activity.INPUT
    return Activity.IDLE
