"""The one rule about `module.` in the names of a state dict.

A wrapper (DistributedDataParallel, DataParallel, torch.compile) puts its own segment in front of
every name: `module.`, `_orig_mod.`. A state saved with other wrappers than those of the module it
is loaded into has other names for the same tensors. Nobody can tell from the names alone whether
`module.` is a wrapper's or a child's of that name; so the names the module itself has decide: of
all ways to drop leading segments from the state and to put the module's own in front, the one under
which most names are the module's is right, and of several that are, the one that changes least.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["WRAPPER_SEGMENTS", "align_names"]

WRAPPER_SEGMENTS = ("module", "_orig_mod")


def align_names(state: Mapping[str, Any], own_names: Collection[str]) -> Mapping[str, Any]:
    """The state under the names the module has; the state itself where that changes nothing."""
    own = set(own_names)
    dropped, added = _best_change(list(state), own)
    if not dropped and not added:
        return state
    renamed = type(state)()
    for name, value in state.items():
        renamed[added + name.removeprefix(dropped)] = value  # type: ignore[index]  # a dict
    _align_metadata(state, renamed, dropped, added)
    return renamed


def _best_change(names: list[str], own: set[str]) -> tuple[str, str]:
    """What to drop from and what to put in front of every name."""
    best, best_matches = ("", ""), sum(name in own for name in names)
    if best_matches == len(names):
        return best
    droppable, addable = _wrapper_prefixes(names), _wrapper_prefixes(own)
    # Few segments first: of two changes that fit equally well, the smaller one is taken.
    changes = sorted(itertools.product(droppable, addable), key=lambda pair: len("".join(pair)))
    for dropped, added in changes:
        matches = sum(added + name.removeprefix(dropped) in own for name in names)
        if matches > best_matches:
            best, best_matches = (dropped, added), matches
    return best


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


def _align_metadata(state: Any, renamed: Any, dropped: str, added: str) -> None:
    """Torch keeps the versions of modules beside a state dict, by the modules' names."""
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return
    drop, add = dropped.removesuffix("."), added.removesuffix(".")
    changed = {}
    for name, facts in metadata.items():
        if drop and name != drop and not name.startswith(dropped):
            continue  # a wrapper's own entry
        inner = name[len(dropped) :] if drop else name
        changed[f"{add}.{inner}" if add and inner else add or inner] = facts
    renamed._metadata = changed
