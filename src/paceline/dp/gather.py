"""How the outputs of replicas become one: tensors are joined, losses averaged. Pure: descriptions
in, a plan out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.dp.structure import Spec
from paceline.errors import ConfigError, MismatchError

__all__ = ["GatherPlan", "TensorMeta", "join_leaf", "same_structure", "weights_of"]


class TensorMeta(NamedTuple):
    """What the main process must know of a tensor of a worker."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False
    channels_last: bool = False


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """How one output comes about: "cat" along `dim` at `ranges`, "mean" by `weights`, or "stack" of
    scalars.
    """

    how: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    ranges: tuple[tuple[int, int], ...] = ()
    weights: tuple[float, ...] = ()
    dim: int = 0


def weights_of(sizes: Sequence[int]) -> tuple[float, ...]:
    """Each replica's part of the batch."""
    total = sum(sizes)
    return tuple(size / total for size in sizes)


def join_leaf(
    metas: Sequence[TensorMeta], sizes: Sequence[int], dim: int, scalars: str
) -> GatherPlan:
    """Plan one output from what the replicas returned for it."""
    first = metas[0]
    for replica, meta in enumerate(metas[1:], 1):
        if meta.dtype != first.dtype or len(meta.shape) != len(first.shape):
            raise MismatchError(
                f"replica 0 returned {_describe(first)} where replica {replica} returned {_describe(meta)}; "
                "outputs of all replicas must have the same type and rank",
                {index: _describe(each) for index, each in enumerate(metas)},
            )
    needs = any(meta.requires_grad for meta in metas)
    if not first.shape:
        return _join_scalars(first.dtype, sizes, scalars, needs)
    axis = dim if len(first.shape) > dim else 0
    _check_shapes(metas, axis)
    starts = [0]
    for meta in metas:
        starts.append(starts[-1] + meta.shape[axis])
    shape = (*first.shape[:axis], starts[-1], *first.shape[axis + 1 :])
    return GatherPlan("cat", shape, first.dtype, needs, tuple(itertools.pairwise(starts)), dim=axis)


def _join_scalars(
    dtype: torch.dtype, sizes: Sequence[int], scalars: str, needs: bool
) -> GatherPlan:
    if scalars == "stack" or not (dtype.is_floating_point or dtype.is_complex):
        return GatherPlan("stack", (len(sizes),), dtype, needs)
    weights = weights_of(sizes) if scalars == "mean" else (1.0,) * len(sizes)
    return GatherPlan("mean", (), dtype, needs, weights=weights)


def _check_shapes(metas: Sequence[TensorMeta], axis: int) -> None:
    rest = {(*meta.shape[:axis], *meta.shape[axis + 1 :]) for meta in metas}
    if len(rest) > 1:
        raise MismatchError(
            "the replicas returned tensors of shapes "
            + ", ".join(str(meta.shape) for meta in metas)
            + f", which cannot be joined along dimension {axis}. Pad to a size that does not depend on the chunk",
            {index: _describe(meta) for index, meta in enumerate(metas)},
        )


def _describe(meta: TensorMeta) -> str:
    return f"{meta.dtype} of shape {meta.shape}"


def same_structure(specs: Sequence[Spec], objects: Sequence[Sequence[Any]]) -> None:
    """All replicas returned the same structure, and the same values where these are no tensors."""
    for replica, spec in enumerate(specs[1:], 1):
        if spec != specs[0]:
            raise MismatchError(
                f"replica 0 and replica {replica} returned outputs of different structure: {specs[0]} and {spec}"
            )
    for position, values in enumerate(zip(*objects, strict=True)):
        if any(
            type(value) is not type(values[0]) or not _equal(value, values[0])
            for value in values[1:]
        ):
            raise ConfigError(
                f"the replicas returned different values for output {position}, which is no tensor: "
                f"{', '.join(repr(value)[:60] for value in values)}. Return a tensor, so that it can be joined"
            )


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
