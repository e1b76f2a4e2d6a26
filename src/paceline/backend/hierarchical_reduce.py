"""A reduction over all ranks of several hosts, in place.

Vocabulary
    lane    the ranks with the same index on each host: lane 0 is every host's first rank, and so
            on. There are as many lanes as the smallest host has ranks.
    slice   the part of a block that one lane carries between the hosts, so that all local ranks
            share the work.
    piece   the part of a slice that one host sums, where there are more than two.

A tensor is cut into blocks, and a block goes through
    1. contribute  reduce-scatter inside each host: each lane has its host's sum of a slice, and
                   sends it to the other hosts
    2. combine     each lane sums the hosts' sums, in order of host
    3. distribute  all-gather inside each host
While a block is on the wire, the ones before are distributed and the ones behind are summed: this
rank runs 1 for block k and 2 and 3 for block k - _DEPTH.

With two hosts each sends its whole sum, which is as little as any algorithm can do, in one step.
With more, slices are cut into a piece per host: each host sums its own piece in step 2 and sends
the sum to all others, which takes one more step and, for any number of hosts, no more than twice
the slice. Short slices go whole.

A short tensor has no slices: the host's sum is taken by every rank, and every lane sends all of it.
That saves step 3.

Every sum is done by the core in an order that depends on the placement alone, so all ranks get the
same bits, in every run. With a `wire_dtype` the hosts' sums are rounded to it, one's own included,
and added in the type of the tensor.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
from collections.abc import Sequence

import torch

from paceline.backend.engine import SUM, Reduction
from paceline.backend.host_engine import core_dtype
from paceline.backend.lane import LaneMessage
from paceline.backend.multi_host_call import MultiHostCall
from paceline.core import abi
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES, Op

__all__ = ["ReducePlan", "reduce_hierarchically"]

_DEPTH = 2
_SHORT_BYTES = 8 << 10
_MIN_SLICE_BYTES = 256 << 10
_MAX_SLICE_BYTES = 1 << 20
_BLOCKS_WANTED = 4
# Above, slices go to more than two hosts in pieces.
_MAX_WHOLE_BYTES = 16 << 10
# torch works on less than this without its pool of threads.
_SERIAL_NUMEL = 32768
_LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """How `count` elements are cut. Pure, and the same on all ranks."""

    count: int
    element_bytes: int
    lanes: int
    hosts: int
    slice_count: int
    in_pieces: bool

    @classmethod
    def of(cls, count: int, element_bytes: int, lanes: int, hosts: int) -> ReducePlan:
        wanted = -(-count * element_bytes // lanes // _BLOCKS_WANTED)
        slice_bytes = min(max(wanted, _MIN_SLICE_BYTES), _MAX_SLICE_BYTES)
        slice_bytes = -(-slice_bytes // _LINE_BYTES) * _LINE_BYTES
        in_pieces = hosts > 2 and count * element_bytes > _MAX_WHOLE_BYTES * lanes
        return cls(count, element_bytes, lanes, hosts, slice_bytes // element_bytes, in_pieces)

    @property
    def is_short(self) -> bool:
        return self.count * self.element_bytes <= _SHORT_BYTES

    @property
    def blocks(self) -> int:
        return -(-self.count // (self.slice_count * self.lanes))

    def slices(self, block: int) -> list[tuple[int, int]]:
        """Where the slice of each lane begins and how long it is, in elements."""
        start = block * self.slice_count * self.lanes
        count = min(self.slice_count * self.lanes, self.count - start)
        return _cut(start, count, self.lanes)

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """The same for each host's piece of a slice."""
        return _cut(0, count, self.hosts)


