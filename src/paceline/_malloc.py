"""The C library's heap: what a training step frees, the next one needs again.

By default the allocator of glibc gives the top of its heap back to the system as soon as some tens
of megabytes of it are free, which is once in every step of a larger model; the next step gets it
again page by page, zeroed, at a microsecond or more a page. Keeping it makes such steps up to a
third faster, with any class or none.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

__all__ = ["KEEP_MEMORY", "keep_freed_memory"]

KEEP_MEMORY = "PACELINE_KEEP_MEMORY"  # 0: leave the allocator alone
_THEIR_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD = (
    32 * 1024 * 1024
)  # the most that glibc takes; it gets there by itself, but not once the other is set
_SHARE = 4  # of the memory of the host, all its ranks together
_LEAST = 64 * 1024 * 1024  # glibc keeps about as much by itself

_kept = 0


def keep_freed_memory(processes: int) -> bool:
    """Let this process, one of so many on its host, keep memory it has freed. False: someone
    decided otherwise.

    It keeps at most its share of a quarter of the host's memory. Whoever sets one of glibc's own
    variables has decided.
    """
    global _kept  # noqa: PLW0603 - the heap is the process's
    if os.environ.get(KEEP_MEMORY) == "0" or _is_set_by_user():
        return False
    limit = _memory_of_host() // (_SHARE * max(processes, 1))
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or limit < _LEAST:
        return False
    if limit > _kept:
        size = min(limit, 2**31 - 1)  # the argument is an int
        if not (
            set_option(_M_TRIM_THRESHOLD, size) and set_option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        ):
            return False
        _kept = limit
    return True


def _is_set_by_user() -> bool:
    return any(name in os.environ for name in _THEIR_SETTINGS) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


def _memory_of_host() -> int:
    """Bytes of it, or of the container this runs in."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(found, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return found
