"""The ranks that average the gradients of an optimizer's parameters, as a step that they make
together sees them: those of a `DistributedDataParallel`, or those of a `paceline.Training`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.core.communicator import Communicator
from paceline.ddp import DistributedDataParallel
from paceline.ddp.consistency import SmallGathers
from paceline.ddp.failures import StepHistory
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_partners import StepPartner, models_of
from paceline.ddp.step_partners import registrations as registered_models
from paceline.errors import ConfigError

__all__ = [
    "AveragingRanks",
    "ModelRanks",
    "enter_loop",
    "find_ranks",
    "leave_loop",
    "registrations",
]


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
    """As long as this number is the same, `find_ranks` finds none that it has not found before."""
    return registered_models() + _loops.entered


def find_ranks(parameters: Sequence[torch.Tensor]) -> AveragingRanks | None:
    """The ranks that average the gradients of these parameters, and did so last; None if there are
    none, or but one process.

    The last ones: a model that was dropped may not be gone yet, on some of the ranks.
    """
    wanted = {id(parameter) for parameter in parameters}
    found: list[AveragingRanks] = [ranks for ranks in _loops.ranks if wanted & ranks.names.keys()]
    found += [ModelRanks(m) for m in models_of(parameters) if m.process_group.size() > 1]
    return max(found, key=lambda ranks: ranks.history.last_average, default=None)


class ModelRanks:
    """The ranks of a `DistributedDataParallel`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> DistributedDataParallel:
        model = self._model()
        if model is None:
            raise ConfigError(
                "the DistributedDataParallel whose parameters this optimizer shares is gone; make "
                "a new optimizer"
            )
        return model

    @property
    def history(self) -> StepHistory:
        return self.model.reducer.history

    @property
    def shared_memory(self) -> Communicator | None:
        return self.model.shared_memory

    @property
    def gathers(self) -> SmallGathers:
        return self._reducer.transport

    @property
    def names(self) -> Mapping[int, str]:
        return {id(entry.parameter): entry.name for entry in self._reducer.managed}

    @property
    def model_name(self) -> str:
        return type(self.model.module).__name__

    @property
    def are_ready(self) -> bool:
        reducer = self.model.reducer
        return bool(reducer.history.steps and not (reducer.history.absent or reducer.window.open))

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool:
        return isinstance(self.model.reducer, Reducer) and self.names.keys() <= set(
            map(id, parameters)
        )

    def has_local_gradients(self, averages_used: int) -> bool:
        # A backward inside `no_sync()` came after the average, or there was none.
        reducer = self.model.reducer
        return reducer.window.open or reducer.history.steps == averages_used

    def why_not_shared(self, asked_for: str) -> str:
        return (
            f"{asked_for} needs a model whose gradients are averaged in shared memory, and this "
            f"{self.model_name}'s are not (backend "
            f"{dist.get_backend(self.model.process_group)!r}): all ranks on one host, backend "
            "'paceline', parameters on the CPU, no sparse gradients, no communication hook, no "
            f"mixed precision. Leave {asked_for} out"
        )

    def add_partner(self, partner: StepPartner) -> None:
        self.model.step_partners.add(partner)

    def raise_failure(self) -> None:
        self._reducer.participate_without_data(lambda _signals: None)

    @property
    def _reducer(self) -> Reducer:
        reducer = self.model.reducer
        assert isinstance(reducer, Reducer)
        return reducer
