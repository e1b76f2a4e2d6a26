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
from torch.nn.utils.rnn import PackedSequence

from paceline._pytree import Spec, classes_in, first_difference, leaf_paths, leaves_in_objects
from paceline.dp.protocol import TensorMeta
from paceline.dp.scatter import SplitInputs
from paceline.errors import ConfigError, MismatchError

__all__ = [
    "GatherKind",
    "GatherPlan",
    "ReplicaOutputs",
    "ScalarGather",
    "check_same_structure",
    "plan_gather",
    "plan_outputs",
]


class GatherKind(enum.Enum):
    """What is done with the replicas' tensors."""

    CONCATENATE = "concatenate"
    MEAN = "mean"  # a weighted sum of scalars
    STACK = "stack"
    SAME = "same"  # all replicas have the same scalar


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """How one output comes about.

    CONCATENATE along `dim`, where replica r has `ranges[r]`; MEAN by `weights`; STACK of scalars.
    `path` is what a program would call the output.
    """

    path: str
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
        if self.kind is GatherKind.SAME:
            self._check_same(tensors)
            return tensors[0].clone()
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        terms = [
            tensor.to(wide) * weight for tensor, weight in zip(tensors, self.weights, strict=True)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(self.dtype)

    def _check_same(self, tensors: Sequence[torch.Tensor]) -> None:
        if not all(torch.equal(tensors[0], other) for other in tensors[1:]):
            raise ConfigError(
                f"the replicas returned different numbers for {self.path}: "
                f"{', '.join(str(tensor.item()) for tensor in tensors)}. Numbers in objects of "
                "your own are kept, not gathered: give the tensor a dimension, and the replicas' "
                "values are concatenated"
            )

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


@dataclasses.dataclass(frozen=True)
class ReplicaOutputs:
    """What one replica returned, taken apart: where tensors are, their metas, and what else."""

    spec: Spec
    are_tensors: tuple[bool, ...]
    metas: Sequence[TensorMeta]
    objects: Sequence[Any]


class ScalarGather:
    """How scalars become one, in all calls: "mean", "sum" or "stack".

    Keeps what is to be said about the first mean of losses whose weights are not known.
    """

    def __init__(self, how: str) -> None:
        self.how = how
        self._is_noted = False
        self._note: str | None = None

    def note_means(self, plans: Sequence[GatherPlan], split: SplitInputs) -> None:
        """Look for means that another count of the samples would change."""
        if self._is_noted or self.how != "mean":
            return
        means = [plan.path for plan in plans if plan.kind is GatherKind.MEAN]
        if means and split.unknown_counts and len({*split.sizes}) > 1:
            self._is_noted = True
            self._note = (
                f"DataParallel averaged {means[0]} equally over its replicas, as "
                f"torch.nn.DataParallel and mean() do. They got {_listed(split.sizes)} rows of the "
                f"batch, but how many samples that are is not known: {split.unknown_counts}. For "
                "the mean over the batch return the sum of the losses and their number from "
                "forward, pass scalars='sum', and divide one by the other"
            )

    def take_note(self) -> str | None:
        """What is to be said, once."""
        note, self._note = self._note, None
        return note


def _listed(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}"


def plan_outputs(
    replicas: Sequence[ReplicaOutputs], split: SplitInputs, scalars: ScalarGather
) -> list[GatherPlan]:
    """Plan every tensor that the replicas returned. Raises if they returned different things."""
    check_same_structure(replicas)
    first = replicas[0]
    leaves = zip(
        leaf_paths(first.spec, "outputs"),
        leaves_in_objects(first.spec),
        first.are_tensors,
        strict=True,
    )
    tensors = [(path, in_object) for path, in_object, is_tensor in leaves if is_tensor]
    metas = zip(*(replica.metas for replica in replicas), strict=True)
    plans = [
        plan_gather(output, split.loss_counts, split.dim, scalars.how, path, in_object)
        for (path, in_object), output in zip(tensors, metas, strict=True)
    ]
    scalars.note_means(plans, split)
    return plans


def plan_gather(
    metas: Sequence[TensorMeta],
    counts: Sequence[int],
    dim: int,
    scalars: str,
    path: str = "outputs",
    in_object: bool = False,
) -> GatherPlan:
    """Plan one output from what the replicas returned for it."""
    first = metas[0]
    for replica, meta in enumerate(metas[1:], 1):
        if meta.dtype != first.dtype or len(meta.shape) != len(first.shape):
            raise MismatchError(
                f"for {path} replica 0 returned {_describe(first)} and replica {replica} returned "
                f"{_describe(meta)}; outputs of all replicas must have the same type and number of "
                "dimensions",
                {index: _describe(each) for index, each in enumerate(metas)},
            )
    requires_grad = any(meta.requires_grad for meta in metas)
    if not first.shape:
        return _plan_scalars(path, first.dtype, counts, scalars, requires_grad, in_object)
    axis = dim if len(first.shape) > dim else 0
    _check_shapes(path, metas, axis)
    starts = [0]
    for meta in metas:
        starts.append(starts[-1] + meta.shape[axis])
    shape = (*first.shape[:axis], starts[-1], *first.shape[axis + 1 :])
    ranges = tuple(itertools.pairwise(starts))
    return GatherPlan(
        path, GatherKind.CONCATENATE, shape, first.dtype, requires_grad, ranges, dim=axis
    )


def _plan_scalars(
    path: str,
    dtype: torch.dtype,
    counts: Sequence[int],
    scalars: str,
    requires_grad: bool,
    in_object: bool,
) -> GatherPlan:
    is_number = dtype.is_floating_point or dtype.is_complex
    if in_object and not is_number:
        return GatherPlan(path, GatherKind.SAME, (), dtype, requires_grad)
    if scalars == "stack" or not is_number:
        return GatherPlan(path, GatherKind.STACK, (len(counts),), dtype, requires_grad)
    total = sum(counts) if scalars == "mean" else None
    weights = tuple(1.0 if total is None else size / total for size in counts)
    return GatherPlan(path, GatherKind.MEAN, (), dtype, requires_grad, weights=weights)


def _check_shapes(path: str, metas: Sequence[TensorMeta], axis: int) -> None:
    rest = {(*meta.shape[:axis], *meta.shape[axis + 1 :]) for meta in metas}
    if len(rest) > 1:
        shapes = ", ".join(str(meta.shape) for meta in metas)
        raise MismatchError(
            f"for {path} the replicas returned tensors of shapes {shapes}, which cannot be "
            f"concatenated along dimension {axis}. Pad them to a size that does not depend on the "
            "share of the batch",
            {index: _describe(meta) for index, meta in enumerate(metas)},
        )


def _describe(meta: TensorMeta) -> str:
    return f"{meta.dtype} of shape {meta.shape}"


def check_same_structure(replicas: Sequence[ReplicaOutputs]) -> None:
    """Raise unless all replicas returned the same structure, and equal values beside tensors."""
    first = replicas[0]
    for number, replica in enumerate(replicas[1:], 1):
        if replica.spec != first.spec:
            path, here, there = first_difference(first.spec, replica.spec, "outputs")
            raise MismatchError(
                f"replica 0 and replica {number} returned outputs of different structure: {path} "
                f"is {here} in replica 0 and {there} in replica {number}. Return the same "
                "structure for every share of the batch",
                {0: here, number: there},
            )
        if replica.are_tensors != first.are_tensors:
            kinds = zip(first.are_tensors, replica.are_tensors, strict=True)
            position = next(index for index, (one, other) in enumerate(kinds) if one != other)
            path = leaf_paths(first.spec, "outputs")[position]
            raise MismatchError(
                f"{path} is a tensor in replica {0 if first.are_tensors[position] else number} and "
                f"none in replica {number if first.are_tensors[position] else 0}. Return the same "
                "structure for every share of the batch"
            )
    if not any(PackedSequence is kind for kind in classes_in(first.spec)):
        _check_objects(replicas)
        return
    raise ConfigError(
        "the module returned a PackedSequence, whose parts cannot be concatenated. Return a padded "
        "tensor (torch.nn.utils.rnn.pad_packed_sequence with total_length=)"
    )


def _check_objects(replicas: Sequence[ReplicaOutputs]) -> None:
    for position, values in enumerate(zip(*(replica.objects for replica in replicas), strict=True)):
        if all(_equal(value, values[0]) for value in values[1:]):
            continue
        first = replicas[0]
        paths = zip(leaf_paths(first.spec, "outputs"), first.are_tensors, strict=True)
        path = [path for path, is_tensor in paths if not is_tensor][position]
        shown = ", ".join(repr(value)[:60] for value in values)
        kind = type(values[0])
        cure = "Return a tensor, so that the values can be gathered"
        if kind.__module__ != "builtins":
            cure += (
                f", or a dataclass, or register how a {kind.__name__} is taken apart with "
                "torch.utils._pytree.register_pytree_node"
            )
        raise ConfigError(
            f"{path} is not a tensor, and the replicas returned different values for it: {shown}. "
            f"{cure}"
        )


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    result = one == other
    if hasattr(result, "all"):  # arrays
        return getattr(one, "shape", None) == getattr(other, "shape", None) and bool(result.all())
    if result or (one != one and other != other):  # noqa: PLR0124 - NaN
        return True
    # Objects of classes that define no equality.
    has_equality = "__eq__" in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}
    return not has_equality and _equal_attributes(one, other)


def _equal_attributes(one: Any, other: Any) -> bool:
    attributes, others = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
    if not attributes or not others or attributes.keys() != others.keys():
        return False
    return all(_equal(value, others[name]) for name, value in attributes.items())
