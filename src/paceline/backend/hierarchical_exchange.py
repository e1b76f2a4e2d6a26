"""Gather, scatter and all-to-all over all ranks of several hosts: every rank sends every other
something, of any length.

Nearly always all parts have one length. No rank knows that of the others, so it is tried:

    1. compare     inside each host: parts for its own ranks are handed over in shared memory, and
                   those for other hosts to the rank that sends them. If lengths differ, this fails
                   on all ranks of the host.
    2. send        between hosts: the length, and the parts behind it if a message has room
    3. deliver     inside each host: its ranks get what came for them

If all hosts have found the same length, that was all, but for parts that were too long: these are
now known to fit, and go straight from rank to rank, over Gloo between hosts and in shared memory
inside one. Otherwise a `_RowExchange` does it all: each rank has a row, how many bytes it sends to
each rank and expects from each. Rows are gathered, so that all ranks reach the same conclusion if
they do not fit, and everything goes straight.

A gather and a scatter are spoken by the first rank of each host. In an all-to-all every rank has
something for every host: there all lanes speak, and it is tried only where all hosts have as many
ranks.
"""

from __future__ import annotations

import abc
import ctypes as C
from collections.abc import Sequence

import torch

from paceline._torch_internals import Work
from paceline.backend.hierarchical_move import RankParts, all_gather, is_brief, lanes_to_move
from paceline.backend.host_engine import address_of
from paceline.backend.host_placement import Placement
from paceline.backend.lane import LaneMessage, message_capacity
from paceline.backend.multi_host_call import DIRECT_TAG, MultiHostCall, UnevenParts
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES
from paceline.errors import MismatchError

__all__ = ["all_to_all", "all_to_all_lanes", "exchange_is_brief", "gather", "scatter"]

# A message begins with the length of all parts, or with this.
_UNEVEN = -1
_LENGTH_BYTES = C.sizeof(C.c_int64)


def gather(
    call: MultiHostCall, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int
) -> None:
    """Give rank `root` the tensors of all ranks. Only that one has outputs."""
    gathering = _Gather(call, outputs, tensor, root)
    if not gathering.run():
        nothing = tensor.new_empty(0)
        sent = [tensor if rank == root else nothing for rank in range(call.placement.size)]
        received = outputs or [nothing] * call.placement.size
        _run_the_rest(call, received, sent, rows_needed=not gathering.is_even)


def scatter(
    call: MultiHostCall, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
) -> None:
    """Give every rank its input of rank `root`, which alone has inputs."""
    scattering = _Scatter(call, output, inputs, root)
    if not scattering.run():
        nothing = output.new_empty(0)
        sent = inputs or [nothing] * call.placement.size
        received = [output if rank == root else nothing for rank in range(call.placement.size)]
        _run_the_rest(call, received, sent, rows_needed=not scattering.is_even)


