"""Buffers (running statistics and the like): every shard starts from those of the pass's beginning;
afterwards they become the mean over all shards, or what shard 0 made of them.

Only buffers that a shard changed are touched: the mean of equal numbers may differ from them in the
last bit, and a constant must stay one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from paceline._torch_internals import foreach_add
from paceline.errors import StepError
from paceline.training.gradient_sums import SUMMED_AS
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.tree_sum import TreeSum

__all__ = ["BufferValues", "NamedBuffer", "ShardBuffers", "named_buffers"]

# Values of the buffers that one shard changed, by the buffer's number.
BufferValues: TypeAlias = dict[int, torch.Tensor]


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

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Let the model hold this tensor again, with this value."""
        with torch.no_grad():
            tensor.copy_(value)
        if self.current is not tensor:
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
        self._start = [tensor.detach().clone() for tensor in self._tensors]
        self.changed: dict[int, BufferValues] = {}

    def take(self, shard: Shard) -> None:
        """After a shard: keep what it has changed, and put back what there was before."""
        values: BufferValues = {}
        for number, (buffer, start) in enumerate(zip(self._buffers, self._start, strict=True)):
            value = buffer.current
            if _same_bits(value, start):
                continue
            if value.shape != start.shape or value.dtype != start.dtype:
                raise StepError(
                    f"buffer {buffer.name} had shape {tuple(start.shape)} and {start.dtype} before "
                    f"shard {shard.number}, and {tuple(value.shape)} and {value.dtype} after it: "
                    "buffers must keep their form within a step"
                )
            if _is_averaged(start) or shard.number == 0:
                values[number] = value.detach().clone()
            buffer.set(self._tensors[number], start)
        self.changed[shard.number] = values

    def put_back(self) -> None:
        """Forget what was changed since."""
        for buffer, tensor, start in zip(self._buffers, self._tensors, self._start, strict=True):
            buffer.set(tensor, start)

    def finish(self, changed: Mapping[int, BufferValues]) -> set[str]:
        """Set the buffers from what all shards changed; returns the names of those."""
        numbers = sorted({number for values in changed.values() for number in values})
        averaged = [number for number in numbers if _is_averaged(self._start[number])]
        for number, value in zip(averaged, self._means(changed, averaged), strict=True):
            self._buffers[number].set(self._tensors[number], value)
        for number in set(numbers) - set(averaged):
            self._buffers[number].set(self._tensors[number], changed[0][number])
        return {self._buffers[number].name for number in numbers}

    def _means(
        self, changed: Mapping[int, BufferValues], numbers: Sequence[int]
    ) -> list[torch.Tensor]:
        if not numbers:
            return []
        tree = TreeSum[list[torch.Tensor]](len(self._plan.shards), foreach_add)
        for shard in self._plan.shards:
            values = changed[shard.number]
            tree.add_leaf(
                shard.number,
                [_summand(values.get(n, self._start[n])) * shard.weight for n in numbers],
            )
        return [total / self._plan.total_weight for total in tree.root]


def _summand(value: torch.Tensor) -> torch.Tensor:
    return value.to(SUMMED_AS.get(value.dtype, value.dtype))


def _is_averaged(buffer: torch.Tensor) -> bool:
    """Whether numbers of this type have a mean; integers and booleans follow shard 0."""
    return buffer.is_floating_point() or buffer.is_complex()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether nothing changed. Compared as integers: NaN equals nothing, and -0.0 equals 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not _is_averaged(one):
        return torch.equal(one, other)
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    integer = _INTEGER_OF_SIZE[one.element_size()]
    return torch.equal(one.detach().view(integer), other.view(integer))


_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
