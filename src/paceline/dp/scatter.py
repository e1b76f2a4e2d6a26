"""How a batch is divided among replicas. Pure: sizes in, ranges out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.dp.structure import Spec, Whole, flatten
from paceline.errors import ConfigError

__all__ = ["Ranges", "Splitter", "SplitInputs", "even_ranges", "split_inputs"]

Ranges = list[tuple[int, int]]
Splitter = Callable[[Any, Ranges], Sequence[Any]]


def even_ranges(batch: int, replicas: int) -> Ranges:
    """Cut `batch` samples into at most `replicas` non-empty ranges, in order, sizes differing by at
    most one.
    """
    count = max(1, min(batch, replicas))
    size, longer = divmod(batch, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


@dataclasses.dataclass
class SplitInputs:
    """Inputs taken apart, and what each replica gets of every leaf."""

    spec: Spec
    leaves: list[Any]
    factors: list[
        int | None
    ]  # tensors: rows per sample, 0 for "whole"; None: `parts` holds one object per replica
    parts: list[Sequence[Any] | None]
    ranges: Ranges
    dim: int

    def again(self, leaves: list[Any]) -> SplitInputs:
        """The same for other inputs; tensors of the same shapes, and nothing else."""
        return SplitInputs(self.spec, leaves, self.factors, self.parts, self.ranges, self.dim)

    @property
    def sizes(self) -> list[int]:
        """Samples per replica."""
        return [stop - start for start, stop in self.ranges]

    def share(self, index: int, replica: int) -> Any:
        """Replica's share of leaf `index`: a view of a tensor, or an object."""
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
    batch = _batch_size(leaves, dim, leaf_types)
    ranges = even_ranges(batch, replicas)
    factors: list[int | None] = []
    parts: list[Sequence[Any] | None] = []
    for position, leaf in enumerate(leaves):
        pieces: Sequence[Any] | None = None
        factor: int | None = None
        if isinstance(leaf, Whole):
            leaves[position] = leaf.value
            factor = 0
        elif leaf_types and isinstance(leaf, leaf_types):
            pieces = _custom(leaf, ranges, splitters)
        elif isinstance(leaf, torch.Tensor):
            factor = _rows_per_sample(leaf, batch, dim)
        else:
            factor = 0
        factors.append(factor)
        parts.append(pieces)
    return SplitInputs(spec, leaves, factors, parts, ranges, dim)


def _batch_size(leaves: list[Any], dim: int, leaf_types: tuple[type, ...]) -> int:
    """The first tensor that has the dimension says it; else the first object with a declared split."""
    sizes = [
        leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim
    ]
    if sizes:
        return int(next((size for size in sizes if size != 1), 1))
    custom: list[Any] = [leaf for leaf in leaves if leaf_types and isinstance(leaf, leaf_types)]
    if not custom:
        return 1
    try:
        return len(custom[0])
    except TypeError as error:
        raise ConfigError(
            f"DataParallel cannot tell the batch size: no input is a tensor, and {type(custom[0]).__name__} has no "
            "len(). Give the class a __len__, or pass a tensor along"
        ) from error


def _rows_per_sample(leaf: torch.Tensor, batch: int, dim: int) -> int:
    """0: every replica gets the whole tensor. Else how many entries along `dim` belong to one
    sample.
    """
    if leaf.dim() <= dim or (leaf.shape[dim] == 1 and batch != 1):
        return 0
    if leaf.layout is not torch.strided:
        raise ConfigError(
            f"DataParallel cannot split a tensor of layout {leaf.layout}; pass it as Whole(tensor) to give it to every "
            "replica, or declare how with split="
        )
    rows = leaf.shape[dim]
    if batch == 0 or rows % batch:
        if rows == batch:
            return 1
        raise ConfigError(
            f"DataParallel splits inputs along dimension {dim}: the batch has {batch} samples there, but one input has "
            f"shape {tuple(leaf.shape)}, and {rows} is no multiple of {batch}. Pass it as paceline.dp.Whole(tensor) to "
            "give all of it to every replica"
        )
    return rows // batch


def _custom(leaf: Any, ranges: Ranges, splitters: Mapping[type, Splitter]) -> Sequence[Any]:
    splitter = next(function for kind, function in splitters.items() if isinstance(leaf, kind))
    pieces = splitter(leaf, ranges)
    if len(pieces) != len(ranges):
        raise ConfigError(
            f"split[{type(leaf).__name__}] gave {len(pieces)} parts for {len(ranges)} replicas; it is called with the "
            "object and a list of (start, stop) and returns one part for each"
        )
    return pieces
