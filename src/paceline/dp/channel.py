"""Messages between the main process and one worker: a header and tensors, in memory both have
mapped.

Each side owns the memory it writes, an anonymous file that is replaced by a larger one when a
message does not fit; the reader opens it through `/proc`. There is one message at a time in each
direction, and flags tell when it is there.

Steps of training repeat: what messages have in common is a `Form`, worked out once by each side and
looked up later.
"""

from __future__ import annotations

import ctypes
import marshal
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from paceline.core.rendezvous import open_peer_descriptor
from paceline.dp import serialization
from paceline.dp.gather import TensorMeta
from paceline.errors import NativeError

__all__ = [
    "NOTICE_BYTES",
    "Form",
    "Inbox",
    "Message",
    "Outbox",
    "Source",
    "is_plain",
    "meta_of",
    "source_of",
]

NOTICE_BYTES = 64
_NOTICE = struct.Struct("<QQQQQ")  # descriptor, capacity, bytes of fixed part, of spec, of objects
_SEED = struct.Struct("<QQ")  # which raise of the flag it came with, seed
Source = int | torch.Tensor  # the address of a plain tensor, or one that is not plain
_ALIGN = 64
_HEADER_STEP = 4096
_FIRST_CAPACITY = 1 << 16
_FORMS_KEPT = 256  # shapes that change all the time do not fill the memory


class Message(NamedTuple):
    """What was read: `fixed` is a tuple of plain values, `objects` were pickled."""

    fixed: tuple[Any, ...]
    form: Form
    objects: list[Any]


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """What the reader must know to see the tensor again."""
    last = (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, last)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are what lies at its address, one after the other."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def source_of(tensor: torch.Tensor) -> Source:
    """Where its values are to be read. The tensor must live until they were."""
    return tensor.data_ptr() if type(tensor) is torch.Tensor and is_plain(tensor) else tensor


def _nbytes(meta: TensorMeta) -> int:
    count = 1
    for size in meta.shape:
        count *= size
    return count * meta.dtype.itemsize


