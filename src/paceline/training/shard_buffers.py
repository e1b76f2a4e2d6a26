"""Buffers (running statistics and the like): every shard starts from those of the pass's beginning;
afterwards they become the mean over all shards, or what shard 0 made of them.

Only buffers that a shard changed are touched: the mean of equal numbers may differ from them in the
last bit, and a constant must stay one.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from paceline._torch_internals import foreach_copy_
from paceline.core.abi import native_status
from paceline.core.kernels import copy_pieces, differing_pieces
from paceline.errors import StepError
from paceline.training.gradient_sums import SUMMED_AS
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.tree_sum import TreeSum

__all__ = ["BufferSet", "ChangedBuffers", "NamedBuffer", "ShardBuffers", "named_buffers"]

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


class BufferSet:
    """The buffers of a model, for many passes."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = named_buffers(model)
        self._forms: list[_Form] = []
        self._groups: list[_Group] = []

    def current(self) -> list[torch.Tensor]:
        """What the model holds now."""
        return [buffer.current for buffer in self.buffers]

    def groups_of(self, tensors: Sequence[torch.Tensor]) -> tuple[list[_Form], list[_Group]]:
        """What these tensors are, and how they are looked at: the same in nearly every pass."""
        forms = [_form_of(tensor) for tensor in tensors]
        if forms != self._forms:
            self._forms, self._groups = forms, _groups(forms)
        return self._forms, self._groups


class ShardBuffers:
    """The buffers in one pass over this rank's shards."""

    def __init__(self, buffers: BufferSet, plan: BatchPlan) -> None:
        self._set, self._plan = buffers, plan
        self._buffers = buffers.buffers
        self._tensors = buffers.current()
        self._forms, self._groups = buffers.groups_of(self._tensors)
        self._starts = [group.kept(group.row(self._tensors)) for group in self._groups]
        self.changed: dict[int, ChangedBuffers] = {}

    def take(self, shard: Shard) -> None:
        """After a shard: keep what it has changed, and put back what there was before."""
        changes = ChangedBuffers([], {})
        if self._buffers:
            self._take(shard, changes)
        self.changed[shard.number] = changes

    @torch.no_grad()
    def _take(self, shard: Shard, changes: ChangedBuffers) -> None:
        currents = self._set.current()
        self._check_forms(currents, shard)
        every: list[int] = []
        for index, (group, start) in enumerate(zip(self._groups, self._starts, strict=True)):
            row = group.row(currents)
            numbers = group.differing(row, start)
            every += numbers
            if numbers and (group.is_averaged or shard.number == 0):
                changes.numbers.extend(numbers)
                changes.values[index] = group.kept(row)
        self._put_back(currents, every)

    @torch.no_grad()
    def put_back(self) -> None:
        """Forget what was changed since."""
        currents = self._set.current()
        changed = list[int]()
        for group, start in zip(self._groups, self._starts, strict=True):
            changed += group.differing(group.row(currents), start)
        self._put_back(currents, changed)

    def _put_back(self, currents: Sequence[torch.Tensor], changed: Sequence[int]) -> None:
        for buffer, tensor, current in zip(self._buffers, self._tensors, currents, strict=True):
            if current is not tensor:
                buffer.set(tensor)
        for group, start in zip(self._groups, self._starts, strict=True):
            group.write(start, self._tensors, changed)

    def _check_forms(self, currents: Sequence[torch.Tensor], shard: Shard) -> None:
        for buffer, current, form in zip(self._buffers, currents, self._forms, strict=True):
            if (found := _form_of(current)) != form:
                raise StepError(
                    f"buffer {buffer.name} had shape {tuple(form.shape)} and {form.dtype} before "
                    f"shard {shard.number}, and {tuple(found.shape)} and {found.dtype} after it "
                    f"(device {form.device}, now {found.device}): buffers must keep their form "
                    "within a step"
                )

    def finish(self, changed: Mapping[int, ChangedBuffers]) -> set[str]:
        """Set the buffers from what all shards changed; returns the names of those."""
        numbers = {number for changes in changed.values() for number in changes.numbers}
        if numbers:
            self._set_all(numbers, changed)
        return {self._buffers[number].name for number in numbers}

    @torch.no_grad()
    def _set_all(self, numbers: set[int], changed: Mapping[int, ChangedBuffers]) -> None:
        for index, group in enumerate(self._groups):
            if any(index in changes.values for changes in changed.values()):
                # Integers are those of shard 0, the only ones that were kept.
                row = self._mean(index, changed) if group.is_averaged else changed[0].values[index]
                group.write(row, self._tensors, numbers)

    def _mean(self, index: int, changed: Mapping[int, ChangedBuffers]) -> torch.Tensor:
        start = self._starts[index]
        tree = TreeSum[torch.Tensor](len(self._plan.shards), torch.add)
        for shard in self._plan.shards:
            row = changed[shard.number].values.get(index, start)
            row = row.to(start.device, SUMMED_AS.get(row.dtype, row.dtype))
            tree.add_leaf(shard.number, row * shard.weight)
        return tree.root / self._plan.total_weight


