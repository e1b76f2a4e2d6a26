"""Messages between the main process and one worker, in memory both have mapped.

    Channel, made before the fork, 384 bytes per worker:
        0   flag: orders sent             raised by the main process, waited for by the worker
       64   flag: answers sent            raised by the worker, waited for by the main process
      128   notice of the order           where to find it; seeds have a cache line of their own
      256   notice of the answer

    Box, one for each direction, an anonymous file of the side that writes it:
        0   header: plain values, layout, pickled objects
     4096   tensors, each at a multiple of 64 bytes (later if the header is longer)

There is one message at a time in each direction: an order is written when the answer to the last
one was read, and the other way round; so neither side ever writes what the other reads. The reader
opens a box through `/proc`; a message that does not fit replaces the box by a larger one.

Steps of training repeat. What messages have in common is a `MessageLayout`, worked out once by each
side and looked up later. A message that differs from an earlier one in nothing but its call number
and the contents of its tensors has no header at all: its notice names the earlier header by number,
and one native call copies the tensors, writes the notice and wakes the reader.
"""

from __future__ import annotations

import marshal
import mmap
import os
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline._linux import anonymous_memory
from paceline.core.kernels import copy_pieces
from paceline.core.rendezvous import open_peer_descriptor
from paceline.core.wakeup import FLAG_BYTES, Flag, HandOver
from paceline.dp import serialization
from paceline.dp.protocol import Source, TensorMeta
from paceline.errors import NativeError

__all__ = ["CHANNEL_BYTES", "Channel", "Inbox", "Message", "MessageLayout", "Outbox"]

_NOTICE_BYTES = 128
CHANNEL_BYTES = 2 * FLAG_BYTES + 2 * _NOTICE_BYTES

# Words of a notice. The native hand-over writes the first two.
_REPEATS = 0  # number of the header this message repeats; 0: it has one of its own
_CALL = 1
_DESCRIPTOR = 2
_CAPACITY = 3
_VALUES_BYTES = 4
_LAYOUT_BYTES = 5
_HEADER_BYTES = 6
_DEFINES = 7  # number under which this header can be repeated; 0: it cannot
_SEED_AT = 8  # which raise of the flag the seed came with
_SEED = 9

_ALIGN = 64
_HEADER_STEP = 4096
_FIRST_CAPACITY = 1 << 16
_KEPT = 256  # layouts and headers; shapes that change all the time do not fill the memory


class Message(NamedTuple):
    """What was read: `values` are plain, `objects` were pickled."""

    values: tuple[Any, ...]
    call: int
    layout: MessageLayout
    objects: list[Any]


class Channel:
    """What the two ends of one connection share; made before the fork."""

    def __init__(self, memory: mmap.mmap, offset: int, spin_ns: int) -> None:
        self.spin_ns = spin_ns
        self.orders = Flag(memory, offset)
        self.answers = Flag(memory, offset + FLAG_BYTES)
        view = memoryview(memory)
        start = offset + 2 * FLAG_BYTES
        self.order_notice = view[start : start + _NOTICE_BYTES].cast("Q")
        self.answer_notice = view[start + _NOTICE_BYTES : start + 2 * _NOTICE_BYTES].cast("Q")