class Form:
    """The part of a message that is the same each time: its spec, and where its tensors lie."""

    def __init__(self, spec: tuple[Any, ...], metas: tuple[TensorMeta, ...], data: bytes) -> None:
        self.spec = spec
        self.metas = metas
        self.data = data
        self.is_flat: bool | None = (
            None  # whether the reader calls its module with just the tensors, once it knows
        )
        self._offsets: list[int] = []
        self._sizes = [*map(_nbytes, metas)]
        self.nbytes = 0
        for size in self._sizes:
            self._offsets.append(self.nbytes)
            self.nbytes += -(-size // _ALIGN) * _ALIGN
        self._where: tuple[mmap.mmap | None, int] = (None, 0)
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def tensors(self, memory: mmap.mmap, start: int) -> list[torch.Tensor]:
        """Views of the memory from `start` on; made again only if that is another place than last
        time.
        """
        if self._where[0] is not memory or self._where[1] != start:
            places = zip(self._offsets, self.metas, strict=True)
            with torch.inference_mode(False):  # they outlast the call
                self._tensors = [_view(memory, start + offset, meta) for offset, meta in places]
            self._addresses = [tensor.data_ptr() for tensor in self._tensors]
            self._where = (memory, start)
        return self._tensors

    def fill(self, memory: mmap.mmap, start: int, sources: Sequence[Source]) -> None:
        """Copy tensors to their places in the memory."""
        for index, place in enumerate(self.tensors(memory, start)):
            source = sources[index]
            if type(source) is int:
                ctypes.memmove(self._addresses[index], source, self._sizes[index])
            else:
                with torch.no_grad():
                    place.copy_(cast("torch.Tensor", source))

    def forget_place(self) -> None:
        """Let go of memory that is not used any more."""
        self._where, self._tensors = (None, 0), []


def _view(memory: mmap.mmap, offset: int, meta: TensorMeta) -> torch.Tensor:
    count = _nbytes(meta) // meta.dtype.itemsize
    if count == 0:
        return torch.empty(meta.shape, dtype=meta.dtype)
    flat = torch.frombuffer(memory, dtype=meta.dtype, count=count, offset=offset)
    if not meta.channels_last:
        return flat.view(meta.shape)
    batch, channels, height, width = meta.shape
    return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _start_of_tensors(header: int) -> int:
    return -(-header // _HEADER_STEP) * _HEADER_STEP


class Outbox:
    """The writing side."""

    def __init__(self, notice: memoryview) -> None:
        self._notice = notice
        self._descriptor = -1
        self._capacity = 0
        self._memory: mmap.mmap | None = None
        self._forms: dict[tuple[Any, Any], Form] = {}

    def form(self, spec: tuple[Any, ...], metas: tuple[TensorMeta, ...]) -> Form:
        """What messages with this spec and tensors like `metas` have in common."""
        key = (spec, metas)
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            form = self._forms[key] = Form(spec, metas, serialization.dumps(key))
        return form

    def write(
        self,
        fixed: tuple[Any, ...],
        form: Form,
        sources: Sequence[Source] = (),
        objects: Sequence[Any] = (),
    ) -> None:
        """Put a message in place."""
        plain = marshal.dumps(fixed)  # plain values, both sides one interpreter: the fastest way
        pickled = serialization.dumps(list(objects)) if objects else b""
        data = plain + form.data + pickled
        start = _start_of_tensors(len(data))
        memory = self._room(start + form.nbytes)
        memory[: len(data)] = data
        if sources:
            form.fill(memory, start, sources)
        _NOTICE.pack_into(
            self._notice, 0, self._descriptor, self._capacity, len(plain), len(form.data), len(data)
        )

    def write_seed(self, number: int, seed: int) -> None:
        """Put a seed in place, apart from messages: it can be there ahead of one."""
        _SEED.pack_into(self._notice, _NOTICE.size, number, seed)

    def close(self) -> None:
        """Give the memory up; a mapping lives on while tensors use it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = None
        for form in self._forms.values():
            form.forget_place()

    def _room(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or nbytes > self._capacity:
            self.close()
            # Half as much again: batches that grow slowly do not replace it each time.
            self._capacity = max(
                _FIRST_CAPACITY, -(-nbytes * 3 // 2 // _HEADER_STEP) * _HEADER_STEP
            )
            self._descriptor = os.memfd_create("paceline-dp", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self._descriptor, 0, self._capacity)
            except OSError as error:
                self.close()
                raise NativeError(
                    f"no room for {self._capacity / 2**20:.0f} MiB of shared memory for inputs and outputs of "
                    f"DataParallel: {error.strerror}. Free memory, raise the memory limit, or use smaller batches"
                ) from error
            self._memory = mmap.mmap(self._descriptor, self._capacity)
        return self._memory


class Inbox:
    """The reading side."""

    def __init__(self, pid: int, notice: memoryview) -> None:
        self._pid = pid
        self._notice = notice
        self._known = (-1, 0)
        self._memory: mmap.mmap | None = None
        self._start = 0
        self._forms: dict[bytes, Form] = {}

    def read(self) -> Message:
        """The message that is there."""
        descriptor, capacity, plain, spec, header = _NOTICE.unpack_from(self._notice, 0)
        if self._memory is None or self._known != (descriptor, capacity):
            opened = open_peer_descriptor(self._pid, descriptor)
            self.close()
            self._memory = mmap.mmap(opened, capacity)
            os.close(opened)
            self._known = (descriptor, capacity)
        data = self._memory[:header]
        self._start = _start_of_tensors(header)
        end = plain + spec
        form = self._form(data[plain:end])
        return Message(
            marshal.loads(data[:plain]),
            form,
            serialization.loads(data[end:]) if end < header else [],
        )

    def seed(self, number: int) -> int | None:
        """The seed, if it is what the flag was raised for this time."""
        came_with, seed = _SEED.unpack_from(self._notice, _NOTICE.size)
        return seed if came_with == number else None

    def tensors(self, form: Form) -> list[torch.Tensor]:
        """The tensors of the message that was read, where they lie: gone with the next message."""
        assert self._memory is not None
        return form.tensors(self._memory, self._start)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None
        for form in self._forms.values():
            form.forget_place()

    def _form(self, data: bytes) -> Form:
        form = self._forms.get(data)
        if form is None:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            spec, metas = serialization.loads(data)
            form = self._forms[data] = Form(spec, metas, data)
        return form
