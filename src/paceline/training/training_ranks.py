"""The ranks of a training as its optimizers see them: those of `paceline.optim` keep parameters and
state once per host and split the step over the ranks, as they do with DistributedDataParallel.

Inside the loop over batches gradients are the same on every rank whenever a step is made, and every
rank makes the same steps. Outside of it nobody says so: a step made there is each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.communicator import Communicator
from paceline.ddp.failures import StepHistory
from paceline.ddp.step_partners import StepPartner
from paceline.errors import StepError
from paceline.optim.averaging_ranks import enter_loop, leave_loop
from paceline.optim.shared_step import SharedStep
from paceline.training.deferred_nodes import DeferredNodes
from paceline.training.parameter_set import ParameterSet
from paceline.training.shared_exchange import SharedExchange

__all__ = ["TrainingRanks"]


class TrainingRanks:
    """The ranks of one training, all on one host: `AveragingRanks` for its optimizers.

    Args:
        exchange: between them.
        model: what is trained.
        optimizers: those of the training; every rank steps each of them.
        shards: how many there are in a global batch.
        may_leave_sums: whether sums may be left to the steps of an optimizer that takes them.
    """

    have_loops = True

    def __init__(
        self,
        exchange: SharedExchange,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        *,
        shards: int,
        may_leave_sums: bool,
    ) -> None:
        self._exchange, self._shards = exchange, shards
        self._may_leave_sums = may_leave_sums and exchange.comm.reads_directly
        self._is_in_loop = False
        self._optimizers = list(optimizers)
        self._parameters = ParameterSet(model)
        self._deferred: DeferredNodes | None = None
        self.names: Mapping[int, str] = {}
        self.model_name = type(model).__name__
        self.history = StepHistory()
        self.gathers = _Gathers(exchange)

    def enter_loop(self, parameters: ParameterSet) -> None:
        """The loop over batches begins, or goes on with other parameters."""
        self._parameters = parameters
        self.names = {
            id(parameter): name
            for name, parameter in zip(parameters.names, parameters.parameters, strict=True)
        }
        self._is_in_loop = True
        enter_loop(self)

    def leave_loop(self) -> None:
        """The loop over batches is over, or was left."""
        self._is_in_loop = False
        leave_loop(self)

    def count_pass(self) -> None:
        """The gradient of a global batch is complete."""
        self.history.step_averaged()

    @property
    def deferred(self) -> DeferredNodes | None:
        """What passes leave to the steps of an optimizer, as long as that shares parameters."""
        deferred = self._deferred
        return None if deferred is None or deferred.goes_with.is_released else deferred

    def average_what_is_left(self) -> None:
        """Let `.grad` be means, where sums were left to a step; all ranks call it."""
        if self._deferred is not None:
            self._deferred.average()

    # --- for optimizers: `AveragingRanks` ---------------------------------------------------------

    @property
    def shared_memory(self) -> Communicator | None:
        return self._exchange.comm if self._is_in_loop else None

    @property
    def are_ready(self) -> bool:
        return self._is_in_loop and self.history.steps > 0

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool:
        wanted = set(map(id, parameters))
        return any(
            wanted == {id(p) for group in each.param_groups for p in group["params"]}
            for each in self._optimizers
        )

    def has_local_gradients(self, averages_used: int) -> bool:
        return False

    def leave_sums(self, shared: SharedStep, optimizer: Optimizer) -> DeferredNodes | None:
        if not self._may_leave_sums or not all(p in shared for p in self._parameters.parameters):
            return None
        if self._deferred is not None and self._deferred.covers(self._parameters):
            self._deferred.goes_with = shared
        else:
            self._deferred = DeferredNodes(self._exchange, self._parameters, self._shards, shared)
        return self._deferred

    def why_not_shared(self, asked_for: str) -> str:
        return (
            f"{asked_for}: ranks of paceline.Training share parameters inside the loop over "
            f"training.batches() only. Make the step there, or leave {asked_for} out"
        )

    def add_partner(self, partner: StepPartner) -> None:
        # No rank gives a step up: a pass that fails on one of them raises on all.
        pass

    def raise_failure(self) -> None:
        raise StepError("a rank has given up a step of paceline.Training")


class _Gathers:
    """A few bytes of every rank, by the exchange of the training."""

    members: tuple[int, ...] = ()

    def __init__(self, exchange: SharedExchange) -> None:
        self._exchange, self.rank = exchange, exchange.rank

    def all_gather_small(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensors[0] for _, tensors in self._exchange.gather({}, [row])])

    def all_gather_text(self, text: str) -> list[str]:
        return [facts["text"] for facts, _ in self._exchange.gather({"text": text})]
