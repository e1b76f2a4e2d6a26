"""A reduce-scatter over all ranks of several hosts that have as many ranks each.

Lane j carries what is for the ranks with index j of all hosts. Their parts are cut into blocks, and
a block goes through
    1. contribute  for each host, a reduce-scatter inside this one: rank j has the sum of what
                   is for rank j of that host, and sends it there
    2. combine     each rank sums the hosts' sums of its own part, in order of host
Every host sends every other what is for its ranks, and no more: of two hosts each sends half of the
whole, where an all-reduce sends all of it. While a block is on the wire, those behind it are
summed. The bits are those of an all-reduce.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

import torch

from paceline.backend.engine import Reduction
from paceline.backend.hierarchical_reduce import HostwiseReduction
from paceline.backend.lane import message_capacity
from paceline.backend.multi_host_call import MultiHostCall

__all__ = ["PartReduction"]

_DEPTH = 2
_BLOCK_BYTES = 256 << 10
_LINE_BYTES = 64


class PartReduction(HostwiseReduction):
    """Gives each rank the sum of what all have for it.

    Args:
        call: the call it belongs to.
        output: this rank's part of the result, contiguous.
        inputs: what this rank has for each, contiguous; as long on all ranks.
        op: the operation.
        wire_dtype: the type in which hosts' sums travel.
    """

    def __init__(
        self,
        call: MultiHostCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction,
        wire_dtype: torch.dtype,
    ) -> None:
        super().__init__(call, output, op, wire_dtype)
        self._output = output.view(-1)
        self._addresses = [tensor.data_ptr() for tensor in inputs]
        self._counts = [tensor.numel() for tensor in inputs]
        longest = message_capacity(call.placement.hosts)
        block_bytes = min(_BLOCK_BYTES * self._element // self._wire_element, longest)
        self._block_count = block_bytes // _LINE_BYTES * _LINE_BYTES // self._element
        self._blocks = max(-(-max(self._counts) // self._block_count), 1)
        # This host's sums of this rank's part, for the blocks under way, and one to be rounded.
        self._sums = call.workspace((_DEPTH + 2, self._block_count), output.dtype)

    def run(self) -> None:
        for step in range(self._blocks + _DEPTH):
            if step < self._blocks:
                self._contribute(step)
            if step >= _DEPTH:
                self._combine(step - _DEPTH)

    def _block_of(self, rank: int, block: int) -> tuple[int, int]:
        """Where a block of a rank's part begins, and how long it is."""
        start = min(block * self._block_count, self._counts[rank])
        return start, min(self._block_count, self._counts[rank] - start)

    def _own_sum(self, block: int) -> int:
        """The address of this host's sum of a block of this rank's part."""
        return self._sums[block % (_DEPTH + 1)].data_ptr()

    # --- 1. contribute ----------------------------------------------------------------------------
    def _contribute(self, block: int) -> None:
        # This host's own last: what others wait for goes first.
        for host in (*self._placement.other_hosts, self._placement.host):
            members = self._placement.members[host]
            if host == self._placement.host:
                self._sum_block(block, members, self._own_sum(block))
            else:
                self._send_to(host, block, members)

    def _send_to(self, host: int, block: int, members: Sequence[int]) -> None:
        lane, call = self._call.links.lane, self._call
        message = lane.outgoing(call.header, call.left())
        is_first = block == 0 and host == self._placement.other_hosts[0]
        count = self._sum_block(block, members, message.address, is_first=is_first)
        lane.send(message, count * self._wire_element, [host])

    def _sum_block(
        self, block: int, members: Sequence[int], target: int, *, is_first: bool = False
    ) -> int:
        """Put this host's sum of a block, as it travels, where `target` is; its length."""
        count = self._block_of(members[self._placement.local_index], block)[1]
        total = self._sums[-1].data_ptr() if self._rounds else target
        self._sum_on_host(*self._table(block, members), total, is_first=is_first)
        if self._rounds:
            self._core.plc_round_to_bf16(target, total, count)
        return count

    def _table(
        self, block: int, members: Sequence[int]
    ) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
        """Addresses and lengths of a block of these ranks' parts, for the core."""
        blocks = [self._block_of(rank, block) for rank in members]
        addresses = (
            self._addresses[rank] + start * self._element
            for rank, (start, _) in zip(members, blocks, strict=True)
        )
        return (
            (C.c_void_p * len(members))(*addresses),
            (C.c_uint64 * len(members))(*(count for _, count in blocks)),
        )

    # --- 2. combine -------------------------------------------------------------------------------
    def _combine(self, block: int) -> None:
        lane, call = self._call.links.lane, self._call
        if block == 0:
            received = call.receive_first()
        else:
            received = [lane.receive(host, call.left()) for host in self._placement.other_hosts]
        start, count = self._block_of(self._placement.rank, block)
        out = self._output[start : start + count]
        self._add_shares(out, received, self._own_sum(block))
        call.received()
