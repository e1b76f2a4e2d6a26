"""The ranks that average the gradients of an optimizer's parameters, as a step that they make
together sees them: those of a `DistributedDataParallel`, or those of a `paceline.Training`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim import Optimizer

from paceline.core.communicator import Communicator
from paceline.ddp.consistency import SmallGathers
from paceline.ddp.failures import StepHistory
from paceline.ddp.step_partners import StepPartner
from paceline.ddp.step_partners import registrations as registered_models
from paceline.optim.parameter_table import GradientArrays, ParameterTable

if TYPE_CHECKING:
    from paceline.optim.shared_step import SharedStep

__all__ = [
    "AveragingRanks",
    "StepSums",
    "enter_loop",
    "leave_loop",
    "loops_of",
    "registrations",
]


class StepSums(Protocol):
    """The sums over ranks that an optimizer takes in its steps, with one_pass=True."""

    goes_with: SharedStep

    @property
    def are_left(self) -> bool:
        """Whether gradients have been left to the next step, or may be at any time."""

    def __contains__(self, parameter: torch.Tensor) -> bool: ...

    def place(self) -> None:
        """Gradients that were put elsewhere since backward go where peers find them."""

    def prepare(
        self,
        present: Sequence[int],
        tables: Sequence[tuple[ParameterTable, GradientArrays]],
    ) -> bytes:
        """Let these tables sum over the ranks that are present; what that means, for
        comparison.
        """

    def forget_gradients(self) -> None:
        """They were zeroed."""


class AveragingRanks(Protocol):
    """See the module's description."""

    @property
    def history(self) -> StepHistory:
        """How often they have averaged, and who had no data in the last step."""

    @property
    def shared_memory(self) -> Communicator | None:
        """What joins them, if they are on one host and average in shared memory now."""

    @property
    def gathers(self) -> SmallGathers:
        """How they exchange a few bytes."""

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the parameters whose gradients they average, by the parameter's id."""

    @property
    def model_name(self) -> str:
        """The class of the model, for messages."""

    @property
    def have_loops(self) -> bool:
        """Whether they average in a loop only, and may do so again in the next one."""

    @property
    def are_ready(self) -> bool:
        """Whether all of them have averaged the gradients that are there, so that all will come to
        share parameters.
        """

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether an optimizer of these parameters steps on all of these ranks, for all that is
        known. One of some parameters may be another one on each rank, as in torch's
        ZeroRedundancyOptimizer: then the others would not come.
        """

    def has_local_gradients(self, averages_used: int) -> bool:
        """Whether gradients may differ between ranks. `averages_used`: how often they had averaged
        when they made the last step.
        """

    def leave_sums(self, shared: SharedStep, optimizer: Optimizer) -> StepSums | None:
        """From now on leave sums to the steps of this optimizer, whose parameters are shared. All
        ranks call it after a step. None if that cannot be, or not yet.
        """

    def why_not_shared(self, asked_for: str) -> str:
        """Why `shared_memory` is None, as a sentence with the cure."""

    def add_partner(self, partner: StepPartner) -> None:
        """Let a partner hear of steps that fail."""

    def raise_failure(self) -> None:
        """A rank has given the step up: raise what it says."""


class _Loops:
    """The ranks of trainings whose loop over batches runs."""

    def __init__(self) -> None:
        self.ranks: weakref.WeakSet[AveragingRanks] = weakref.WeakSet()
        self.entered = 0


_loops = _Loops()


def enter_loop(ranks: AveragingRanks) -> None:
    """A training begins its loop: its optimizers may find its ranks."""
    _loops.ranks.add(ranks)
    _loops.entered += 1


def leave_loop(ranks: AveragingRanks) -> None:
    """The loop is over: a step made now is not one of the training."""
    _loops.ranks.discard(ranks)


def registrations() -> int:
    """As long as this number is the same, there are no ranks that were not there before."""
    return registered_models() + _loops.entered


def loops_of(parameters: Sequence[torch.Tensor]) -> list[AveragingRanks]:
    """The ranks of trainings in their loops that average gradients of some of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [ranks for ranks in _loops.ranks if wanted & ranks.names.keys()]
