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
While a block is on the wire, the ones before are distributed and the ones behind are summed: a
rank runs 1 for block k and 2 and 3 for block k - _DEPTH. The core runs all of that
(`csrc/hosts_reduction.c`), in parts that stay in cache and without the interpreter, which it calls
for each message (`lane_wire`). Here blocks are planned, and calls compared.

With two hosts each sends its whole sum, which is as little as any algorithm can do, in one step.
With more, slices are cut into a piece per host: each host sums its own piece in step 2 and sends
the sum to all others, which takes one more step and, for any number of hosts, no more than twice
the slice. Where the bytes that this saves take less time than the step, slices go whole.

A short tensor goes whole through one lane: the first rank of a host takes the host's sum, exchanges
it and gives its other ranks the result. What a message costs is more than its bytes, and the other
ranks need not be woken for them.

How long blocks are and whether there are pieces depends on how fast the links are, which is
measured once (`link_speed`). It changes no bits: every sum is done by the core, in an order that
depends on the placement alone, so all ranks get the same bits, in every run. Gloo's own all-reduce
adds in another order, and is no choice for that reason.

With a `wire_dtype` the hosts' sums of tensors that are not short are rounded to it, one's own
included, and added in the type of the tensor.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
from collections.abc import Sequence

import torch

from paceline.backend.engine import SUM, Reduction
from paceline.backend.host_engine import core_dtype
from paceline.backend.host_placement import cut_range
from paceline.backend.lane import LaneMessage, message_capacity
from paceline.backend.lane_wire import LaneWire
from paceline.backend.link_speed import LinkSpeed
from paceline.backend.multi_host_call import MultiHostCall
from paceline.core import abi
from paceline.core.abi import HostsReduction, Kind, Request
from paceline.core.dtypes import BYTES, Op
from paceline.errors import MismatchError

__all__ = ["HostwiseReduction", "ReducePlan", "is_short", "reduce_hierarchically", "wire_dtype_of"]

