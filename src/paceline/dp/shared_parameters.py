"""A module's parameters in memory that forked workers share.

All processes see an optimizer step, and nothing is copied. The memory is anonymous and made before
the fork, which is how both sides come to map it.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import operator
from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import ConfigError

__all__ = ["SharedParameters", "Slot", "SubstitutedParameters", "aligned_bytes", "view_like"]

_ALIGN = 64
_Holder = dict[str, torch.Tensor | None]  # a module's `_parameters` or `_buffers`
_Entry = tuple[_Holder, str]  # a holder and a name in it
_address = torch.Tensor.data_ptr
_shape = operator.attrgetter("shape")
_stride = torch.Tensor.stride


@dataclasses.dataclass
class Slot:
    """One parameter and what is known of it.

    `entries` are where the module refers to it: more than one if layers share it. `view` is its
    part of the shared memory; None if it has no elements.
    """

    parameter: torch.Tensor
    entries: list[_Entry]
    name: str
    view: torch.Tensor | None
    address: int
    shape: torch.Size
    requires_grad: bool


class SharedParameters:
    """Every parameter of a module once, in the order of `module.parameters()`.

    `trainable` are the slots that require gradients and `trainable_indices` their positions.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = _find_parameters(module)
        self._holders = [
            *{id(holder): holder for _, _, entries in parameters for holder, _ in entries}.values()
        ]
        total = sum(aligned_bytes(parameter) for _, parameter, _ in parameters)
        memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))
        self.slots: list[Slot] = []
        self.trainable: list[Slot] = []
        self.trainable_indices: list[int] = []
        offset = 0
        with torch.no_grad():
            for name, parameter, entries in parameters:
                view = _move(name, parameter, memory, offset)
                self.slots.append(
                    Slot(
                        parameter,
                        entries,
                        name,
                        view,
                        parameter.data_ptr(),
                        parameter.shape,
                        parameter.requires_grad,
                    )
                )
                offset += aligned_bytes(parameter)
        self._lengths = [*map(len, self._holders)]
        self._names = [*itertools.chain.from_iterable(self._holders)]
        self._addresses = [slot.address for slot in self.slots]
        self._shapes = [slot.shape for slot in self.slots]
        self._strides = [slot.parameter.stride() for slot in self.slots]
        self._choose_trainable()

    def _choose_trainable(self) -> None:
        """New lists: calls keep those of their forward."""
        self.trainable_indices = [
            index for index, slot in enumerate(self.slots) if slot.requires_grad
        ]
        self.trainable = [self.slots[index] for index in self.trainable_indices]
        self._parameters = [slot.parameter for slot in self.slots]
        self._requires_grad = [slot.requires_grad for slot in self.slots]
        self._held = [*itertools.chain.from_iterable(map(dict.values, self._holders))]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters themselves."""
        return [slot.parameter for slot in self.slots]

    def belong_to(self, module: nn.Module) -> bool:
        """Whether these are still the parameters of the module, under the same names."""
        now = [
            (id(parameter), [(id(holder), name) for holder, name in entries])
            for _, parameter, entries in _find_parameters(module)
        ]
        return now == [
            (id(slot.parameter), [(id(holder), name) for holder, name in slot.entries])
            for slot in self.slots
        ]

    def follow_changes(self) -> bool:
        """Take over what the user did to the parameters; False if that takes new workers."""
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
            and [*map(_stride, self._parameters)] == self._strides
        ):
            return True
        if not all(map(self._follow_slot, self.slots)):
            return False
        self._choose_trainable()
        return True

    def _follow_slot(self, slot: Slot) -> bool:
        first, name = slot.entries[0]
        now = first[name]
        if now is None or any(holder[key] is not now for holder, key in slot.entries[1:]):
            return False
        has_same_shape = now.shape == slot.shape
        if slot.view is None:
            return now is slot.parameter and has_same_shape
        if (
            now is slot.parameter
            and has_same_shape
            and now.data_ptr() == slot.address
            and now.stride() == slot.view.stride()
        ):
            return True
        fits = (
            has_same_shape
            and now.dtype == slot.view.dtype
            and now.device == slot.view.device
            and now.layout == torch.strided
        )
        if not fits:
            return False
        slot.view.copy_(now.detach().clone())  # it may be the same memory in another order
        now.data = slot.view
        slot.parameter = now
        return True

    def requires_grad_changes(self) -> tuple[tuple[int, bool], ...]:
        """Parameters whose requires_grad was changed since the last call, and to what."""
        if [parameter.requires_grad for parameter in self._parameters] == self._requires_grad:
            return ()
        changed = []
        for index, slot in enumerate(self.slots):
            if slot.parameter.requires_grad != slot.requires_grad:
                slot.requires_grad = not slot.requires_grad
                changed.append((index, slot.requires_grad))
        self._choose_trainable()
        return tuple(changed)


class SubstitutedParameters:
    """A context in which the module computes with `tensors` in place of its parameters."""

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(slots, tensors, strict=True))

    def __enter__(self) -> None:
        for slot, tensor in self._pairs:
            for holder, name in slot.entries:
                holder[name] = tensor

    def __exit__(self, *exc: object) -> None:
        for slot, tensor in self._pairs:
            for holder, name in slot.entries:
                if holder.get(name) is tensor:
                    holder[name] = slot.parameter


def _find_parameters(module: nn.Module) -> list[tuple[str, torch.Tensor, list[_Entry]]]:
    """Name, tensor and entries of each parameter.

    A buffer that requires a gradient needs the same care and counts as one, in `_buffers`.
    """
    parameters: dict[int, tuple[str, torch.Tensor, list[_Entry]]] = {}
    for prefix, part in module.named_modules():
        holders: tuple[_Holder, ...] = (part._parameters, part._buffers)
        for holder in holders:
            for name, tensor in holder.items():
                if tensor is not None and (holder is part._parameters or tensor.requires_grad):
                    full_name = f"{prefix}.{name}" if prefix else name
                    _, _, entries = parameters.setdefault(id(tensor), (full_name, tensor, []))
                    entries.append((holder, name))
    return list(parameters.values())


def aligned_bytes(tensor: torch.Tensor) -> int:
    """The memory of a tensor, up to the next cache line."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN


def _move(
    name: str, parameter: torch.Tensor, memory: mmap.mmap, offset: int
) -> torch.Tensor | None:
    if parameter.device.type != "cpu" or parameter.layout != torch.strided:
        raise ConfigError(
            "DataParallel with worker processes needs dense parameters on the CPU; "
            f"{name} is a {parameter.layout} tensor on {parameter.device}. Use executor='threads' "
            "for accelerators, or move the module to the CPU"
        )
    if parameter.numel() == 0:
        return None
    view = view_like(parameter, memory, offset)
    view.copy_(parameter.detach())
    parameter.data = view
    return view


def view_like(parameter: torch.Tensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    """Part of the memory as a tensor, dense, in the parameter's own order of dimensions."""
    like = torch.empty_like(parameter, device="meta", requires_grad=False)
    if parameter.numel() == 0:
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
    return flat.as_strided(parameter.shape, like.stride())
