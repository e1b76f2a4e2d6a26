"""Groups that span several hosts: shared memory inside each host, Gloo between them.

Reductions are in `hierarchical_reduce`. What only moves data is here: the ranks of all hosts first
make sure that they make the same call, then
    broadcast   the root's host has the data; each lane carries a slice of it to the other hosts,
                which share their slices
    all-gather  each host in turn broadcasts what its ranks have
    exchange    everything else (gather, scatter, all-to-all) is left to Gloo
A call runs on the group's own thread, see `call_thread`, as a `MultiHostCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from paceline._torch_internals import AllgatherOptions, PrefixStore, Store, Work
from paceline.backend.call_thread import CallThread
from paceline.backend.engine import Reduction, Ticket
from paceline.backend.group_options import GroupOptions
from paceline.backend.hierarchical_reduce import reduce_hierarchically
from paceline.backend.host_engine import core_dtype, dtype_label
from paceline.backend.host_placement import Placement
from paceline.backend.multi_host_call import Links, MultiHostCall, is_timeout
from paceline.core import Communicator
from paceline.core.abi import ANY_SOURCE, CallRecord, Kind
from paceline.core.dtypes import BYTES
from paceline.errors import CollectiveTimeout, ConfigError, MismatchError, PeerLost

__all__ = ["MultiHostEngine"]

_CHUNK_BYTES = 8 << 20
# How long a call may take to notice that the group was aborted.
_ABORT_LIMIT_S = 2.0

_Options = TypeVar("_Options", AllgatherOptions, dist.AllToAllOptions, dist.BroadcastOptions)


class MultiHostEngine:
    """One rank of a group on several hosts. `host_of[r]` is the index of rank r's host."""

    def __init__(
        self,
        store: Store,
        rank: int,
        host_of: Sequence[int],
        comm: Communicator,
        timeout: timedelta,
        group_options: GroupOptions,
    ) -> None:
        self._placement = Placement.of(rank, host_of)
        self.rank, self.size = rank, self._placement.size
        self._timeout = timeout
        self._wire_dtype = group_options.wire_dtype
        self._sequence = 0
        self._links = Links(store, self._placement, comm, timeout)
        self._signals = PrefixStore("signals/", store)
        self._calls = CallThread("paceline-hosts")

    # --- collectives ------------------------------------------------------------------------------
    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        header = self._header(Kind.ALLREDUCE, core_dtype(tensor), tensor.numel(), op=op.code)
        return self._start(header, lambda call: self._reduce(call, tensor, op), wait, timeout_ns)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        dtype = core_dtype(tensor)
        header = self._header(Kind.REDUCE, dtype, tensor.numel(), op=op.code, root=root)
        # Only the root's tensor may change.
        own = tensor if self.rank == root else tensor.clone()
        return self._start(header, lambda call: self._reduce(call, own, op), wait, timeout_ns)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        self._check_one_per_rank("reduce_scatter", inputs)
        counts = [tensor.numel() for tensor in inputs]
        header = self._header(Kind.REDUCE_SCATTER, core_dtype(output), sum(counts), op=op.code)

        def run(call: MultiHostCall) -> None:
            whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._reduce(call, whole, op)
            output.copy_(whole.split(counts)[self.rank].view_as(output))

        return self._start(header, run, wait, timeout_ns)

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        data = _as_bytes(tensor)
        header = self._header(
            Kind.BROADCAST, BYTES, data.numel(), root=root, label=dtype_label(tensor)
        )
        return self._compared(header, lambda call: _broadcast(call, data, root), wait, timeout_ns)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        self._check_one_per_rank("all_gather", outputs)
        if outputs[self.rank].numel() != tensor.numel():
            raise ConfigError(
                f"rank {self.rank}: all_gather: the input has {tensor.numel()} elements, this "
                f"rank's output {outputs[self.rank].numel()}"
            )
        total = sum(output.numel() * output.element_size() for output in outputs)
        header = self._header(Kind.ALLGATHER, BYTES, total, label=dtype_label(tensor))
        return self._compared(
            header, lambda call: _allgather(call, outputs, tensor), wait, timeout_ns
        )

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        header = self._header(Kind.GATHER, BYTES, 0, root=root, label=dtype_label(tensor))
        nothing = tensor.new_empty(0)
        sent = [tensor if r == root else nothing for r in range(self.size)]
        received = outputs or [nothing] * self.size
        return self._compared(
            header, lambda call: _exchange(call, received, sent), wait, timeout_ns
        )

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        label = dtype_label(output)
        header = self._header(Kind.SCATTER, BYTES, output.numel(), root=root, label=label)
        nothing = output.new_empty(0)
        sent = inputs or [nothing] * self.size
        received = [output if r == root else nothing for r in range(self.size)]
        return self._compared(
            header, lambda call: _exchange(call, received, sent), wait, timeout_ns
        )

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        self._check_one_per_rank("all_to_all", outputs)
        self._check_one_per_rank("all_to_all", inputs)
        header = self._header(Kind.ALLTOALL, BYTES, 0, label=dtype_label(inputs[0]))
        return self._compared(
            header, lambda call: _exchange(call, outputs, inputs), wait, timeout_ns
        )

    def barrier(self, *, wait: bool, timeout_ns: int) -> Ticket | None:
        header = self._header(Kind.BARRIER, BYTES, 0)
        return self._compared(header, lambda _: None, wait, timeout_ns)

    # --- messages ---------------------------------------------------------------------------------
    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        work = self._links.all_ranks.send([_as_bytes(tensor)], peer, abs(tag))
        return _GlooTicket(work, tensor, timeout_ns, self._name_of("send to", peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        gloo, buffer = self._links.all_ranks, [_as_bytes(tensor)]
        if peer == ANY_SOURCE:
            work = gloo.recv_anysource(buffer, abs(tag))
        else:
            work = gloo.recv(buffer, peer, abs(tag))
        return _GlooTicket(work, tensor, timeout_ns, self._name_of("recv from", peer, tag))

    def _name_of(self, call: str, peer: int, tag: int) -> str:
        who = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
        return f"rank {self.rank}: {call} {who} (tag {tag})"

    # Through the store: Gloo closes its connections when a receive is given up.
    def post_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        self._signals.set(f"{self.rank}/{peer}/{number}", "")

    def await_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        limit = timedelta(milliseconds=max(timeout_ns // 1_000_000, 1))
        try:
            self._signals.wait([f"{peer}/{self.rank}/{number}"], limit)
        except Exception as error:  # each store has its own type for a timeout
            raise CollectiveTimeout(
                f"rank {self.rank}: rank {peer} sent no monitored_barrier signal within "
                f"{limit.total_seconds():g} s",
                missing=[peer],
            ) from error

    # --- life -------------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._links.set_timeout(timeout)

    def abort(self) -> None:
        """End every wait of this rank's calls, and of those that wait for it."""
        self._links.local.abort()
        self._links.disconnect()

    def close(self) -> None:
        self._calls.close()
        self._links.local.close()
        self._links.close()

    # --- steps ------------------------------------------------------------------------------------
    def _reduce(self, call: MultiHostCall, tensor: torch.Tensor, op: Reduction) -> None:
        reduce_hierarchically(call, tensor, op, self._wire_dtype)

    def _header(
        self, kind: int, dtype: int, count: int, *, op: int = 0, root: int = -1, label: int = 0
    ) -> CallRecord:
        self._sequence += 1
        return CallRecord(
            sequence=self._sequence,
            kind=kind,
            dtype=dtype,
            op=op,
            root=root,
            count=count,
            label=label,
        )

    def _compared(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        """Make sure that all ranks make this call, then run it."""

        def agree_and_run(call: MultiHostCall) -> None:
            call.agree()
            run(call)

        return self._start(header, agree_and_run, wait, timeout_ns)

    def _start(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        limit_ns = timeout_ns if timeout_ns >= 0 else int(self._timeout.total_seconds() * 1e9)

        def operate() -> None:
            call = MultiHostCall(self._placement, self._links, header, limit_ns)
            with call.failing_together():
                run(call)

        ticket = self._calls.start(operate)
        if not wait:
            return ticket
        try:
            ticket.wait()
        except BaseException:
            if not ticket.done():
                # What a signal handler raised. The call may not go on without its caller, whose
                # memory it writes to.
                self.abort()
                ticket.has_ended(_ABORT_LIMIT_S)
            raise
        return None

    def _check_one_per_rank(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.rank}: {call} needs one tensor for each of the {self.size} ranks, "
                f"got {len(tensors)}"
            )


# --- moving data ----------------------------------------------------------------------------------
def _broadcast(call: MultiHostCall, data: torch.Tensor, root: int) -> None:
    host = call.placement.host_of[root]
    if call.placement.host == host:
        local_root = call.placement.members[host].index(root)
        call.local.broadcast(data, local_root, wait=True, timeout_ns=call.left_ns())
    _broadcast_from_host(call, host, data)


def _allgather(call: MultiHostCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    for host, members in enumerate(call.placement.members):
        sizes = [_as_bytes(outputs[rank]).numel() for rank in members]
        block = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = block.split(sizes)
        if host == call.placement.host:
            call.local.allgather(parts, _as_bytes(tensor), wait=True, timeout_ns=call.left_ns())
        _broadcast_from_host(call, host, block)
        for rank, part in zip(members, parts, strict=True):
            _as_bytes(outputs[rank]).copy_(part)


def _broadcast_from_host(call: MultiHostCall, host: int, data: torch.Tensor) -> None:
    """Give every rank the bytes that all ranks of one host have."""
    placement = call.placement
    ours = placement.host == host
    index, lanes = placement.local_index, placement.lanes
    for chunk in data.split(_CHUNK_BYTES) if data.numel() else []:
        length = -(-chunk.numel() // lanes)
        whole = chunk.new_zeros(length * lanes)
        if ours:
            whole[: chunk.numel()] = chunk
        # Ranks without a lane have no slice.
        slices = [*whole.split(length), *[whole[:0]] * (len(placement.local) - lanes)]
        if placement.has_lane:
            options = _options(call, dist.BroadcastOptions())
            options.rootRank = host
            call.links.lane.gloo.broadcast([slices[index]], options).wait()
        if not ours:
            mine = slices[index].clone()
            call.local.allgather(slices, mine, wait=True, timeout_ns=call.left_ns())
            chunk.copy_(whole[: chunk.numel()])


def _exchange(
    call: MultiHostCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Every rank sends every other something, of any size, over Gloo."""
    sent = torch.cat([_as_bytes(tensor) for tensor in inputs])
    sizes = [_as_bytes(tensor).numel() for tensor in outputs]
    in_sizes = [_as_bytes(tensor).numel() for tensor in inputs]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    _check_sizes(call, sizes, in_sizes)
    options = _options(call, dist.AllToAllOptions())
    call.links.all_ranks.alltoall_base(received, sent, sizes, in_sizes, options).wait()
    for output, part in zip(outputs, received.split(sizes), strict=True):
        _as_bytes(output).copy_(part)


def _check_sizes(call: MultiHostCall, wanted: list[int], sent: list[int]) -> None:
    """Every rank sees what each sends to and expects from each, so that all reach the same
    conclusion.
    """
    size = call.placement.size
    mine = torch.tensor([sent, wanted])
    table = torch.empty((size, 2, size), dtype=torch.int64)
    options = _options(call, AllgatherOptions())
    gloo = call.links.all_ranks
    gloo._allgather_base(_as_bytes(table), _as_bytes(mine), options).wait()
    sizes_sent, sizes_wanted = table[:, 0, :], table[:, 1, :].T
    if not torch.equal(sizes_sent, sizes_wanted):
        source, goal = (sizes_sent != sizes_wanted).nonzero()[0].tolist()
        sends, expects = int(sizes_sent[source, goal]), int(sizes_wanted[source, goal])
        raise MismatchError(
            f"{Kind.NAMES[call.record.kind]}: rank {source} sends {sends} bytes to rank {goal}, "
            f"which expects {expects}; give tensors of the same size and type on both sides",
            {source: f"sends {sends}", goal: f"expects {expects}"},
        )


def _options(call: MultiHostCall, options: _Options) -> _Options:
    options.timeout = call.left()
    return options


# --- messages -------------------------------------------------------------------------------------
class _GlooTicket:
    """A message in progress. Gloo gives a time limit to the wait, not to the message."""

    def __init__(self, work: Work, keep: torch.Tensor, timeout_ns: int, name: str) -> None:
        self._work, self._keep, self._timeout_ns, self._name = work, keep, timeout_ns, name

    def wait(self, timeout_ns: int = -1) -> bool:
        limit_ns = timeout_ns if timeout_ns > 0 else self._timeout_ns
        try:
            if limit_ns > 0:
                self._work.wait(timedelta(microseconds=limit_ns / 1000))
            else:
                self._work.wait()
        except RuntimeError as error:
            kind = CollectiveTimeout if is_timeout(str(error)) else PeerLost
            raise kind(f"{self._name} over Gloo failed: {error}") from error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())

    @property
    def source(self) -> int:
        return int(self._work._source_rank())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    # A single element may have any stride and still count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
