"""How the outputs of replicas become one: tensors are concatenated, losses averaged.

Planning is pure: descriptions in, a `GatherPlan` out.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from paceline._pytree import Spec
from paceline.dp.protocol import TensorMeta
from paceline.errors import ConfigError, MismatchError

__all__ = ["GatherKind", "GatherPlan", "check_same_structure", "plan_gather"]


class GatherKind(enum.Enum):
    """What is done with the replicas' tensors."""

    CONCATENATE = "concatenate"
    MEAN = "mean"  # a weighted sum of scalars
    STACK = "stack"


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """How one output comes about.

    CONCATENATE along `dim`, where replica r has `ranges[r]`; MEAN by `weights`; STACK of scalars.
    """

    kind: GatherKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    ranges: tuple[tuple[int, int], ...] = ()
    weights: tuple[float, ...] = ()
    dim: int = 0

    def gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output, from what the replicas returned. Means are taken in double precision."""
        if self.kind is GatherKind.CONCATENATE:
            return torch.cat(tuple(tensors), self.dim)
        if self.kind is GatherKind.STACK:
            return torch.stack(tuple(tensors))
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        terms = [
            tensor.to(wide) * weight for tensor, weight in zip(tensors, self.weights, strict=True)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(self.dtype)

    def gradient_share(self, gradient: torch.Tensor, replica: int) -> torch.Tensor:
        """One replica's part of the gradient of the output."""
        if self.kind is GatherKind.STACK:
            return gradient[replica]
        if self.kind is GatherKind.MEAN:
            return gradient * self.weights[replica]
        start, stop = self.ranges[replica]
        if self.dim == 0:
            return gradient[start:stop]
        return gradient.narrow(self.dim, start, stop - start)


def plan_gather(
    metas: Sequence[TensorMeta], sizes: Sequence[int], dim: int, scalars: str
) -> GatherPlan:
    """Plan one output from what the replicas returned for it."""
    first = metas[0]
    for replica, meta in enumerate(metas[1:], 1):
        if meta.dtype != first.dtype or len(meta.shape) != len(first.shape):
            raise MismatchError(
                f"replica 0 returned {_describe(first)} where replica {replica} returned "
                f"{_describe(meta)}; outputs of all replicas must have the same type and number of "
                "dimensions",
                {index: _describe(each) for index, each in enumerate(metas)},
            )
    requires_grad = any(meta.requires_grad for meta in metas)
    if not first.shape:
        return _plan_scalars(first.dtype, sizes, scalars, requires_grad)
    axis = dim if len(first.shape) > dim else 0
    _check_shapes(metas, axis)
    starts = [0]
    for meta in metas:
        starts.append(starts[-1] + meta.shape[axis])
    shape = (*first.shape[:axis], starts[-1], *first.shape[axis + 1 :])
    ranges = tuple(itertools.pairwise(starts))
    return GatherPlan(GatherKind.CONCATENATE, shape, first.dtype, requires_grad, ranges, dim=axis)


def _plan_scalars(
    dtype: torch.dtype, sizes: Sequence[int], scalars: str, requires_grad: bool
) -> GatherPlan:
    if scalars == "stack" or not (dtype.is_floating_point or dtype.is_complex):
        return GatherPlan(GatherKind.STACK, (len(sizes),), dtype, requires_grad)
    total = sum(sizes) if scalars == "mean" else None
    weights = tuple(1.0 if total is None else size / total for size in sizes)
    return GatherPlan(GatherKind.MEAN, (), dtype, requires_grad, weights=weights)


def _check_shapes(metas: Sequence[TensorMeta], axis: int) -> None:
    rest = {(*meta.shape[:axis], *meta.shape[axis + 1 :]) for meta in metas}
    if len(rest) > 1:
        shapes = ", ".join(str(meta.shape) for meta in metas)
        raise MismatchError(
            f"the replicas returned tensors of shapes {shapes}, which cannot be concatenated along "
            f"dimension {axis}. Pad them to a size that does not depend on the share of the batch",
            {index: _describe(meta) for index, meta in enumerate(metas)},
        )


def _describe(meta: TensorMeta) -> str:
    return f"{meta.dtype} of shape {meta.shape}"


def check_same_structure(specs: Sequence[Spec], objects: Sequence[Sequence[Any]]) -> None:
    """Raise unless all replicas returned the same structure, and equal values beside tensors."""
    for replica, spec in enumerate(specs[1:], 1):
        if spec != specs[0]:
            raise MismatchError(
                f"replica 0 and replica {replica} returned outputs of different structure: "
                f"{specs[0]} and {spec}"
            )
    for position, values in enumerate(zip(*objects, strict=True)):
        if any(
            type(value) is not type(values[0]) or not _equal(value, values[0])
            for value in values[1:]
        ):
            shown = ", ".join(repr(value)[:60] for value in values)
            raise ConfigError(
                f"the replicas returned different values for output {position}, which is not a "
                f"tensor: {shown}. Return a tensor, so that the values can be gathered"
            )


def _equal(left: Any, right: Any) -> bool:
    return left is right or bool(left == right)
