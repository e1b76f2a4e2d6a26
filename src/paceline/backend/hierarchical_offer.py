"""A few numbers of every rank, given to all ranks of several hosts; and in the same messages the
sum of a short tensor that all of them offer.

Whether the tensors are summed is decided by what the numbers say. A rank that knows of no tensor
brings its numbers alone: then only these count, and every tensor stays as it is.

    1. share     the ranks of each host get its numbers; if all of them offer a tensor, the first
                 rank takes the host's sum
    2. exchange  the first ranks send each other numbers and sums, one message for each host
    3. tell      they give the other ranks of their host all numbers and, if the host offered, the
                 sum
    4. accept    every rank finds out from the same numbers whether the sum counts

The sum is taken in the order of `hierarchical_reduce`: the bits are those of an all-reduce.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
from collections.abc import Callable, Sequence

import torch

from paceline.backend.engine import Reduction
from paceline.backend.hierarchical_reduce import HostwiseReduction
from paceline.backend.host_placement import Placement
from paceline.backend.lane import LaneMessage
from paceline.backend.multi_host_call import MultiHostCall
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES, Op

__all__ = ["Offer", "NumberTable", "exchange_numbers"]

_NUMBER_BYTES = 8
_LINE_BYTES = 64


class NumberTable:
    """The numbers of all ranks, a row for each."""

    def __init__(self, ranks: int, width: int) -> None:
        self._ranks, self._width = ranks, width
        # One more in each: how many bytes its rank offers.
        self.row_bytes = (width + 1) * _NUMBER_BYTES
        self.nbytes = ranks * self.row_bytes
        self._numbers = (C.c_double * (ranks * (width + 1)))()
        self.start = C.addressof(self._numbers)

    def put(self, rank: int, row: Sequence[float], offered: int) -> None:
        first = rank * (self._width + 1)
        self._numbers[first : first + self._width + 1] = [*row, offered]

    def address(self, rank: int) -> int:
        return self.start + rank * self.row_bytes

    def offered(self, rank: int) -> int:
        return int(self._numbers[rank * (self._width + 1) + self._width])

    def rows(self) -> list[list[float]]:
        """Everybody's."""
        step = self._width + 1
        return [self._numbers[r * step : r * step + self._width] for r in range(self._ranks)]


@dataclasses.dataclass
class Offer:
    """A short tensor, to be summed times a factor if all ranks offer one of its length and
    `accepts` says so of everybody's numbers. Every rank asks its own, which has to say the same on
    all.
    """

    tensor: torch.Tensor
    factor: float
    accepts: Callable[[list[list[float]]], bool]
    # Afterwards: the tensor holds the sum. Otherwise it is as it was.
    is_taken: bool = False


def exchange_numbers(call: MultiHostCall, table: NumberTable, offer: Offer | None) -> None:
    """Fill in the numbers of all other ranks, and sum what is offered if they allow it."""
    _share_on_host(call, table)
    # The ranks of a host see the same: either all take part in its sum or none does.
    if offer is not None and _all_offer(table, call.placement.local, offer):
        _OfferedSum(call, table, offer).run()
        return
    if call.speaks:
        message = call.links.lane.outgoing(call.header, call.left())
        nbytes = _put_rows(call.placement, table, message)
        call.links.lane.send(message, nbytes, call.placement.other_hosts)
        _take_rows(call.placement, table, call.receive_first())
    if not call.all_speak:
        _broadcast_from_first(call, table.start, table.nbytes)
    if call.speaks:
        call.received()


def _share_on_host(call: MultiHostCall, table: NumberTable) -> None:
    local = call.placement.local
    request = Request(kind=Kind.ALLGATHER, dtype=BYTES, root=-1, count=table.row_bytes)
    request.input = table.address(call.placement.rank)
    request.outputs = (C.c_void_p * len(local))(*map(table.address, local))
    request.out_counts = (C.c_uint64 * len(local))(*[table.row_bytes] * len(local))
    call.run_first_local(request)


