"""A module's parameters in memory that forked workers share: all see an optimizer step, nothing is
copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import operator
from array import array
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from paceline.backend.host_engine import DTYPE_CODES
from paceline.core.kernels import copy_pieces
from paceline.errors import ConfigError

__all__ = ["GradientPlaces", "GradientRoom", "SharedParameters", "Slot", "substituted"]

_ALIGN = 64
_Place = tuple[dict[str, Any], str]  # a module's `_parameters` and the name in it
_address = torch.Tensor.data_ptr
_shape = operator.attrgetter("shape")


@dataclasses.dataclass
class Slot:
    """One parameter, where the module has it, and what is known of it."""

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
        self._holders = [
            *{id(holder): holder for _, _, places in found for holder, _ in places}.values()
        ]
        total = sum(_room(parameter) for _, parameter, _ in found)
        memory = mmap.mmap(
            -1, max(total, mmap.PAGESIZE)
        )  # anonymous and shared: forked processes map it too
        self.slots: list[Slot] = []
        self.trainable: list[Slot] = []
        self.places: list[int] = []  # of the trainable ones among all
        at = 0
        with torch.no_grad():
            for name, parameter, places in found:
                view = _move(name, parameter, memory, at)
                self.slots.append(
                    Slot(
                        parameter,
                        places,
                        name,
                        view,
                        parameter.data_ptr(),
                        parameter.shape,
                        parameter.requires_grad,
                    )
                )
                at += _room(parameter)
        self._lengths = [*map(len, self._holders)]
        self._names = [*itertools.chain.from_iterable(self._holders)]
        self._addresses = [slot.address for slot in self.slots]
        self._shapes = [slot.shape for slot in self.slots]
        self._choose_trainable()

    def _choose_trainable(self) -> None:
        """New lists: calls keep those of their forward."""
        self.places = [index for index, slot in enumerate(self.slots) if slot.requires_grad]
        self.trainable = [self.slots[index] for index in self.places]
        self._parameters = [slot.parameter for slot in self.slots]
        self._requires_grad = [slot.requires_grad for slot in self.slots]
        self._held = [*itertools.chain.from_iterable(map(dict.values, self._holders))]

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
            (id(parameter), [(id(holder), name) for holder, name in places])
            for _, parameter, places in _places(module)
        ]
        return now == [
            (id(s.parameter), [(id(holder), name) for holder, name in s.places]) for s in self.slots
        ]

    def follow(self) -> bool:
        """Take over what the user did to the parameters; False if workers must be started anew for
        it.
        """
        holders = self._holders
        if [*map(len, holders)] != self._lengths or [
            *itertools.chain.from_iterable(holders)
        ] != self._names:
            return False
        if (
            all(
                map(
                    operator.is_,
                    itertools.chain.from_iterable(map(dict.values, holders)),
                    self._held,
                )
            )
            and [*map(_address, self._parameters)] == self._addresses
            and [*map(_shape, self._parameters)] == self._shapes
        ):
            return True
        if not all(map(self._follow_one, self.slots)):
            return False
        self._choose_trainable()
        return True

    def _follow_one(self, slot: Slot) -> bool:
        first, name = slot.places[0]
        now = first[name]
        if now is slot.parameter and now.data_ptr() == slot.address and now.shape == slot.shape:
            return (
                all(holder[key] is now for holder, key in slot.places[1:])
                if len(slot.places) > 1
                else True
            )
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
        if [parameter.requires_grad for parameter in self._parameters] == self._requires_grad:
            return ()
        changed = []
        for index, slot in enumerate(self.slots):
            if slot.parameter.requires_grad != slot.requires_grad:
                slot.requires_grad = not slot.requires_grad
                changed.append((index, slot.requires_grad))
        self._choose_trainable()
        return tuple(changed)


class GradientRoom:
    """Where one worker leaves the gradients of the parameters: a place for each, in memory both
    have mapped.

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


class GradientPlaces:
    """The places of some parameters in a room, for copying to and adding from all of them in one
    call.
    """

    def __init__(self, room: GradientRoom, indices: Sequence[int]) -> None:
        self.tensors = [room.places[index] for index in indices]
        self.addresses = array("Q", [place.data_ptr() for place in self.tensors])
        self.counts = array("Q", [place.numel() for place in self.tensors])
        self.dtypes = array("I", [DTYPE_CODES.get(place.dtype, 0) for place in self.tensors])
        self._nbytes = array("Q", [place.nbytes for place in self.tensors])
        self._is_plain = all(
            place.is_contiguous() and place.is_floating_point() and place.dtype in DTYPE_CODES
            for place in self.tensors
        )

    def like_these(self, gradients: Sequence[torch.Tensor | None]) -> array[int] | None:
        """The addresses of gradients that lie in memory as the places do; None if some do not, or
        are missing.
        """
        if not self._is_plain:
            return None
        for gradient in gradients:
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or not gradient.is_contiguous()
                or gradient.is_neg()  # negated when read
            ):
                return None
        return array("Q", map(_address, cast("Sequence[torch.Tensor]", gradients)))

    def fill(self, addresses: array[int]) -> None:
        """Copy from there."""
        copy_pieces(self.addresses, addresses, self._nbytes)


class substituted:  # noqa: N801 - used like a function, in `with`; a generator costs more
    """While this lasts, the module computes with `tensors` in place of its parameters."""

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> None:
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
    """Parameters. A buffer that requires a gradient needs the same care and counts as one, in
    `_buffers`.
    """
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


def _move(
    name: str, parameter: nn.Parameter, memory: mmap.mmap, offset: int
) -> torch.Tensor | None:
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
