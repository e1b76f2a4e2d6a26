"""The gradients of a pass: taken from the parameters after each shard, added in the tree, and set
when the sum over all shards is known.

Those of the last shard stay loose until another one begins: an exchange that reads all sums in any
case may add them on its way, and save a pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

from paceline.training.gradient_sums import (
    NO_GRADIENT,
    GradientKinds,
    Gradients,
    add_gradients,
    merged_kinds,
    summands,
    weighted,
)
from paceline.training.parameter_set import ParameterSet
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.tree_sum import Node, TreeSum

__all__ = ["ShardGradients"]


_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class ShardGradients:
    """The gradients of this rank's shards in one pass."""

    def __init__(self, parameters: ParameterSet, plan: BatchPlan) -> None:
        self._parameters, self._set = parameters.parameters, parameters
        # Those of passes before, to which this one's are added: accumulation.
        self._carried = list(map(_gradient_of, self._parameters))
        self.carries = any(gradient is not None for gradient in self._carried)
        self._is_clear = not self.carries
        self._tree = TreeSum[Gradients](len(plan.shards), add_gradients)
        self._kinds: set[GradientKinds] = set()
        # The number of the shard that is a node by itself, beside a sibling perhaps.
        self.loose: int | None = None

    @property
    def nodes(self) -> dict[Node, Gradients]:
        """Sums of this rank's shards, by node of the tree."""
        return self._tree.nodes

    def begin(self) -> None:
        """Before a shard: backward would add to what it finds in `.grad`, and needs the memory that
        sums make free.
        """
        self.add_loose()
        if not self._is_clear:
            self.clear()

    def clear(self) -> None:
        """Leave nothing in `.grad`."""
        for parameter in self._parameters:
            parameter.grad = None
        self._is_clear = True

    def take(self, shard: Shard) -> bool:
        """After a shard: keep its gradients. False if backward left none.

        Raises:
            StepError: they are of another kind than those of the shards before.
        """
        gradients = list(map(_gradient_of, self._parameters))
        if all(gradient is None for gradient in gradients):
            return False
        self.clear()
        gradients, kinds = summands(gradients)
        self._kinds.add(kinds)
        if len(self._kinds) > 1:
            self.kinds()  # now, while all ranks can still hear of it
        self.loose = shard.number
        self.nodes[0, shard.number] = weighted(gradients, shard.weight)
        return True

    def add_loose(self) -> None:
        """Add the gradients of the last shard to those of its sibling, if that is here."""
        if self.loose is not None:
            self._tree.add_leaf(self.loose, self.nodes.pop((0, self.loose)))
            self.loose = None

    def take_nodes(self) -> dict[Node, Gradients]:
        """The sums, which are not needed here any more."""
        nodes = dict(self.nodes)
        self.forget()
        return nodes

    def forget(self) -> None:
        """Count no shard as computed."""
        self.nodes.clear()
        self.loose = None

    def kinds(self) -> GradientKinds:
        """What this rank's shards have computed.

        Raises:
            StepError: a gradient is sparse in one shard and dense in another.
        """
        return merged_kinds(list(self._kinds) or [NO_GRADIENT * len(self._parameters)])

    def put_back(self) -> None:
        """Leave `.grad` as it was before the pass."""
        for parameter, carried in zip(self._parameters, self._carried, strict=True):
            parameter.grad = carried
        self._is_clear = not self.carries

    def finish(self, means: Gradients) -> None:
        """Set `.grad` from the means over all shards. Uses them up."""
        if not self.carries and self._set.are_summed_as_they_are:
            for parameter, mean in zip(self._parameters, means, strict=True):
                parameter.grad = mean
            return
        for parameter, mean, carried in zip(self._parameters, means, self._carried, strict=True):
            if mean is None:
                parameter.grad = carried
            else:
                gradient = _as_gradient_of(parameter, mean)
                parameter.grad = gradient if carried is None else _accumulated(carried, gradient)


def _as_gradient_of(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The mean in the type of the parameter."""
    if mean.dtype is parameter.dtype:
        return mean
    if parameter.is_complex():
        mean = torch.view_as_complex(mean)
    return mean.to(parameter.dtype)


def _accumulated(carried: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if carried.is_sparse or mean.is_sparse:
            return carried + mean
        return carried.add_(mean)
