"""A module's parameters in memory that forked workers share: all see an optimizer step, nothing is copied."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError

__all__ = ["GradientRoom", "SharedParameters", "substituted"]

_ALIGN = 64
_LARGE_BYTES = 1 << 18  # memory of this size costs more to get than to fill
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
        self.trainable: list[_Slot] = []
        self.places: list[int] = []  # of the trainable ones among all
        self.large: list[int] = []  # among the trainable ones
        at = 0
        with torch.no_grad():
            for name, parameter, places in found:
                view = _move(name, parameter, memory, at)
                self.slots.append(
                    _Slot(parameter, places, name, view, parameter.data_ptr(), parameter.shape, parameter.requires_grad)
                )
                at += _room(parameter)
        self._choose_trainable()

    def _choose_trainable(self) -> None:
        """New lists: calls keep those of their forward."""
        self.places = [index for index, slot in enumerate(self.slots) if slot.requires_grad]
        self.trainable = [self.slots[index] for index in self.places]
        self.large = [i for i, slot in enumerate(self.trainable) if slot.parameter.nbytes >= _LARGE_BYTES]

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
        if changed:
            self._choose_trainable()
        return tuple(changed)


class GradientRoom:
    """Where one worker leaves the gradients of the parameters: a place for each, in memory both have mapped.

    Made before the fork. Pages that no gradient is written to do not exist.
    """

    def __init__(self, parameters: SharedParameters) -> None:
        tensors = parameters.tensors
        memory = mmap.mmap(-1, max(sum(map(_room, tensors)), mmap.PAGESIZE))
        self.places: list[torch.Tensor] = []
        at = 0
        for parameter in tensors:
            self.places.append(_view_like(parameter, memory, at))
            at += _room(parameter)


class substituted:  # noqa: N801 - used like a function, in `with`; a generator costs more
    """While this lasts, the module computes with `tensors` in place of its parameters."""

    def __init__(self, slots: Sequence[_Slot], tensors: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(slots, tensors, strict=True))

    def __enter__(self) -> None:
        for slot, tensor in self._pairs:
            for holder, name in slot.places:
                holder[name] = tensor

    def __exit__(self, *exc: object) -> None:
        for slot, tensor in self._pairs:
            for holder, name in slot.places:
                if holder.get(name) is tensor:
                    holder[name] = slot.parameter


def _places(module: nn.Module) -> list[tuple[str, nn.Parameter, list[_Place]]]:
    """Parameters. A buffer that requires a gradient needs the same care and counts as one, in `_buffers`."""
    found: dict[int, tuple[str, nn.Parameter, list[_Place]]] = {}
    for prefix, part in module.named_modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for name, tensor in holder.items():
                if tensor is not None and (holder is part._parameters or tensor.requires_grad):
                    full = f"{prefix}.{name}" if prefix else name
                    found.setdefault(id(tensor), (full, tensor, []))[2].append((holder, name))
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
    view = _view_like(parameter, memory, offset)
    view.copy_(parameter.detach())
    parameter.data = view
    return view


def _view_like(parameter: torch.Tensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    """Part of the memory as a tensor, dense, in the parameter's own order of dimensions."""
    like = torch.empty_like(parameter, device="meta", requires_grad=False)
    if parameter.numel() == 0:
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
    return flat.as_strided(parameter.shape, like.stride())
