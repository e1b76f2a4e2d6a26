"""What becomes of objects in a checkpoint: state dicts and plain values."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigError

__all__ = ["first_refused", "state_of", "unwrapped"]

# Classes that hold the bare module in an attribute: torch's and ours for data parallelism, and what
# torch.compile returns.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


_ALWAYS_DATA = {bool, int, float, str, type(None)}


def state_of(name: str, value: Any) -> Any:
    """What the file holds of an object.

    Raises:
        ConfigError: a tensor in it has no values.
    """
    value = unwrapped(value)
    state = value.state_dict() if hasattr(value, "state_dict") else value
    return _plain(state, name, frozenset())


def unwrapped(value: Any) -> Any:
    """The module inside any number of wrappers."""
    while isinstance(value, nn.Module):
        names = (_WRAPPERS.get(base.__name__) for base in type(value).__mro__)
        inner = next((getattr(value, name, None) for name in names if name), None)
        if not isinstance(inner, nn.Module):
            break
        value = inner
    return value


def _plain(value: Any, where: str, around: frozenset[int]) -> Any:
    """The same with Python's numbers in place of NumPy's. What has none of them stays the same
    object: a state dict has attributes, and tensors may share memory.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise ConfigError(f"{where} is on the meta device: it has no values to save")
    if id(value) in around:
        return value
    if isinstance(value, Mapping):
        return _plain_mapping(value, where, around | {id(value)})
    if isinstance(value, list | tuple):
        return _plain_sequence(value, where, around | {id(value)})
    return value


def _plain_sequence(value: Any, where: str, inside: frozenset[int]) -> Any:
    parts = [_plain(part, f"{where}[{i}]", inside) for i, part in enumerate(value)]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    if isinstance(value, list):
        return parts
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


def _plain_mapping(value: Mapping[Any, Any], where: str, inside: frozenset[int]) -> Any:
    parts = [
        (_plain(key, where, inside), _plain(part, f"{where}[{key!r}]", inside))
        for key, part in value.items()
    ]
    pairs = zip(parts, value.items(), strict=True)
    if all(key is old_key and part is old for (key, part), (old_key, old) in pairs):
        return value
    changed: Any = copy.copy(value)
    changed.clear()
    for key, part in parts:
        changed[key] = part
    return changed


def first_refused(content: Any) -> str | None:
    """A sentence about the first value that cannot be loaded safely, None if every one can."""
    for where, value in _leaves(content, "", frozenset()):
        try:
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:
            return f"{where} is a {type(value).__module__}.{type(value).__qualname__}"
    return None


def _leaves(value: Any, where: str, around: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Every value that is neither a container nor known to be data, and where it stands."""
    if id(value) in around or isinstance(value, torch.Tensor) or type(value) in _ALWAYS_DATA:
        return
    inside = around | {id(value)}
    if type(value) in (list, tuple):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{where}[{i}]", inside)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(key, f"a key of {where}" if where else f"{key}", inside)
            yield from _leaves(part, f"{where}[{key!r}]" if where else f"{key}", inside)
    else:
        yield where, value
