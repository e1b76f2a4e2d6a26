"""Forwards whose backward is still to come."""

from __future__ import annotations

import weakref

import torch

from paceline.ddp.step import ForwardPass
from paceline.ddp.weighting import NO_SAMPLES, SampleCount

__all__ = ["ForwardTracker"]

_PASSES_KEPT = 8


class ForwardTracker:
    """Knows the forwards that were made, not who holds their outputs: it refers to them weakly."""

    __slots__ = ("_futures", "_passes", "awaits_backward", "sample_count")

    def __init__(self) -> None:
        self.sample_count = NO_SAMPLES  # of the forward that is running
        self.awaits_backward = False  # a forward was made, and no backward has reached it yet
        self._passes: list[weakref.ref[ForwardPass]] = []
        self._futures: list[torch.futures.Future[object]] = []

    def begin(self, sample_count: SampleCount) -> None:
        """A forward of this weight is about to run."""
        self.sample_count = sample_count

    def returned(self, forward: ForwardPass, *, reachable: bool) -> None:
        """It has finished; `reachable` if backward can come to its outputs."""
        self.awaits_backward = True
        if not reachable:
            return
        if len(self._passes) >= _PASSES_KEPT:
            # Forwards without a backward: their outputs are gone.
            self._passes = [ref for ref in self._passes if ref() is not None]
        self._passes.append(weakref.ref(forward))

    def reached(self, forward: ForwardPass) -> list[ForwardPass]:
        """Backward has come to this forward; returns those to which it has not come yet."""
        self.awaits_backward = False
        forward.spend()
        return self.outstanding()

    def outstanding(self) -> list[ForwardPass]:
        """Forwards whose backward has not come yet."""
        passes = [
            forward
            for forward in (ref() for ref in self._passes)
            if forward is not None and not forward.spent
        ]
        self._passes = [weakref.ref(forward) for forward in passes]
        return passes

    def add_future(self, future: torch.futures.Future[object]) -> None:
        """What a buffer hook has started is waited for at the end of backward."""
        self._futures.append(future)

    def wait_for_futures(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
