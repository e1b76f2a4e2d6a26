"""Those whose work follows a step's average on all ranks together: optimizers in shared memory, or
with a state that is divided among the ranks.

A model knows the former so that they hear of a step that has failed here: peers may be waiting in
them for this rank. It knows the latter because a rank without data has its part of their work to
do as well. They find the model by the parameters whose gradients it averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.ddp.signals import Call, Signal
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.ddp.distributed_data_parallel import DistributedDataParallel

__all__ = [
    "DividedWork",
    "StepPartner",
    "StepPartners",
    "digest_of",
    "models_of",
    "refuse_absence_from_division",
    "register_model",
    "registrations",
]


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


class DividedWork(Protocol):
    """Work of which every rank has a part."""

    def answer(self, signals: Sequence[Signal]) -> None:
        """The ranks with data do this; this one has none, and does its part."""


_NUMBER_AT = 32  # above a digest


def digest_of(signal: Signal) -> int:
    """What a rank is about to do in a divided work."""
    return signal.digest & ((1 << _NUMBER_AT) - 1)


class StepPartners:
    """The partners of one model."""

    def __init__(self) -> None:
        self._partners: weakref.WeakSet[StepPartner] = weakref.WeakSet()
        self._divided: weakref.WeakValueDictionary[int, DividedWork] = weakref.WeakValueDictionary()
        self._last_number = 0

    def add(self, partner: StepPartner) -> None:
        self._partners.add(partner)

    def add_divided(self, work: DividedWork) -> int:
        """Its number, by which ranks that have none of their own to do know whose work to answer:
        the same on all of them, because they add it together.
        """
        self._last_number = self._last_number % 255 + 1
        self._divided[self._last_number] = work
        return self._last_number

    @staticmethod
    def divided_signal(call: Call, number: int, digest: int = 0) -> Signal:
        """What a rank is about to do in the work of this number."""
        return Signal(call, digest=number << _NUMBER_AT | digest)

    @property
    def divided(self) -> int:
        """How many works each step is followed by in which every rank has a part."""
        return len(self._divided)

    def answer(self, signals: Sequence[Signal]) -> None:
        """Do this rank's part in what the others do, which have data."""
        call, number = next(
            (signal.call, signal.digest >> _NUMBER_AT)
            for signal in signals
            if signal.call.is_of_optimizer
        )
        if call is Call.OPTIMIZER_DIVIDE:
            refuse_absence_from_division(signals)
        work = self._divided.get(number)
        if work is None:
            raise ConfigError(
                f"the other ranks are at {call}, of which this rank has a part, but its own "
                "optimizer is gone. Keep it as long as the other ranks train"
            )
        work.answer(signals)

    def step_failed(self) -> None:
        for partner in list(self._partners):
            partner.step_failed()

    def catch_up(self) -> None:
        for partner in list(self._partners):
            partner.catch_up()


def refuse_absence_from_division(signals: Sequence[Signal]) -> None:
    """Called on all ranks together: raises if one of them has no data."""
    absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
    if absent:
        raise ConfigError(
            f"rank {', '.join(map(str, absent))} ran out of data, but the state of an optimizer is "
            "to be divided among the ranks anew, which needs all of them. Load checkpoints and "
            "change parameter groups when all ranks have data, or when none has"
        )


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
