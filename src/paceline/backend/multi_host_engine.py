"""Groups that span several hosts: shared memory inside each host, Gloo between them.

Vocabulary
    lane    the ranks with the same index on each host: lane 0 is every host's first rank, and so
            on. There are as many lanes as the smallest host has ranks. Each lane is a Gloo group of
            one rank per host.
    slice   the part of a tensor that one lane carries between the hosts, so that all local ranks
            share the work.

An all-reduce, in chunks of bounded size:
    1. reduce-scatter inside each host: each lane holds the host's sum of its slice
    2. each lane: all-to-all of pieces, sum of the hosts' pieces in order of host, all-gather of the
       sums
    3. all-gather inside each host
Gloo only ever moves bytes; every sum is done by the core, in an order that depends on the placement
alone. So all ranks get the same bits, in every run.

Before data moves, the headers of all ranks are compared, as on one host. An all-reduce of up to
4 KB is carried by that comparison: three steps in all instead of seven.

A call is an `_Operation`: it is created when the call's turn comes, holds its deadline, and gives
each of its steps, in shared memory or over Gloo, the time that is left. Steps that wait for a rank
that never comes therefore end by the time limit of the call. A collective that failed in one step
cannot be resumed on the other ranks: connections are closed, and the group is lost for all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes as C
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline._torch_internals import AllgatherOptions, PrefixStore, ProcessGroupGloo, Store, Work
from paceline.backend.engine import SUM, Reduction, Ticket
from paceline.backend.host_engine import HostEngine, address_of, core_dtype, dtype_label
from paceline.core import Communicator, abi
from paceline.core.abi import ANY_SOURCE, CallRecord, Kind
from paceline.core.call_errors import calls_mismatch
from paceline.core.dtypes import BYTES, Op
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    GroupError,
    MismatchError,
    PacelineError,
    PeerLost,
)

__all__ = ["MultiHostEngine"]

_CHUNK_BYTES = 8 << 20
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_HEADER_BYTES = 64  # a call record, and room to keep what follows aligned
_CARRIED_BYTES = 4096
_MIN_LEFT_NS = 1_000_000

_Options = TypeVar("_Options", AllgatherOptions, dist.AllToAllOptions, dist.BroadcastOptions)


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Which ranks are on which host, seen from one of them."""

    rank: int
    host_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, host_of: Sequence[int]) -> _Placement:
        members = tuple(
            tuple(r for r, h in enumerate(host_of) if h == host) for host in range(max(host_of) + 1)
        )
        return cls(rank, tuple(host_of), members)

    @property
    def size(self) -> int:
        return len(self.host_of)

    @property
    def hosts(self) -> int:
        return len(self.members)

    @property
    def host(self) -> int:
        return self.host_of[self.rank]

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.members[self.host]

    @property
    def local_index(self) -> int:
        return self.local.index(self.rank)

    @property
    def lanes(self) -> int:
        return min(map(len, self.members))


class _Links:
    """What connects this rank to the others: shared memory, and Gloo to all and to its lane."""

    def __init__(
        self, store: Store, placement: _Placement, comm: Communicator, timeout: timedelta
    ) -> None:
        self.local = HostEngine(comm)
        self._all: ProcessGroupGloo | None = ProcessGroupGloo(
            PrefixStore("everyone/", store), placement.rank, placement.size, timeout=timeout
        )
        self._lane: ProcessGroupGloo | None = None
        if placement.local_index < placement.lanes:
            self._lane = ProcessGroupGloo(
                PrefixStore(f"lane{placement.local_index}/", store),
                placement.host,
                placement.hosts,
                timeout=timeout,
            )

    # Any: torch's stubs of this class have none of its collectives.
    @property
    def all_ranks(self) -> Any:
        return self._open(self._all)

    @property
    def lane(self) -> Any:
        return self._open(self._lane)

    @staticmethod
    def _open(group: ProcessGroupGloo | None) -> Any:
        if group is None:
            raise GroupAborted(
                "a call of this group failed before, and its connections to the other hosts were "
                "closed; call destroy_process_group(), then init_process_group() again"
            )
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        self.local.set_timeout(timeout)
        for group in (self._all, self._lane):
            if group is not None:
                group._set_default_timeout(timeout)

    def disconnect(self) -> None:
        """Close the connections: ranks on other hosts notice."""
        self._all = self._lane = None


