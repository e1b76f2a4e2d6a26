"""The ranks of a `DistributedDataParallel` as its optimizers see them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.core.communicator import Communicator
from paceline.ddp import DistributedDataParallel
from paceline.ddp.consistency import SmallGathers
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.failures import StepHistory
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_partners import StepPartner, models_of
from paceline.errors import ConfigError
from paceline.optim.averaging_ranks import AveragingRanks, loops_of
from paceline.optim.one_pass import OnePass
from paceline.optim.shared_step import SharedStep

__all__ = ["ModelRanks", "find_ranks"]


def find_ranks(parameters: Sequence[torch.Tensor]) -> AveragingRanks | None:
    """The ranks that average the gradients of these parameters, and did so last; None if there are
    none, or but one process.

    The last ones: a model that was dropped may not be gone yet, on some of the ranks.
    """
    found = loops_of(parameters)
    found += [ModelRanks(m) for m in models_of(parameters) if m.process_group.size() > 1]
    return max(found, key=lambda ranks: ranks.history.last_average, default=None)


class ModelRanks:
    """`AveragingRanks` of a model."""

    have_loops = False

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

    def leave_sums(self, shared: SharedStep, optimizer: Optimizer) -> OnePass | None:
        model = self.model
        # All ranks have to be here, and backward must be over.
        if model.reducer.history.absent or model.reducer.in_backward:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in shared]
        return OnePass(shared, model, DeferredSum(parameters, optimizer))

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
