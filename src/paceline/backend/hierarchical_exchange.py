"""Gather, scatter and all-to-all over all ranks of several hosts: every rank sends every other
something, of any length.

Nearly always all parts have one length. No rank knows that of the others, so it is tried, in the
lane of each host's first rank:

    1. compare     inside each host: parts for its own ranks are handed over in shared memory, and
                   those for other hosts to its first rank. If lengths differ, this fails on all
                   ranks of the host.
    2. send        between hosts: the length, and the parts behind it if a message has room
    3. deliver     inside each host: its ranks get what came for them

If all hosts have found the same length, that was all.

Long parts go straight from tensor to tensor (`_StraightExchange`), over Gloo between hosts and in
shared memory inside one, in the place of step 3. They are on their way while the calls of all ranks
are compared, and so do not wait for that.

If lengths differ, each rank has a row: how many bytes it sends to each rank and expects from each.
Rows are gathered, so that all ranks reach the same conclusion if they do not fit, and everything
goes straight.
"""

from __future__ import annotations

import abc
import ctypes as C
from collections.abc import Sequence

import torch

from paceline.backend.hierarchical_move import all_gather, is_brief, lanes_to_move
from paceline.backend.host_engine import address_of
from paceline.backend.host_placement import Placement
from paceline.backend.lane import LaneMessage, message_capacity
from paceline.backend.multi_host_call import MultiHostCall, UnevenParts
from paceline.backend.straight_transfer import StraightTransfer
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES
from paceline.errors import MismatchError

__all__ = ["all_to_all", "exchange_is_brief", "gather", "scatter"]

# What a message has of parts at most. Longer ones are sooner there when each rank sends its own.
_MESSAGE_BYTES = 512 << 10
# In the place of the length of all parts.
_UNEVEN = -1


def gather(
    call: MultiHostCall, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int
) -> None:
    """Give rank `root` the tensors of all ranks. Only that one has outputs."""

    nothing = tensor.new_empty(0)
    sent = [tensor if rank == root else nothing for rank in range(call.placement.size)]
    straight = _StraightExchange(call, outputs or [nothing] * call.placement.size, sent)
    _Gather(call, outputs, tensor, root).run_or_else(straight)


def scatter(
    call: MultiHostCall, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
) -> None:
    """Give every rank its input of rank `root`, which alone has inputs."""

    nothing = output.new_empty(0)
    received = [output if rank == root else nothing for rank in range(call.placement.size)]
    straight = _StraightExchange(call, received, inputs or [nothing] * call.placement.size)
    _Scatter(call, output, inputs, root).run_or_else(straight)


