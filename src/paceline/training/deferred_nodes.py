"""Nodes of the tree that a pass leaves as they are, for an optimizer's step to sum.

With `one_pass=True` the means over the global batch are never written. Each rank keeps its nodes.
In the step, which the ranks split among themselves, each reads its part of all nodes, adds them in
the order of the tree and updates parameters and state, in one pass over memory
(`csrc/update_parts.c`). `.grad` is this rank's first node meanwhile: it says which parameters are
to be stepped, and no more.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from operator import is_

import torch

from paceline.core.communicator import Communicator
from paceline.core.shared_memory import open_shared_memory
from paceline.core.update import TreeGradients
from paceline.errors import ConfigError
from paceline.optim.parameter_table import GradientArrays, ParameterTable
from paceline.optim.shared_step import SharedStep
from paceline.training.gradient_sums import Gradients
from paceline.training.parameter_set import Forms, ParameterSet
from paceline.training.shard_plan import BatchPlan
from paceline.training.shared_exchange import SharedExchange, TreeOrder
from paceline.training.tree_sum import Node

__all__ = ["DeferredNodes"]


@dataclasses.dataclass(frozen=True)
class _LeftSum:
    """What a pass has left."""

    held: Sequence[Sequence[torch.Tensor]]  # the gradients of each of this rank's nodes
    versions: Sequence[int]  # of the first node's
    order: TreeOrder
    nodes: Sequence[Sequence[Node]]
    forms: Forms
    plan: BatchPlan


class DeferredNodes:
    """The sums that one optimizer takes in its steps: those of all parameters of a training."""

    def __init__(
        self, exchange: SharedExchange, parameters: ParameterSet, shards: int, shared: SharedStep
    ) -> None:
        """Made by all ranks together. `shared` has the parameters, and perhaps others."""
        self.goes_with = shared
        self._exchange = exchange
        self._parameters, self._names = parameters.parameters, parameters.names
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._addresses = _AddressTable(exchange.comm, shards, len(self._parameters))
        self._left: _LeftSum | None = None

    # --- for passes -------------------------------------------------------------------------------

    def covers(self, parameters: ParameterSet) -> bool:
        """Whether the step will sum the gradients of exactly these."""
        own, others = self._parameters, parameters.parameters
        return len(own) == len(others) and all(map(is_, own, others))

    def leave(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        """Keep this rank's nodes, at least one, for the step; the first of them. Arguments are
        those of `Exchange.average_nodes`.
        """
        order = self._exchange.order(nodes, len(plan.shards))
        held = [
            [form.laid_out(gradient) for form, gradient in zip(forms, own[node], strict=True)]
            for node in order.own
        ]
        versions = [gradient._version for gradient in held[0]]
        self._left = _LeftSum(held, versions, order, nodes, forms, plan)
        return list(held[0])

    def average(self) -> None:
        """What was left, and not zeroed since, becomes means as without all this: all ranks call
        it.
        """
        left, self._left = self._left, None
        if left is None or not self._has_gradients():
            return
        self._refuse_changes(left, self._parameters)
        own = dict[Node, Gradients](
            (node, list(held)) for node, held in zip(left.order.own, left.held, strict=True)
        )
        means = self._exchange.average_nodes(own, left.nodes, left.forms, left.plan)
        for parameter, mean in zip(self._parameters, means, strict=True):
            if parameter.grad is not None:
                parameter.grad = mean

    # --- for the optimizer: `StepSums` ------------------------------------------------------------

    @property
    def are_left(self) -> bool:
        """Whether `.grad` is a node now, and no mean."""
        return self._left is not None and self._has_gradients()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._numbers

    def place(self) -> None:
        """Gradients are read wherever they are."""

    def prepare(
        self,
        present: Sequence[int],
        tables: Sequence[tuple[ParameterTable, GradientArrays]],
    ) -> bytes:
        """Let these tables take the root of the tree as their gradient; what that means, for
        comparison. Gradients that are means already are taken as they are.
        """
        left = self._left
        tables = [each for each in tables if each[0].parameters[0] in self]
        if left is None:
            for table, _ in tables:
                table.update.sum_over_ranks((), ())
            return b""
        assert len(present) == self._exchange.size, "no rank of a training is without data"
        order, column = left.order, 0
        for table, _ in tables:
            self._refuse_changes(left, table.parameters)
            self._refuse_scale(table)
            numbers = [self._numbers[id(parameter)] for parameter in table.parameters]
            rows = [[node[number].data_ptr() for number in numbers] for node in left.held]
            at = self._addresses.write(order.own_positions, column, rows)
            table.update.sum_over_tree(
                TreeGradients(
                    self._exchange.comm,
                    order.owners,
                    order.adds,
                    left.plan.total_weight,
                    at,
                    self._addresses.stride,
                )
            )
            column += len(numbers)
        return order.owners.tobytes() + order.adds.tobytes() + b"%d" % left.plan.total_weight

    def forget_gradients(self) -> None:
        """They were zeroed."""
        self._left = None

    # ----------------------------------------------------------------------------------------------

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _refuse_changes(self, left: _LeftSum, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            number = self._numbers[id(parameter)]
            node = left.held[0][number]
            if parameter.grad is None or (
                parameter.grad is node and node._version == left.versions[number]
            ):
                continue
            raise ConfigError(
                f"one_pass=True: {self._names[number]}.grad was changed after the loop over "
                "batch.shards(), where it is a part of the sum that the step takes. Clip with "
                "max_norm= of the optimizer, zero with optimizer.zero_grad(), or call "
                "training.averaged_gradients() first, which makes it the mean"
            )

    @staticmethod
    def _refuse_scale(table: ParameterTable) -> None:
        if table.update.numbers.grad_scale != 1.0:
            raise ConfigError(
                "one_pass=True: a GradScaler looks at gradients before the step has summed them. "
                "Give it to paceline.Training(state={'scaler': scaler}): sums are taken before the "
                "step then"
            )


class _AddressTable:
    """Where ranks have the gradients of their nodes: a row for each node, in memory that all have
    mapped. A rank writes those of its nodes before the meeting that begins a step, and not again
    before the one that ends it.
    """

    def __init__(self, comm: Communicator, nodes: int, parameters: int) -> None:
        self.stride = parameters
        memory = open_shared_memory(comm, 8 * nodes * parameters)
        self._rows = torch.frombuffer(memory, dtype=torch.int64).view(nodes, parameters)

    def write(self, nodes: Sequence[int], column: int, rows: Sequence[Sequence[int]]) -> int:
        """Write down the addresses of these nodes, from a column on; where that column is."""
        for node, addresses in zip(nodes, rows, strict=True):
            row = torch.frombuffer(array("q", addresses), dtype=torch.int64)
            self._rows[node, column : column + len(addresses)].copy_(row)
        return self._rows.data_ptr() + 8 * column
