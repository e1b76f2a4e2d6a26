"""All-gather over all ranks of several hosts, and long broadcasts to more than two: bytes that are
moved only.

Both are one thing, `_Spread`: each host has a segment of the whole, and every rank gets every
segment. The first step in shared memory gives all ranks of a host its segment. A short whole then
goes through one lane, and from the first rank of a host to the others. A long one goes in blocks:
each lane sends its slice of the host's own block to all other hosts, and the slices that it
received are shared inside the host. A broadcast first deals a segment to each host, so that the
link of its own need not carry all of it to all of them. What fits into one block needs no thread of
its own (`is_brief`).
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from itertools import accumulate, islice

import torch

from paceline.backend.hierarchical_reduce import is_short
from paceline.backend.host_engine import address_of
from paceline.backend.host_placement import Placement, cut_range
from paceline.backend.lane import message_capacity
from paceline.backend.multi_host_call import MultiHostCall
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES

__all__ = [
    "RankParts",
    "all_gather",
    "as_bytes",
    "broadcast_in_pieces",
    "is_brief",
    "lanes_to_move",
]

_SLICE_BYTES = 512 << 10
_DEPTH = 2


def lanes_to_move(placement: Placement, nbytes: int) -> int:
    """How many lanes are spoken on to move a whole of this length."""
    return 1 if is_short(nbytes, placement.hosts) else placement.lanes


def is_brief(placement: Placement, nbytes: int) -> bool:
    """Whether a whole of this length needs no more than the first message of each host: whoever
    waits for that gets signals.
    """
    return nbytes <= lanes_to_move(placement, nbytes) * _slice_bytes(placement) and (
        placement.hosts == 2 or is_short(nbytes, placement.hosts)
    )


def _slice_bytes(placement: Placement) -> int:
    return min(_SLICE_BYTES, message_capacity(placement.hosts))


def broadcast_in_pieces(call: MultiHostCall, data: torch.Tensor, root: int) -> None:
    """Give every rank the bytes that rank `root` has: each host gets a piece, and gives it to the
    others.
    """
    placement = call.placement
    source = placement.host_of[root]
    request = Request(kind=Kind.BARRIER, dtype=BYTES, root=-1)
    if placement.host == source:
        local_root = placement.local.index(root)
        request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=local_root, count=data.numel())
        request.input = request.output = address_of(data)
    call.run_first_local(request)
    call.compare_headers()
    lengths = [count for _, count in cut_range(0, data.numel(), placement.hosts)]
    pieces = _Spread(call, data, lengths)
    pieces.deal(source)
    pieces.run()


def all_gather(call: MultiHostCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Give every rank the bytes of all, one tensor for each rank."""
    members = call.placement.members
    parts = RankParts([outputs[rank] for of_host in members for rank in of_host])
    whole, is_in_place = parts.memory()
    _gather_on_host(call, whole, parts.lengths, tensor)
    lengths = iter(parts.lengths)
    segments = [sum(islice(lengths, len(of_host))) for of_host in members]
    _Spread(call, whole, segments).run()
    if not is_in_place:
        parts.fill(whole.split(parts.lengths))


def _gather_on_host(
    call: MultiHostCall, whole: torch.Tensor, parts: Sequence[int], tensor: torch.Tensor
) -> None:
    """Collect the tensors of this host's ranks in its segment of the whole."""
    placement = call.placement
    first = sum(len(members) for members in placement.members[: placement.host])
    last = first + len(placement.local)
    address = whole.data_ptr() + sum(parts[:first])
    mine = as_bytes(tensor)
    request = Request(kind=Kind.ALLGATHER, dtype=BYTES, root=-1, count=mine.numel())
    request.input = address_of(mine)
    request.outputs, request.out_counts = _table(address, parts[first:last])
    call.run_first_local(request)


def _table(address: int, lengths: Sequence[int]) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
    """Parts of these lengths, one behind the other, for the core."""
    starts = [0, *accumulate(lengths)][:-1]
    return (
        (C.c_void_p * len(lengths))(*(address + start for start in starts)),
        (C.c_uint64 * len(lengths))(*lengths),
    )


