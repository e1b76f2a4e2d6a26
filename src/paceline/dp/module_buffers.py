"""The buffers of a module, as all replicas see them at the beginning of a forward.

Replica 0 is the module itself; the others begin each forward with its buffers, and change copies of
their own. A changed buffer cannot be told by its version, which `buffer.data`, NumPy and the
kernels of batch normalisation do not raise. So contents are compared: the main process compares its
buffers with what it published last, in memory that workers map, and a worker compares its own with
what is published. Only what differs is copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import operator
from array import array

import torch
from torch import nn

from paceline._torch_internals import version_of
from paceline.core.kernels import copy_pieces, differing_pieces
from paceline.dp.shared_parameters import aligned_bytes, view_like

__all__ = ["ModuleBuffers"]

_Holder = dict[str, torch.Tensor | None]  # a module's `_buffers`
_Entry = tuple[_Holder, str]  # a holder and a name in it
_address = torch.Tensor.data_ptr
_stride = torch.Tensor.stride
_shape, _dtype, _requires_grad = map(operator.attrgetter, ("shape", "dtype", "requires_grad"))


@dataclasses.dataclass(eq=False)
class _Slot:
    """One buffer: the tensor of this process, and what is published of it.

    `entries` are where the module refers to it: more than one if layers share it.
    """

    tensor: torch.Tensor
    entries: list[_Entry]
    published: torch.Tensor

    def restore(self) -> None:
        """Put a copy in its place. Not in place: a graph may still use the old one."""
        self.tensor = self.published.clone()
        for holder, name in self.entries:
            holder[name] = self.tensor

    def is_in_module(self) -> bool:
        return (
            all(holder.get(name) is self.tensor for holder, name in self.entries)
            and self.tensor.shape == self.published.shape
            and self.tensor.dtype == self.published.dtype
        )


class ModuleBuffers:
    """Made before workers are forked; published by the main process, restored by workers.

    Buffers that require a gradient are not among them: they are shared, like parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[_Holder] = [part._buffers for part in module.modules() if part._buffers]
        found: dict[int, tuple[torch.Tensor, list[_Entry]]] = {}
        for holder in self._holders:
            for name, buffer in holder.items():
                if buffer is not None and not buffer.requires_grad:
                    found.setdefault(id(buffer), (buffer, []))[1].append((holder, name))
        ordinary = [(buffer, entries) for buffer, entries in found.values() if _is_ordinary(buffer)]
        self._inherited = [
            _InheritedBuffer(buffer) for buffer, _ in found.values() if not _is_ordinary(buffer)
        ]
        total = sum(aligned_bytes(buffer) for buffer, _ in ordinary)
        memory = mmap.mmap(-1, max(total, mmap.PAGESIZE))
        self._slots: list[_Slot] = []
        offset = 0
        for buffer, entries in ordinary:
            published = view_like(buffer, memory, offset)
            self._slots.append(_Slot(buffer, entries, published.copy_(buffer)))
            offset += aligned_bytes(buffer)
        self._note_tensors()

    def publish(self) -> bool:
        """In the main process, before a forward; False if new workers are needed."""
        if not self._held:
            return True
        if not self._are_noted():
            if not self._follow_replacements():
                return False
            self._note_tensors()
        if any(map(_requires_grad, self._tensors)):
            return False
        if any(buffer.has_changed() for buffer in self._inherited):
            return False
        if differing := differing_pieces(self._own, self._shared, self._nbytes):
            copy_pieces(
                array("Q", [self._shared[index] for index in differing]),
                array("Q", [self._own[index] for index in differing]),
                array("Q", [self._nbytes[index] for index in differing]),
            )
        for slot in self._strided:
            slot.published.copy_(slot.tensor)
        return True

    def restore(self) -> None:
        """In a worker, before a forward: begin with what the main process published."""
        if not self._slots:
            return
        if not self._are_noted():
            for slot in self._slots:
                if not slot.is_in_module():
                    slot.restore()
            self._note_tensors()
        differing = differing_pieces(self._own, self._shared, self._nbytes)
        stale = [self._dense[index] for index in differing]
        stale += [slot for slot in self._strided if not _same_bytes(slot.tensor, slot.published)]
        if stale:
            for slot in stale:
                slot.restore()
            self._note_tensors()

    def _follow_replacements(self) -> bool:
        """Take over tensors that the user put in place of others, if workers can hold them."""
        slots = {(id(holder), name): slot for slot in self._slots for holder, name in slot.entries}
        before = iter(self._held)
        for holder in self._holders:
            for name, now in holder.items():
                was = next(before, None)
                slot = slots.get((id(holder), name))
                if slot is not None:
                    slot.tensor = now if now is not None else slot.tensor
                elif now is not was and not (
                    now is not None and now.requires_grad and was is not None and was.requires_grad
                ):
                    return False  # new, or of a kind that workers inherit
        return all(slot.is_in_module() and _is_ordinary(slot.tensor) for slot in self._slots)

    def _note_tensors(self) -> None:
        """Remember which tensors there are, and where their values lie."""
        self._held = [*itertools.chain.from_iterable(map(dict.values, self._holders))]
        self._tensors = [slot.tensor for slot in self._slots]
        self._noted = self._described()
        # Those that lie in memory as the published ones do are compared in one native call.
        self._dense: list[_Slot] = []
        self._strided: list[_Slot] = []
        for slot in self._slots:
            lie_alike = _lie_alike(slot.tensor, slot.published)
            (self._dense if lie_alike else self._strided).append(slot)
        self._own = array("Q", [slot.tensor.data_ptr() for slot in self._dense])
        self._shared = array("Q", [slot.published.data_ptr() for slot in self._dense])
        self._nbytes = array("Q", [slot.published.nbytes for slot in self._dense])

    def _are_noted(self) -> bool:
        """Whether they are the tensors that were noted, each with the same memory."""
        now = itertools.chain.from_iterable(map(dict.values, self._holders))
        return all(map(operator.is_, now, self._held)) and self._described() == self._noted

    def _described(self) -> list[object]:
        tensors = self._tensors
        return [
            *map(_address, tensors),
            *map(_shape, tensors),
            *map(_stride, tensors),
            *map(_dtype, tensors),
        ]


class _InheritedBuffer:
    """A buffer of a kind that workers only have by being forked; new ones are needed if it changes.

    Sparse tensors are compared by their parts; of others only the version can be looked at.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._version = _version(buffer)
        self._parts = [part.clone() for part in _parts_of_sparse(buffer)]

    def has_changed(self) -> bool:
        parts = _parts_of_sparse(self._buffer)
        return (
            _version(self._buffer) != self._version
            or len(parts) != len(self._parts)
            or not all(map(_same_bytes, parts, self._parts))
        )


def _is_ordinary(buffer: torch.Tensor) -> bool:
    return (
        type(buffer) in (torch.Tensor, nn.Parameter)
        and buffer.layout is torch.strided
        and buffer.is_cpu
        and not buffer.is_quantized
    )


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride() and not one.is_conj() and not one.is_neg()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, bit for bit: compared as numbers, NaN would differ from itself."""
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)