class _Form(NamedTuple):
    """What a buffer is."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _form_of(tensor: torch.Tensor) -> _Form:
    return _Form(tensor.shape, tensor.dtype, tensor.device)


class _Group:
    """Buffers of one type on one device, looked at as one row of numbers.

    In host memory the core copies and compares them, each at its own address, in one call.
    """

    def __init__(self, numbers: Sequence[int], forms: Sequence[_Form]) -> None:
        own = [forms[number] for number in numbers]
        self._numbers = numbers
        self._shapes = [form.shape for form in own]
        self._sizes = [form.shape.numel() for form in own]
        self._dtype = own[0].dtype
        self._nbytes = array("Q", [size * self._dtype.itemsize for size in self._sizes])
        self._offsets = [0, *itertools.accumulate(self._nbytes)][:-1]
        self._has_core = own[0].device.type == "cpu" and native_status().available
        self.is_averaged = self._dtype.is_floating_point or self._dtype.is_complex

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their numbers: a copy, or for one by itself what the model holds."""
        members = [tensors[number] for number in self._numbers]
        if len(members) == 1:
            return members[0].detach().reshape(-1)
        if not self._can_copy(members):
            return torch.cat([member.detach().reshape(-1) for member in members])
        row = torch.empty(sum(self._sizes), dtype=self._dtype)
        copy_pieces(self._places_in(row), _addresses(members), self._nbytes)
        return row

    def kept(self, row: torch.Tensor) -> torch.Tensor:
        """A row that nobody else changes."""
        return row if len(self._numbers) > 1 else row.clone()

    def differing(self, row: torch.Tensor, other: torch.Tensor) -> list[int]:
        """The numbers of the buffers that differ in two rows. Compared as bytes: NaN equals
        nothing, and -0.0 equals 0.0.
        """
        if self._has_core:
            places = self._places_in(row), self._places_in(other)
            return [self._numbers[index] for index in differing_pieces(*places, self._nbytes)]
        one, two = row.view(torch.uint8), other.view(torch.uint8)
        if torch.equal(one, two):
            return []
        differs = np.logical_or.reduceat(one.ne(two).cpu().numpy(), self._offsets)
        return [self._numbers[index] for index in np.flatnonzero(differs).tolist()]

    def write(
        self, row: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: Collection[int]
    ) -> None:
        """Set those of the buffers that have these numbers to what a row says."""
        chosen = [index for index, number in enumerate(self._numbers) if number in numbers]
        if not chosen:
            return
        targets = [tensors[self._numbers[index]] for index in chosen]
        if self._can_copy(targets):
            row = row.to(self._dtype)
            places = self._places_in(row)
            sources = array("Q", [places[index] for index in chosen])
            nbytes = array("Q", [self._nbytes[index] for index in chosen])
            copy_pieces(_addresses(targets), sources, nbytes)
            increment_version(targets)
            return
        parts = row.split(self._sizes)
        foreach_copy_(targets, [parts[index].view(self._shapes[index]) for index in chosen])

    def _can_copy(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._has_core and all(map(_is_contiguous, tensors))

    def _places_in(self, row: torch.Tensor) -> array[int]:
        start = row.data_ptr()
        return array("Q", [start + offset for offset in self._offsets])


_is_contiguous, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.data_ptr


def _addresses(tensors: Sequence[torch.Tensor]) -> array[int]:
    return array("Q", map(_data_ptr, tensors))


def _groups(forms: Sequence[_Form]) -> list[_Group]:
    alike: dict[object, list[int]] = {}
    for number, form in enumerate(forms):
        nbytes = form.shape.numel() * form.dtype.itemsize
        if nbytes:
            large = number if nbytes >= _LARGE_BYTES else None
            alike.setdefault((form.dtype, form.device, large), []).append(number)
    return [_Group(numbers, forms) for numbers in alike.values()]
