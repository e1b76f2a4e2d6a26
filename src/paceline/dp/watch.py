"""Notices what the user did to a module since its workers were forked, so that they follow."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleWatch", "apply_updates"]

Update = tuple[int, str, Any]  # index of the module, attribute, value

# Looked after elsewhere: parameters and buffers by value, children by identity below.
_APART = ("_parameters", "_buffers")
_SIMPLE = (bool, int, float, str, type(None))


class ModuleWatch:
    """A picture of the attributes of a module and its children, one level deep, compared by identity.

    A changed number, string or flag (train and eval are one) is a small update; anything else, a hook or another
    child say, needs new workers. Changes inside objects of the user's own are not seen: `DataParallel.refresh` is for
    those.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._take()

    def _take(self) -> None:
        self._parts = list(self._module.modules())
        self._pictures = [_Picture(part) for part in self._parts]

    def updates(self) -> list[Update] | None:
        """What workers must be told; None if they must be started anew."""
        found: list[Update] = []
        for index, picture in enumerate(self._pictures):
            if picture.is_same():
                continue
            changed = picture.simple_changes()
            if changed is None:
                return None
            found.extend((index, name, value) for name, value in changed)
        return found

    def absorb(self) -> None:
        """What forward itself did to the module, other than to numbers, is its own business in every replica."""
        for picture in self._pictures:
            if not picture.is_same():
                picture.retake_but_simple()


class _Picture:
    def __init__(self, part: nn.Module) -> None:
        self._attributes = part.__dict__
        self._parts = part
        self._take()

    def _take(self) -> None:
        self._names = tuple(self._attributes)
        self._values = tuple(self._attributes.values())
        self._deeper = [
            (value, _inside(value))
            for name, value in self._attributes.items()
            if isinstance(value, dict | list | set | torch.Tensor) and name not in _APART
        ]
        self._buffers = tuple(self._parts._buffers)

    def is_same(self) -> bool:
        attributes = self._attributes
        return (
            len(attributes) == len(self._values)
            and all(map(operator.is_, attributes.values(), self._values))
            and self._is_same_inside()
        )

    def _is_same_inside(self) -> bool:
        for value, before in self._deeper:
            now = _inside(value)
            if isinstance(now, int):
                if now != before:
                    return False
            elif len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return tuple(self._parts._buffers) == self._buffers

    def simple_changes(self) -> list[tuple[str, Any]] | None:
        if tuple(self._attributes) != self._names or not self._is_same_inside():
            return None
        changed = []
        for name, now, before in zip(self._names, self._attributes.values(), self._values, strict=True):
            if now is not before:
                if type(now) not in _SIMPLE or type(before) not in _SIMPLE:
                    return None
                changed.append((name, now))
        self._take()
        return changed

    def retake_but_simple(self) -> None:
        before = dict(zip(self._names, self._values, strict=True))
        self._take()
        self._values = tuple(
            before[name] if type(now) in _SIMPLE and type(before.get(name, ...)) in _SIMPLE else now
            for name, now in zip(self._names, self._values, strict=True)
        )


def _inside(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return (*value, *value.values()) if value else ()
    return tuple(value)


def apply_updates(parts: list[nn.Module], updates: Any) -> None:
    """In a worker: follow."""
    for index, name, value in updates:
        object.__setattr__(parts[index], name, value)
