"""The exchange of ranks that share the memory of one host.

A message is written where every rank can read it, and the ranks meet once. Gradients stay in the
memory of their ranks: blocks of them pass through a little shared memory that stays in the cache,
each rank adds its part of a block over all nodes, in the order of the tree, and all fetch the
means, into the memory of a node that is no longer needed (`csrc/tree_average.c`).
"""

from __future__ import annotations

import functools
import operator
import pickle
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.backend import PacelineGroup
from paceline.backend.host_engine import DTYPE_CODES, HostEngine
from paceline.core import BucketArena
from paceline.core.abi import TreeAverage
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import WaitLabel
from paceline.training.gradient_sums import Gradients
from paceline.training.group_exchange import Facts, GroupExchange, Message
from paceline.training.parameter_set import Forms
from paceline.training.shard_plan import BatchPlan
from paceline.training.tree_sum import HeldNode, Node, additions
from paceline.training.work_sharing import WorkSharing

__all__ = ["SharedExchange", "TreeOrder"]

_ALIGNMENT = 64
_MESSAGES, _GRADIENTS = 0, 1  # buckets: where ranks meet, and what gradients pass through
_SUM = 0
_FIRST_MESSAGE_BYTES = 16 * 1024
_RING_BYTES = 1024 * 1024
_RING_BYTES_PER_PART = 512  # what a part of a block needs at least, in all rings
_LENGTHS = struct.Struct("<QQ")  # of the message, and of its header
_NAME = "the end of the loop over batch.shards() of paceline.Training"


