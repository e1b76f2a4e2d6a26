"""The one walker of nested structures: what modules and loaders take and return.

Two ways to look into a structure:

`flatten` / `unflatten`  take apart and put back: tuples, lists, dicts, named tuples, dataclasses,
                         what is registered with `torch.utils._pytree`, and on request objects by
                         their attributes. The spec is hashable and made of types and names, so that
                         two processes that know the same types can exchange it once and refer to it
                         afterwards.
`tensors_in`             only look: also into sets, mappings of any kind, remote references and
                         objects of the caller's own, which could not be rebuilt.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline._torch_internals import pytree_node

__all__ = [
    "LEAF",
    "Opens",
    "Spec",
    "Whole",
    "classes_in",
    "first_difference",
    "first_tensor",
    "flatten",
    "is_flat_call",
    "is_taken_apart_by_attributes",
    "leaf_paths",
    "leaves_in_objects",
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

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
Opens = Callable[[Any], bool]


def flatten(
    value: Any, leaf_types: tuple[type, ...] = (), opens: Opens | None = None
) -> tuple[Spec, list[Any]]:
    """Take a structure apart into its spec and its leaves.

    Objects of `leaf_types` are not looked into. If `Whole` is among them, it is no leaf itself but
    marks each leaf inside it. Objects that `opens` accepts are taken apart by their attributes.
    """
    if isinstance(value, torch.Tensor):
        return LEAF, [value]
    walk = _Flattening(leaf_types, opens)
    return walk.describe(value), walk.leaves


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


def is_taken_apart_by_attributes(value: Any) -> bool:
    """Whether an object holds tensors, and its attributes are all there is to it.

    Not if a `torch.Size` is among them: the object knows its shape, which would not be that of its
    tensors any more.
    """
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, type) or callable(value):
        return False
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or any(
        isinstance(each, torch.Size) for each in attributes.values()
    ):
        return False
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        object.__new__(kind)  # refuses classes with memory of their own: subclasses of list, dict
    except TypeError:
        return False
    return first_tensor(value) is not None


class _Context:
    """What `torch.utils._pytree` keeps of a container; compared, but not always hashable."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(_Context)

    def __repr__(self) -> str:
        return repr(self.value)


class _Flattening:
    """One structure on its way apart."""

    def __init__(self, leaf_types: tuple[type, ...], opens: Opens | None) -> None:
        self.leaves: list[Any] = []
        self._leaf_types = leaf_types
        self._opens = opens
        self._open: list[Any] = []  # objects that this walk is inside of

    def describe(self, value: Any) -> Spec:  # noqa: PLR0911 - one return for each kind of container
        leaf_types = self._leaf_types
        if Whole in leaf_types and isinstance(value, Whole):
            spec, inside = flatten(value.value, leaf_types)
            self.leaves += [leaf if isinstance(leaf, Whole) else Whole(leaf) for leaf in inside]
            return spec
        if isinstance(value, torch.Tensor) or (leaf_types and isinstance(value, leaf_types)):
            return self._leaf(value)
        kind = type(value)
        if kind in _SIMPLE:
            return self._leaf(value)
        if kind is tuple or kind is list:
            return (kind.__name__, self._inner(value))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ("named", kind, self._inner(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Whole):
            names = tuple(
                field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
            )
            how = "keywords" if isinstance(value, dict) else "fields"
            return (how, kind, names, self._inner(getattr(value, name) for name in names))
        if kind is collections.defaultdict:
            return ("default", value.default_factory, tuple(value), self._inner(value.values()))
        if isinstance(value, dict):
            return ("dict", kind, tuple(value), self._inner(value.values()))
        if (node := pytree_node(kind)) is not None:
            children, context = node.flatten_fn(value)
            return ("node", kind, _Context(context), self._inner(children))
        if self._opens is not None and self._opens(value):
            return self._object(value)
        return self._leaf(value)

    def _leaf(self, value: Any) -> Spec:
        self.leaves.append(value)
        return LEAF

    def _inner(self, parts: Iterable[Any]) -> Spec:
        return tuple(map(self.describe, parts))

    def _object(self, value: Any) -> Spec:
        if any(outer is value for outer in self._open):
            return self._leaf(value)  # it refers back to itself
        self._open.append(value)
        attributes = vars(value)
        spec = ("object", type(value), tuple(attributes), self._inner(attributes.values()))
        self._open.pop()
        return spec


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
    if kind == "node":
        return pytree_node(spec[1]).unflatten_fn(parts, spec[2].value)
    pairs = zip(spec[2], parts, strict=True)
    if kind == "dict":
        return spec[1](pairs)
    if kind == "default":
        return collections.defaultdict(spec[1], pairs)
    if kind == "keywords":
        return spec[1](**dict(pairs))
    # A dataclass or an object: not through its __init__, which may do more than store what it is
    # given.
    rebuilt = object.__new__(spec[1])
    for name, part in pairs:
        object.__setattr__(rebuilt, name, part)
    return rebuilt


# ------------------------------------------------------------------ specs in words


def leaf_paths(spec: Spec, root: str) -> list[str]:
    """What each leaf would be called in a program: `outputs.past_key_values.layers[0].keys`."""
    if spec == LEAF:
        return [root]
    return [
        path
        for step, child in zip(_steps(spec), spec[-1], strict=True)
        for path in leaf_paths(child, root + step)
    ]


def classes_in(spec: Spec) -> Iterator[type]:
    """The classes of the containers, but for tuples, lists and dicts."""
    if spec != LEAF:
        if isinstance(spec[1], type):
            yield spec[1]
        for child in spec[-1]:
            yield from classes_in(child)


def leaves_in_objects(spec: Spec, is_inside: bool = False) -> list[bool]:
    """For each leaf, whether it was an attribute of an object that was taken apart."""
    if spec == LEAF:
        return [is_inside]
    is_inside |= spec[0] == "object"
    return [each for child in spec[-1] for each in leaves_in_objects(child, is_inside)]


def first_difference(one: Spec, other: Spec, root: str) -> tuple[str, str, str]:
    """Where two specs differ, and what each has there."""
    if one[:-1] != other[:-1] or one == LEAF or len(one[-1]) != len(other[-1]):
        return root, _in_words(one), _in_words(other)
    for step, child, other_child in zip(_steps(one), one[-1], other[-1], strict=True):
        if child != other_child:
            return first_difference(child, other_child, root + step)
    return root, _in_words(one), _in_words(other)


def _steps(spec: Spec) -> list[str]:
    """How a program gets from a container to each of its parts."""
    if spec[0] in ("tuple", "list", "node"):
        return [f"[{index}]" for index in range(len(spec[-1]))]
    if spec[0] in ("dict", "default"):
        return [f"[{key!r}]" for key in spec[2]]
    names = spec[1]._fields if spec[0] == "named" else spec[2]
    return [f".{name}" for name in names]


def _in_words(spec: Spec) -> str:
    kind = spec[0]
    if kind == "leaf":
        return "a single value"
    if kind in ("tuple", "list"):
        return f"a {kind} of {len(spec[-1])}"
    if kind in ("dict", "default"):
        return f"a dict with the keys {', '.join(map(repr, spec[2]))}"
    has_names = kind in ("keywords", "fields", "object")
    return f"a {spec[1].__name__}" + (f" with {', '.join(spec[2])}" if has_names else "")


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