_DEPTH = 2
# Up to the first a tensor is short, and up to the second if a host sends no more in all.
_SHORT_BYTES = 8 << 10
_SHORT_SENT_BYTES = 128 << 10
# Each further block costs about a millisecond of hand-overs, which is hidden while the one before
# is on its way. On slow links blocks of the first length are long enough for that, or slices of the
# second where there are few lanes; on fast ones, where less is hidden, they are longer.
_MIN_BLOCK_BYTES = 512 << 10
_MIN_SLICE_BYTES = 256 << 10
_FAST_MIN_SLICE_BYTES = 512 << 10
_BLOCK_S = 4e-3
# A piece of it fits into a message between any number of hosts. With half of that, four hosts took
# a tenth longer, and with bfloat16 nearly twice as long: pieces are short, and messages many.
_MAX_SLICE_IN_PIECES_BYTES = 2 << 20
_BLOCKS_WANTED = 4
# With a wire_dtype a piece is rounded twice, so whether there are pieces may not depend on what was
# measured: above this length of a slice.
_MAX_WHOLE_BYTES = 16 << 10
_LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """How `count` elements are cut. Pure, and the same on all ranks. `lanes`: those spoken on."""

    count: int
    element_bytes: int
    lanes: int
    hosts: int
    slice_count: int
    in_pieces: bool

    @classmethod
    def of(
        cls,
        count: int,
        element_bytes: int,
        wire_bytes: int,
        lanes: int,
        hosts: int,
        link: LinkSpeed | None,
    ) -> ReducePlan:
        """For a group that has these lanes; `wire_bytes`: of an element on its way. `link` is not
        needed for a short tensor.
        """
        nbytes = count * element_bytes
        if is_short(nbytes, hosts):
            return cls(count, element_bytes, 1, hosts, count, in_pieces=False)
        assert link is not None
        in_pieces = hosts > 2 and (
            nbytes > _MAX_WHOLE_BYTES * lanes
            if wire_bytes < element_bytes
            else _pieces_are_faster(nbytes, hosts, link)
        )
        on_its_way = int(link.bytes_per_s * _BLOCK_S) // lanes
        shortest = min(_MIN_SLICE_BYTES, _MIN_BLOCK_BYTES // lanes)
        at_least = min(max(on_its_way, shortest), _FAST_MIN_SLICE_BYTES)
        wanted = -(-nbytes // lanes // _BLOCKS_WANTED)
        at_most = _MAX_SLICE_IN_PIECES_BYTES if in_pieces else message_capacity(hosts)
        slice_bytes = min(max(wanted, at_least * element_bytes // wire_bytes), at_most)
        slice_bytes = -(-slice_bytes // _LINE_BYTES) * _LINE_BYTES
        return cls(count, element_bytes, lanes, hosts, slice_bytes // element_bytes, in_pieces)

    @property
    def is_short(self) -> bool:
        return is_short(self.count * self.element_bytes, self.hosts)

    @property
    def blocks(self) -> int:
        return -(-self.count // (self.slice_count * self.lanes))

    def slices(self, block: int) -> list[tuple[int, int]]:
        """Where the slice of each lane begins and how long it is, in elements."""
        start = block * self.slice_count * self.lanes
        count = min(self.slice_count * self.lanes, self.count - start)
        return cut_range(start, count, self.lanes)

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """The same for each host's piece of a slice."""
        return cut_range(0, count, self.hosts)


def _pieces_are_faster(nbytes: int, hosts: int, link: LinkSpeed) -> bool:
    """Whether the bytes that pieces save take longer than the step they add."""
    saved = nbytes * (hosts - 1) * (1 - 2 / hosts)
    return saved / link.bytes_per_s > link.latency_s


def is_short(nbytes: int, hosts: int) -> bool:
    """Whether a tensor goes whole through one lane."""
    return nbytes <= max(_SHORT_BYTES, _SHORT_SENT_BYTES // (hosts - 1))


def wire_dtype_of(
    tensor: torch.Tensor, op: Reduction, wire_dtype: torch.dtype | None
) -> torch.dtype:
    """The type in which hosts' sums travel in a group with this `wire_dtype`."""
    rounds = wire_dtype is not None and tensor.dtype == torch.float32 and op.code in _ADDING
    return wire_dtype if rounds and wire_dtype is not None else tensor.dtype


def reduce_hierarchically(
    call: MultiHostCall,
    tensor: torch.Tensor,
    op: Reduction,
    plan: ReducePlan,
    wire_dtype: torch.dtype,
    root: int | None = None,
) -> None:
    """Reduce a contiguous tensor over all ranks, in place; with a `root`, on that rank only."""
    if plan.count == 0:
        call.agree()
        return
    # Only the root's tensor may change. Of two hosts' long ones no other does.
    is_read = root in (None, call.placement.rank) or not (plan.is_short or plan.hosts > 2)
    own = tensor if is_read else tensor.clone()
    if plan.is_short:
        _ShortReduction(call, own, op).run()
    else:
        _BlockReduction(call, own, op, plan, wire_dtype, root).run()


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


class HostwiseReduction:
    """A reduction inside each host, then over the hosts: what all ways have in common.

    Args:
        call: the call it belongs to.
        tensor: one of the type that is reduced.
        op: the operation.
        wire_dtype: the type in which hosts' sums travel, if they are rounded on their way.
    """

    def __init__(
        self,
        call: MultiHostCall,
        tensor: torch.Tensor,
        op: Reduction,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._call = call
        self._placement = call.placement
        self._element = tensor.element_size()
        self._dtype = core_dtype(tensor)
        self._arithmetic = _Arithmetic(tensor.dtype, op, self._placement.size)
        self._core = abi.library()
        self._wire_dtype = wire_dtype or tensor.dtype
        self._rounds = self._wire_dtype != tensor.dtype
        self._wire_element = self._wire_dtype.itemsize

    def _sum_on_host(
        self,
        inputs: C.Array[C.c_void_p],
        counts: C.Array[C.c_uint64],
        output: int | None,
        *,
        is_first: bool,
    ) -> None:
        """The host's sum of what is this rank's: a reduce-scatter of one input for each rank."""
        op = self._arithmetic.inside
        request = Request(
            kind=Kind.REDUCE_SCATTER,
            dtype=self._dtype,
            op=op.code,
            root=-1,
            output=output,
            factor=op.scalar,
        )
        request.inputs, request.in_counts = inputs, counts
        if is_first:
            self._call.run_first_local(request)
        else:
            self._call.run_local(request)

    def _add_shares(self, out: torch.Tensor, received: Sequence[LaneMessage], mine: int) -> None:
        """Put the sum of the other hosts' shares and this one's, at address `mine`, into `out`."""
        shares = [message.address for message in received]
        shares.insert(self._placement.host, mine)
        if not self._rounds:
            self._sum_hosts(out.data_ptr(), shares, out.numel())
            return
        pointers = (C.c_void_p * len(shares))(*shares)
        self._core.plc_sum_of_bf16(out.data_ptr(), pointers, len(shares), out.numel())
        self._average(out.data_ptr(), out.numel())

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


class _ShortReduction(HostwiseReduction):
    """The first rank of each host takes the host's sum, sends it, and has the result first."""

    def __init__(self, call: MultiHostCall, tensor: torch.Tensor, op: Reduction) -> None:
        super().__init__(call, tensor, op)
        self._tensor = tensor
        self._address = tensor.data_ptr()

    def run(self) -> None:
        call, count = self._call, self._tensor.numel()
        if not call.speaks:
            self._reduce_to_first(None)
            self._broadcast_from_first()
            return
        lane = call.links.lane
        message = lane.outgoing(call.header, call.left())
        self._reduce_to_first(message.address)
        lane.send(message, count * self._element, self._placement.other_hosts)
        shares = [received.address for received in call.receive_first()]
        shares.insert(self._placement.host, message.address)
        self._sum_hosts(self._address, shares, count)
        if not call.all_speak:
            self._broadcast_from_first()
        call.received()

    def _reduce_to_first(self, output: int | None) -> None:
        op = self._arithmetic.inside
        self._call.run_first_local(
            Request(
                kind=Kind.REDUCE,
                dtype=self._dtype,
                op=op.code,
                root=0,
                count=self._tensor.numel(),
                input=self._address,
                output=output,
                factor=op.scalar,
            )
        )

    def _broadcast_from_first(self) -> None:
        nbytes = self._tensor.numel() * self._element
        request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=0, count=nbytes)
        request.input = request.output = self._address
        self._call.run_local(request)


class _BlockReduction(HostwiseReduction):
    """Blocks in several steps, many of them under way at any time. The core takes the steps; here
    is what it has to know.
    """

    def __init__(
        self,
        call: MultiHostCall,
        tensor: torch.Tensor,
        op: Reduction,
        plan: ReducePlan,
        wire_dtype: torch.dtype,
        root: int | None,
    ) -> None:
        super().__init__(call, tensor, op, wire_dtype)
        self._tensor, self._plan = tensor, plan
        placement = self._placement
        # Of two hosts the root's has the sum. The other one only sends, and nobody but the root
        # gets the result.
        at_root = root is None or plan.hosts > 2 or root in placement.local
        self._sends = root is None or plan.hosts > 2 or not at_root
        self._receives = at_root
        self._reads = root is None or plan.hosts > 2 or root == placement.rank

    def run(self) -> None:
        call = self._call
        wire = call.wire() if call.speaks else None
        job = self._job(wire)
        count = self._plan.count
        call.run_first_local(_step(Kind.HOSTS_BEGIN, job, count), wire=wire)
        try:
            self._agree()
        except MismatchError:
            call.run_rest(_step(Kind.HOSTS_ABANDON, job, count), None)
            raise
        call.run_rest(_step(Kind.HOSTS_FINISH, job, count), wire)

    def _agree(self) -> None:
        """Learn that all hosts make this call, from their first messages. The core waits for those
        again, and finds them.
        """
        call = self._call
        if call.speaks:
            if not self._sends:
                call.send_header()
            call.receive_first()
        call.confirm()
        if call.speaks and not self._receives:
            call.received()

    def _job(self, wire: LaneWire | None) -> HostsReduction:
        plan, arithmetic = self._plan, self._arithmetic
        # Longest first.
        row_bytes = max(count for _, count in plan.slices(0)) * self._element
        slices = [part for block in range(plan.blocks) for part in plan.slices(block)]
        job = HostsReduction(
            host=self._placement.host,
            hosts=plan.hosts,
            lanes=plan.lanes,
            depth=_DEPTH,
            in_pieces=plan.in_pieces,
            dtype=self._dtype,
            op=arithmetic.inside.code,
            op_between=arithmetic.between,
            rounds=self._rounds,
            factor=arithmetic.inside.scalar,
            divisor=arithmetic.divisor,
            sends=self._sends,
            receives=self._receives,
            reads=self._reads,
            data=self._tensor.data_ptr(),
            blocks=plan.blocks,
            scratch=self._call.workspace((_DEPTH + 2, row_bytes), torch.uint8).data_ptr(),
            row_bytes=row_bytes,
        )
        job.slice_starts, job.slice_counts = _columns(slices)
        if plan.in_pieces and self._call.speaks:
            mine = slices[self._placement.local_index :: plan.lanes]
            pieces = [piece for _, count in mine for piece in plan.pieces(count)]
            job.piece_starts, job.piece_counts = _columns(pieces)
        if wire is not None:
            job.wire = wire.table
        return job


def _columns(ranges: Sequence[tuple[int, int]]) -> tuple[C.Array[C.c_uint64], C.Array[C.c_uint64]]:
    starts, counts = zip(*ranges, strict=True)
    array = C.c_uint64 * len(ranges)
    return array(*starts), array(*counts)


def _step(kind: int, job: HostsReduction, count: int) -> Request:
    return Request(kind=kind, dtype=BYTES, root=-1, count=count, input=C.addressof(job))