class MessageLayout:
    """The part of messages that is often the same: its spec, and where its tensors lie.

    `is_flat_call` is the reader's: whether it calls its module with just the tensors, once it
    knows.
    """

    def __init__(self, spec: tuple[Any, ...], metas: tuple[TensorMeta, ...], data: bytes) -> None:
        self.spec = spec
        self.metas = metas
        self.data = data
        self.is_flat_call: bool | None = None
        self.sizes = [*map(_nbytes, metas)]
        self.offsets: list[int] = []
        self.nbytes = 0
        for size in self.sizes:
            self.offsets.append(self.nbytes)
            self.nbytes += -(-size // _ALIGN) * _ALIGN
        self._mapped_at: tuple[mmap.mmap | None, int] = (None, 0)
        self._tensors: list[torch.Tensor] = []

    def tensors(self, memory: mmap.mmap, start: int) -> list[torch.Tensor]:
        """Views of the memory from `start` on; made again only if they were elsewhere last time."""
        if self._mapped_at[0] is not memory or self._mapped_at[1] != start:
            layout = zip(self.offsets, self.metas, strict=True)
            with torch.inference_mode(False):  # they outlast the call
                self._tensors = [_view(memory, start + offset, meta) for offset, meta in layout]
            self._mapped_at = (memory, start)
        return self._tensors

    def fill(self, memory: mmap.mmap, start: int, sources: Sequence[Source]) -> None:
        """Copy tensors to their offsets in the memory."""
        for index, target in enumerate(self.tensors(memory, start)):
            source = sources[index]
            if isinstance(source, int):
                _copy(target, source, self.sizes[index])
            else:
                with torch.no_grad():
                    target.copy_(source)

    def forget_memory(self) -> None:
        """Let go of memory that is not used any more."""
        self._mapped_at, self._tensors = (None, 0), []


def _copy(target: torch.Tensor, source: int, nbytes: int) -> None:
    copy_pieces(array("Q", [target.data_ptr()]), array("Q", [source]), array("Q", [nbytes]))


def _nbytes(meta: TensorMeta) -> int:
    count = 1
    for size in meta.shape:
        count *= size
    return count * meta.dtype.itemsize


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
    """The writing side of one direction."""

    def __init__(self, flag: Flag, notice: memoryview[int]) -> None:
        self._flag = flag
        self._notice = notice
        self._sent = 0  # how often the flag was raised
        self._last_number = 0  # of a header that can be repeated
        self._start = 0  # of the tensors of the last message with a header
        self._descriptor = -1
        self._capacity = 0
        self._memory: mmap.mmap | None = None
        self._layouts: dict[tuple[Any, Any], MessageLayout] = {}
        self._repeats: dict[tuple[Any, MessageLayout], HandOver] = {}

    def layout(self, spec: tuple[Any, ...], metas: tuple[TensorMeta, ...]) -> MessageLayout:
        """What messages with this spec and tensors like `metas` have in common."""
        key = (spec, metas)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            layout = self._layouts[key] = MessageLayout(spec, metas, serialization.dumps(key))
        return layout

    def send(
        self,
        values: tuple[Any, ...],
        call: int,
        layout: MessageLayout,
        sources: Sequence[Source] = (),
        objects: Sequence[Any] = (),
        is_repeatable: bool = False,
    ) -> None:
        """Write a message and wake the reader.

        `is_repeatable`: more messages with the same values are likely to follow.
        """
        number = 0
        if is_repeatable and not objects:
            hand_over = self._repeats.get((values, layout))
            if hand_over is None:
                number = self._next_number()
            elif hand_over(call, sources):
                self._sent += 1
                return
        self._write(values, call, layout, sources, objects, number)
        self._sent += 1
        self._flag.raise_()
        if number:
            self._repeats[values, layout] = self._hand_over(number, layout)

    def send_seed(self, seed: int) -> None:
        """Send a seed, apart from messages: it is read ahead of the next one, without an answer."""
        self._sent += 1
        self._notice[_SEED_AT] = self._sent & 0xFFFFFFFF
        self._notice[_SEED] = seed
        self._flag.raise_()

    def close(self) -> None:
        """Give the memory up; a mapping stays while tensors use it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = None
        self._repeats.clear()
        for layout in self._layouts.values():
            layout.forget_memory()

    def _write(
        self,
        values: tuple[Any, ...],
        call: int,
        layout: MessageLayout,
        sources: Sequence[Source],
        objects: Sequence[Any],
        number: int,
    ) -> None:
        plain = marshal.dumps(values)  # plain values, both sides one interpreter: the fastest way
        pickled = serialization.dumps(list(objects)) if objects else b""
        header = plain + layout.data + pickled
        start = _start_of_tensors(len(header))
        memory = self._memory_for(start + layout.nbytes)
        memory[: len(header)] = header
        if sources:
            layout.fill(memory, start, sources)
        self._start = start
        notice = self._notice
        notice[_REPEATS], notice[_CALL] = 0, call
        notice[_DESCRIPTOR], notice[_CAPACITY] = self._descriptor, self._capacity
        notice[_VALUES_BYTES], notice[_LAYOUT_BYTES] = len(plain), len(layout.data)
        notice[_HEADER_BYTES], notice[_DEFINES] = len(header), number

    def _next_number(self) -> int:
        if self._last_number >= _KEPT:
            # Numbers start again; each replaces what the reader knew under it.
            self._repeats.clear()
            self._last_number = 0
        self._last_number += 1
        return self._last_number

    def _hand_over(self, number: int, layout: MessageLayout) -> HandOver:
        assert self._memory is not None
        targets = [view.data_ptr() for view in layout.tensors(self._memory, self._start)]
        return HandOver(self._flag, self._notice, number, targets, layout.sizes)

    def _memory_for(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or nbytes > self._capacity:
            self.close()
            # Half as much again: batches that grow slowly do not replace it each time.
            self._capacity = max(
                _FIRST_CAPACITY, -(-nbytes * 3 // 2 // _HEADER_STEP) * _HEADER_STEP
            )
            self._descriptor = anonymous_memory("paceline-dp")
            try:
                os.posix_fallocate(self._descriptor, 0, self._capacity)
            except OSError as error:
                self.close()
                raise NativeError(
                    f"cannot allocate {self._capacity / 2**20:.0f} MiB of shared memory for inputs "
                    f"and outputs of DataParallel: {error.strerror}. Free memory, raise the "
                    "memory limit, or use smaller batches"
                ) from error
            self._memory = mmap.mmap(self._descriptor, self._capacity)
        return self._memory


class Inbox:
    """The reading side of one direction. `pid` is the process that writes."""

    def __init__(self, pid: int, notice: memoryview[int]) -> None:
        self._pid = pid
        self._notice = notice
        self._box = (-1, 0)  # descriptor and capacity
        self._memory: mmap.mmap | None = None
        self._start = 0
        self._layouts: dict[bytes, MessageLayout] = {}
        # By number: values, layout and start of the tensors.
        self._repeatable: dict[int, tuple[tuple[Any, ...], MessageLayout, int]] = {}

    def read(self) -> Message:
        """The message that is there, once the flag was raised."""
        notice = self._notice
        number = notice[_REPEATS]
        if number:
            values, layout, self._start = self._repeatable[number]
            return Message(values, notice[_CALL], layout, [])
        return self._read_with_header(*notice[_CALL:_SEED_AT])

    def _read_with_header(
        self,
        call: int,
        descriptor: int,
        capacity: int,
        values_bytes: int,
        layout_bytes: int,
        header_bytes: int,
        number: int,
    ) -> Message:
        header = self._open(descriptor, capacity)[:header_bytes]
        self._start = _start_of_tensors(header_bytes)
        end = values_bytes + layout_bytes
        values = marshal.loads(header[:values_bytes])
        layout = self._layout(header[values_bytes:end])
        if number:
            self._repeatable[number] = (values, layout, self._start)
        objects = serialization.loads(header[end:]) if end < header_bytes else []
        return Message(values, call, layout, objects)

    def seed(self, raised: int) -> int | None:
        """The seed, if it is what the flag was raised for this time."""
        return self._notice[_SEED] if self._notice[_SEED_AT] == raised else None

    def tensors(self, layout: MessageLayout) -> list[torch.Tensor]:
        """The tensors of the message that was read, where they lie: gone with the next message."""
        assert self._memory is not None
        return layout.tensors(self._memory, self._start)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None
        for layout in self._layouts.values():
            layout.forget_memory()

    def _open(self, descriptor: int, capacity: int) -> mmap.mmap:
        """The writer's box. A larger box has another capacity, whatever its descriptor."""
        if self._memory is None or self._box != (descriptor, capacity):
            opened = open_peer_descriptor(self._pid, descriptor)
            self.close()
            self._memory = mmap.mmap(opened, capacity)
            os.close(opened)
            self._box = (descriptor, capacity)
        return self._memory

    def _layout(self, data: bytes) -> MessageLayout:
        layout = self._layouts.get(data)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            spec, metas = serialization.loads(data)
            layout = self._layouts[data] = MessageLayout(spec, metas, data)
        return layout
