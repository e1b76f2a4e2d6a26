"""The gradients of a pass: taken from the parameters after each shard, added in the tree, and set
when the sum over all shards is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline._torch_internals import foreach_div_
from paceline.training.gradient_sums import (
    NO_GRADIENT,
    GradientKinds,
    Gradients,
    add_gradients,
    kinds_of,
    merged_kinds,
    summand,
    weighted,
    with_values,
)
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.tree_sum import Node, TreeSum

__all__ = ["ShardGradients"]


class ShardGradients:
    """The gradients of this rank's shards in one pass."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plan: BatchPlan) -> None:
        self._parameters, self._total_weight = parameters, plan.total_weight
        # Those of passes before, to which this one's are added: accumulation.
        self._carried = [parameter.grad for parameter in parameters]
        self._tree = TreeSum[Gradients](len(plan.shards), add_gradients)

    @property
    def nodes(self) -> dict[Node, Gradients]:
        """Sums of this rank's shards, by node of the tree."""
        return self._tree.nodes

    def clear(self) -> None:
        """Before a shard: backward would add to what it finds in `.grad`."""
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, shard: Shard) -> bool:
        """After a shard: add its gradients. False if backward left none."""
        gradients = [summand(parameter.grad) for parameter in self._parameters]
        if all(gradient is None for gradient in gradients):
            return False
        self.clear()
        with torch.no_grad():
            self._tree.add_leaf(shard.number, weighted(gradients, shard.weight))
        return True

    def kinds(self) -> GradientKinds:
        """What this rank's shards have computed."""
        found = [kinds_of(gradients) for gradients in self.nodes.values()]
        return merged_kinds(found or [NO_GRADIENT * len(self._parameters)])

    def put_back(self) -> None:
        """Leave `.grad` as it was before the pass."""
        for parameter, carried in zip(self._parameters, self._carried, strict=True):
            parameter.grad = carried

    def finish(self, total: Gradients) -> None:
        """Set `.grad` from the sums over all shards. Uses them up."""
        dense = [gradient for gradient in total if gradient is not None and not gradient.is_sparse]
        with torch.no_grad():
            if dense and self._total_weight != 1:
                foreach_div_(dense, self._total_weight)
            every = zip(self._parameters, total, self._carried, strict=True)
            for parameter, gradient, carried in every:
                parameter.grad = carried
                if gradient is not None:
                    mean = self._mean(parameter, gradient)
                    parameter.grad = mean if carried is None else _accumulated(carried, mean)

    def _mean(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The final value in the type of the parameter; dense sums are divided already."""
        if gradient.is_sparse:
            return with_values(gradient, gradient.values() / self._total_weight)
        if parameter.is_complex():
            gradient = torch.view_as_complex(gradient)
        return gradient.to(parameter.dtype)


def _accumulated(carried: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    if carried.is_sparse or mean.is_sparse:
        return carried + mean
    return carried.add_(mean)
