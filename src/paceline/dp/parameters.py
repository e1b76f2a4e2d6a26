"""A module's parameters in memory that forked workers share: all see an optimizer step, nothing is copied."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError

__all__ = ["SharedParameters", "substituted"]

_ALIGN = 64
_Place = tuple[dict[str, Any], str]  # a module's `_parameters` and the name in it


@dataclasses.dataclass
class _Slot:
    parameter: nn.Parameter
    places: list[_Place]
    name: str
    view: torch.Tensor | None  # None: nothing to share, no elements
    address: int
    shape: torch.Size
    requires_grad: bool


class SharedParameters:
    """Every parameter of a module once, in the order of `module.parameters()`."""

    def __init__(self, module: nn.Module) -> None:
        found = _places(module)
        holders = {id(holder): holder for _, _, places in found for holder, _ in places}
        self._dicts = [(holder, tuple(holder)) for holder in holders.values()]
        total = sum(_room(parameter) for _, parameter, _ in found)
        memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))  # anonymous and shared: forked processes map it too
        self.slots: list[_Slot] = []
        at = 0
        with torch.no_grad():
            for name, parameter, places in found:
                view = _move(name, parameter, memory, at)
                self.slots.append(
                    _Slot(parameter, places, name, view, parameter.data_ptr(), parameter.shape, parameter.requires_grad)
                )
                at += _room(parameter)

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The parameters themselves."""
        return [slot.parameter for slot in self.slots]

    @property
    def names(self) -> list[str]:
        """Their names in the module."""
        return [slot.name for slot in self.slots]

    def cover(self, module: nn.Module) -> bool:
        """Whether these are still the parameters of the module, at the same places."""
        now = [
            (id(parameter), [(id(holder), name) for holder, name in places]) for _, parameter, places in _places(module)
        ]
        return now == [(id(s.parameter), [(id(holder), name) for holder, name in s.places]) for s in self.slots]

    def follow(self) -> bool:
        """Take over what the user did to the parameters; False if workers must be started anew for it."""
        for holder, names in self._dicts:
            if tuple(holder) != names:
                return False
        return all(map(self._follow_one, self.slots))

    def _follow_one(self, slot: _Slot) -> bool:
        first, name = slot.places[0]
        now = first[name]
        if now is slot.parameter and now.data_ptr() == slot.address and now.shape == slot.shape:
            return all(holder[key] is now for holder, key in slot.places[1:]) if len(slot.places) > 1 else True
        if now is None or any(holder[key] is not now for holder, key in slot.places):
            return False
        fits = (
            slot.view is not None
            and now.shape == slot.shape
            and now.dtype == slot.view.dtype
            and now.device == slot.view.device
            and now.layout == torch.strided
        )
        if not fits:
            return False
        assert slot.view is not None
        slot.view.copy_(now.detach())
        now.data = slot.view
        slot.parameter = now
        return True

    def newly_frozen_or_thawed(self) -> tuple[tuple[int, bool], ...]:
        """Parameters whose requires_grad was changed since the last call."""
        changed = []
        for index, slot in enumerate(self.slots):
            if slot.parameter.requires_grad != slot.requires_grad:
                slot.requires_grad = not slot.requires_grad
                changed.append((index, slot.requires_grad))
        return tuple(changed)


@contextmanager
def substituted(slots: Sequence[_Slot], tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """While this lasts, the module computes with `tensors` in place of its parameters (None: the parameter)."""
    pairs = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if tensor is not None]
    for slot, tensor in pairs:
        for holder, name in slot.places:
            holder[name] = tensor
    try:
        yield
    finally:
        for slot, tensor in pairs:
            for holder, name in slot.places:
                if holder.get(name) is tensor:
                    holder[name] = slot.parameter


def _places(module: nn.Module) -> list[tuple[str, nn.Parameter, list[_Place]]]:
    found: dict[int, tuple[str, nn.Parameter, list[_Place]]] = {}
    for prefix, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(parameter), (full, parameter, []))[2].append((part._parameters, name))
    return list(found.values())


def _room(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // _ALIGN) * _ALIGN


def _move(name: str, parameter: nn.Parameter, memory: mmap.mmap, offset: int) -> torch.Tensor | None:
    if parameter.device.type != "cpu" or parameter.layout != torch.strided:
        raise ConfigError(
            f"DataParallel with worker processes needs dense parameters on the CPU; {name} is a {parameter.layout} "
            f"tensor on {parameter.device}. Use executor='threads' for accelerators, or move the module to the CPU"
        )
    if parameter.numel() == 0:
        return None
    flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
    like = torch.empty_like(parameter, device="meta")  # dense, in the parameter's own order of dimensions
    view = flat.as_strided(parameter.shape, like.stride())
    view.copy_(parameter.detach())
    parameter.data = view
    return view
