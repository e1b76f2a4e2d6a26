"""Gather, scatter and all-to-all over all ranks of several hosts: every rank sends every other
something, of any size.

Each rank has a row: how many bytes it sends to each rank, and how many it expects from each. All
ranks see all rows before anything is written, so that all reach the same conclusion if they do not
fit. Rows travel in one of two ways:

    by lanes   where all hosts have as many ranks: each rank sends its row to its lane, and what it
               has for the ranks of a host with it, if that is not long. One message carries both,
               and the ranks of a host give each other what came for them.
    gathered   elsewhere, or if rows are too long for that: an all-gather.

What did not travel with the rows goes straight from rank to rank over Gloo between hosts, from and
to the tensors themselves, and through shared memory inside a host.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

import torch

from paceline._torch_internals import Work
from paceline.backend.hierarchical_move import RankParts, all_gather, is_brief, lanes_to_move
from paceline.backend.host_engine import address_of
from paceline.backend.host_placement import Placement
from paceline.backend.lane import LaneMessage, message_capacity
from paceline.backend.multi_host_call import DIRECT_TAG, MultiHostCall
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES
from paceline.errors import MismatchError

__all__ = ["exchange", "exchange_is_brief", "exchange_lanes"]

# What a message carries for the ranks of one host.
_CARRIED_BYTES = 256 << 10


def exchange(
    call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Give every rank r `inputs[r]`, and get `outputs[r]` from it."""
    exchange_ = _Exchange(call, RankParts(outputs), RankParts(inputs))
    if _is_by_lanes(call.placement):
        exchange_.run_by_lanes()
    else:
        exchange_.run_gathered()


def exchange_lanes(placement: Placement) -> int:
    """How many lanes are spoken on."""
    if _is_by_lanes(placement):
        return placement.lanes
    return lanes_to_move(placement, _bytes_of_all_rows(placement))


def exchange_is_brief(placement: Placement) -> bool:
    """Whether it waits where signals are handled."""
    return _is_by_lanes(placement) or is_brief(placement, _bytes_of_all_rows(placement))


def _is_by_lanes(placement: Placement) -> bool:
    return placement.is_even and _row_bytes(placement) + _CARRIED_BYTES <= message_capacity(
        placement.hosts
    )


def _row_bytes(placement: Placement) -> int:
    return 2 * placement.size * C.sizeof(C.c_int64)


def _bytes_of_all_rows(placement: Placement) -> int:
    return placement.size * _row_bytes(placement)


