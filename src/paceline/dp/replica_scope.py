"""Whether code runs inside a replica of a DataParallel.

A DataParallel inside another one does not split its inputs again: in a replica, which is one
process or one thread of several, it is the module it wraps.
"""

from __future__ import annotations

import threading

__all__ = ["ReplicaScope", "is_inside_replica", "stay_inside_replica"]


class _Thread(threading.local):
    depth = 0


_thread = _Thread()
_process_is_replica = False


def is_inside_replica() -> bool:
    """Whether this thread is in a replica's forward, or this process is a worker."""
    return _process_is_replica or _thread.depth > 0


def stay_inside_replica() -> None:
    """This process is a worker."""
    global _process_is_replica  # noqa: PLW0603 - a worker is one for life
    _process_is_replica = True


class ReplicaScope:
    """A context: a replica's forward runs in this thread."""

    def __enter__(self) -> None:
        _thread.depth += 1

    def __exit__(self, *exc: object) -> None:
        _thread.depth -= 1