def all_to_all(
    call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Give every rank r `inputs[r]`, and get `outputs[r]` from it."""
    straight = _StraightExchange(call, outputs, inputs)
    _AllToAll(call, outputs, inputs).run_or_else(straight)


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
    some that differ. A message has `carried` of them, if there is room.
    """

    def __init__(self, call: MultiHostCall, length: int | None, carried: int) -> None:
        self._call = call
        self._placement = call.placement
        self._length = length or 0
        self._is_even = length is not None
        room = min(message_capacity(call.placement.hosts), _MESSAGE_BYTES)
        self._is_carried = self._is_even and carried * self._length <= room
        call.header.length = self._length

    def run_or_else(self, straight: _StraightExchange) -> None:
        """Deliver everything, or let another exchange do it."""
        with straight.transfer:
            if self._goes_straight():
                straight.post_receives()
            self._compare()
            try:
                if self._call.speaks:
                    self._speak(straight)
                else:
                    if self._goes_straight():
                        straight.post_sends()
                    self._finish({}, straight)
            except UnevenParts:
                self._is_even = False
            if not self._is_even:
                straight.compare_rows()
                straight.run()

    def _goes_straight(self) -> bool:
        return self._is_even and not self._is_carried

    def _speak(self, straight: _StraightExchange) -> None:
        """Steps 2 and 3 of the first rank of a host."""
        call = self._call
        if not self._is_even:
            call.header.length = _UNEVEN
        if self._is_even and self._is_carried:
            self._send()
        else:
            # Before the parts, which would hold it up.
            call.send_header()
        if self._goes_straight():
            straight.post_sends()
        messages = dict(zip(self._placement.other_hosts, call.receive_first(), strict=True))
        try:
            lengths = {message.header.length for message in messages.values()}
            if self._is_even and lengths != {self._length}:
                self._is_even = False
                call.report_uneven()
            else:
                self._finish(messages, straight)
        finally:
            call.received()

    def _finish(self, messages: dict[int, LaneMessage], straight: _StraightExchange) -> None:
        """Step 3, in which the others learn that all ranks make this call."""
        if not self._is_even:
            self._call.confirm()
        elif self._is_carried:
            self._deliver(messages)
        else:
            straight.run()

    def _compare(self) -> None:
        """Step 1. `is_even` is whether all parts that ranks of this host have are."""
        request = Request(kind=Kind.BARRIER, dtype=BYTES, root=-1)
        if self._is_carried:
            self._fill_first(request)
        try:
            self._call.run_first_local(request, self._length if self._is_even else _UNEVEN)
        except UnevenParts:
            self._is_even = False

    @abc.abstractmethod
    def _fill_first(self, request: Request) -> None:
        """Make step 1 one that hands parts over."""

    @abc.abstractmethod
    def _send(self) -> None:
        """Step 2: one message with parts to each other host."""

    @abc.abstractmethod
    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        """Step 3; a rank that does not speak has no messages."""

    # --- bytes ------------------------------------------------------------------------------------
    def _outgoing(self) -> LaneMessage:
        return self._call.links.lane.outgoing(self._call.header, self._call.left())

    def _send_message(self, message: LaneMessage, parts: int, hosts: Sequence[int]) -> None:
        self._call.links.lane.send(message, parts * self._length, hosts)

    def _addresses_in(self, message: LaneMessage, host: int) -> list[int]:
        """Where in a message the part of each rank of a host is."""
        first = message.address
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
        largest_host = max(map(len, call.placement.members))
        super().__init__(call, _common_length([own, *all_parts]), largest_host)
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
            self._send_message(self._message, len(self._placement.local), [self._root_host])
            others = tuple(host for host in others if host != self._root_host)
        if others:
            self._send_message(self._outgoing(), 0, others)

    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        if self._is_at_root and self._root_speaks:
            for host, message in messages.items():
                self._take(host, message.address)
        if not self._is_at_root or self._root_speaks:
            self._call.confirm()
            return
        for host in self._placement.other_hosts:
            data = messages[host].address if messages else 0
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
        root = self._local_root
        request.kind, request.root, request.count = Kind.SCATTER, root, self._length
        if self._placement.local_index == root:
            # Its own part need not go through shared memory.
            _copy_part(self._own, parts[root] or 0)
            others = [None if index == root else part for index, part in enumerate(parts)]
            request.inputs, request.in_counts = self._table(others)
            return
        wanted: list[int | None] = [None] * len(self._placement.local)
        wanted[root] = self._own.data_ptr()
        request.outputs, request.out_counts = self._table(wanted)

    def _compare(self) -> None:
        super()._compare()
        if self._is_even and self._is_carried and self._is_at_root and not self._root_speaks:
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
        if not self._is_at_root:
            self._call.send_header()
            return
        for host in self._placement.other_hosts:
            message, members = self._outgoing(), self._placement.members[host]
            for address, rank in zip(self._addresses_in(message, host), members, strict=True):
                C.memmove(address, self._all_parts[rank].data_ptr(), self._length)
            self._send_message(message, len(members), [host])

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
    """Through the first rank of each host. To this one each of the others hands a block: the part
    that is for itself, then those for the ranks of other hosts.
    """

    def __init__(
        self, call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        *_, second, largest = sorted(map(len, call.placement.members))
        super().__init__(call, _common_length([*outputs, *inputs]), second * largest)
        self._outputs, self._inputs = outputs, inputs
        placement = self._placement
        self._elsewhere = [
            rank for host in placement.other_hosts for rank in placement.members[host]
        ]
        self._memory = 0

    def _fill_first(self, request: Request) -> None:
        local, index = self._placement.local, self._placement.local_index
        block_bytes = (1 + len(self._elsewhere)) * self._length
        # Of a first rank: the others' blocks; later what is delivered to them, which is less.
        blocks = max(len(local) - 1, 1) if index == 0 else 1
        self._memory = self._call.workspace((blocks, block_bytes), torch.uint8).data_ptr()
        sent = self._parts_of(self._inputs)
        wanted = self._parts_of(self._outputs)
        if index > 0:
            self._pack([self._inputs[rank] for rank in (local[0], *self._elsewhere)])
            sent[0] = (self._memory, block_bytes)
        else:
            wanted = [
                (self._memory + (i - 1) * block_bytes, block_bytes) for i in range(len(local))
            ]
        _copy_part(self._outputs[local[index]], self._inputs[local[index]].data_ptr())
        sent[index] = wanted[index] = (None, 0)
        _fill_exchange(request, sent, wanted)

    def _parts_of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int | None, int]]:
        return [(tensors[rank].data_ptr(), self._length) for rank in self._placement.local]

    def _pack(self, parts: Sequence[torch.Tensor]) -> None:
        for index, part in enumerate(parts):
            C.memmove(self._memory + index * self._length, part.data_ptr(), self._length)

    def _send(self) -> None:
        others = self._placement.local[1:]
        block_bytes = (1 + len(self._elsewhere)) * self._length
        blocks = [self._memory + index * block_bytes for index in range(len(others))]
        for rank, block in zip(others, blocks, strict=True):
            _copy_part(self._outputs[rank], block)
        position = self._length
        for host in self._placement.other_hosts:
            members = self._placement.members[host]
            message = self._outgoing()
            address = message.address
            for rank in members:
                C.memmove(address, self._inputs[rank].data_ptr(), self._length)
                address += self._length
            run_bytes = len(members) * self._length
            for block in blocks:
                C.memmove(address, block + position, run_bytes)
                address += run_bytes
            position += run_bytes
            self._send_message(message, (1 + len(others)) * len(members), [host])

    def _deliver(self, messages: dict[int, LaneMessage]) -> None:
        local, index = self._placement.local, self._placement.local_index
        nothing: tuple[int | None, int] = (None, 0)
        sent, wanted = [nothing] * len(local), [nothing] * len(local)
        nbytes = len(self._elsewhere) * self._length
        if index > 0:
            wanted[0] = (self._memory, nbytes)
        else:
            self._sort(messages)
            sent[1:] = [(self._memory + i * nbytes, nbytes) for i in range(len(local) - 1)]
        if len(local) > 1:
            request = Request(dtype=BYTES)
            _fill_exchange(request, sent, wanted)
            self._call.run_local(request)
        if index > 0:
            for position, rank in enumerate(self._elsewhere):
                _copy_part(self._outputs[rank], self._memory + position * self._length)

    def _sort(self, messages: dict[int, LaneMessage]) -> None:
        """Take the parts that came for this rank, and put those for each other one together."""
        goals = len(self._placement.local)
        parts = [
            message.address + index * goals * self._length
            for host, message in messages.items()
            for index in range(len(self._placement.members[host]))
        ]
        for rank, part in zip(self._elsewhere, parts, strict=True):
            _copy_part(self._outputs[rank], part)
        address = self._memory
        for goal in range(1, goals):
            for part in parts:
                C.memmove(address, part + goal * self._length, self._length)
                address += self._length


