"""How a batch is divided among replicas. Pure: inputs and sizes in, ranges and shares out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from paceline._pytree import (
    Opens,
    Spec,
    Whole,
    classes_in,
    flatten,
    is_taken_apart_by_attributes,
    tensors_in,
)
from paceline.errors import ConfigError

__all__ = ["Ranges", "SplitInputs", "Splitter", "even_ranges", "split_inputs"]

Ranges = list[tuple[int, int]]
Splitter = Callable[[Any, Ranges], Sequence[Any]]


def even_ranges(batch: int, replicas: int) -> Ranges:
    """Cut `batch` samples into at most `replicas` non-empty ranges.

    They are in order, and their sizes differ by at most one.
    """
    count = max(1, min(batch, replicas))
    size, longer = divmod(batch, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


@dataclasses.dataclass
class SplitInputs:
    """Inputs taken apart, and what each replica gets of every leaf.

    For a tensor `factors` has its rows per sample, or 0 if every replica gets the whole; for an
    object with a declared split it is None, and `parts` has an object for each replica.
    `unknown_counts` says why it is not known how many samples each replica has; empty if it is.
    """

    spec: Spec
    leaves: list[Any]
    factors: list[int | None]
    parts: list[Sequence[Any] | None]
    ranges: Ranges
    dim: int
    unknown_counts: str = ""

    def with_leaves(self, leaves: list[Any]) -> SplitInputs:
        """The same for other inputs: tensors of the same shapes, and nothing else."""
        return SplitInputs(
            self.spec,
            leaves,
            self.factors,
            self.parts,
            self.ranges,
            self.dim,
            self.unknown_counts,
        )

    @property
    def sizes(self) -> list[int]:
        """How much of the batch each replica gets."""
        return [stop - start for start, stop in self.ranges]

    @property
    def loss_counts(self) -> list[int]:
        """How much the loss of each replica counts in a mean: its samples, or all the same."""
        return [1] * len(self.ranges) if self.unknown_counts else self.sizes

    def share(self, index: int, replica: int) -> Any:
        """The replica's share of leaf `index`: a view of a tensor, or an object."""
        factor, leaf, parts = self.factors[index], self.leaves[index], self.parts[index]
        if parts is not None:
            return parts[replica]
        if not factor:
            return leaf
        start, stop = self.ranges[replica]
        if self.dim == 0:
            return leaf[start * factor : stop * factor]  # quicker than narrow
        return leaf.narrow(self.dim, start * factor, (stop - start) * factor)


def split_inputs(
    inputs: Any,
    replicas: int,
    dim: int,
    splitters: Mapping[type, Splitter],
    leaf_types: tuple[type, ...],
) -> SplitInputs:
    """Take the inputs apart and decide who gets what."""
    spec, leaves = flatten(inputs, leaf_types)
    if PackedSequence in classes_in(spec):
        _refuse_packed(inputs, leaf_types)
    batch = _batch_size(leaves, dim, leaf_types)
    opens: Opens = lambda value: _is_split_by_attributes(value, batch, dim)  # noqa: E731
    if any(map(opens, leaves)):
        spec, leaves = flatten(inputs, leaf_types, opens)
    ranges = even_ranges(batch, replicas)
    factors: list[int | None] = []
    parts: list[Sequence[Any] | None] = []
    for position, leaf in enumerate(leaves):
        leaf_parts: Sequence[Any] | None = None
        factor: int | None = 0
        if isinstance(leaf, Whole):
            leaves[position] = leaf.value
        elif leaf_types and isinstance(leaf, leaf_types):
            leaf_parts, factor = _custom_parts(leaf, ranges, splitters), None
        elif isinstance(leaf, torch.Tensor):
            factor = _rows_per_sample(leaf, batch, dim)
        factors.append(factor)
        parts.append(leaf_parts)
    unknown_counts = _why_counts_are_unknown(leaves, factors, parts, dim)
    return SplitInputs(spec, leaves, factors, parts, ranges, dim, unknown_counts)


