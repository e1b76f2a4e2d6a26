"""Objects that are loaded together: all of them, or none.

An object's `load_state_dict` may fail after it has changed the object, and it may fail after others
were loaded. So what an object holds is copied before it is loaded, to the host's memory, and put
back if anything fails. A module and an optimizer are put back directly, which cannot fail and
rounds nothing; so is what knows a way back of its own; anything else by its `load_state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline._state_dict import align_names
from paceline.checkpoint.content import unwrapped
from paceline.errors import ConfigError

__all__ = ["KnowsWayBack", "Restoration", "way_back"]


class Restoration:
    """One loading of `targets`, objects by name, which `undo` takes back.

    Raises:
        ConfigError: a target cannot be loaded at all.
    """

    def __init__(self, targets: Mapping[str, Any], strict: bool) -> None:
        self._targets = {name: unwrapped(target) for name, target in targets.items()}
        self._strict = strict
        # How to put back what was loaded, by name, None where there is no way.
        self._undo: dict[str, Callable[[], None] | None] = {}
        for name, target in self._targets.items():
            if not hasattr(target, "load_state_dict"):
                raise ConfigError(
                    f"{name} is a {type(target).__name__}, which has no load_state_dict(); "
                    "read it from the result"
                )

    def load(self, states: Mapping[str, Any]) -> None:
        """Load each target's state. After an error, `undo` is needed."""
        undo = {name: way_back(target) for name, target in self._targets.items()}
        # What cannot be put back comes last, when the others have been loaded.
        for name in sorted(self._targets, key=lambda name: undo[name] is None):
            self._undo[name] = undo[name]
            try:
                _load(self._targets[name], states[name], self._strict)
            except Exception as error:
                error.add_note(f"raised while {name} was loaded")
                raise

    def undo(self, error: BaseException) -> None:
        """Put back what was loaded, and note in `error` what could not be."""
        problems = []
        for name, put_back in reversed(self._undo.items()):
            if put_back is None:
                problems.append(f"{name} may have been changed: it has no state_dict() to copy")
                continue
            try:
                put_back()
            except Exception as problem:
                problems.append(f"{name} could not be put back: {problem}")
        if self._undo and not problems:
            problems = ["nothing was loaded: every object holds what it held before"]
        for note in problems:
            error.add_note(note)
        self._undo.clear()


def _load(target: Any, state: Any, strict: bool) -> None:
    if isinstance(target, nn.Module):
        if isinstance(state, Mapping):
            state = align_names(state, target.state_dict())
        target.load_state_dict(state, strict=strict)
    else:
        target.load_state_dict(state)


@runtime_checkable
class KnowsWayBack(Protocol):
    """An object that can put back what it holds, better than by its own state dict."""

    def way_back(self) -> Callable[[], None]:
        """A function that puts back what the object holds now."""


def way_back(target: Any) -> Callable[[], None] | None:
    """A function that puts back what the object holds now; None if there is no way."""
    if isinstance(target, KnowsWayBack):
        return target.way_back()
    if isinstance(target, nn.Module):
        return _module_way_back(target)
    # An optimizer of another library may keep more than torch's class knows.
    if (
        isinstance(target, torch.optim.Optimizer)
        and type(target).load_state_dict is torch.optim.Optimizer.load_state_dict
    ):
        return _optimizer_way_back(target)
    try:
        state = copy.deepcopy(target.state_dict())
    except Exception:
        return None
    return lambda: target.load_state_dict(state)


def _module_way_back(module: nn.Module) -> Callable[[], None]:
    # Each tensor once, whatever a state dict would make of it. A parameter that is not initialised,
    # or is on the meta device, has no values.
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    values = [
        (tensor, tensor.detach().to("cpu", copy=True))
        for tensor in tensors.values()
        if not is_lazy(tensor) and not tensor.is_meta
    ]
    extras = [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for part, extra in extras:
            part.set_extra_state(extra)

    return put_back


def _optimizer_way_back(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    # Not by load_state_dict, which casts an optimizer's numbers to the types of the parameters. It
    # makes new tensors and leaves the former ones alone, so there is no need to copy those.
    state = {parameter: copy.copy(entry) for parameter, entry in optimizer.state.items()}
    groups = [
        (group, {key: _copy_unless_params(key, entry) for key, entry in group.items()})
        for group in optimizer.param_groups
    ]

    def put_back() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, entries in groups:
            group.clear()
            group.update(entries)
        optimizer.param_groups[:] = [group for group, _ in groups]

    return put_back


def _copy_unless_params(key: str, entry: Any) -> Any:
    return entry if key == "params" else copy.deepcopy(entry)
