"""`workers="auto"`: runs the first batches whole, the next ones split; keeps what is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Autotune"]

_CALLS_EACH = 4  # of which the first warms up
_WORTH_IT = 0.95


class Autotune:
    """Times forwards: whole ones first, so that OpenMP's threads do not disturb the workers."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._whole: list[float] = []
        self._split: list[float] = []

    def run(self, whole: Callable[[], Any], split: Callable[[], Any]) -> Any:
        """One forward, whole or split, whichever is next."""
        times, forward = (
            (self._whole, whole) if len(self._whole) < _CALLS_EACH else (self._split, split)
        )
        started = self._clock()
        result = forward()
        times.append(self._clock() - started)
        return result

    @property
    def is_over(self) -> bool:
        """Whether both were timed often enough."""
        return len(self._split) == _CALLS_EACH

    @property
    def splitting_pays(self) -> bool:
        """Whether the best split forward was clearly faster than the best unsplit one."""
        return min(self._split[1:]) < _WORTH_IT * min(self._whole[1:])

    def describe(self) -> str:
        """The two times, in words."""
        whole_ms, split_ms = min(self._whole[1:]) * 1e3, min(self._split[1:]) * 1e3
        return f"{whole_ms:.2f} ms unsplit, {split_ms:.2f} ms split"
