"""Notices what the user changed in a module since its workers were forked, so that they follow."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.dp.protocol import Update

__all__ = ["ModuleSnapshot", "apply_updates"]

# Compared by value, in `shared_parameters` and `module_buffers`.
_TRACKED_ELSEWHERE = ("_parameters", "_buffers")
# No forward depends on these, or only together with others that are compared.
_IRRELEVANT = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
)
_SIMPLE = (bool, int, float, str, type(None))
_FORWARDS_TO_WATCH = 8


class ModuleSnapshot:
    """The attributes of a module and its children, one level deep, compared by identity.

    A changed number, string or flag (train and eval are one) is a small update; anything else, for
    example a hook or another child, needs new workers. Changes inside objects of the user's own are
    not seen: `DataParallel.refresh` is for those. Looking costs about half a microsecond per child:
    everything is compared in a few sweeps.

    What a forward itself changes in the module, other than numbers, it changes in every replica
    (`accept_forward_changes`). After some forwards that changed nothing this is not looked at any
    more; if a later one does change something, new workers are started once, as for the user's
    changes, and the next snapshot is made with `forward_mutates`.
    """

    def __init__(self, module: nn.Module, forward_mutates: bool = False) -> None:
        self.forward_mutates = forward_mutates
        self._forwards_to_watch = _FORWARDS_TO_WATCH
        self._parts = list(module.modules())
        self._holders = [part.__dict__ for part in self._parts]
        self._values: list[Any] = []
        self._capture()

    def updates(self) -> list[Update] | None:
        """What to send to the workers; None if new workers are needed."""
        if self._is_same():
            return []
        changes = self._small_changes()
        if changes is None:
            self.forward_mutates |= self._forwards_to_watch == 0  # it may have been a forward
        else:
            self._capture()
        return changes

    def _small_changes(self) -> list[Update] | None:
        if [*map(tuple, self._holders)] != self._names or not self._contents_are_same():
            return None
        changes: list[Update] = []
        values = iter(self._values)
        for index, holder in enumerate(self._holders):
            for name, now in holder.items():
                before = next(values)
                if now is before:
                    continue
                if type(now) not in _SIMPLE or type(before) not in _SIMPLE:
                    return None
                changes.append((index, name, now))
        return changes

    def accept_forward_changes(self) -> None:
        """A forward ran: what it changed, other than numbers, changed in every replica."""
        if not self.forward_mutates:
            if self._forwards_to_watch == 0:
                return
            self._forwards_to_watch -= 1
        if self._is_same():
            return
        self.forward_mutates = True
        before = {
            (index, name): value
            for (index, name), value in zip(self._keys(), self._values, strict=True)
            if type(value) in _SIMPLE
        }
        self._capture()
        self._values = [
            before.get(key, now) if type(now) in _SIMPLE else now
            for key, now in zip(self._keys(), self._values, strict=True)
        ]

    def _keys(self) -> list[tuple[int, str]]:
        return [(index, name) for index, names in enumerate(self._names) for name in names]

    def _capture(self) -> None:
        self._names = [*map(tuple, self._holders)]
        self._values = [*itertools.chain.from_iterable(holder.values() for holder in self._holders)]
        self._buffers = [
            (part._buffers, tuple(part._buffers)) for part in self._parts if part._buffers
        ]
        containers = [
            value
            for (_, name), value in zip(self._keys(), self._values, strict=True)
            if isinstance(value, dict | list | set)
            and name not in _TRACKED_ELSEWHERE
            and name not in _IRRELEVANT
        ]
        containers += [part._buffers for part in self._parts if not part._buffers]
        self._empty = [value for value in containers if not value]
        self._filled = [(value, _contents(value)) for value in containers if value]
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._tensors = [(value, value._version) for value in tensors if not value.is_inference()]

    def _is_same(self) -> bool:
        holders = self._holders
        return (
            sum(map(len, holders)) == len(self._values)
            and all(
                map(
                    operator.is_,
                    itertools.chain.from_iterable(map(dict.values, holders)),
                    self._values,
                )
            )
            and self._contents_are_same()
        )

    def _contents_are_same(self) -> bool:
        if any(self._empty):
            return False
        for value, before in self._filled:
            now = _contents(value)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        if self._buffers and not all(tuple(holder) == names for holder, names in self._buffers):
            return False
        return not self._tensors or all(
            value._version == version for value, version in self._tensors
        )


def _contents(value: Any) -> tuple[Any, ...]:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def apply_updates(parts: list[nn.Module], updates: Sequence[Update]) -> None:
    """In a worker: make the same changes."""
    for index, name, value in updates:
        object.__setattr__(parts[index], name, value)
