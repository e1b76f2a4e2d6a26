"""One rank: there is nobody to average with. Only micro-batches of different sizes change anything:
they are weighed against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.ddp.backward_observer import BackwardObserver
from paceline.ddp.buckets import Bucket
from paceline.ddp.step import Phase, Step
from paceline.ddp.weighting import AverageRule, weights_of

__all__ = ["SingleRank"]


class SingleRank(BackwardObserver):
    """The reducer of a model that has no peers, or whose gradients all go another way."""

    # What a reducer of several ranks has, for those who look at it.
    buckets: Sequence[Bucket] = ()
    frozen: Sequence[torch.Tensor] = ()
    was_replanned = False

    def tracks(self, sync: bool) -> bool:
        """Whether a forward needs to be tracked at all."""
        return not sync or self.window.open or self._actions.before_scatter is not None

    def _finish_step(self, step: Step) -> None:
        contribution = step.count_samples(self.window)
        if step.phase is Phase.ACCUMULATING:
            return
        (weight,) = weights_of([contribution], AverageRule(by_ranks=self.rule.by_ranks))
        if weight not in (0.0, 1.0):
            for managed in self.managed:
                if managed.parameter.grad is not None:
                    managed.parameter.grad.mul_(weight)
        if self._actions.before_scatter is not None:
            self._actions.before_scatter()

    def fail(self, error: BaseException | None, where: str) -> None:
        """Nobody waits: this rank's error is all there is."""
        del error, where
        self.history.step_failed()
        self.history.failure_agreed()
        self.abandon_step()

    def publish_dropped(self) -> None:
        if self.step is not None and self.step.phase is Phase.DROPPED:
            self.fail(None, "backward")