def _adjoining(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of all parts if they lie one behind the other, as those of one tensor do."""
    first, nbytes = parts[0], sum(part.numel() for part in parts)
    storage = first.untyped_storage()
    position = first.data_ptr()
    for part in parts:
        if part.data_ptr() != position or part.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        position += part.numel()
    return first.as_strided((nbytes,), (1,))


class _Spread:
    """Every rank of host h has segment h of the whole, and gets the others."""

    def __init__(self, call: MultiHostCall, whole: torch.Tensor, lengths: Sequence[int]) -> None:
        self._call = call
        self._placement = call.placement
        self._whole = whole
        self._address = whole.data_ptr()
        self._lengths = lengths
        self._starts = [0, *accumulate(lengths)][:-1]
        self._lanes = lanes_to_move(call.placement, whole.numel())
        self._slice_bytes = _slice_bytes(call.placement)
        self._blocks = -(-max(lengths) // (self._lanes * self._slice_bytes))

    def run(self) -> None:
        if is_short(self._whole.numel(), self._placement.hosts):
            self._run_whole()
            return
        for step in range(self._blocks + _DEPTH):
            if step < self._blocks and self._call.speaks:
                self._contribute(step)
            if step >= _DEPTH:
                self._collect(step - _DEPTH)

    def deal(self, source: int) -> None:
        """Give every host its segment of the whole, which the ranks of host `source` have."""
        host, index = self._placement.host, self._placement.local_index
        for block in range(self._blocks):
            if host != source:
                slices = self._slices(host, block)
                if self._call.speaks:
                    self._receive(source, *slices[index])
                if slices[0][1] > 0:
                    self._share(slices)
            elif self._call.speaks:
                for other in self._placement.other_hosts:
                    self._send(*self._slices(other, block)[index], [other])

    def _run_whole(self) -> None:
        call, host = self._call, self._placement.host
        if call.speaks:
            if self._lengths[host] == 0:
                call.send_header()
            self._send(self._starts[host], self._lengths[host], self._placement.other_hosts)
            messages = call.receive_first()
            for other, message in zip(self._placement.other_hosts, messages, strict=True):
                self._part(self._starts[other], self._lengths[other]).copy_(
                    message.data(self._lengths[other])
                )
        if not call.all_speak:
            nbytes = self._whole.numel()
            request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=0, count=nbytes)
            request.input = request.output = self._address
            call.run_local(request)
        if call.speaks:
            call.received()

    # --- long ones --------------------------------------------------------------------------------
    def _slices(self, host: int, block: int) -> list[tuple[int, int]]:
        """Where the slice of each lane of a host's block begins, and how long it is."""
        block_bytes = self._lanes * self._slice_bytes
        start = min(block * block_bytes, self._lengths[host])
        count = min(block_bytes, self._lengths[host] - start)
        return cut_range(self._starts[host] + start, count, self._lanes)

    def _contribute(self, block: int) -> None:
        start, count = self._slices(self._placement.host, block)[self._placement.local_index]
        if block == 0 and count == 0:
            # Its first message shows what call a host makes.
            self._call.send_header()
        self._send(start, count, self._placement.other_hosts)

    def _collect(self, block: int) -> None:
        if block == 0:
            self._agree()
        for host in self._placement.other_hosts:
            slices = self._slices(host, block)
            if self._call.speaks:
                self._receive(host, *slices[self._placement.local_index])
            if slices[0][1] > 0:
                self._share(slices)

    def _agree(self) -> None:
        if self._call.speaks:
            self._call.receive_first()
            for host in self._placement.other_hosts:
                if self._slices(host, 0)[self._placement.local_index][1] == 0:
                    self._call.links.lane.received(host)
        if not self._call.all_speak:
            self._call.run_local(Request(kind=Kind.BARRIER, dtype=BYTES, root=-1))

    def _receive(self, host: int, start: int, count: int) -> None:
        if count > 0:
            lane = self._call.links.lane
            message = lane.receive(host, self._call.left())
            self._part(start, count).copy_(message.data(count))
            lane.received(host)

    def _share(self, slices: Sequence[tuple[int, int]]) -> None:
        """Give all ranks of this host what its lanes received."""
        lengths = [count for _, count in slices]
        lengths += [0] * (len(self._placement.local) - self._lanes)
        request = Request(kind=Kind.ALLGATHER, dtype=BYTES, root=-1)
        if self._call.speaks:
            start, request.count = slices[self._placement.local_index]
            request.input = self._address + start
        request.outputs, request.out_counts = _table(self._address + slices[0][0], lengths)
        self._call.run_local(request)

    # --- bytes ------------------------------------------------------------------------------------
    def _part(self, start: int, count: int) -> torch.Tensor:
        return self._whole[start : start + count]

    def _send(self, start: int, count: int, hosts: Sequence[int]) -> None:
        if count > 0:
            call = self._call
            lane = call.links.lane
            message = lane.outgoing(call.header, call.left())
            message.data(count).copy_(self._part(start, count))
            lane.send(message, count, hosts)


# --- bytes of tensors ----------------------------------------------------------------------------
class RankParts:
    """One tensor for each rank, as bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.parts = [as_bytes(tensor) for tensor in tensors]
        self.lengths = [part.numel() for part in self.parts]

    def memory(self) -> tuple[torch.Tensor, bool]:
        """Memory for all bytes, one part behind the other, and whether it is that of the
        tensors.
        """
        adjoining = _adjoining(self.parts)
        if adjoining is not None:
            return adjoining, True
        return torch.empty(sum(self.lengths), dtype=torch.uint8), False

    def fill(self, data: Sequence[torch.Tensor]) -> None:
        for part, received in zip(self.parts, data, strict=True):
            part.copy_(received)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    # A single element may have any stride and still count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
