"""While replicas run on all cores, each keeps to its own."""

from __future__ import annotations

import torch

__all__ = ["ThreadLimit"]


class ThreadLimit:
    """Sets torch's intra-op threads inside, and back to what they were outside. May be entered again inside."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._depth = 0
        self._before = 0

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
