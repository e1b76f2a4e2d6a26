"""The one walker of nested structures: what modules and loaders take and return.

Two ways to look into a structure:

`flatten` / `unflatten`  take apart and put back: tuples, lists, dicts, named tuples, dataclasses.
                         The spec is hashable and made of types and names, so that two processes
                         that know the same types can exchange it once and refer to it afterwards.
`tensors_in`             only look: also into sets, mappings of any kind, remote references and
                         objects of the caller's own, which could not be rebuilt.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "LEAF",
    "Spec",
    "Whole",
    "first_tensor",
    "flatten",
    "is_flat_call",
    "map_leaves",
    "tensors_in",
    "unflatten",
    "without_marks",
]

Spec = tuple[Any, ...]
LEAF: Spec = ("leaf",)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks an input that every replica gets as it is: `model(x, Whole(mask))`.

    It may be anywhere inside the inputs, and hold anything: a tensor, or a structure of them.
    """

    value: Any


# -------------------------------------------------------- take apart, put back


def flatten(value: Any, leaf_types: tuple[type, ...] = ()) -> tuple[Spec, list[Any]]:
    """Take a structure apart into its spec and its leaves.

    Objects of `leaf_types` are not looked into. If `Whole` is among them, it is no leaf itself but
    marks each leaf inside it.
    """
    if isinstance(value, torch.Tensor):
        return LEAF, [value]
    leaves: list[Any] = []
    return _describe(value, leaves, leaf_types), leaves


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The structure again, around other leaves."""
    if spec is LEAF:
        (leaf,) = leaves
        return leaf
    return _build(spec, iter(leaves))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The structure with `function(leaf)` in place of every leaf."""
    spec, leaves = flatten(value)
    return unflatten(spec, [function(leaf) for leaf in leaves])


def is_flat_call(spec: Spec) -> bool:
    """Whether it describes `(args, kwargs)` with nothing inside: each leaf is an argument."""
    return (
        spec[0] == "tuple"
        and spec[1][1] == ("dict", dict, (), ())
        and all(arg == LEAF for arg in spec[1][0][1])
    )


def without_marks(value: Any) -> Any:
    """The structure with the value in place of every `Whole`."""
    spec, leaves = flatten(value, (Whole,))
    if not any(isinstance(leaf, Whole) for leaf in leaves):
        return value
    return unflatten(spec, [leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves])


def _describe(  # noqa: PLR0911 - one return for each kind of container
    value: Any, leaves: list[Any], leaf_types: tuple[type, ...]
) -> Spec:
    if Whole in leaf_types and isinstance(value, Whole):
        inside: list[Any] = []
        spec = _describe(value.value, inside, leaf_types)
        leaves += [leaf if isinstance(leaf, Whole) else Whole(leaf) for leaf in inside]
        return spec
    if isinstance(value, torch.Tensor) or (leaf_types and isinstance(value, leaf_types)):
        leaves.append(value)
        return LEAF

    def inner(parts: Iterable[Any]) -> Spec:
        return tuple(_describe(part, leaves, leaf_types) for part in parts)

    kind = type(value)
    if kind is tuple or kind is list:
        return (kind.__name__, inner(value))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ("named", kind, inner(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Whole):
        names = tuple(
            field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
        )
        how = "keywords" if isinstance(value, dict) else "fields"
        return (how, kind, names, inner(getattr(value, name) for name in names))
    if kind is collections.defaultdict:
        return ("default", value.default_factory, tuple(value), inner(value.values()))
    if isinstance(value, dict):
        return ("dict", kind, tuple(value), inner(value.values()))
    leaves.append(value)
    return LEAF


def _build(  # noqa: PLR0911 - one return for each kind of container
    spec: Spec, leaves: Iterator[Any]
) -> Any:
    kind = spec[0]
    if kind == "leaf":
        return next(leaves)
    parts = [_build(child, leaves) for child in spec[-1]]
    if kind == "tuple":
        return tuple(parts)
    if kind == "list":
        return parts
    if kind == "named":
        return spec[1](*parts)
    pairs = zip(spec[2], parts, strict=True)
    if kind == "dict":
        return spec[1](pairs)
    if kind == "default":
        return collections.defaultdict(spec[1], pairs)
    if kind == "keywords":
        return spec[1](**dict(pairs))
    # A dataclass: not through its __init__, which may do more than store what it is given.
    rebuilt = object.__new__(spec[1])
    for name, part in pairs:
        object.__setattr__(rebuilt, name, part)
    return rebuilt


# ------------------------------------------------------------------- only look


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a nested structure."""
    if isinstance(value, torch.Tensor):
        return [value]
    return list(_walk(value, set()))


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in a nested structure."""
    return next(_walk(value, set()), None)


def _walk(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = _parts(value)
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    for part in parts:
        yield from _walk(part, seen)


def _parts(value: Any) -> list[Any] | None:
    """What a container holds; None for anything that is no container."""
    parts: list[Any] | None = None
    if isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif type(value).__name__ == "RRef" and value.is_owner():
        parts = [value.local_value()]
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        # An output object of the caller's own.
        parts = list(vars(value).values())
    return parts