def _copy_part(part: torch.Tensor, address: int) -> None:
    C.memmove(part.data_ptr(), address, part.nbytes)


def _common_length(tensors: Sequence[torch.Tensor]) -> int | None:
    """How many bytes each of them has, if all have as many."""
    length = tensors[0].nbytes
    return length if all(tensor.nbytes == length for tensor in tensors) else None


# --- parts of any length --------------------------------------------------------------------------
class _StraightExchange:
    """One exchange on one rank, from tensor to tensor."""

    def __init__(
        self, call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._call = call
        self._placement = call.placement
        self._outputs, self._inputs = outputs, inputs
        self.transfer = StraightTransfer(call)
        # What has begun.
        self._receives, self._sends = False, False

    def post_receives(self) -> None:
        """Start to receive from ranks of other hosts."""
        if not self._receives:
            self._receives = True
            for rank in self._elsewhere():
                if (part := self._outputs[rank]).nbytes:
                    self.transfer.receive([part], rank)

    def post_sends(self) -> None:
        """Start to send to them."""
        if not self._sends:
            self._sends = True
            for rank in self._elsewhere():
                if (part := self._inputs[rank]).nbytes:
                    self.transfer.send([part], rank)

    def _elsewhere(self) -> list[int]:
        """Each rank begins with another one, so that nobody has all messages at once."""
        placement = self._placement
        ranks = [(placement.rank + step) % placement.size for step in range(1, placement.size)]
        return [rank for rank in ranks if placement.host_of[rank] != placement.host]

    def compare_rows(self) -> None:
        """Make sure that what each rank sends is what the others expect."""
        row = torch.tensor(
            [[part.nbytes for part in parts] for parts in (self._inputs, self._outputs)]
        )
        rows = torch.empty((self._placement.size, *row.shape), dtype=torch.int64)
        all_gather(self._call.on_lanes(_lanes_for_rows(self._placement)), rows.unbind(), row)
        _check_sizes(self._call, rows)

    def run(self) -> None:
        """Sizes are known to fit. That all ranks make this call the first of a host knows; the
        others learn it in the step in shared memory.
        """
        self.post_receives()
        self.post_sends()
        self._exchange_on_host()
        self.transfer.finish()

    def _exchange_on_host(self) -> None:
        placement = self._placement
        local, index = placement.local, placement.local_index
        sent = [(address_of(self._inputs[rank]), self._inputs[rank].nbytes) for rank in local]
        wanted = [(address_of(self._outputs[rank]), self._outputs[rank].nbytes) for rank in local]
        _copy_part(self._outputs[placement.rank], self._inputs[placement.rank].data_ptr())
        sent[index] = wanted[index] = (None, 0)
        if len(local) > 1:
            request = Request(dtype=BYTES)
            _fill_exchange(request, sent, wanted)
            self._call.run_local(request)


def _fill_exchange(
    request: Request,
    sent: Sequence[tuple[int | None, int]],
    wanted: Sequence[tuple[int | None, int]],
) -> None:
    """Make it one in which each rank of the host gives every other one part: its address and its
    length.
    """
    request.kind, request.root = Kind.ALLTOALL, -1
    for parts, addresses, counts in (
        (sent, "inputs", "in_counts"),
        (wanted, "outputs", "out_counts"),
    ):
        setattr(request, addresses, (C.c_void_p * len(parts))(*[address for address, _ in parts]))
        setattr(request, counts, (C.c_uint64 * len(parts))(*[nbytes for _, nbytes in parts]))


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