def _cut(start: int, count: int, parts: int) -> list[tuple[int, int]]:
    """Cut a range into parts as equal as can be, longer ones first."""
    length = -(-count // parts)
    return [
        (start + min(part * length, count), max(min(length, count - part * length), 0))
        for part in range(parts)
    ]


def reduce_hierarchically(
    call: MultiHostCall, tensor: torch.Tensor, op: Reduction, wire_dtype: torch.dtype | None = None
) -> None:
    """Reduce a contiguous tensor over all ranks, in place."""
    placement = call.placement
    plan = ReducePlan.of(tensor.numel(), tensor.element_size(), placement.lanes, placement.hosts)
    if plan.count == 0:
        call.agree()
    elif plan.is_short:
        _ShortReduction(call, tensor, op).run()
    else:
        rounds = wire_dtype is not None and tensor.dtype == torch.float32 and op.code in _ADDING
        _BlockReduction(call, tensor, op, plan, wire_dtype if rounds else None).run()


_ADDING = (Op.SUM, Op.AVG, Op.PREMUL_SUM)


class _Arithmetic:
    """The operation as it is done inside a host, between hosts, and at the end."""

    def __init__(self, dtype: torch.dtype, op: Reduction, ranks: int) -> None:
        self.between = Op.SUM if op.code in _ADDING else op.code
        self.inside = op
        self.divisor = 1
        if op.code == Op.AVG and dtype in (torch.float16, torch.complex32):
            # The sum of many such numbers may be too large for their type, their average is not.
            self.inside = Reduction(Op.PREMUL_SUM, 1.0 / ranks)
        elif op.code == Op.AVG:
            # The average is taken once, at the end.
            self.inside, self.divisor = SUM, ranks


class _Reduction:
    """What both ways have in common."""

    def __init__(self, call: MultiHostCall, tensor: torch.Tensor, op: Reduction) -> None:
        self._call = call
        self._placement = call.placement
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._element = tensor.element_size()
        self._dtype = core_dtype(tensor)
        self._arithmetic = _Arithmetic(tensor.dtype, op, self._placement.size)
        self._core = abi.library()

    def _sum_hosts(self, out: int, shares: Sequence[int], count: int) -> None:
        """out = the sum of the hosts' shares, in order of host; out may be one of them."""
        pointers = (C.c_void_p * len(shares))(*shares)
        self._core.plc_reduce_local(
            out, pointers, len(shares), count, self._dtype, self._arithmetic.between, 1.0
        )
        self._average(out, count)

    def _average(self, address: int, count: int) -> None:
        if self._arithmetic.divisor > 1:
            self._core.plc_scale_local(address, count, self._dtype, self._arithmetic.divisor)


class _ShortReduction(_Reduction):
    """Every rank takes its host's sum, and every lane sends it."""

    def run(self) -> None:
        call, placement = self._call, self._placement
        nbytes = self._tensor.numel() * self._element
        if not placement.has_lane:
            own = self._tensor.clone()
            self._run_local(own.data_ptr())
        else:
            lane = call.links.lane
            message = lane.outgoing(call.header, call.left())
            C.memmove(message.address, self._address, nbytes)
            self._run_local(message.address)
            lane.send(message, nbytes, placement.other_hosts)
            shares = [received.address for received in call.receive_first()]
            shares.insert(placement.host, message.address)
            self._sum_hosts(self._address, shares, self._tensor.numel())
            call.received()
        if not placement.all_have_lanes:
            self._give_to_ranks_without_lane(nbytes)

    def _run_local(self, address: int) -> None:
        op = self._arithmetic.inside
        self._call.run_first_local(
            Request(
                kind=Kind.ALLREDUCE,
                dtype=self._dtype,
                op=op.code,
                root=-1,
                count=self._tensor.numel(),
                input=address,
                output=address,
                factor=op.scalar,
            )
        )

    def _give_to_ranks_without_lane(self, nbytes: int) -> None:
        request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=0, count=nbytes)
        request.input = request.output = self._address
        self._call.run_local(request)


