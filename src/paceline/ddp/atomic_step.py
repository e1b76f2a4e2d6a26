"""`with model.all_or_none():` one step that counts on all ranks or on none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

import torch

from paceline.ddp.config import Policy
from paceline.ddp.failures import concerns_more_than_the_step
from paceline.ddp.reducer import Reducer
from paceline.ddp.single_rank import SingleRank
from paceline.ddp.step_partners import StepPartners

__all__ = ["StepGuard"]


class StepGuard:
    """One step. `succeeded` tells afterwards whether it counts; `error` why not.

    A step is left out only if every rank knows that it failed, and by an error of its own. An error
    that concerns more than the step comes out of the block whatever the policy: leaving out the
    step would not mend it, and the ranks might leave out different ones.

    Parameters may be unfrozen inside the block, and then the model has another reducer at its end
    than at its beginning: so the guard asks for the one in force.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reducer: Callable[[], Reducer | SingleRank],
        policy: Policy,
        partners: StepPartners,
    ) -> None:
        self._model, self._reducer, self._policy = model, reducer, policy
        self._partners = partners
        self._history = reducer().history
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failures = self._agreed_failures = self._steps = 0
        self._handled_before: BaseException | None = None
        self.succeeded = False
        self.error: BaseException | None = None

    def __enter__(self) -> StepGuard:
        self.succeeded, self.error = False, None
        self._failures, self._steps = self._history.failures, self._history.steps
        self._agreed_failures = self._history.agreed_failures
        self._handled_before = sys.exception()
        if self._policy == "skip":
            self._remember()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        reducer = self._reducer()
        if error is None:
            # An error may have been caught inside the block.
            reducer.publish_dropped()
            self.succeeded = self._history.failures == self._failures
            return False
        self.error = error
        if concerns_more_than_the_step(error, self._handled_before):
            reducer.abandon_step()
            return False
        if self._history.agreed_failures == self._agreed_failures:
            # Raised outside forward, or by backward: the peers do not know yet. If they cannot be
            # told, that is what is raised.
            if self._history.steps > self._steps:
                self._partners.step_failed()
            reducer.fail(error, "the step")
            if self._history.steps > self._steps:
                error.add_note(
                    "This came after the gradients of the step had been averaged: other ranks have "
                    "applied it, this one has perhaps not. It cannot be skipped; go on from a "
                    "checkpoint."
                )
                return False
        if self._policy == "raise":
            return False
        self._restore()
        return True

    def _remember(self) -> None:
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self._model.parameters()
        ]
        self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._gradients, self._buffers = [], []
