"""Groups that span several hosts: shared memory inside each host, Gloo between them.

Vocabulary
    lane    the ranks with the same place on each host: lane 0 is every host's first rank, and so on. There are as many
            lanes as the smallest host has ranks. Each lane is a Gloo group of one rank per host.
    slice   the part of a tensor that one lane carries between the hosts, so that all local ranks share the work.

An all-reduce, in chunks of bounded size:
    1. reduce-scatter inside each host: each lane holds the host's sum of its slice
    2. each lane: all-to-all of pieces, sum of the hosts' pieces in order of host, all-gather of the
       sums
    3. all-gather inside each host
Gloo only ever moves bytes; every sum is done by the core, in an order that depends on the placement
alone. So all ranks get the same bits, in every run.

Before data moves, every call is compared across all ranks, as it is on one host. An all-reduce of
up to 4 KB rides along with that comparison: three steps in all instead of seven.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes as C
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from paceline.backend.host_engine import (
    HostEngine,
    Reduction,
    Ticket,
    address_of,
    core_dtype,
    dtype_label,
)
from paceline.core import Communicator, abi
from paceline.core.abi import ANY_SOURCE, CallRecord, Kind
from paceline.core.communicator import describe_call
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupError,
    MismatchError,
    PacelineError,
    PeerLost,
)

__all__ = ["ManyHostsEngine"]

_CHUNK_BYTES = 8 << 20
_SUM, _AVG, _PREMUL = Reduction(0), 1, 8
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_HEADER_BYTES = 64  # a call, and room to keep what follows aligned
_CARRIED_BYTES = 4096


class ManyHostsEngine:
    """One rank of a group on several hosts. `host_of[r]` is the index of rank r's host."""

    def __init__(
        self,
        store: Store,
        rank: int,
        host_of: Sequence[int],
        comm: Communicator,
        timeout: timedelta,
    ) -> None:
        self.rank, self.size = rank, len(host_of)
        self._host_of = list(host_of)
        self._host = host_of[rank]
        self._hosts = max(host_of) + 1
        self._members = [
            [r for r, h in enumerate(host_of) if h == host] for host in range(self._hosts)
        ]
        self._local = HostEngine(comm)
        self._place = self._members[self._host].index(rank)
        self._lanes = min(len(members) for members in self._members)
        self._timeout = timeout
        self._sequence = 0
        self._everyone: Any = ProcessGroupGloo(
            PrefixStore("everyone/", store), rank, self.size, timeout=timeout
        )
        self._lane: Any = None
        if self._place < self._lanes:
            lane_store = PrefixStore(f"lane{self._place}/", store)
            self._lane = ProcessGroupGloo(lane_store, self._host, self._hosts, timeout=timeout)
        self._order = _InOrder()

    # --- collectives -------------------------------------------------------------------------------
    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        call = self._call(Kind.ALLREDUCE, core_dtype(tensor), tensor.numel(), op=op.code)
        if 0 < tensor.numel() * _wide(tensor.dtype).itemsize <= _CARRIED_BYTES:
            return self._in_order(lambda: self._reduce_carried(call, tensor, op), wait)
        return self._do(call, lambda: self._reduce_all(tensor, op), wait)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        call = self._call(Kind.REDUCE, core_dtype(tensor), tensor.numel(), op=op.code, root=root)
        # Only the root's tensor may change.
        return self._do(
            call,
            lambda: self._reduce_all(tensor if self.rank == root else tensor.clone(), op),
            wait,
        )

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
        call = self._call(
            Kind.REDUCE_SCATTER, core_dtype(output), sum(t.numel() for t in inputs), op=op.code
        )

        def run() -> None:
            whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._reduce_all(whole, op)
            output.copy_(whole.split([t.numel() for t in inputs])[self.rank].view_as(output))

        return self._do(call, run, wait)

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        call = self._call(
            Kind.BROADCAST, 16, _bytes(tensor).numel(), root=root, label=dtype_label(tensor)
        )

        def run() -> None:
            host = self._host_of[root]
            if self._host == host:
                self._local.broadcast(
                    tensor, self._members[host].index(root), wait=True, timeout_ns=-1
                )
            self._from_host(host, _bytes(tensor))

        return self._do(call, run, wait)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        self._check_one_per_rank("all_gather", outputs)
        total = sum(output.numel() * output.element_size() for output in outputs)
        call = self._call(Kind.ALLGATHER, 16, total, label=dtype_label(tensor))
        if outputs[self.rank].numel() != tensor.numel():
            raise ConfigError(
                f"rank {self.rank}: all_gather: own share has {tensor.numel()} elements, its place in the output "
                f"{outputs[self.rank].numel()}"
            )

        def run() -> None:
            for host, members in enumerate(self._members):
                block = torch.empty(
                    sum(_bytes(outputs[r]).numel() for r in members), dtype=torch.uint8
                )
                parts = block.split([_bytes(outputs[r]).numel() for r in members])
                if host == self._host:
                    self._local.allgather(parts, _bytes(tensor), wait=True, timeout_ns=-1)
                self._from_host(host, block)
                for r, part in zip(members, parts, strict=True):
                    _bytes(outputs[r]).copy_(part)

        return self._do(call, run, wait)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        call = self._call(Kind.GATHER, 16, 0, root=root, label=dtype_label(tensor))
        nothing = tensor.new_empty(0)
        sent = [tensor if r == root else nothing for r in range(self.size)]
        return self._do(call, lambda: self._exchange(outputs or [nothing] * self.size, sent), wait)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        call = self._call(Kind.SCATTER, 16, output.numel(), root=root, label=dtype_label(output))
        nothing = output.new_empty(0)
        wanted = [output if r == root else nothing for r in range(self.size)]
        return self._do(call, lambda: self._exchange(wanted, inputs or [nothing] * self.size), wait)

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
        call = self._call(Kind.ALLTOALL, 16, 0, label=dtype_label(inputs[0]))
        return self._do(call, lambda: self._exchange(outputs, inputs), wait)

    def barrier(self, *, wait: bool, timeout_ns: int) -> Ticket | None:
        return self._do(self._call(Kind.BARRIER, 16, 0), lambda: None, wait)

    # --- messages ----------------------------------------------------------------------------------
    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        return _GlooTicket(self._everyone.send([_bytes(tensor)], peer, abs(tag)), tensor)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        buffer = [_bytes(tensor)]
        if peer == ANY_SOURCE:
            return _GlooTicket(self._everyone.recv_anysource(buffer, abs(tag)), tensor)
        return _GlooTicket(self._everyone.recv(buffer, peer, abs(tag)), tensor)

    # --- life --------------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._local.set_timeout(timeout)
        for gloo in (self._everyone, self._lane):
            if gloo is not None:
                gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        self._local.abort()

    def close(self) -> None:
        self._order.close()
        self._local.close()
        self._everyone = self._lane = None

    # --- steps -------------------------------------------------------------------------------------
    def _do(self, call: CallRecord, run: Callable[[], None], wait: bool) -> Ticket | None:
        def agreed() -> None:
            self._agree(call)
            run()

        return self._in_order(agreed, wait)

    def _in_order(self, run: Callable[[], None], wait: bool) -> Ticket | None:
        def together() -> None:
            with self._failing_together():
                run()

        return self._order.run(together, wait)

    def _call(
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

    def _agree(
        self, call: CallRecord, carried: torch.Tensor | None = None, code: int = 0
    ) -> torch.Tensor:
        """Compare the calls of all ranks; all of them come to the same verdict.

        `carried` rides along, reduced by `code` within each host, in order of rank. Returns one row
        of bytes a host.
        """
        mine = torch.zeros(_HEADER_BYTES + _CARRIED_BYTES, dtype=torch.uint8)
        mine[: C.sizeof(call)] = torch.frombuffer(bytearray(bytes(call)), dtype=torch.uint8)
        if carried is not None:
            mine[_HEADER_BYTES:][: _bytes(carried).numel()] = _bytes(carried)
        here = torch.empty((len(self._members[self._host]), mine.numel()), dtype=torch.uint8)
        self._local.allgather(here.unbind(), mine, wait=True, timeout_ns=-1)
        # The hosts may have different numbers of ranks: room for the longest.
        longest = max(map(len, self._members))
        headers = longest * _HEADER_BYTES
        block = torch.zeros(headers + _CARRIED_BYTES, dtype=torch.uint8)
        block[: len(here) * _HEADER_BYTES] = here[:, :_HEADER_BYTES].reshape(-1)
        if carried is not None:
            _reduce_local(block[headers:], here[:, _HEADER_BYTES:].unbind(), carried, code)
        everything = torch.empty((self._hosts, block.numel()), dtype=torch.uint8)
        if self._place == 0:
            self._lane._allgather_base(everything.view(-1), block).wait()
        self._local.broadcast(everything, 0, wait=True, timeout_ns=-1)
        self._compare(everything[:, :headers].view(self._hosts, longest, _HEADER_BYTES))
        return everything[:, headers:]

    def _compare(self, headers: torch.Tensor) -> None:
        calls = {
            rank: CallRecord.from_buffer_copy(bytes(row.tolist()))
            for rows, members in zip(headers, self._members, strict=True)
            for row, rank in zip(rows, members, strict=False)
        }
        if len({bytes(c) for c in calls.values()}) > 1:
            values = {rank: describe_call(calls[rank]) for rank in sorted(calls)}
            lines = "\n".join(f"  rank {rank}: {value}" for rank, value in values.items())
            raise MismatchError(
                f"the ranks made different calls, nothing was exchanged:\n{lines}\n"
                "All ranks of a group must make the same calls in the same order with matching sizes",
                values,
            )

    def _reduce_carried(self, call: CallRecord, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce a short tensor in place: the hosts' sums come with the comparison, everyone adds
        them.
        """
        wide = tensor.reshape(-1).to(_wide(tensor.dtype))
        if op.code == _PREMUL:
            wide = wide * op.factor
        code = _SUM.code if op.code in (_AVG, _PREMUL) else op.code
        shares = self._agree(call, wide, code)
        total = torch.empty_like(wide)
        _reduce_local(_bytes(total), shares.unbind(), wide, code)
        if op.code == _AVG:
            abi.library().plc_scale_local(
                address_of(total), total.numel(), core_dtype(total), self.size
            )
        tensor.copy_(total.view_as(tensor))

    def _reduce_all(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce in place, over all ranks."""
        flat = tensor.reshape(-1)
        wide = _wide(flat.dtype)
        pieces = self._lanes * self._hosts
        per_chunk = max(1, _CHUNK_BYTES // wide.itemsize // pieces) * pieces
        for chunk in flat.split(per_chunk) if flat.numel() else []:
            reduced = self._reduce_chunk(chunk.to(wide), op)
            if reduced.data_ptr() != chunk.data_ptr():
                chunk.copy_(reduced)

    def _reduce_chunk(self, chunk: torch.Tensor, op: Reduction) -> torch.Tensor:
        piece = -(-chunk.numel() // (self._lanes * self._hosts))
        slice_ = piece * self._hosts
        whole = chunk  # all but the last chunk divide evenly
        if chunk.numel() != slice_ * self._lanes:
            whole = torch.zeros(slice_ * self._lanes, dtype=chunk.dtype)
            whole[: chunk.numel()] = chunk
        mine = self._local_sum(whole, slice_, op)
        if self._lane is not None:
            self._lane_sum(mine, piece, op)
        self._share_slices(whole, mine, slice_)
        return whole[: chunk.numel()]

    def _slices(self, whole: torch.Tensor, length: int) -> list[torch.Tensor]:
        """One slice per local rank; those without a lane have none."""
        slices = list(whole.split(length)) if length else [whole[:0]] * self._lanes
        return slices + [whole[:0]] * (len(self._members[self._host]) - len(slices))

    def _local_sum(self, whole: torch.Tensor, length: int, op: Reduction) -> torch.Tensor:
        mine = whole.new_empty(length if self._lane is not None else 0)
        # The average is taken once, at the end; the factor of PREMUL_SUM is applied once, here.
        first = op if op.code == _PREMUL else _SUM if op.code == _AVG else op
        self._local.reduce_scatter(
            mine, self._slices(whole, length), first, wait=True, timeout_ns=-1
        )
        return mine

    def _lane_sum(self, mine: torch.Tensor, piece: int, op: Reduction) -> None:
        theirs = torch.empty_like(mine)
        options = dist.AllToAllOptions()
        self._lane.alltoall_base(_bytes(theirs), _bytes(mine), [], [], options).wait()
        total = mine.new_empty(piece)
        code = _SUM.code if op.code in (_AVG, _PREMUL) else op.code
        _reduce_local(total, theirs.split(piece), total, code)
        if op.code == _AVG:
            abi.library().plc_scale_local(address_of(total), piece, core_dtype(total), self.size)
        self._lane._allgather_base(_bytes(mine), _bytes(total)).wait()

    def _share_slices(self, whole: torch.Tensor, mine: torch.Tensor, length: int) -> None:
        self._local.allgather(self._slices(whole, length), mine, wait=True, timeout_ns=-1)

    def _from_host(self, host: int, data: torch.Tensor) -> None:
        """Give every rank the bytes that all ranks of one host have."""
        for chunk in data.split(_CHUNK_BYTES) if data.numel() else []:
            length = -(-chunk.numel() // self._lanes)
            whole = chunk.new_zeros(length * self._lanes)
            if self._host == host:
                whole[: chunk.numel()] = chunk
            slices = self._slices(whole, length)
            if self._lane is not None:
                options = dist.BroadcastOptions()
                options.rootRank = host
                self._lane.broadcast([slices[self._place]], options).wait()
            if self._host != host:
                self._share_slices(whole, slices[self._place].clone(), length)
                chunk.copy_(whole[: chunk.numel()])

    def _exchange(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Everyone sends everyone something, of any size, over Gloo."""
        sent = torch.cat([_bytes(tensor) for tensor in inputs])
        sizes = [_bytes(tensor).numel() for tensor in outputs]
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        self._check_sizes(sizes, [_bytes(tensor).numel() for tensor in inputs])
        in_sizes = [_bytes(tensor).numel() for tensor in inputs]
        self._everyone.alltoall_base(found, sent, sizes, in_sizes, dist.AllToAllOptions()).wait()
        for output, part in zip(outputs, found.split(sizes), strict=True):
            _bytes(output).copy_(part)

    def _check_sizes(self, wanted: list[int], sent: list[int]) -> None:
        """Every rank sees what each sends to and wants from each, so that all come to the same
        verdict.
        """
        mine = torch.tensor([sent, wanted])
        table = torch.empty((self.size, 2, self.size), dtype=torch.int64)
        self._everyone._allgather_base(_bytes(table), _bytes(mine)).wait()
        sizes_sent, sizes_wanted = table[:, 0, :], table[:, 1, :].T
        if not torch.equal(sizes_sent, sizes_wanted):
            source, goal = (sizes_sent != sizes_wanted).nonzero()[0].tolist()
            raise MismatchError(
                f"rank {source} sends {int(sizes_sent[source, goal])} bytes to rank {goal}, "
                f"which expects {int(sizes_wanted[source, goal])}",
                {
                    source: f"sends {int(sizes_sent[source, goal])}",
                    goal: f"wants {int(sizes_wanted[source, goal])}",
                },
            )

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error of Gloo ends the wait of this host's other ranks too, and becomes one of ours."""
        try:
            yield
        except PacelineError as error:
            if isinstance(error, GroupError):
                self._everyone = self._lane = None  # closes the connections: the other hosts notice
            raise
        except RuntimeError as error:
            self._local.abort()
            self._everyone = self._lane = None
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise CollectiveTimeout(
                    f"rank {self.rank}: no answer from another host within {self._timeout.total_seconds():g} s: {text}"
                ) from error
            raise PeerLost(
                f"rank {self.rank}: the connection to a rank on another host was lost: {text}. Its own output tells why"
            ) from error

    def _check_one_per_rank(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.rank}: {call} needs one tensor for each of the {self.size} ranks, got {len(tensors)}"
            )


class _InOrder:
    """Runs calls one after the other: here, or on one thread when the caller does not want to wait."""

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
    def __init__(self, work: Any, keep: torch.Tensor) -> None:
        self._work, self._keep = work, keep

    def wait(self, timeout_ns: int = -1) -> bool:
        try:
            self._work.wait(
                timedelta(microseconds=timeout_ns / 1000)
            ) if timeout_ns > 0 else self._work.wait()
        except RuntimeError as error:
            kind = CollectiveTimeout if "imed out" in str(error) else PeerLost
            raise kind(f"a message between hosts failed: {error}") from error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())

    @property
    def source(self) -> int:
        return int(self._work._source_rank())


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of this type are taken."""
    return _WIDER.get(dtype, dtype)


def _reduce_local(
    out: torch.Tensor, shares: Sequence[torch.Tensor], like: torch.Tensor, code: int
) -> None:
    """out = op over shares, in their order; all of them bytes of tensors like `like`."""
    pointers = (C.c_void_p * len(shares))(*[address_of(share) for share in shares])
    core = abi.library()
    core.plc_reduce_local(
        address_of(out), pointers, len(shares), like.numel(), core_dtype(like), code, 1.0
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    # A single element may have any stride and still count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