class _BlockReduction(_Reduction):
    """Blocks in three steps, several of them under way at any time."""

    def __init__(
        self,
        call: MultiHostCall,
        tensor: torch.Tensor,
        op: Reduction,
        plan: ReducePlan,
        wire_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(call, tensor, op)
        self._plan = plan
        self._lane_index = self._placement.local_index
        self._wire_dtype = wire_dtype or tensor.dtype
        self._rounds = wire_dtype is not None
        self._wire_element = self._wire_dtype.itemsize
        # What this rank sent of the blocks under way.
        self._sent: dict[int, LaneMessage] = {}
        # This rank's slices of the blocks under way: the host's sum, then that of all.
        self._slices = _workspace(call, (2 * _DEPTH + 1, plan.slice_count), tensor.dtype)

    def run(self) -> None:
        distributing = 2 * _DEPTH if self._plan.in_pieces else _DEPTH
        for step in range(self._plan.blocks + distributing):
            if step < self._plan.blocks:
                self._contribute(step)
            if 0 <= step - _DEPTH < self._plan.blocks:
                self._combine(step - _DEPTH)
            if step >= distributing:
                self._distribute(step - distributing)

    def _slice_of(self, block: int) -> torch.Tensor:
        """Memory of this rank for a slice under way."""
        return self._slices[block % len(self._slices)]

    # --- 1. contribute ----------------------------------------------------------------------------
    def _contribute(self, block: int) -> None:
        slices = self._plan.slices(block)
        if not self._placement.has_lane:
            self._reduce_scatter(block, slices, None)
            return
        count = slices[self._lane_index][1]
        lane, call = self._call.links.lane, self._call
        if self._plan.in_pieces:
            mine = self._slice_of(block)
            self._reduce_scatter(block, slices, mine.data_ptr())
            pieces = self._plan.pieces(count)
            for host in self._placement.other_hosts:
                start, length = pieces[host]
                message = lane.outgoing(call.header, call.left())
                self._on_wire(message, length).copy_(mine[start : start + length])
                lane.send(message, length * self._wire_element, [host])
            return
        message = lane.outgoing(call.header, call.left())
        if self._rounds:
            mine = self._slice_of(block)
            self._reduce_scatter(block, slices, mine.data_ptr())
            _convert(self._on_wire(message, count), mine[:count])
        else:
            self._reduce_scatter(block, slices, message.address)
        lane.send(message, count * self._wire_element, self._placement.other_hosts)
        self._sent[block] = message

    def _reduce_scatter(
        self, block: int, slices: Sequence[tuple[int, int]], output: int | None
    ) -> None:
        """The host's sum of this rank's slice."""
        op = self._arithmetic.inside
        request = Request(
            kind=Kind.REDUCE_SCATTER,
            dtype=self._dtype,
            op=op.code,
            root=-1,
            output=output,
            factor=op.scalar,
        )
        request.inputs, request.in_counts = self._table(slices, 1)
        if block == 0:
            self._call.run_first_local(request)
        else:
            self._call.run_local(request)

    def _table(
        self, slices: Sequence[tuple[int, int]], unit: int
    ) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
        """Addresses and lengths of the slices, for the core: one per local rank; those without a
        lane have none.
        """
        ranks = len(self._placement.local)
        addresses = (self._address + start * self._element for start, _ in slices)
        return (
            (C.c_void_p * ranks)(*addresses),
            (C.c_uint64 * ranks)(*(count * unit for _, count in slices)),
        )

    def _on_wire(self, message: LaneMessage, count: int) -> torch.Tensor:
        return message.data(count * self._wire_element).view(self._wire_dtype)

    # --- 2. combine -------------------------------------------------------------------------------
    def _combine(self, block: int) -> None:
        if not self._placement.has_lane:
            return
        count = self._plan.slices(block)[self._lane_index][1]
        received = self._receive(block)
        if self._plan.in_pieces:
            self._combine_piece(block, count, received)
        elif self._rounds:
            shares = [self._on_wire(message, count) for message in received]
            shares.insert(self._placement.host, self._on_wire(self._sent.pop(block), count))
            self._add_rounded(self._slice_of(block)[:count], shares)
        else:
            shares_at = [message.address for message in received]
            shares_at.insert(self._placement.host, self._sent.pop(block).address)
            self._sum_hosts(self._slice_of(block).data_ptr(), shares_at, count)
        self._call.received()

    def _receive(self, block: int) -> list[LaneMessage]:
        call = self._call
        if block == 0:
            return call.receive_first()
        return [call.links.lane.receive(host, call.left()) for host in self._placement.other_hosts]

    def _combine_piece(self, block: int, count: int, received: list[LaneMessage]) -> None:
        """Sum this host's piece of the slice, and send the sum to the other hosts."""
        start, length = self._plan.pieces(count)[self._placement.host]
        mine = self._slice_of(block)[start : start + length]
        lane, call = self._call.links.lane, self._call
        message = lane.outgoing(call.header, call.left())
        on_wire = self._on_wire(message, length)
        if self._rounds:
            on_wire.copy_(mine)
            shares = [self._on_wire(other, length) for other in received]
            shares.insert(self._placement.host, on_wire.clone())
            self._add_rounded(mine, shares)
            on_wire.copy_(mine)
            mine.copy_(on_wire)
        else:
            shares_at = [other.address for other in received]
            shares_at.insert(self._placement.host, mine.data_ptr())
            self._sum_hosts(mine.data_ptr(), shares_at, length)
            on_wire.copy_(mine)
        lane.send(message, length * self._wire_element, self._placement.other_hosts)

    def _add_rounded(self, out: torch.Tensor, shares: Sequence[torch.Tensor]) -> None:
        for parts in zip(*(t.split(_SERIAL_NUMEL) for t in (out, *shares)), strict=True):
            total, first, *others = parts
            total.copy_(first)
            for other in others:
                total.add_(other)
        self._average(out.data_ptr(), out.numel())

    # --- 3. distribute ----------------------------------------------------------------------------
    def _distribute(self, block: int) -> None:
        slices = self._plan.slices(block)
        request = Request(kind=Kind.ALLGATHER, dtype=BYTES, root=-1)
        if self._placement.has_lane:
            count = slices[self._lane_index][1]
            if self._plan.in_pieces:
                self._receive_pieces(block, count)
            request.count = count * self._element
            request.input = self._slice_of(block).data_ptr()
        request.outputs, request.out_counts = self._table(slices, self._element)
        self._call.run_local(request)

    def _receive_pieces(self, block: int, count: int) -> None:
        """The other hosts' sums of their pieces."""
        lane, call = self._call.links.lane, self._call
        mine, pieces = self._slice_of(block), self._plan.pieces(count)
        for host in self._placement.other_hosts:
            start, length = pieces[host]
            message = lane.receive(host, call.left())
            mine[start : start + length].copy_(self._on_wire(message, length))
            lane.received(host)


def _workspace(call: MultiHostCall, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    memory = call.links.workspace(shape[0] * shape[1] * dtype.itemsize)
    return memory.view(dtype).view(shape)


def _convert(out: torch.Tensor, data: torch.Tensor) -> None:
    for to, part in zip(out.split(_SERIAL_NUMEL), data.split(_SERIAL_NUMEL), strict=True):
        to.copy_(part)
