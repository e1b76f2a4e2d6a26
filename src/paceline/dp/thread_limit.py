"""While replicas run on all cores, each keeps to its own."""

from __future__ import annotations

import os
import weakref

import torch

__all__ = ["IntraOpThreadCap", "ThreadLimit", "threads_between_forwards"]


class ThreadLimit:
    """A context that sets torch's intra-op threads, and sets them back at its end.

    May be entered again inside.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._depth = 0
        self._before = 0

    @property
    def is_in_force(self) -> bool:
        """Whether there is nothing to set."""
        return self._depth == 0 and torch.get_num_threads() == self._threads

    def __enter__(self) -> None:
        if self._depth == 0:
            self._before = torch.get_num_threads()
            if self._before != self._threads:
                torch.set_num_threads(self._threads)
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        if self._depth == 0:
            return  # reset meanwhile
        self._depth -= 1
        if self._depth == 0 and self._before != self._threads:
            torch.set_num_threads(self._before)

    def reset(self) -> None:
        """Undo what a failed backward left: autograd does not call back then."""
        if self._depth:
            self._depth = 1
            self.__exit__()


class IntraOpThreadCap:
    """While workers exist, this process uses no more intra-op threads than one of them.

    OpenMP threads spin for milliseconds after each parallel loop, for example an optimizer step's,
    on a core that a worker needs at just that moment. A program that wants more may set them again;
    forward and backward still keep to theirs. Threads that end with their work are no such trouble:
    see `threads_between_forwards`.
    """

    def __init__(self, replicas: int, threads: int) -> None:
        self.all_threads = replicas * threads
        self._threads = threads
        self._finalizer: weakref.finalize[..., IntraOpThreadCap] | None = None

    def begin(self) -> None:
        """Lower the number of threads, once."""
        _in_force.add(self)
        before = torch.get_num_threads()
        if self._finalizer is None and before > self._threads:
            torch.set_num_threads(self._threads)
            self._finalizer = weakref.finalize(self, _restore, self._threads, before)
            self._finalizer.atexit = False

    def end(self) -> None:
        """Put it back, unless the user set another number meanwhile."""
        _in_force.discard(self)
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


def _restore(lowered: int, before: int) -> None:
    if torch.get_num_threads() == lowered:
        torch.set_num_threads(before)


_in_force: weakref.WeakSet[IntraOpThreadCap] = weakref.WeakSet()
os.register_at_fork(after_in_child=_in_force.clear)


def threads_between_forwards() -> int:
    """How many threads this process may compute with while no forward or backward is under way:
    torch's number, or those of all replicas, whose cores are idle then.

    Only for threads that end with their work.
    """
    return max([torch.get_num_threads(), *(cap.all_threads for cap in _in_force)])