class MultiHostEngine:
    """One rank of a group on several hosts. `host_of[r]` is the index of rank r's host."""

    def __init__(
        self,
        store: Store,
        rank: int,
        host_of: Sequence[int],
        comm: Communicator,
        timeout: timedelta,
    ) -> None:
        self._placement = _Placement.of(rank, host_of)
        self.rank, self.size = rank, self._placement.size
        self._timeout = timeout
        self._sequence = 0
        self._links = _Links(store, self._placement, comm, timeout)
        self._signals = PrefixStore("signals/", store)
        self._order = _InOrder()

    # --- collectives ------------------------------------------------------------------------------
    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        header = self._header(Kind.ALLREDUCE, core_dtype(tensor), tensor.numel(), op=op.code)
        if 0 < tensor.numel() * _wide(tensor.dtype).itemsize <= _CARRIED_BYTES:
            return self._start(
                lambda call: call.reduce_carried(header, tensor, op), wait, timeout_ns
            )
        return self._compared(header, lambda call: call.reduce(tensor, op), wait, timeout_ns)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        dtype = core_dtype(tensor)
        header = self._header(Kind.REDUCE, dtype, tensor.numel(), op=op.code, root=root)
        # Only the root's tensor may change.
        own = tensor if self.rank == root else tensor.clone()
        return self._compared(header, lambda call: call.reduce(own, op), wait, timeout_ns)

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

        def run(call: _Operation) -> None:
            whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
            call.reduce(whole, op)
            output.copy_(whole.split(counts)[self.rank].view_as(output))

        return self._compared(header, run, wait, timeout_ns)

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        data = _as_bytes(tensor)
        header = self._header(
            Kind.BROADCAST, BYTES, data.numel(), root=root, label=dtype_label(tensor)
        )
        return self._compared(header, lambda call: call.broadcast(data, root), wait, timeout_ns)

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
            header, lambda call: call.allgather(outputs, tensor), wait, timeout_ns
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
            header, lambda call: call.exchange(received, sent, header), wait, timeout_ns
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
            header, lambda call: call.exchange(received, sent, header), wait, timeout_ns
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
            header, lambda call: call.exchange(outputs, inputs, header), wait, timeout_ns
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
        self._links.local.abort()

    def close(self) -> None:
        self._order.close()
        self._links.local.close()
        self._links.disconnect()

    # --- steps ------------------------------------------------------------------------------------
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
        self, header: CallRecord, run: Callable[[_Operation], None], wait: bool, timeout_ns: int
    ) -> Ticket | None:
        """Compare the headers of all ranks, then run."""

        def compare_and_run(call: _Operation) -> None:
            call.compare(header)
            run(call)

        return self._start(compare_and_run, wait, timeout_ns)

    def _start(
        self, run: Callable[[_Operation], None], wait: bool, timeout_ns: int
    ) -> Ticket | None:
        limit_ns = timeout_ns if timeout_ns >= 0 else int(self._timeout.total_seconds() * 1e9)

        def operate() -> None:
            call = _Operation(self._placement, self._links, limit_ns)
            with call.failing_together():
                run(call)

        return self._order.run(operate, wait)

    def _check_one_per_rank(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.rank}: {call} needs one tensor for each of the {self.size} ranks, "
                f"got {len(tensors)}"
            )


