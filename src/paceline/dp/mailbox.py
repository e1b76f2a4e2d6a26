"""Messages between the main process and one worker: a header and tensors, in memory both have mapped.

Each side owns the memory it writes, an anonymous file that is replaced by a larger one when a message does not fit; the
reader opens it through `/proc`. There is one message at a time in each direction, and flags tell when it is there.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.dp import wire
from paceline.dp.combine import TensorMeta
from paceline.errors import NativeError
from paceline.shm.rendezvous import open_peer_descriptor

__all__ = ["NOTICE_BYTES", "Inbox", "Message", "Outbox", "meta_of"]

NOTICE_BYTES = 64
_NOTICE = struct.Struct("<QQQQQ")  # descriptor, capacity, bytes of fixed part, of spec, of objects
_ALIGN = 64
_HEADER_STEP = 4096
_FIRST_CAPACITY = 1 << 16


class Message(NamedTuple):
    """`fixed` is a tuple of plain values; `spec` is hashable and remembered by the reader; `objects` are pickled."""

    fixed: tuple[Any, ...]
    spec: tuple[Any, ...]
    objects: list[Any]


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """What the reader must know to see the tensor again."""
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, last)


def _nbytes(meta: TensorMeta) -> int:
    count = 1
    for size in meta.shape:
        count *= size
    return count * meta.dtype.itemsize


def _offsets(metas: Sequence[TensorMeta], at: int) -> tuple[list[int], int]:
    """Where each tensor lies, after a header of `at` bytes; and the end."""
    at = -(-at // _HEADER_STEP) * _HEADER_STEP
    found = []
    for meta in metas:
        found.append(at)
        at += -(-_nbytes(meta) // _ALIGN) * _ALIGN
    return found, at


class _Window:
    """A mapping, and tensors over parts of it, made once each."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.memory = mmap.mmap(descriptor, capacity)
        self._views: dict[tuple[int, TensorMeta], torch.Tensor] = {}

    def view(self, offset: int, meta: TensorMeta) -> torch.Tensor:
        key = (offset, meta)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 4096:
                self._views.clear()  # shapes that change all the time
            found = self._views[key] = self._make(offset, meta)
        return found

    def _make(self, offset: int, meta: TensorMeta) -> torch.Tensor:
        count = _nbytes(meta) // meta.dtype.itemsize
        if count == 0:
            return torch.empty(meta.shape, dtype=meta.dtype)
        flat = torch.frombuffer(self.memory, dtype=meta.dtype, count=count, offset=offset)
        if not meta.channels_last:
            return flat.view(meta.shape)
        batch, channels, height, width = meta.shape
        return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)


class Outbox:
    """The writing side."""

    def __init__(self, notice: memoryview) -> None:
        self._notice = notice
        self._descriptor = -1
        self._capacity = 0
        self._window: _Window | None = None
        self._specs: dict[tuple[Any, ...], bytes] = {}

    def write(self, message: Message, tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta]) -> None:
        """Put a message in place; `metas` describe the tensors and are known to the reader, from the spec say."""
        fixed = marshal.dumps(message.fixed)  # plain values, both sides one interpreter: the fastest way
        spec = self._spec(message.spec)
        objects = wire.dumps(message.objects) if message.objects else b""
        header = len(fixed) + len(spec) + len(objects)
        offsets, end = _offsets(metas, header)
        window = self._room(end)
        memory = window.memory
        memory[:header] = fixed + spec + objects
        if tensors:
            places = [window.view(offset, meta) for offset, meta in zip(offsets, metas, strict=True)]
            with torch.no_grad():
                for place, tensor in zip(places, tensors, strict=True):
                    place.copy_(tensor)
        _NOTICE.pack_into(self._notice, 0, self._descriptor, self._capacity, len(fixed), len(spec), len(objects))

    def close(self) -> None:
        """Give the memory up; a mapping lives on while tensors use it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._window = None

    def _spec(self, spec: tuple[Any, ...]) -> bytes:
        data = self._specs.get(spec)
        if data is None:
            if len(self._specs) > 256:
                self._specs.clear()
            data = self._specs[spec] = wire.dumps(spec)
        return data

    def _room(self, nbytes: int) -> _Window:
        if self._window is None or nbytes > self._capacity:
            self.close()
            # Half as much again: batches that grow slowly do not replace it each time.
            self._capacity = max(_FIRST_CAPACITY, -(-nbytes * 3 // 2 // _HEADER_STEP) * _HEADER_STEP)
            self._descriptor = os.memfd_create("paceline-dp", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self._descriptor, 0, self._capacity)
            except OSError as error:
                self.close()
                raise NativeError(
                    f"no room for {self._capacity / 2**20:.0f} MiB of shared memory for inputs and outputs of "
                    f"DataParallel: {error.strerror}. Free memory, raise the memory limit, or use smaller batches"
                ) from error
            self._window = _Window(self._descriptor, self._capacity)
        return self._window


class Inbox:
    """The reading side."""

    def __init__(self, pid: int, notice: memoryview) -> None:
        self._pid = pid
        self._notice = notice
        self._known = (-1, 0)
        self._window: _Window | None = None
        self._header = 0
        self._specs: dict[bytes, tuple[Any, ...]] = {}

    def read(self) -> Message:
        """The message that is there."""
        descriptor, capacity, fixed, spec, objects = _NOTICE.unpack_from(self._notice, 0)
        if self._window is None or self._known != (descriptor, capacity):
            opened = open_peer_descriptor(self._pid, descriptor)
            self._window = _Window(opened, capacity)
            os.close(opened)
            self._known = (descriptor, capacity)
        memory = self._window.memory
        self._header = fixed + spec + objects
        found = marshal.loads(memory[:fixed])
        described = self._described(memory[fixed : fixed + spec])
        return Message(found, described, wire.loads(memory[fixed + spec : self._header]) if objects else [])

    def close(self) -> None:
        """Let go of the memory."""
        self._window = None

    def tensors(self, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
        """The message's tensors, where they lie: gone with the next message."""
        assert self._window is not None
        offsets, _ = _offsets(metas, self._header)
        return [self._window.view(offset, meta) for offset, meta in zip(offsets, metas, strict=True)]

    def _described(self, data: bytes) -> tuple[Any, ...]:
        spec = self._specs.get(data)
        if spec is None:
            if len(self._specs) > 256:
                self._specs.clear()
            spec = self._specs[data] = wire.loads(data)
        return spec
