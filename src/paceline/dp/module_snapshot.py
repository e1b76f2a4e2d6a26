"""Notices what the user did to a module since its workers were forked, so that they follow."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleSnapshot", "apply_updates"]

_Update = tuple[int, str, Any]  # index of the module, attribute, value

# Looked after elsewhere: by value.
_APART = ("_parameters", "_buffers")
# Nothing that a forward does depends on these, or only together with others that are looked at.
_WITHOUT_EFFECT = (
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
_FORWARDS_TO_SEE = 8


class ModuleSnapshot:
    """A picture of the attributes of a module and its children, one level deep, compared by
    identity.

    A changed number, string or flag (train and eval are one) is a small update; anything else, a
    hook or another child say, needs new workers. Changes inside objects of the user's own are not
    seen: `DataParallel.refresh` is for those. Looking costs about half a microsecond per child:
    everything is compared in a few sweeps.

    A forward that changes the module, other than numbers, does so in every replica (`absorb`). One
    that did not at first is not looked at any more (`is_restless` tells); should it change
    something later all the same, workers are started anew once, as for the user's changes, and the
    new watch is told to keep looking.
    """

    def __init__(self, module: nn.Module, is_restless: bool = False) -> None:
        self.is_restless = is_restless
        self._forwards_to_see = _FORWARDS_TO_SEE
        self._parts = list(module.modules())
        self._holders = [part.__dict__ for part in self._parts]
        self._values: list[Any] = []
        self._take()

    def updates(self) -> list[_Update] | None:
        """What workers must be told; None if they must be started anew."""
        if self._is_same():
            return []
        found = self._small_changes()
        if found is None:
            self.is_restless |= self._forwards_to_see == 0  # it may have been a forward
        else:
            self._take()
        return found

    def _small_changes(self) -> list[_Update] | None:
        if [*map(tuple, self._holders)] != self._names or not self._is_same_inside():
            return None
        found: list[_Update] = []
        values = iter(self._values)
        for index, holder in enumerate(self._holders):
            for name, now in holder.items():
                before = next(values)
                if now is before:
                    continue
                if type(now) not in _SIMPLE or type(before) not in _SIMPLE:
                    return None
                found.append((index, name, now))
        return found

    def absorb(self) -> None:
        """What forward itself did to the module, other than to numbers, is its own business in
        every replica.
        """
        if not self.is_restless:
            if self._forwards_to_see == 0:
                return
            self._forwards_to_see -= 1
        if self._is_same():
            return
        self.is_restless = True
        before = {
            (index, name): value
            for (index, name), value in zip(self._keys(), self._values, strict=True)
            if type(value) in _SIMPLE
        }
        self._take()
        self._values = [
            before.get(key, now) if type(now) in _SIMPLE else now
            for key, now in zip(self._keys(), self._values, strict=True)
        ]

    def _keys(self) -> list[tuple[int, str]]:
        return [(index, name) for index, names in enumerate(self._names) for name in names]

    def _take(self) -> None:
        self._names = [*map(tuple, self._holders)]
        self._values = [*itertools.chain.from_iterable(holder.values() for holder in self._holders)]
        self._buffers = [
            (part._buffers, tuple(part._buffers)) for part in self._parts if part._buffers
        ]
        containers = [
            value
            for (_, name), value in zip(self._keys(), self._values, strict=True)
            if isinstance(value, dict | list | set)
            and name not in _APART
            and name not in _WITHOUT_EFFECT
        ]
        containers += [part._buffers for part in self._parts if not part._buffers]
        self._empty = [value for value in containers if not value]
        self._full = [(value, _inside(value)) for value in containers if value]
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
            and self._is_same_inside()
        )

    def _is_same_inside(self) -> bool:
        if any(self._empty):
            return False
        for value, before in self._full:
            now = _inside(value)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        if self._buffers and not all(tuple(holder) == names for holder, names in self._buffers):
            return False
        return not self._tensors or all(
            value._version == version for value, version in self._tensors
        )


def _inside(value: Any) -> tuple[Any, ...]:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def apply_updates(parts: list[nn.Module], updates: Any) -> None:
    """In a worker: follow."""
    for index, name, value in updates:
        object.__setattr__(parts[index], name, value)