class SharedExchange:
    """The ranks of a `paceline` group, all on one host."""

    # However many nodes there are, each is read once.
    adds_in_passing = True

    def __init__(self, group: dist.ProcessGroup, shards: int, sharing: WorkSharing) -> None:
        assert isinstance(group, PacelineGroup)
        assert isinstance(group.engine, HostEngine)
        self.rank, self.size, self.sharing = group.rank(), group.size(), sharing
        self.comm = group.engine.comm
        self._of_devices = GroupExchange(group, sharing)
        # A rank may hold as many nodes as there are shards.
        most_parts = (shards + 1) * self.size * _RING_BYTES_PER_PART
        self._ring_bytes = max(_RING_BYTES, -(-most_parts // 4096) * 4096)
        self._label = WaitLabel(_NAME, "", group_number(_NAME), tuple(self.comm.names)).packed()
        self._meetings = 0
        self._open(_FIRST_MESSAGE_BYTES)
        self._orders: dict[tuple[int, tuple[tuple[Node, ...], ...]], TreeOrder] = {}
        self._rows: tuple[Forms, list[_Row]] = ((), [])

    @staticmethod
    def serves(group: dist.ProcessGroup) -> bool:
        """Whether the ranks of this group share the memory of one host."""
        return isinstance(group, PacelineGroup) and isinstance(group.engine, HostEngine)

    def _open(self, message_bytes: int) -> None:
        self._message_bytes = -(-message_bytes // _ALIGNMENT) * _ALIGNMENT
        messages = _ALIGNMENT + self._ring_bytes
        nbytes = messages + 2 * self._message_bytes
        self._arena = arena = BucketArena.open(self.comm, nbytes, buckets=2)
        code = DTYPE_CODES[torch.float32]
        arena.define(_MESSAGES, 0, 1, code, _SUM)
        arena.define_external(_GRADIENTS, _ALIGNMENT, self._ring_bytes, 1, code, _SUM)
        arena.name_bucket(_MESSAGES, _NAME)
        arena.name_bucket(_GRADIENTS, _NAME)
        self._regions = [arena.region(rank) for rank in range(self.size)]
        self._messages_at = messages

    # --- messages ---------------------------------------------------------------------------------

    def gather(self, facts: Facts, tensors: Sequence[torch.Tensor] = ()) -> list[Message]:
        message = _Encoded(facts, tensors)
        while True:
            at = self._messages_at + self._meetings % 2 * self._message_bytes
            message.write(self._regions[self.rank], at, self._message_bytes)
            self._meet()
            lengths = [_LENGTHS.unpack_from(region, at)[0] for region in self._regions]
            if max(lengths) <= self._message_bytes:
                break
            # All see all lengths, so all decide alike.
            self._open(2 * max(lengths))
        return [
            (facts, tensors) if rank == self.rank else _decode(bytearray(region[at : at + length]))
            for rank, (region, length) in enumerate(zip(self._regions, lengths, strict=True))
        ]

    def _meet(self) -> None:
        """All ranks have written. What one writes for a meeting is read by the others before they
        come to the next one, and overwritten for the one after that.
        """
        self._meetings += 1
        recorder.enter(self._label, self._meetings)
        try:
            self._arena.ready(_MESSAGES)
            self._arena.finish(_MESSAGES)
        finally:
            recorder.leave()

    # --- gradients --------------------------------------------------------------------------------

    def average_nodes(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        rows = self._rows_of(forms)
        if not all(row.is_on_host for row in rows):
            return self._of_devices.average_nodes(own, nodes, forms, plan)
        order = self.order(nodes, len(plan.shards))
        held = [own[node] for node in order.own]
        total: Gradients = [None] * len(forms)
        for row in rows:
            row.average(self._arena, order, held, plan.total_weight, total)
        return total

    def order(self, nodes: Sequence[Sequence[Node]], leaves: int) -> TreeOrder:
        """In which order the nodes of all ranks are added."""
        # The same in nearly every pass; as many as there are deals.
        key = (leaves, tuple(map(tuple, nodes)))
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            order = self._orders[key] = TreeOrder(additions(nodes, leaves), self.rank)
        return order

    def _rows_of(self, forms: Forms) -> list[_Row]:
        made_for, rows = self._rows
        if made_for is not forms:
            alike: dict[torch.dtype, list[int]] = {}
            for number, form in enumerate(forms):
                alike.setdefault(form.dtype, []).append(number)
            rows = [_Row(forms, members) for members in alike.values()]
            self._rows = (forms, rows)
        return rows


_MOST_ORDERS = 256


class TreeOrder:
    """In which order the nodes of all ranks are added. `own` has those of this rank, in the order
    of the leaves below them; `own_positions` says which of all nodes they are.
    """

    def __init__(self, held: Sequence[HeldNode], rank: int) -> None:
        self.own = [each.node for each in held if each.owner == rank]
        self.own_positions = [i for i, each in enumerate(held) if each.owner == rank]
        self.owners = array("I", [each.owner for each in held])
        self.adds = array("I", [each.adds for each in held])


class _Row:
    """The gradients of one type, which the core sees as one long array."""

    def __init__(self, forms: Forms, members: Sequence[int]) -> None:
        self._members, self._forms = members, [forms[number] for number in members]
        self._nothing: Gradients = [None] * len(members)
        self.is_on_host = all(form.device.type == "cpu" for form in self._forms)
        self._strides = [form.strides for form in self._forms]
        self._code = DTYPE_CODES[self._forms[0].dtype]
        self._ends, end = array("Q"), 0
        for form in self._forms:
            end += form.numel
            self._ends.append(end)

    def average(
        self,
        arena: BucketArena,
        order: TreeOrder,
        held: Sequence[Gradients],
        divisor: int,
        total: Gradients,
    ) -> None:
        """The means of these gradients, into `total`; in the memory of the first node, if that is
        laid out as it has to be.
        """
        nodes = [self._laid_out(gradients) for gradients in held]
        inputs = array("Q")
        for node in nodes:
            inputs.extend([0 if each is None else each.data_ptr() for each in node])
        means, outputs = self._places(nodes, inputs)
        arena.average_tree(
            _GRADIENTS,
            TreeAverage(
                len(order.owners),
                order.owners.buffer_info()[0],
                order.adds.buffer_info()[0],
                len(self._members),
                self._code,
                self._ends.buffer_info()[0],
                inputs.buffer_info()[0],
                outputs.buffer_info()[0],
                divisor,
            ),
        )
        for number, mean in zip(self._members, means, strict=True):
            total[number] = mean

    def _places(
        self, nodes: Sequence[Gradients], addresses: array[int]
    ) -> tuple[Sequence[torch.Tensor | None], array[int]]:
        """Where the means go, and the addresses: those of the first node, nearly always."""
        first = nodes[0] if nodes else self._nothing
        begins = addresses[: len(first)] if nodes else ()
        if nodes and 0 not in begins and functools.reduce(operator.or_, begins) % _ALIGNMENT == 0:
            return first, addresses
        means = [
            each if each is not None and each.data_ptr() % _ALIGNMENT == 0 else form.empty()
            for each, form in zip(first, self._forms, strict=True)
        ]
        return means, array("Q", [mean.data_ptr() for mean in means])

    def _laid_out(self, gradients: Gradients) -> Gradients:
        own = gradients
        if len(self._members) < len(gradients):
            own = [gradients[number] for number in self._members]
        # Nearly always. (`None in own` would ask every tensor whether it equals None.)
        if [None if each is None else each.stride() for each in own] == self._strides:
            return own
        return [
            None if each is None else form.laid_out(each)
            for each, form in zip(own, self._forms, strict=True)
        ]


# --- messages as bytes ------------------------------------------------------------------------


class _Encoded:
    """A message: two lengths, the header - facts, types and shapes - and the tensors."""

    def __init__(self, facts: Facts, tensors: Sequence[torch.Tensor]) -> None:
        # Pickles of this user's processes on this host, in memory without a name.
        forms = [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors]
        self._header = pickle.dumps((facts, forms), protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._length = _padded(_LENGTHS.size + len(self._header)) + sum(
            _padded(tensor.nbytes) for tensor in self._tensors
        )

    def write(self, memory: memoryview, at: int, room: int) -> None:
        """Write it all, or only the lengths if there is not enough room."""
        _LENGTHS.pack_into(memory, at, self._length, len(self._header))
        if self._length > room:
            return
        start = at + _LENGTHS.size
        memory[start : start + len(self._header)] = self._header
        at += _padded(_LENGTHS.size + len(self._header))
        for tensor in self._tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            memory[at : at + len(flat)] = flat.data
            at += _padded(len(flat))


def _decode(message: bytearray) -> Message:
    length = _LENGTHS.unpack_from(message)[1]
    end = _LENGTHS.size + length
    facts, forms = pickle.loads(memoryview(message)[_LENGTHS.size : end])
    return facts, list(_tensors(message, _padded(end), forms))


def _tensors(
    message: bytearray, at: int, forms: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[torch.Tensor]:
    for name, shape in forms:
        dtype: torch.dtype = getattr(torch, name)
        count = torch.Size(shape).numel()
        if count:
            yield torch.frombuffer(message, dtype=dtype, count=count, offset=at).view(shape)
        else:
            yield torch.empty(shape, dtype=dtype)
        at += _padded(count * dtype.itemsize)


def _padded(length: int) -> int:
    return -(-length // 16) * 16