def _why_counts_are_unknown(
    leaves: Sequence[Any],
    factors: Sequence[int | None],
    parts: Sequence[Sequence[Any] | None],
    dim: int,
) -> str:
    """A count is known where we cut the batch ourselves, and all tensors agree about its size."""
    custom = [leaf for leaf, made in zip(leaves, parts, strict=True) if made is not None]
    if custom:
        return f"a {type(custom[0]).__name__} was split by your own function"
    rows = {leaf.shape[dim] for leaf, factor in zip(leaves, factors, strict=True) if factor}
    if len(rows) > 1:
        return f"inputs have {', '.join(map(str, sorted(rows)))} rows along dimension {dim}"
    return ""


def _refuse_packed(inputs: Any, leaf_types: tuple[type, ...]) -> None:
    _, leaves = flatten(inputs, (*leaf_types, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise ConfigError(
            "DataParallel cannot split a PackedSequence: its rows are not sorted by sample. Pass "
            "the padded tensor and the lengths, and pack them in forward; or declare how to split "
            "it with split={PackedSequence: ...}"
        )


def _batch_size(leaves: list[Any], dim: int, leaf_types: tuple[type, ...]) -> int:
    """The size of the first tensor that has the dimension.

    Else the length of the first object with a declared split; else the size that all tensors in
    other objects have.
    """
    sizes = _sizes_along(dim, leaves)
    if sizes:
        return next((size for size in sizes if size != 1), 1)
    custom: list[Any] = [leaf for leaf in leaves if leaf_types and isinstance(leaf, leaf_types)]
    if not custom:
        found = {*_sizes_along(dim, tensors_in(leaves))} - {0}
        return found.pop() if len(found) == 1 else 1
    try:
        return len(custom[0])
    except TypeError as error:
        raise ConfigError(
            "DataParallel cannot determine the batch size: no input is a tensor, and "
            f"{type(custom[0]).__name__} has no len(). Give the class a __len__, or pass a tensor "
            "along"
        ) from error


def _sizes_along(dim: int, leaves: Iterable[Any]) -> list[int]:
    return [
        leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim
    ]


def _is_split_by_attributes(value: Any, batch: int, dim: int) -> bool:
    """Whether an object is made of the samples of this batch: a cache, an encoding.

    Then each tensor in it has a row per sample, or no rows at all. Any other object goes to every
    replica as it is.
    """
    if isinstance(value, torch.Tensor) or not is_taken_apart_by_attributes(value):
        return False
    return {*_sizes_along(dim, tensors_in(value))} - {0} == {batch}


def _rows_per_sample(leaf: torch.Tensor, batch: int, dim: int) -> int:
    """How many entries along `dim` belong to one sample; 0 if every replica gets the whole."""
    if leaf.dim() <= dim or (leaf.shape[dim] == 1 and batch != 1):
        return 0
    if leaf.layout is not torch.strided:
        raise ConfigError(
            f"DataParallel cannot split a tensor of layout {leaf.layout}; pass it as Whole(tensor) "
            "to give it to every replica, or declare how to split it with split="
        )
    rows = leaf.shape[dim]
    if batch == 0 or rows % batch:
        if rows == batch:
            return 1
        raise ConfigError(
            f"DataParallel splits inputs along dimension {dim}: the batch has {batch} samples "
            f"there, but one input has shape {tuple(leaf.shape)}, and {rows} is no multiple of "
            f"{batch}. Pass it as paceline.dp.Whole(tensor) to give all of it to every replica"
        )
    return rows // batch


def _custom_parts(leaf: Any, ranges: Ranges, splitters: Mapping[type, Splitter]) -> Sequence[Any]:
    splitter = next(function for kind, function in splitters.items() if isinstance(leaf, kind))
    parts = splitter(leaf, ranges)
    if len(parts) != len(ranges):
        raise ConfigError(
            f"split[{type(leaf).__name__}] returned {len(parts)} parts for {len(ranges)} replicas; "
            "it is called with the object and a list of (start, stop) and returns one part for each"
        )
    return parts
