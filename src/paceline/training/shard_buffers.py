"""Buffers (running statistics and the like): every shard starts from those of the pass's beginning;
afterwards they become the mean over all shards, or what shard 0 made of them.

Only buffers that a shard changed are touched: the mean of equal numbers may differ from them in the
last bit, and a constant must stay one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from paceline._torch_internals import foreach_copy_
from paceline.errors import StepError
from paceline.training.gradient_sums import SUMMED_AS
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.tree_sum import TreeSum

__all__ = ["ChangedBuffers", "NamedBuffer", "ShardBuffers", "named_buffers"]

# Buffers of this size and more are not copied to see whether they have changed.
_LARGE_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class ChangedBuffers:
    """What one shard has changed: the numbers of the buffers, and the values of the groups they are
    in, by the group's number.
    """

    numbers: list[int]
    values: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class NamedBuffer:
    """The place of a buffer in the model; a forward may put another tensor there."""

    name: str
    module: nn.Module
    key: str

    @property
    def current(self) -> torch.Tensor:
        """What the model holds now."""
        found: torch.Tensor = getattr(self.module, self.key)
        return found

    def set(self, tensor: torch.Tensor) -> None:
        """Let the model hold this tensor."""
        setattr(self.module, self.key, tensor)


def named_buffers(model: nn.Module) -> list[NamedBuffer]:
    """All buffers of a model, each once, in its order."""
    found: dict[torch.Tensor, NamedBuffer] = {}
    for path, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            found.setdefault(tensor, NamedBuffer(f"{path}.{key}" if path else key, module, key))
    return list(found.values())


class ShardBuffers:
    """The buffers in one pass over this rank's shards."""

    def __init__(self, buffers: Sequence[NamedBuffer], plan: BatchPlan) -> None:
        self._buffers, self._plan = buffers, plan
        self._tensors = [buffer.current for buffer in buffers]
        self._forms = [(tensor.shape, tensor.dtype) for tensor in self._tensors]
        self._groups = _groups(self._tensors)
        self._start = {n: value for group in self._groups for n, value in group.start_values()}
        self.changed: dict[int, ChangedBuffers] = {}

    def take(self, shard: Shard) -> None:
        """After a shard: keep what it has changed, and put back what there was before."""
        changes = ChangedBuffers([], {})
        if self._buffers:
            self._take(shard, changes)
        self.changed[shard.number] = changes

    @torch.no_grad()
    def _take(self, shard: Shard, changes: ChangedBuffers) -> None:
        currents = [buffer.current for buffer in self._buffers]
        self._check_forms(currents, shard)
        every: list[int] = []
        for index, group in enumerate(self._groups):
            row = group.row(currents)
            numbers = group.changed(row)
            every += numbers
            if numbers and (group.is_averaged or shard.number == 0):
                changes.numbers.extend(numbers)
                changes.values[index] = group.kept(row)
        self._put_back(currents, every)

    @torch.no_grad()
    def put_back(self) -> None:
        """Forget what was changed since."""
        currents = [buffer.current for buffer in self._buffers]
        rows = [(group, group.row(currents)) for group in self._groups]
        self._put_back(currents, [n for group, row in rows for n in group.changed(row)])

    def _put_back(self, currents: Sequence[torch.Tensor], changed: Sequence[int]) -> None:
        for buffer, tensor, current in zip(self._buffers, self._tensors, currents, strict=True):
            if current is not tensor:
                buffer.set(tensor)
        if changed:
            foreach_copy_(
                [self._tensors[number] for number in changed],
                [self._start[number] for number in changed],
            )

    def _check_forms(self, currents: Sequence[torch.Tensor], shard: Shard) -> None:
        for buffer, current, (shape, dtype) in zip(
            self._buffers, currents, self._forms, strict=True
        ):
            if current.shape != shape or current.dtype is not dtype:
                raise StepError(
                    f"buffer {buffer.name} had shape {tuple(shape)} and {dtype} before "
                    f"shard {shard.number}, and {tuple(current.shape)} and {current.dtype} after "
                    "it: buffers must keep their form within a step"
                )

    def finish(self, changed: Mapping[int, ChangedBuffers]) -> set[str]:
        """Set the buffers from what all shards changed; returns the names of those."""
        numbers = {number for changes in changed.values() for number in changes.numbers}
        if numbers:
            self._set(numbers, changed)
        return {self._buffers[number].name for number in numbers}

    @torch.no_grad()
    def _set(self, numbers: set[int], changed: Mapping[int, ChangedBuffers]) -> None:
        for index, group in enumerate(self._groups):
            if any(index in changes.values for changes in changed.values()):
                # Integers are those of shard 0, the only ones that were kept.
                row = (
                    self._mean(index, group, changed)
                    if group.is_averaged
                    else changed[0].values[index]
                )
                values = {n: value for n, value in group.values_in(row) if n in numbers}
                foreach_copy_([self._tensors[n] for n in values], list(values.values()))

    def _mean(
        self, index: int, group: _Group, changed: Mapping[int, ChangedBuffers]
    ) -> torch.Tensor:
        tree = TreeSum[torch.Tensor](len(self._plan.shards), torch.add)
        for shard in self._plan.shards:
            row = changed[shard.number].values.get(index, group.start)
            row = row.to(group.start.device, SUMMED_AS.get(row.dtype, row.dtype))
            tree.add_leaf(shard.number, row * shard.weight)
        return tree.root / self._plan.total_weight


class _Group:
    """Buffers of one type on one device, looked at as one row of numbers."""

    def __init__(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self._numbers = numbers
        self._members = [tensors[number] for number in numbers]
        self._sizes = [tensor.numel() for tensor in self._members]
        bytes_before = np.cumsum([0, *(tensor.nbytes for tensor in self._members)])
        self._starts = bytes_before[:-1]
        self.start = self.kept(self.row(tensors))
        self.is_averaged = _is_averaged(self.start)

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their numbers: a copy, or for a large one what the model holds."""
        parts = [tensors[number].detach().reshape(-1) for number in self._numbers]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def kept(self, row: torch.Tensor) -> torch.Tensor:
        """A row that nobody else changes."""
        return row if len(self._numbers) > 1 else row.clone()

    def start_values(self) -> list[tuple[int, torch.Tensor]]:
        """Each buffer's number, and its value at the beginning of the pass."""
        return self.values_in(self.start)

    def values_in(self, row: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Each buffer's number, and its value in a row."""
        parts = row.split(self._sizes)
        return [
            (number, part.view(member.shape))
            for number, part, member in zip(self._numbers, parts, self._members, strict=True)
        ]

    def changed(self, row: torch.Tensor) -> list[int]:
        """The numbers of the buffers that are not what they were. Compared as bytes: NaN equals
        nothing, and -0.0 equals 0.0.
        """
        one, other = row.view(torch.uint8), self.start.view(torch.uint8)
        if torch.equal(one, other):
            return []
        differs = np.logical_or.reduceat(one.ne(other).cpu().numpy(), self._starts)
        return [self._numbers[index] for index in np.flatnonzero(differs).tolist()]


def _groups(tensors: Sequence[torch.Tensor]) -> list[_Group]:
    alike: dict[object, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            large = number if tensor.nbytes >= _LARGE_BYTES else None
            alike.setdefault((tensor.dtype, tensor.device, large), []).append(number)
    return [_Group(numbers, tensors) for numbers in alike.values()]


def _is_averaged(buffer: torch.Tensor) -> bool:
    """Whether numbers of this type have a mean; integers and booleans follow shard 0."""
    return buffer.is_floating_point() or buffer.is_complex()