def _all_offer(table: NumberTable, ranks: Sequence[int], offer: Offer) -> bool:
    return all(table.offered(rank) == offer.tensor.nbytes for rank in ranks)


def _put_rows(placement: Placement, table: NumberTable, message: LaneMessage) -> int:
    """Put the rows of this host into a message; how many bytes they take."""
    for index, rank in enumerate(placement.local):
        C.memmove(message.address + index * table.row_bytes, table.address(rank), table.row_bytes)
    return len(placement.local) * table.row_bytes


def _take_rows(placement: Placement, table: NumberTable, received: Sequence[LaneMessage]) -> None:
    for host, message in zip(placement.other_hosts, received, strict=True):
        for index, rank in enumerate(placement.members[host]):
            theirs = message.address + index * table.row_bytes
            C.memmove(table.address(rank), theirs, table.row_bytes)


def _broadcast_from_first(call: MultiHostCall, address: int, nbytes: int) -> None:
    request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=0, count=nbytes)
    request.input = request.output = address
    call.run_local(request)


class _OfferedSum(HostwiseReduction):
    """The rest of the exchange on a host whose ranks all offer a tensor."""

    def __init__(self, call: MultiHostCall, table: NumberTable, offer: Offer) -> None:
        super().__init__(call, offer.tensor, Reduction(Op.PREMUL_SUM, offer.factor))
        self._table, self._offer = table, offer
        self._tensor = offer.tensor

    def run(self) -> None:
        call, table = self._call, self._table
        if call.all_speak:
            self._exchange(self._tensor.data_ptr())
            call.received()
            return
        # The other ranks of the host learn with the sum whether it counts: it comes to a place of
        # its own.
        behind = _behind(table.nbytes)
        memory = call.workspace((1, behind + self._tensor.nbytes), torch.uint8)[0]
        start = memory.data_ptr()
        if call.speaks:
            self._exchange(start + behind)
            C.memmove(start, table.start, table.nbytes)
        else:
            self._sum_to_first(None)
        _broadcast_from_first(call, start, memory.numel())
        if call.speaks:
            call.received()
        else:
            C.memmove(table.start, start, table.nbytes)
            self._offer.is_taken = self._is_accepted()
        if self._offer.is_taken:
            C.memmove(self._tensor.data_ptr(), start + behind, self._tensor.nbytes)

    def _exchange(self, out: int) -> None:
        """With the other hosts: all rows and, if it counts, the sum, which goes to an address."""
        call, placement = self._call, self._placement
        lane = call.links.lane
        message = lane.outgoing(call.header, call.left())
        behind = _behind(_put_rows(placement, self._table, message))
        self._sum_to_first(message.address + behind)
        lane.send(message, behind + self._tensor.nbytes, placement.other_hosts)
        received = call.receive_first()
        _take_rows(placement, self._table, received)
        self._offer.is_taken = self._is_accepted()
        if self._offer.is_taken:
            row_bytes = self._table.row_bytes
            shares = [
                theirs.address + _behind(len(placement.members[host]) * row_bytes)
                for host, theirs in zip(placement.other_hosts, received, strict=True)
            ]
            shares.insert(placement.host, message.address + behind)
            self._sum_hosts(out, shares, self._tensor.numel())

    def _is_accepted(self) -> bool:
        everybody = range(self._placement.size)
        return _all_offer(self._table, everybody, self._offer) and self._offer.accepts(
            self._table.rows()
        )

    def _sum_to_first(self, output: int | None) -> None:
        """The host's sum."""
        self._call.run_local(
            Request(
                kind=Kind.REDUCE,
                dtype=self._dtype,
                op=Op.PREMUL_SUM,
                root=0,
                count=self._tensor.numel(),
                input=self._tensor.data_ptr(),
                output=output,
                factor=self._offer.factor,
            )
        )


def _behind(nbytes: int) -> int:
    """Where a tensor begins that comes after so many bytes."""
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES
