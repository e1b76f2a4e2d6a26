"""The one rule about `module.` in the names of a state dict.

A wrapper (DistributedDataParallel, DataParallel, torch.compile) adds a segment to the names of what
it wraps: `module.` or `_orig_mod.`, in front of every name, or further inside where only a part of
the model is wrapped. A state saved with other wrappers than those of the module it is loaded into
has other names for the same tensors. Nobody can tell from a name alone whether `module.` is a
wrapper's or a child's of that name; so the names the module itself has decide. In this order:

1. One change of the front of all names - segments dropped from the state's, segments of the
   module's added - makes every name one of the module's.
2. Without wrappers' segments, the names are the module's in the module's order. Wrappers do not
   change that order, so it tells tensors apart whose names differ in such segments only.
3. The change of the front under which most names are the module's; and of the names that are still
   not, those that are the only ones, here and in the module, without wrappers' segments.

A name for which none of this holds is left as it is, for `load_state_dict` to complain about.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

__all__ = ["WRAPPER_SEGMENTS", "align_names"]

WRAPPER_SEGMENTS = ("module", "_orig_mod")


def align_names(state: Mapping[str, Any], own_names: Collection[str]) -> Mapping[str, Any]:
    """The state under the names the module has, which are given in the module's order; the state
    itself where that changes nothing.
    """
    new_names = _new_names(list(state), list(own_names))
    if all(new == old for old, new in new_names.items()):
        return state
    renamed = type(state)()
    for name, value in state.items():
        renamed[new_names[name]] = value  # type: ignore[index]  # a dict
    _align_metadata(state, renamed, new_names)
    return renamed


def _new_names(names: list[str], own: list[str]) -> dict[str, str]:
    """What each name of the state becomes."""
    known = set(own)
    moved = _with_best_front(names, known)
    if known.issuperset(moved.values()):
        return moved
    if list(map(_bare, names)) == list(map(_bare, own)):
        return dict(zip(names, own, strict=True))
    alone, own_alone = _by_unique_bare_name(names), _by_unique_bare_name(own)
    taken = known.intersection(moved.values())
    for bare in alone.keys() & own_alone.keys():
        if moved[alone[bare]] not in known and own_alone[bare] not in taken:
            moved[alone[bare]] = own_alone[bare]
    return moved


def _with_best_front(names: list[str], own: set[str]) -> dict[str, str]:
    """All names with the change of their front that makes most of them the module's."""
    best, best_matches = ("", ""), sum(name in own for name in names)
    if best_matches < len(names):
        droppable, addable = _wrapper_prefixes(names), _wrapper_prefixes(own)
        # Few segments first: of two changes that fit equally well, the smaller one is taken.
        changes = itertools.product(droppable, addable)
        for dropped, added in sorted(changes, key=lambda change: len("".join(change))):
            matches = sum(added + name.removeprefix(dropped) in own for name in names)
            if matches > best_matches:
                best, best_matches = (dropped, added), matches
    dropped, added = best
    return {name: added + name.removeprefix(dropped) for name in names}


def _wrapper_prefixes(names: Collection[str]) -> list[str]:
    """Prefixes made of wrappers' segments that all these names have: "", "module.", ..."""
    prefixes = [""]
    while names:
        segments = {name.removeprefix(prefixes[-1]).partition(".")[0] for name in names}
        is_prefix = all(name.startswith(prefixes[-1]) and "." in name for name in names)
        if len(segments) != 1 or not is_prefix or not segments <= set(WRAPPER_SEGMENTS):
            break
        prefixes.append(f"{prefixes[-1]}{segments.pop()}.")
    return prefixes


def _bare(name: str) -> str:
    """The name without wrappers' segments. The last segment is a tensor's, whatever it is."""
    *modules, tensor = name.split(".")
    return ".".join([*(part for part in modules if part not in WRAPPER_SEGMENTS), tensor])


def _by_unique_bare_name(names: Iterable[str]) -> dict[str, str]:
    by_bare_name = collections.defaultdict(list)
    for name in names:
        by_bare_name[_bare(name)].append(name)
    return {bare: found[0] for bare, found in by_bare_name.items() if len(found) == 1}


def _align_metadata(state: Any, renamed: Any, new_names: Mapping[str, str]) -> None:
    """Torch keeps the versions of modules beside a state dict, by the modules' names. A module's
    new name is in front of its tensors' and its children's, of which as much follows it as before.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return
    modules: dict[str, str] = {}
    for old, new in new_names.items():
        old_parts, new_parts = old.split("."), new.split(".")
        while old_parts and new_parts and old_parts[-1] == new_parts[-1]:
            old_parts.pop()
            new_parts.pop()
            modules.setdefault(".".join(old_parts), ".".join(new_parts))
    changed = {modules[name]: facts for name, facts in metadata.items() if name in modules}
    renamed._metadata = changed
