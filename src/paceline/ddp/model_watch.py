"""Does a module still have the parameters that its buckets were planned for?

Asked before every forward that may have a backward, so it has to cost next to nothing: parameters
and layers are compared by identity, parameters also by address. Only what differs is looked at more
closely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from paceline._torch_internals import implementation_of, member_tables

__all__ = ["ModelWatch", "PlannedParameter", "changes_between", "describe_kind"]

_address_of: Callable[[Any], int] = torch.Tensor.data_ptr
_values_of: Callable[[Any], Iterable[Any]] = dict.values


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedParameter:
    """A parameter as it was when the buckets were planned."""

    name: str
    parameter: torch.Tensor
    kind: str

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> PlannedParameter:
        return cls(name, parameter, describe_kind(parameter))


def describe_kind(parameter: torch.Tensor) -> str:
    """Everything about a parameter that a bucket depends on."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{tuple(parameter.shape)} {dtype} on {parameter.device}"


class ModelWatch:
    """The members of a module and the memory of the parameters in its plan."""

    def __init__(
        self,
        module: torch.nn.Module,
        planned: Sequence[PlannedParameter],
        *,
        relies_on_hooks: bool,
    ) -> None:
        self.planned = planned
        self._tables = member_tables(module)
        self._entries = sum(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._members = [*chain.from_iterable(map(_values_of, self._filled))]
        self._parameters = [entry.parameter for entry in planned]
        self._addresses = [*map(_address_of, self._parameters)]
        # Whoever swaps the tensor behind a parameter takes its hooks away.
        self._hooked = self._parameters if relies_on_hooks else []
        self._implementations = [*map(implementation_of, self._hooked)]

    def has_changed(self) -> bool:
        """Whether anything is not as it was; it need not concern the plan."""
        # Layers without parameters or children have empty tables. Their length is enough.
        if sum(map(len, self._tables)) != self._entries:
            return True
        members = [*chain.from_iterable(map(_values_of, self._filled))]
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            return True
        if [*map(implementation_of, self._hooked)] != self._implementations:
            return True
        addresses = [*map(_address_of, self._parameters)]
        if addresses == self._addresses:
            return False
        if any(entry.kind != describe_kind(entry.parameter) for entry in self.planned):
            return True  # until there is another plan
        self._addresses = addresses
        return False


def changes_between(
    planned: Sequence[PlannedParameter],
    trainable: Mapping[str, torch.Tensor],
    everything: Iterable[torch.Tensor],
    frozen: Iterable[torch.Tensor],
) -> list[str]:
    """What makes a plan obsolete, a line each, in the order of the module.

    `everything` are the parameters the module has now, those of them that need a gradient are
    `trainable`; `frozen` are parameters for which there is no place in the plan as yet.
    """
    known = {id(entry.parameter): entry for entry in planned}
    names = {entry.name for entry in planned}
    frozen_ids, present = set(map(id, frozen)), set(map(id, everything))
    changes = []
    for name, parameter in trainable.items():
        entry = known.get(id(parameter))
        if id(parameter) in frozen_ids:
            changes.append(f"{name} was unfrozen")
        elif entry is None:
            changes.append(f"{name} {'was replaced' if name in names else 'is new'}")
        elif entry.kind != (kind := describe_kind(parameter)):
            changes.append(f"{name} was {entry.kind} and is {kind}")
    changes += [
        f"{entry.name} was removed"
        for entry in planned
        if id(entry.parameter) not in present and entry.name not in trainable
    ]
    return changes
