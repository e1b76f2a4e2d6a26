"""The C library's heap: what a training step frees, the next one needs again.

By default glibc's allocator returns the top of its heap to the system as soon as some tens of
megabytes of it are free, which is once in every step of a larger model; the next step gets it
again page by page, zeroed, at a microsecond or more a page. Keeping it makes such steps up to a
third faster, with any class or none.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

__all__ = ["KEEP_MEMORY", "keep_freed_memory", "return_freed_memory"]

KEEP_MEMORY = "PACELINE_KEEP_MEMORY"  # 0: leave the allocator alone
_GLIBC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# The most that glibc accepts. It gets there by itself, but not once the other threshold is set.
_MMAP_THRESHOLD = 32 * 1024 * 1024
_HOST_MEMORY_DIVISOR = 4  # a quarter of it, for all ranks of the host together
_MIN_LIMIT = 64 * 1024 * 1024  # glibc keeps about as much by itself

_limit = 0


def keep_freed_memory(processes: int) -> bool:
    """Let this process, one of `processes` on its host, keep memory it has freed. False: the user
    decided otherwise, or the system does not allow it.

    It keeps at most its share of a quarter of the host's memory. A user who sets one of glibc's own
    variables has decided.
    """
    global _limit  # noqa: PLW0603 - the heap is the process's
    if os.environ.get(KEEP_MEMORY) == "0" or _is_set_by_user():
        return False
    limit = _host_memory() // (_HOST_MEMORY_DIVISOR * max(processes, 1))
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or limit < _MIN_LIMIT:
        return False
    if limit > _limit:
        size = min(limit, 2**31 - 1)  # the argument is an int
        if not (
            set_option(_M_TRIM_THRESHOLD, size) and set_option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        ):
            return False
        _limit = limit
    return True


def return_freed_memory() -> None:
    """Return to the system what is free now: much was freed that will not be needed again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _is_set_by_user() -> bool:
    return any(name in os.environ for name in _GLIBC_SETTINGS) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


def _host_memory() -> int:
    """Bytes of memory of the host, or of the container this runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return total
