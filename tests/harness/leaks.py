"""What a test may not leave behind: a child process, a thread, an environment variable, shared
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import threading
import time

# Set by libraries on first use, once per process: not a test's doing.
_TOLERATED_VARIABLES = (
    "PYTEST_",
    "KMP_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "HYPOTHESIS_",
    "COLUMNS",
    "LINES",
)
_SHM = pathlib.Path("/dev/shm")
_PR_GET_CHILD_SUBREAPER = 37
GRACE_S = 10.0  # what a killed program leaves is cleaned up by another, when that gets to run


def snapshot() -> dict[str, set[str]]:
    """Everything a leak could be, by kind."""
    return {
        "child process": _children(),
        "thread": {f"{t.name} ({t.ident})" for t in threading.enumerate()},
        "environment variable": {f"{k}={v}" for k, v in os.environ.items() if not _tolerated(k)},
        "shared memory object": _shared_memory(),
    }


def leaks(before: dict[str, set[str]]) -> list[str]:
    """What is there now and was not before, and stays for a short grace: some things are just
    ending.

    Only what is there at every look counts: other programs on the machine, and tests in other
    workers, come and go in shared memory meanwhile.
    """
    found = _new_since(before)
    deadline = time.monotonic() + GRACE_S
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        if _adopts_orphans():
            _reap(_children() - before["child process"])
        found &= _new_since(before)
    ours = {item for item in found if not _belongs_to_another_program(item)}
    # Once more: its owner may have ended after the last look and before the question whose it is.
    return sorted(map(_described, ours & _new_since(before))) if ours else []


def _new_since(before: dict[str, set[str]]) -> set[str]:
    return {f"{kind}: {item}" for kind, now in snapshot().items() for item in now - before[kind]}


def _adopts_orphans() -> bool:
    """Whether what a killed launcher leaves comes to this process: the first one of a container, or
    one that asked for it. Elsewhere a zombie is a child that somebody here forgot to wait for.
    """
    asked = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(asked), 0, 0, 0)
    return os.getpid() == 1 or asked.value != 0


def _reap(pids: set[str]) -> None:
    """Wait for those that have ended; one that still runs remains a leak."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(int(pid), os.WNOHANG)


def _described(item: str) -> str:
    """A process with its command line, which may still have changed between two looks."""
    kind, _, pid = item.partition(": ")
    return f"{item} {_command(pid) or '(zombie)'}" if kind == "child process" else item


def _belongs_to_another_program(item: str) -> bool:
    """Whether a file in shared memory is in use by a process that we did not start.

    Tests run side by side: another worker's ranks come and go while this one looks.
    """
    kind, _, path = item.partition(": ")
    if kind != "shared memory object" or not path.startswith(str(_SHM)):
        return False
    ours = _descendants()
    return any(
        int(process.name) not in ours and _uses(process, path)
        for process in pathlib.Path("/proc").glob("[0-9]*")
    )


def _uses(process: pathlib.Path, path: str) -> bool:
    """Whether a process, by its directory in /proc, has a file open or mapped.

    By the file's number and not by its name: the C library makes a semaphore under another name and
    renames it, and its maker's maps go on to show the first one.
    """
    with contextlib.suppress(OSError):
        found = os.stat(path)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        if f" {device} {found.st_ino} " in (process / "maps").read_text():
            return True
        with os.scandir(process / "fd") as descriptors:
            return any(os.readlink(entry.path) == path for entry in descriptors)
    return False


def _descendants() -> set[int]:
    """This process and all below it, those of the fork server included."""
    found = {os.getpid()}
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return found


def _tolerated(name: str) -> bool:
    return name.startswith(_TOLERATED_VARIABLES)


def _children() -> set[str]:
    """Children of this process, zombies included, but for multiprocessing's own two servants."""
    pids: set[str] = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            pids.update((task / "children").read_text().split())
    servants = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return {pid for pid in pids if not any(name in _command(pid) for name in servants)}


def _command(pid: str) -> str:
    """The command line of a process; empty for one that has ended."""
    with contextlib.suppress(OSError):
        content = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        return content.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


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
