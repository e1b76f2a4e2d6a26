"""`with model.all_or_none():` one step that counts on all ranks or on none."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

import torch

from paceline.ddp.reducer import Reducer
from paceline.errors import StepError

__all__ = ["StepGuard", "Policy"]

Policy = Literal["raise", "skip"]


class StepGuard:
    """One step. `succeeded` tells afterwards whether it counts; `error` why not."""

    def __init__(self, model: torch.nn.Module, reducer: Reducer, policy: Policy) -> None:
        self._model, self._reducer, self._policy = model, reducer, policy
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failures = self._steps = 0
        self.succeeded = False
        self.error: BaseException | None = None

    def __enter__(self) -> StepGuard:
        self.succeeded, self.error = False, None
        self._failures, self._steps = self._reducer.failures, self._reducer.steps
        self._reducer.defer_failure = (
            True  # this block sees the traceback, a failed backward does not
        )
        if self._policy == "skip":
            self._remember()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._reducer.defer_failure = False
        if error is None:
            self.succeeded = (
                self._reducer.failures == self._failures
            )  # an error may have been caught inside the block
            return False
        if not isinstance(error, Exception):
            self._reducer.abandon_step()
            return False  # Ctrl-C and exit are not failures of a step
        self.error = error
        if self._reducer.failures == self._failures and not isinstance(error, StepError):
            self._reducer.fail(
                error, "the step"
            )  # raised outside forward and backward: nobody knows yet
            if self._reducer.steps > self._steps:
                error.add_note(
                    "This came after the gradients of the step had been averaged: other ranks have applied it, this "
                    "one has perhaps not. It cannot be skipped; go on from a checkpoint."
                )
                return False
        if self._policy == "raise":
            return False
        self._restore()
        return True

    def _remember(self) -> None:
        self._gradients = [
            (one, None if one.grad is None else one.grad.clone())
            for one in self._model.parameters()
        ]
        self._buffers = [(one, one.clone()) for one in self._model.buffers()]

    def _restore(self) -> None:
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._gradients, self._buffers = [], []
