"""What modules take and return: nested tuples, lists, dicts, named tuples and dataclasses, taken
apart and put back.

`flatten` gives a spec and the leaves; the spec is hashable and made of types and names, so that two
processes that know the same types can exchange it once and refer to it afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["LEAF", "Spec", "Whole", "flatten", "is_flat_call", "unflatten", "without_marks"]

Spec = tuple[Any, ...]
LEAF: Spec = ("leaf",)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks an input that every replica gets as it is: `model(x, Whole(mask))`.

    It may be anywhere inside the inputs, and hold anything: a tensor, or a structure of them.
    """

    value: Any


def flatten(thing: Any, leaf_types: tuple[type, ...] = ()) -> tuple[Spec, list[Any]]:
    """Take a structure apart. Objects of `leaf_types` are not looked into; a `Whole` marks each
    leaf inside it.
    """
    if isinstance(thing, torch.Tensor):
        return LEAF, [thing]
    leaves: list[Any] = []
    return _describe(thing, leaves, leaf_types), leaves


def unflatten(spec: Spec, leaves: Any) -> Any:
    """The structure again, around other leaves."""
    if spec is LEAF:
        (leaf,) = leaves
        return leaf
    return _build(spec, iter(leaves))


def is_flat_call(spec: Spec) -> bool:
    """Whether it describes `(args, kwargs)` with nothing inside: each leaf is an argument."""
    return (
        spec[0] == "tuple"
        and spec[1][1] == ("dict", dict, (), ())
        and all(arg == LEAF for arg in spec[1][0][1])
    )


def without_marks(thing: Any) -> Any:
    """The structure with the value in place of every `Whole`."""
    spec, leaves = flatten(thing, (Whole,))
    if not any(isinstance(leaf, Whole) for leaf in leaves):
        return thing
    return unflatten(spec, [leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves])


def _describe(thing: Any, leaves: list[Any], leaf_types: tuple[type, ...]) -> Spec:  # noqa: PLR0911 - one a kind
    if Whole in leaf_types and isinstance(thing, Whole):
        inside: list[Any] = []
        spec = _describe(thing.value, inside, leaf_types)
        leaves += [leaf if isinstance(leaf, Whole) else Whole(leaf) for leaf in inside]
        return spec
    if isinstance(thing, torch.Tensor) or (leaf_types and isinstance(thing, leaf_types)):
        leaves.append(thing)
        return LEAF

    def inner(parts: Any) -> Spec:
        return tuple(_describe(part, leaves, leaf_types) for part in parts)

    kind = type(thing)
    if kind is tuple or kind is list:
        return (kind.__name__, inner(thing))
    if isinstance(thing, tuple) and hasattr(kind, "_fields"):
        return ("named", kind, inner(thing))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type | Whole):
        names = tuple(
            field.name for field in dataclasses.fields(thing) if hasattr(thing, field.name)
        )
        how = "keywords" if isinstance(thing, dict) else "fields"
        return (how, kind, names, inner(getattr(thing, name) for name in names))
    if kind is collections.defaultdict:
        return ("default", thing.default_factory, tuple(thing), inner(thing.values()))
    if isinstance(thing, dict):
        return ("dict", kind, tuple(thing), inner(thing.values()))
    leaves.append(thing)
    return LEAF


def _build(spec: Spec, leaves: Iterator[Any]) -> Any:  # noqa: PLR0911 - one a kind
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
    thing = object.__new__(spec[1])
    for name, part in pairs:
        object.__setattr__(thing, name, part)
    return thing
