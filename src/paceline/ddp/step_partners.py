"""Those whose work follows a step's average on all ranks together: optimizers in shared memory.

A model knows them so that they hear of a step that has failed here: peers may be waiting in them
for this rank. They find the model by the parameters whose gradients it averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from paceline.ddp.distributed_data_parallel import DistributedDataParallel

__all__ = ["StepPartner", "StepPartners", "models_of", "register_model", "registrations"]


class _Registry:
    """The models of this process."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.registrations = 0

    def add(self, model: DistributedDataParallel) -> None:
        self.models.add(model)
        self.registrations += 1


_registry = _Registry()


class StepPartner(Protocol):
    """What a model tells those who follow its steps."""

    def step_failed(self) -> None:
        """This rank will not come to the part of the step that all make together."""

    def catch_up(self) -> None:
        """The others are not in a step: see what they have made without this rank."""


class StepPartners:
    """The partners of one model."""

    def __init__(self) -> None:
        self._partners: weakref.WeakSet[StepPartner] = weakref.WeakSet()

    def add(self, partner: StepPartner) -> None:
        self._partners.add(partner)

    def step_failed(self) -> None:
        for partner in list(self._partners):
            partner.step_failed()

    def catch_up(self) -> None:
        for partner in list(self._partners):
            partner.catch_up()


def register_model(model: DistributedDataParallel) -> None:
    """Make a model known to `models_of`."""
    _registry.add(model)


def registrations() -> int:
    """How many models have been registered so far: as long as it is the same, `models_of` finds
    none that it has not found before.
    """
    return _registry.registrations


def models_of(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """The models that average gradients of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        model
        for model in list(_registry.models)
        if any(id(parameter) in wanted for parameter in model.module.parameters())
    ]