class _Exchange:
    """One exchange, on one rank."""

    def __init__(self, call: MultiHostCall, to_receive: RankParts, to_send: RankParts) -> None:
        self._call = call
        self._placement = call.placement
        self._to_receive, self._to_send = to_receive, to_send
        self._row = torch.tensor([to_send.lengths, to_receive.lengths])

    # --- rows -------------------------------------------------------------------------------------
    def run_gathered(self) -> None:
        """Rows are gathered, then everything goes straight to its rank."""
        rows = torch.empty((self._placement.size, *self._row.shape), dtype=torch.int64)
        all_gather(self._call, rows.unbind(), self._row)
        _check_sizes(self._call, rows)
        self._send_straight()

    def run_by_lanes(self) -> None:
        """What is not long travels with the rows."""
        rows = torch.empty((self._placement.size, *self._row.shape), dtype=torch.int64)
        self._share_rows(rows, self._placement.host, self._row, is_first=True)
        self._send_with_row()
        messages = dict(zip(self._placement.other_hosts, self._call.receive_first(), strict=True))
        for host, message in messages.items():
            theirs = message.data(_row_bytes(self._placement)).view(torch.int64)
            self._share_rows(rows, host, theirs)
        are_carried = self._all_are_carried(rows)
        try:
            _check_sizes(self._call, rows)
            if are_carried:
                for host in range(self._placement.hosts):
                    self._share_parts(host, rows, messages.get(host))
        finally:
            self._call.received()
        if not are_carried:
            self._send_straight()

    def _share_rows(
        self, rows: torch.Tensor, host: int, mine: torch.Tensor, *, is_first: bool = False
    ) -> None:
        """Give all ranks of this host the rows of a host, of which each has one."""
        nbytes = _row_bytes(self._placement)
        request = Request(kind=Kind.ALLGATHER, dtype=BYTES, root=-1, count=nbytes)
        request.input = address_of(mine)
        addresses = [address_of(rows[rank]) for rank in self._placement.members[host]]
        request.outputs = (C.c_void_p * len(addresses))(*addresses)
        request.out_counts = (C.c_uint64 * len(addresses))(*[nbytes] * len(addresses))
        if is_first:
            self._call.run_first_local(request)
        else:
            self._call.run_local(request)

    def _send_with_row(self) -> None:
        call, lane = self._call, self._call.links.lane
        nbytes = _row_bytes(self._placement)
        for host in self._placement.other_hosts:
            message = lane.outgoing(call.header, call.left())
            message.data(nbytes).copy_(self._row.view(-1).view(torch.uint8))
            position = nbytes
            parts = [self._to_send.parts[rank] for rank in self._placement.members[host]]
            if sum(map(len, parts)) <= _CARRIED_BYTES:
                for part in parts:
                    message.data(position + len(part))[position:].copy_(part)
                    position += len(part)
            lane.send(message, position, [host])

    def _all_are_carried(self, rows: torch.Tensor) -> bool:
        """Whether all ranks could send with their rows what other hosts get of them."""
        placement = self._placement
        by_host = torch.zeros((placement.size, placement.hosts), dtype=torch.int64)
        host_of = torch.tensor(placement.host_of)
        by_host.index_add_(1, host_of, rows[:, 0, :])
        by_host[torch.arange(placement.size), host_of] = 0
        return int(by_host.max()) <= _CARRIED_BYTES

    # --- bytes ------------------------------------------------------------------------------------
    def _share_parts(self, host: int, rows: torch.Tensor, message: LaneMessage | None) -> None:
        """Give all ranks of this host what each has from a host, one rank of it for each: what came
        with a message, or without one its own.
        """
        placement = self._placement
        addresses: list[int | None]
        if message is None:
            sent = [self._to_send.parts[rank] for rank in placement.local]
            addresses = [address_of(part) for part in sent]
            lengths = [len(part) for part in sent]
        else:
            source = placement.members[host][placement.local_index]
            lengths = rows[source, 0, list(placement.local)].tolist()
            position = message.address + _row_bytes(placement)
            addresses = [position + sum(lengths[:index]) for index in range(len(lengths))]
        received = [self._to_receive.parts[rank] for rank in placement.members[host]]
        self._run_all_to_all(addresses, lengths, received)

    def _run_all_to_all(
        self,
        addresses: Sequence[int | None],
        lengths: Sequence[int],
        received: Sequence[torch.Tensor],
    ) -> None:
        ranks = len(addresses)
        request = Request(kind=Kind.ALLTOALL, dtype=BYTES, root=-1)
        request.inputs = (C.c_void_p * ranks)(*addresses)
        request.in_counts = (C.c_uint64 * ranks)(*lengths)
        request.outputs = (C.c_void_p * ranks)(*map(address_of, received))
        request.out_counts = (C.c_uint64 * ranks)(*map(len, received))
        self._call.run_local(request)

    def _send_straight(self) -> None:
        """From tensor to tensor: sizes are known to fit."""
        placement, call = self._placement, self._call
        gloo = call.links.all_ranks
        works: list[Work] = []
        # Each rank begins with another one, so that nobody has all messages at once.
        others = [(placement.rank + step) % placement.size for step in range(1, placement.size)]
        for rank in others:
            if placement.host_of[rank] == placement.host:
                continue
            if len(part := self._to_receive.parts[rank]):
                works.append(gloo.recv([part], rank, DIRECT_TAG))
            if len(part := self._to_send.parts[rank]):
                works.append(gloo.send([part], rank, DIRECT_TAG))
        sent = [self._to_send.parts[rank] for rank in placement.local]
        received = [self._to_receive.parts[rank] for rank in placement.local]
        self._run_all_to_all([address_of(part) for part in sent], [*map(len, sent)], received)
        call.await_gloo(works)


def _check_sizes(call: MultiHostCall, rows: torch.Tensor) -> None:
    """Every rank sees what each sends to and expects from each, so that all reach the same
    conclusion.
    """
    sizes_sent, sizes_wanted = rows[:, 0, :], rows[:, 1, :].T
    if not torch.equal(sizes_sent, sizes_wanted):
        source, goal = (sizes_sent != sizes_wanted).nonzero()[0].tolist()
        sends, expects = int(sizes_sent[source, goal]), int(sizes_wanted[source, goal])
        raise MismatchError(
            f"{Kind.NAMES[call.record.kind]}: rank {source} sends {sends} bytes to rank {goal}, "
            f"which expects {expects}; give tensors of the same size and type on both sides",
            {source: f"sends {sends}", goal: f"expects {expects}"},
        )
