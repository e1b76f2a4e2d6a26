"""Tensors inside what a module takes and returns: nested lists, dicts, dataclasses, named tuples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["first_batch_size", "tensors_in"]


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """All tensors in a nested structure."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    return list(_walk(thing, set()))


def first_batch_size(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The leading dimension of the first tensor among the inputs; 1 if there is none."""
    if inputs and isinstance(inputs[0], torch.Tensor):
        first: torch.Tensor | None = inputs[0]
    else:
        first = next(_walk((inputs, kwargs), set()), None)
    return first.shape[0] if first is not None and first.dim() > 0 else 1


def _walk(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts = _parts(thing)
    if parts is None or id(thing) in seen:
        return
    seen.add(id(thing))
    for part in parts:
        yield from _walk(part, seen)


def _parts(thing: Any) -> list[Any] | None:
    """What a container holds; None for anything that is no container."""
    parts: list[Any] | None = None
    if isinstance(thing, list | tuple | set | frozenset):
        parts = list(thing)
    elif isinstance(thing, Mapping):
        parts = list(thing.values())
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    elif type(thing).__name__ == "RRef" and thing.is_owner():
        parts = [thing.local_value()]
    elif hasattr(thing, "__dict__") and not isinstance(thing, type) and not callable(thing):
        parts = list(vars(thing).values())  # an output object of the caller's own
    return parts
