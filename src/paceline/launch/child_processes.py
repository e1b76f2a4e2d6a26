"""Process facts Linux offers and Python does not: die with the parent, adopt orphans, list
descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import time

__all__ = ["die_with_parent", "outlive_parent", "adopt_orphans", "descendants", "end_descendants"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends - or now, if it is
    gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take back `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if (
        _libc.prctl(
            option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children. Zombies do not count."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry.name))
            if state == "Z":
                zombies.add(int(entry.name))
    found: list[int] = []
    front = list(children.get(root, []))
    while front:
        found += front
        front = [child for parent in front for child in children.get(parent, [])]
    return [pid for pid in found if pid not in zombies]


def end_descendants(root: int, *, wait_s: float, term_s: float) -> None:
    """See every descendant off: wait for those that end by themselves, then SIGTERM, then SIGKILL.

    The first wait is for servants that tidy up when their master is gone, such as multiprocessing's
    resource tracker: killing those at once would leave shared memory behind.
    """
    if not _gone_within(root, wait_s):
        _signal_all(root, signal.SIGTERM)
        if not _gone_within(root, term_s):
            deadline = time.monotonic() + 5.0
            while descendants(root) and time.monotonic() < deadline:
                _signal_all(root, signal.SIGKILL)
                _gone_within(root, 0.1)


def _signal_all(root: int, number: int) -> None:
    for pid in descendants(root):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _gone_within(root: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while descendants(root):
        _reap()
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    _reap()
    return True


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