class _Operation:
    """One call while it runs: its deadline, and the steps that calls are made of."""

    def __init__(self, placement: _Placement, links: _Links, limit_ns: int) -> None:
        self._placement = placement
        self._links = links
        self._local = links.local
        self._limit_ns = limit_ns
        self._deadline = time.monotonic_ns() + limit_ns
        self._has_lane = placement.local_index < placement.lanes

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error of Gloo becomes one of ours, and ends the wait of this host's other ranks."""
        try:
            yield
        except PacelineError as error:
            if isinstance(error, GroupError):
                self._links.disconnect()
            raise
        except RuntimeError as error:
            self._local.abort()
            self._links.disconnect()
            raise self._error_of_gloo(str(error)) from error

    def _error_of_gloo(self, text: str) -> GroupError:
        rank = self._placement.rank
        if _is_timeout(text):
            return CollectiveTimeout(
                f"rank {rank}: no answer from another host within {self._limit_ns / 1e9:g} s: "
                f"{text}"
            )
        return PeerLost(
            f"rank {rank}: the connection to a rank on another host was lost: {text}. See that "
            "rank's output for the cause"
        )

    def _left_ns(self) -> int:
        return max(self._deadline - time.monotonic_ns(), _MIN_LEFT_NS)

    def _options(self, options: _Options) -> _Options:
        options.timeout = timedelta(microseconds=self._left_ns() // 1000)
        return options

    # --- headers ----------------------------------------------------------------------------------
    def compare(
        self, header: CallRecord, carried: torch.Tensor | None = None, code: int = 0
    ) -> torch.Tensor:
        """Compare the headers of all ranks; all of them reach the same conclusion.

        `carried` goes along, reduced by `code` within each host, in order of rank. Returns one row
        of bytes a host.
        """
        mine = torch.zeros(_HEADER_BYTES + _CARRIED_BYTES, dtype=torch.uint8)
        mine[: C.sizeof(header)] = torch.frombuffer(bytearray(bytes(header)), dtype=torch.uint8)
        if carried is not None:
            mine[_HEADER_BYTES:][: _as_bytes(carried).numel()] = _as_bytes(carried)
        here = torch.empty((len(self._placement.local), mine.numel()), dtype=torch.uint8)
        self._local.allgather(here.unbind(), mine, wait=True, timeout_ns=self._left_ns())
        # The hosts may have different numbers of ranks: room for the longest.
        longest = max(map(len, self._placement.members))
        headers = longest * _HEADER_BYTES
        block = torch.zeros(headers + _CARRIED_BYTES, dtype=torch.uint8)
        block[: len(here) * _HEADER_BYTES] = here[:, :_HEADER_BYTES].reshape(-1)
        if carried is not None:
            _reduce_local(block[headers:], here[:, _HEADER_BYTES:].unbind(), carried, code)
        hosts = self._placement.hosts
        everything = torch.empty((hosts, block.numel()), dtype=torch.uint8)
        if self._placement.local_index == 0:
            self._lane_allgather(everything.view(-1), block)
        self._local.broadcast(everything, 0, wait=True, timeout_ns=self._left_ns())
        self._check_equal(everything[:, :headers].view(hosts, longest, _HEADER_BYTES))
        return everything[:, headers:]

    def _check_equal(self, headers: torch.Tensor) -> None:
        calls = {
            rank: CallRecord.from_buffer_copy(bytes(row.tolist()))
            for rows, members in zip(headers, self._placement.members, strict=True)
            for row, rank in zip(rows, members, strict=False)
        }
        if len({bytes(call) for call in calls.values()}) > 1:
            raise calls_mismatch(calls)

    # --- reductions -------------------------------------------------------------------------------
    def reduce_carried(self, header: CallRecord, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce a short tensor in place: the hosts' sums come with the comparison, and every rank
        adds them.
        """
        wide = tensor.reshape(-1).to(_wide(tensor.dtype))
        if op.code == Op.PREMUL_SUM:
            wide = wide * op.factor
        shares = self.compare(header, wide, _code_between_hosts(op))
        total = torch.empty_like(wide)
        _reduce_local(_as_bytes(total), shares.unbind(), wide, _code_between_hosts(op))
        self._average(total, op)
        tensor.copy_(total.view_as(tensor))

    def reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce in place, over all ranks."""
        flat = tensor.reshape(-1)
        wide = _wide(flat.dtype)
        pieces = self._placement.lanes * self._placement.hosts
        per_chunk = max(1, _CHUNK_BYTES // wide.itemsize // pieces) * pieces
        for chunk in flat.split(per_chunk) if flat.numel() else []:
            reduced = self._reduce_chunk(chunk.to(wide), op)
            if reduced.data_ptr() != chunk.data_ptr():
                chunk.copy_(reduced)

    def _reduce_chunk(self, chunk: torch.Tensor, op: Reduction) -> torch.Tensor:
        lanes, hosts = self._placement.lanes, self._placement.hosts
        piece = -(-chunk.numel() // (lanes * hosts))
        length = piece * hosts
        whole = chunk  # all but the last chunk divide evenly
        if chunk.numel() != length * lanes:
            whole = torch.zeros(length * lanes, dtype=chunk.dtype)
            whole[: chunk.numel()] = chunk
        mine = self._reduce_within_host(whole, length, op)
        if self._has_lane:
            self._reduce_between_hosts(mine, piece, op)
        self._share_slices(whole, mine, length)
        return whole[: chunk.numel()]

    def _slices(self, whole: torch.Tensor, length: int) -> list[torch.Tensor]:
        """One slice per local rank; those without a lane have none."""
        slices = list(whole.split(length)) if length else [whole[:0]] * self._placement.lanes
        return slices + [whole[:0]] * (len(self._placement.local) - len(slices))

    def _reduce_within_host(self, whole: torch.Tensor, length: int, op: Reduction) -> torch.Tensor:
        mine = whole.new_empty(length if self._has_lane else 0)
        # The average is taken once, at the end; the factor of PREMUL_SUM is applied once, here.
        first = SUM if op.code == Op.AVG else op
        self._local.reduce_scatter(
            mine, self._slices(whole, length), first, wait=True, timeout_ns=self._left_ns()
        )
        return mine

    def _reduce_between_hosts(self, mine: torch.Tensor, piece: int, op: Reduction) -> None:
        theirs = torch.empty_like(mine)
        options = self._options(dist.AllToAllOptions())
        lane = self._links.lane
        lane.alltoall_base(_as_bytes(theirs), _as_bytes(mine), [], [], options).wait()
        total = mine.new_empty(piece)
        _reduce_local(total, theirs.split(piece), total, _code_between_hosts(op))
        self._average(total, op)
        self._lane_allgather(_as_bytes(mine), _as_bytes(total))

    def _average(self, total: torch.Tensor, op: Reduction) -> None:
        if op.code == Op.AVG:
            abi.library().plc_scale_local(
                address_of(total), total.numel(), core_dtype(total), self._placement.size
            )

    def _share_slices(self, whole: torch.Tensor, mine: torch.Tensor, length: int) -> None:
        self._local.allgather(
            self._slices(whole, length), mine, wait=True, timeout_ns=self._left_ns()
        )

    def _lane_allgather(self, output: torch.Tensor, data: torch.Tensor) -> None:
        options = self._options(AllgatherOptions())
        self._links.lane._allgather_base(output, data, options).wait()

    # --- moving data ------------------------------------------------------------------------------
    def broadcast(self, data: torch.Tensor, root: int) -> None:
        host = self._placement.host_of[root]
        if self._placement.host == host:
            local_root = self._placement.members[host].index(root)
            self._local.broadcast(data, local_root, wait=True, timeout_ns=self._left_ns())
        self._broadcast_from_host(host, data)

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        for host, members in enumerate(self._placement.members):
            sizes = [_as_bytes(outputs[rank]).numel() for rank in members]
            block = torch.empty(sum(sizes), dtype=torch.uint8)
            parts = block.split(sizes)
            if host == self._placement.host:
                self._local.allgather(
                    parts, _as_bytes(tensor), wait=True, timeout_ns=self._left_ns()
                )
            self._broadcast_from_host(host, block)
            for rank, part in zip(members, parts, strict=True):
                _as_bytes(outputs[rank]).copy_(part)

    def _broadcast_from_host(self, host: int, data: torch.Tensor) -> None:
        """Give every rank the bytes that all ranks of one host have."""
        ours = self._placement.host == host
        index, lanes = self._placement.local_index, self._placement.lanes
        for chunk in data.split(_CHUNK_BYTES) if data.numel() else []:
            length = -(-chunk.numel() // lanes)
            whole = chunk.new_zeros(length * lanes)
            if ours:
                whole[: chunk.numel()] = chunk
            slices = self._slices(whole, length)
            if self._has_lane:
                options = self._options(dist.BroadcastOptions())
                options.rootRank = host
                self._links.lane.broadcast([slices[index]], options).wait()
            if not ours:
                self._share_slices(whole, slices[index].clone(), length)
                chunk.copy_(whole[: chunk.numel()])

    def exchange(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        header: CallRecord,
    ) -> None:
        """Every rank sends every other something, of any size, over Gloo. `header`: of the call
        that does this, for errors.
        """
        sent = torch.cat([_as_bytes(tensor) for tensor in inputs])
        sizes = [_as_bytes(tensor).numel() for tensor in outputs]
        in_sizes = [_as_bytes(tensor).numel() for tensor in inputs]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self._check_sizes(sizes, in_sizes, Kind.NAMES[header.kind])
        options = self._options(dist.AllToAllOptions())
        self._links.all_ranks.alltoall_base(received, sent, sizes, in_sizes, options).wait()
        for output, part in zip(outputs, received.split(sizes), strict=True):
            _as_bytes(output).copy_(part)

    def _check_sizes(self, wanted: list[int], sent: list[int], call: str) -> None:
        """Every rank sees what each sends to and expects from each, so that all reach the same
        conclusion.
        """
        size = self._placement.size
        mine = torch.tensor([sent, wanted])
        table = torch.empty((size, 2, size), dtype=torch.int64)
        options = self._options(AllgatherOptions())
        gloo = self._links.all_ranks
        gloo._allgather_base(_as_bytes(table), _as_bytes(mine), options).wait()
        sizes_sent, sizes_wanted = table[:, 0, :], table[:, 1, :].T
        if not torch.equal(sizes_sent, sizes_wanted):
            source, goal = (sizes_sent != sizes_wanted).nonzero()[0].tolist()
            sends, expects = int(sizes_sent[source, goal]), int(sizes_wanted[source, goal])
            raise MismatchError(
                f"{call}: rank {source} sends {sends} bytes to rank {goal}, which expects "
                f"{expects}; give tensors of the same size and type on both sides",
                {source: f"sends {sends}", goal: f"expects {expects}"},
            )


class _InOrder:
    """Runs calls one after the other: here, or on one thread when the caller does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future[None] | None = None

    def run(self, step: Callable[[], None], wait: bool) -> Ticket | None:
        with self._lock:
            if wait and (self._last is None or self._last.done()):
                step()
                return None
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(1, "paceline-hosts")
            future = self._last = self._pool.submit(step)
        if wait:
            future.result()
            return None
        return _FutureTicket(future)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class _FutureTicket:
    """A collective in progress. It ends by itself at its deadline."""

    source = ANY_SOURCE

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def wait(self, timeout_ns: int = -1) -> bool:
        try:
            self._future.result(None if timeout_ns < 0 else timeout_ns / 1e9)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise  # the call's own
            return False
        return True

    def done(self) -> bool:
        return self._future.done()


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
            kind = CollectiveTimeout if _is_timeout(str(error)) else PeerLost
            raise kind(f"{self._name} over Gloo failed: {error}") from error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())

    @property
    def source(self) -> int:
        return int(self._work._source_rank())


def _is_timeout(text: str) -> bool:
    return "imed out" in text or "imeout" in text


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of this type are taken."""
    return _WIDER.get(dtype, dtype)


def _code_between_hosts(op: Reduction) -> int:
    return Op.SUM if op.code in (Op.AVG, Op.PREMUL_SUM) else op.code


def _reduce_local(
    out: torch.Tensor, shares: Sequence[torch.Tensor], like: torch.Tensor, code: int
) -> None:
    """out = op over shares, in their order; all of them bytes of tensors like `like`."""
    pointers = (C.c_void_p * len(shares))(*[address_of(share) for share in shares])
    abi.library().plc_reduce_local(
        address_of(out), pointers, len(shares), like.numel(), core_dtype(like), code, 1.0
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    # A single element may have any stride and still count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