def all_to_all(
    call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Give every rank r `inputs[r]`, and get `outputs[r]` from it."""
    if not call.placement.is_even:
        _run_the_rest(call, outputs, inputs, rows_needed=True)
        return
    exchanging = _AllToAll(call, outputs, inputs)
    if not exchanging.run():
        _run_the_rest(call, outputs, inputs, rows_needed=not exchanging.is_even)


def _run_the_rest(
    call: MultiHostCall,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    rows_needed: bool,
) -> None:
    exchange = _RowExchange(
        call.on_lanes(_lanes_for_rows(call.placement)), RankParts(outputs), RankParts(inputs)
    )
    if rows_needed:
        exchange.compare_rows()
    exchange.send_straight()


def all_to_all_lanes(placement: Placement) -> int:
    """How many lanes an all-to-all speaks on."""
    return placement.lanes if placement.is_even else _lanes_for_rows(placement)


def exchange_is_brief(placement: Placement) -> bool:
    """Whether it waits where signals are handled."""
    return is_brief(placement, _bytes_of_all_rows(placement))


def _lanes_for_rows(placement: Placement) -> int:
    return lanes_to_move(placement, _bytes_of_all_rows(placement))


def _bytes_of_all_rows(placement: Placement) -> int:
    return 2 * placement.size**2 * C.sizeof(C.c_int64)


# --- parts of one length --------------------------------------------------------------------------
class _EvenExchange(abc.ABC):
    """One exchange on one rank, which believes that all parts have `length` bytes; None: it has
    some that differ.
    """

    def __init__(self, call: MultiHostCall, length: int | None) -> None:
        self._call = call
        self._placement = placement = call.placement
        self._length = length or 0
        self.is_even = length is not None
        longest = max(map(len, placement.members)) * self._length + _LENGTH_BYTES
        self._is_carried = self.is_even and longest <= message_capacity(placement.hosts)

    def run(self) -> bool:
        """Whether everything is delivered. If not, see `is_even`."""
        call = self._call
        self._compare()
        if not call.speaks:
            self._learn()
            return self._is_carried and self.is_even
        if self.is_even:
            self._send()
        else:
            self._send_length(_UNEVEN, self._placement.other_hosts)
        messages = dict(zip(self._placement.other_hosts, call.receive_first(), strict=True))
        lengths = {_length_in(message) for message in messages.values()}
        try:
            if self.is_even and lengths != {self._length}:
                self.is_even = False
                call.report_uneven()
            elif self.is_even and self._is_carried:
                self._deliver(messages)
            else:
                call.confirm()
        finally:
            call.received()
        return self._is_carried and self.is_even

    def _compare(self) -> None:
        """Step 1. `is_even` is whether all parts that ranks of this host have are."""
        request = Request(kind=Kind.BARRIER, dtype=BYTES, root=-1)
        if self._is_carried:
            self._fill_first(request)
        try:
            self._call.run_first_local(request, self._length if self.is_even else _UNEVEN)
        except UnevenParts:
            self.is_even = False

    def _learn(self) -> None:
        """Steps 2 and 3 of a rank that does not speak."""
        try:
            if self.is_even and self._is_carried:
                self._deliver({})
            else:
                self._call.confirm()
        except UnevenParts:
            self.is_even = False

    @abc.abstractmethod
    def _fill_first(self, request: Request) -> None:
        """Make step 1 one that hands parts over."""

    @abc.abstractmethod
    def _send(self) -> None:
        """Step 2: one message to each other host."""

    @abc.abstractmethod
    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        """Step 3; a rank that does not speak has no messages."""

    # --- bytes ------------------------------------------------------------------------------------
    def _send_length(self, length: int, hosts: Sequence[int]) -> None:
        if hosts:
            self._send_message(self._outgoing(), length, 0, hosts)

    def _outgoing(self) -> LaneMessage:
        return self._call.links.lane.outgoing(self._call.header, self._call.left())

    def _send_message(
        self, message: LaneMessage, length: int, parts: int, hosts: Sequence[int]
    ) -> None:
        C.c_int64.from_address(message.address).value = length
        self._call.links.lane.send(message, _LENGTH_BYTES + parts * self._length, hosts)

    def _send_parts(self, sources: Sequence[torch.Tensor], hosts: Sequence[int]) -> None:
        """To each of these hosts what its ranks get of one tensor for each rank of the group."""
        for host in hosts:
            message = self._outgoing()
            members = self._placement.members[host]
            if self._is_carried:
                for address, rank in zip(self._addresses_in(message, host), members, strict=True):
                    C.memmove(address, sources[rank].data_ptr(), self._length)
            self._send_message(
                message, self._length, len(members) if self._is_carried else 0, [host]
            )

    def _addresses_in(self, message: LaneMessage, host: int) -> list[int]:
        """Where in a message the part of each rank of a host is."""
        first = message.address + _LENGTH_BYTES
        return [first + index * self._length for index in range(len(self._placement.members[host]))]

    def _table(
        self, addresses: Sequence[int | None]
    ) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
        """Parts at these addresses, for the core; None: nothing."""
        counts = [0 if address is None else self._length for address in addresses]
        return (C.c_void_p * len(counts))(*addresses), (C.c_uint64 * len(counts))(*counts)

    def _addresses_of(
        self, tensors: Sequence[torch.Tensor], ranks: Sequence[int]
    ) -> list[int | None]:
        return [tensors[rank].data_ptr() for rank in ranks]


class _RootedExchange(_EvenExchange):
    """One in which rank `root` has all parts, and the others have one."""

    def __init__(
        self, call: MultiHostCall, own: torch.Tensor, all_parts: Sequence[torch.Tensor], root: int
    ) -> None:
        super().__init__(call, _common_length([own, *all_parts]))
        self._own = own
        self._all_parts = all_parts  # empty but on the root
        placement = self._placement
        self._root_host = placement.host_of[root]
        self._is_at_root = placement.host == self._root_host
        self._local_root = placement.local.index(root) if self._is_at_root else 0
        # Of the root's host.
        self._root_speaks = self._local_root == 0

    def _block(self, hosts: Sequence[int]) -> torch.Tensor:
        """Memory for the parts of all ranks of these hosts."""
        ranks = sum(len(self._placement.members[host]) for host in hosts)
        return self._call.workspace((ranks, self._length), torch.uint8)

    def _hand_over(self, root: int, source: int, data: int, output: int, nbytes: int) -> None:
        """Give a rank of this host what another one has."""
        request = Request(kind=Kind.GATHER, dtype=BYTES, root=root)
        index, ranks = self._placement.local_index, len(self._placement.local)
        if index == source:
            request.input, request.count = data, nbytes
        if index == root:
            counts = [nbytes if rank == source else 0 for rank in range(ranks)]
            request.outputs = (C.c_void_p * ranks)(*[output] * ranks)
            request.out_counts = (C.c_uint64 * ranks)(*counts)
        self._call.run_local(request)


class _Gather(_RootedExchange):
    """First to the root, or to the first rank of another host, which sends it all."""

    def __init__(
        self,
        call: MultiHostCall,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
    ) -> None:
        super().__init__(call, tensor, outputs or (), root)
        self._message: LaneMessage | None = None

    def _fill_first(self, request: Request) -> None:
        placement = self._placement
        request.kind, request.root = Kind.GATHER, self._local_root
        request.input, request.count = self._own.data_ptr(), self._length
        if self._is_at_root and self._all_parts:
            request.outputs, request.out_counts = self._table(
                self._addresses_of(self._all_parts, placement.local)
            )
        elif not self._is_at_root and self._call.speaks:
            self._message = self._outgoing()
            request.outputs, request.out_counts = self._table(
                self._addresses_in(self._message, placement.host)
            )

    def _send(self) -> None:
        others = self._placement.other_hosts
        if self._message is not None:
            parts = len(self._placement.local)
            self._send_message(self._message, self._length, parts, [self._root_host])
            others = tuple(host for host in others if host != self._root_host)
        self._send_length(self._length, others)

    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        if self._is_at_root and self._root_speaks:
            for host, message in messages.items():
                self._take(host, message.address + _LENGTH_BYTES)
        if not self._is_at_root or self._root_speaks:
            self._call.confirm()
            return
        for host in self._placement.other_hosts:
            data = messages[host].address + _LENGTH_BYTES if messages else 0
            block = self._block([host])
            self._hand_over(self._local_root, 0, data, block.data_ptr(), block.nbytes)
            if self._all_parts:
                self._take(host, block.data_ptr())

    def _take(self, host: int, address: int) -> None:
        """Copy the parts of a host's ranks to the outputs."""
        for index, rank in enumerate(self._placement.members[host]):
            part = self._all_parts[rank]
            C.memmove(part.data_ptr(), address + index * self._length, self._length)


class _Scatter(_RootedExchange):
    """From the root to the ranks of its host, and from its first rank to those of other hosts."""

    def __init__(
        self,
        call: MultiHostCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
    ) -> None:
        super().__init__(call, output, inputs or (), root)

    def _fill_first(self, request: Request) -> None:
        if self._is_at_root:
            ranks = self._placement.local if self._all_parts else ()
            self._fill_scatter(request, self._addresses_of(self._all_parts, ranks))

    def _fill_scatter(self, request: Request, parts: Sequence[int | None]) -> None:
        """From the root of this host's ranks to all of them."""
        request.kind, request.root, request.count = Kind.SCATTER, self._local_root, self._length
        wanted: list[int | None] = [None] * len(self._placement.local)
        wanted[self._local_root] = self._own.data_ptr()
        request.outputs, request.out_counts = self._table(wanted)
        if self._placement.local_index == self._local_root:
            request.inputs, request.in_counts = self._table(parts)

    def _compare(self) -> None:
        super()._compare()
        if self.is_even and self._is_carried and self._is_at_root and not self._root_speaks:
            self._all_parts = self._parts_for_other_hosts()

    def _parts_for_other_hosts(self) -> Sequence[torch.Tensor]:
        """The root's, on the first rank of its host."""
        placement = self._placement
        block = self._block(placement.other_hosts)
        ranks = [rank for host in placement.other_hosts for rank in placement.members[host]]
        if self._all_parts:
            for row, rank in zip(block, ranks, strict=True):
                C.memmove(row.data_ptr(), self._all_parts[rank].data_ptr(), self._length)
        address = block.data_ptr()
        self._hand_over(0, self._local_root, address, address, block.nbytes)
        if not self._call.speaks:
            return self._all_parts
        parts = [self._own] * placement.size
        for row, rank in zip(block, ranks, strict=True):
            parts[rank] = row
        return parts

    def _send(self) -> None:
        if self._is_at_root:
            self._send_parts(self._all_parts, self._placement.other_hosts)
        else:
            self._send_length(self._length, self._placement.other_hosts)

    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        if self._is_at_root:
            self._call.confirm()
            return
        request = Request(dtype=BYTES)
        host = self._placement.host
        parts = self._addresses_in(messages[self._root_host], host) if messages else []
        self._fill_scatter(request, parts)
        self._call.run_local(request)


class _AllToAll(_EvenExchange):
    """Each rank sends what the ranks of a host get of it to the one in its own lane."""

    def __init__(
        self, call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(call, _common_length([*outputs, *inputs]))
        self._outputs, self._inputs = outputs, inputs

    def _fill_first(self, request: Request) -> None:
        local = self._placement.local
        self._fill(request, self._addresses_of(self._inputs, local), local)

    def _fill(self, request: Request, parts: Sequence[int | None], senders: Sequence[int]) -> None:
        request.kind, request.root = Kind.ALLTOALL, -1
        request.inputs, request.in_counts = self._table(parts)
        request.outputs, request.out_counts = self._table(
            self._addresses_of(self._outputs, senders)
        )

    def _send(self) -> None:
        self._send_parts(self._inputs, self._placement.other_hosts)

    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        for host, message in messages.items():
            request = Request(dtype=BYTES)
            parts = self._addresses_in(message, self._placement.host)
            self._fill(request, parts, self._placement.members[host])
            self._call.run_local(request)


def _length_in(message: LaneMessage) -> int:
    return C.c_int64.from_address(message.address).value


def _common_length(tensors: Sequence[torch.Tensor]) -> int | None:
    """How many bytes each of them has, if all have as many."""
    length = tensors[0].nbytes
    return length if all(tensor.nbytes == length for tensor in tensors) else None


# --- parts of any length --------------------------------------------------------------------------
class _RowExchange:
    """One exchange, on one rank."""

    def __init__(self, call: MultiHostCall, to_receive: RankParts, to_send: RankParts) -> None:
        self._call = call
        self._placement = call.placement
        self._to_receive, self._to_send = to_receive, to_send

    def compare_rows(self) -> None:
        """Make sure that what each rank sends is what the others expect."""
        row = torch.tensor([self._to_send.lengths, self._to_receive.lengths])
        rows = torch.empty((self._placement.size, *row.shape), dtype=torch.int64)
        all_gather(self._call, rows.unbind(), row)
        _check_sizes(self._call, rows)

    def send_straight(self) -> None:
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
        self._exchange_on_host()
        call.await_gloo(works)

    def _exchange_on_host(self) -> None:
        local = self._placement.local
        request = Request(kind=Kind.ALLTOALL, dtype=BYTES, root=-1)
        request.inputs, request.in_counts = _rows_of([self._to_send.parts[r] for r in local])
        request.outputs, request.out_counts = _rows_of([self._to_receive.parts[r] for r in local])
        self._call.run_local(request)


def _rows_of(parts: Sequence[torch.Tensor]) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
    return (
        (C.c_void_p * len(parts))(*map(address_of, parts)),
        (C.c_uint64 * len(parts))(*map(len, parts)),
    )


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
