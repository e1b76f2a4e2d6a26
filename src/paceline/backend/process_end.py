"""What a group on several hosts does before its process ends, if nobody has destroyed it.

`atexit` would not do: multiprocessing ends its processes without it, and calls its own finalizers.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from multiprocessing import util

__all__ = ["Order", "before_process_ends"]


class Order(enum.IntEnum):
    """The higher comes first."""

    SEND_THE_REST = 10
    END_CALLS = 20


def before_process_ends(method: Callable[[], None], order: Order) -> Callable[[], object]:
    """Call a method when this process ends, not a copy of it, if its object is there then. Returns
    what takes that back.
    """
    reference = weakref.WeakMethod(method)

    def run() -> None:
        found = reference()
        if found is not None:
            found()

    return util.Finalize(None, run, exitpriority=int(order)).cancel
