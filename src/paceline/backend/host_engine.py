"""Collectives on tensors of one host: turns contiguous CPU tensors into requests to the native
core.
"""

from __future__ import annotations

import ctypes as C
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from paceline._interpreter import NotifiesOnDrop
from paceline.backend.engine import Reduction, Ticket
from paceline.core import BucketArena, Communicator
from paceline.core.abi import ANY_SOURCE, Kind, Message, Request
from paceline.core.dtypes import BYTES, DTYPE_NAMES
from paceline.errors import ConfigError

__all__ = ["DTYPE_CODES", "HostEngine", "address_of", "core_dtype", "dtype_label"]

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES) if code != BYTES
}
_SIGNAL_TAG = 0x70616365  # far from the tags that users choose


def address_of(tensor: torch.Tensor) -> int | None:
    """Where a tensor's elements are; None when there are none."""
    return tensor.data_ptr() or None


class _RequestTicket(NotifiesOnDrop):
    """A collective in progress. `keep` holds the tensors and arrays that the core points to."""

    source = ANY_SOURCE

    def __init__(self, comm: Communicator, request: Request, keep: object | None) -> None:
        self._comm, self._request, self._keep = comm, request, keep

    def wait(self, timeout_ns: int = -1) -> bool:
        done = self._comm.wait(self._request, timeout_ns)
        if done:
            self._keep = None  # the call may be remembered for long, its tensors need not be
        return done

    def done(self) -> bool:
        return bool(self._request.finished)

    def on_drop(self) -> None:
        # A dropped asynchronous call still has to run: the peers count on it, and the core writes
        # to this memory.
        if not self._request.finished and self._comm.is_open:
            _keep_until_finished(self._request, self._keep)


# Calls in progress that nobody waits for, and what the core still points to for them.
_unawaited: dict[int, tuple[Request | Message, object]] = {}


def _keep_until_finished(call: Request | Message, keep: object) -> None:
    """Runs in any thread, also in the middle of itself: each step is atomic."""
    _unawaited[id(call)] = (call, keep)
    for key, (other, _) in list(_unawaited.items()):
        if other.finished:
            _unawaited.pop(key, None)


class _MessageTicket(NotifiesOnDrop):
    """A message in progress."""

    def __init__(self, comm: Communicator, message: Message, keep: object | None) -> None:
        self._comm, self._message, self._keep = comm, message, keep

    def wait(self, timeout_ns: int = -1) -> bool:
        done = self._comm.wait_message(self._message, timeout_ns)
        if done:
            self._keep = None
        return done

    def done(self) -> bool:
        return bool(self._message.finished)

    @property
    def source(self) -> int:
        return int(self._message.source)

    def on_drop(self) -> None:
        if not self._message.finished and self._comm.is_open:
            _keep_until_finished(self._message, self._keep)


class HostEngine:
    """All ranks of the group are on this host."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size

    # --- reductions -------------------------------------------------------------------------------
    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        return self._run_or_start(_reduction(Kind.ALLREDUCE, tensor, op, timeout_ns), tensor, wait)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        request = _reduction(Kind.REDUCE, tensor, op, timeout_ns)
        request.root = root
        return self._run_or_start(request, tensor, wait)

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
        if output.numel() != inputs[self.rank].numel():
            raise ConfigError(
                f"rank {self.rank}: reduce_scatter's output has {output.numel()} elements, "
                f"its own input block {inputs[self.rank].numel()}"
            )
        pointers, counts = _table(inputs)
        request = Request(
            kind=Kind.REDUCE_SCATTER,
            dtype=core_dtype(output),
            op=op.code,
            root=-1,
            output=address_of(output),
            inputs=pointers,
            in_counts=counts,
            factor=op.scalar,
            timeout_ns=timeout_ns,
        )
        return self._run_or_start(request, (output, inputs, pointers, counts), wait)

    # --- moving data ------------------------------------------------------------------------------
    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        address = address_of(tensor)
        request = _movement(Kind.BROADCAST, tensor, timeout_ns, root=root)
        request.input = request.output = address
        return self._run_or_start(request, tensor, wait)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        self._check_one_per_rank("all_gather", outputs)
        return self._gather(Kind.ALLGATHER, outputs, tensor, -1, wait, timeout_ns)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        if outputs is not None:
            self._check_one_per_rank("gather", outputs)
        return self._gather(Kind.GATHER, outputs, tensor, root, wait, timeout_ns)

    def _gather(
        self,
        kind: int,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        request = _movement(kind, tensor, timeout_ns, root=root)
        request.input = address_of(tensor)
        keep: tuple[object, ...] = (tensor, outputs)
        if outputs is not None:
            pointers, counts = _table(outputs, in_bytes=True)
            request.outputs, request.out_counts = pointers, counts
            keep = (*keep, pointers, counts)
        return self._run_or_start(request, keep, wait)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        # An all-to-all in which only the root sends, and every rank receives from the root alone.
        request = _movement(Kind.SCATTER, output, timeout_ns, root=root)
        wanted = [
            output if r == root else output[:0] if output.dim() else output.new_empty(0)
            for r in range(self.size)
        ]
        pointers, counts = _table(wanted, in_bytes=True)
        request.outputs, request.out_counts = pointers, counts
        keep: tuple[object, ...] = (output, wanted, pointers, counts)
        if inputs is not None:
            self._check_one_per_rank("scatter", inputs)
            in_pointers, in_counts = _table(inputs, in_bytes=True)
            request.inputs, request.in_counts = in_pointers, in_counts
            keep = (*keep, inputs, in_pointers, in_counts)
        return self._run_or_start(request, keep, wait)

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
        request = _movement(Kind.ALLTOALL, inputs[0], timeout_ns)
        request.count = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        pointers, counts = _table(outputs, in_bytes=True)
        in_pointers, in_counts = _table(inputs, in_bytes=True)
        request.outputs, request.out_counts, request.inputs, request.in_counts = (
            pointers,
            counts,
            in_pointers,
            in_counts,
        )
        keep = (outputs, inputs, pointers, counts, in_pointers, in_counts)
        return self._run_or_start(request, keep, wait)

    def barrier(self, *, wait: bool, timeout_ns: int) -> Ticket | None:
        return self._run_or_start(
            Request(kind=Kind.BARRIER, dtype=BYTES, root=-1, timeout_ns=timeout_ns), None, wait
        )

    # --- messages ---------------------------------------------------------------------------------
    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        return self._post(tensor, peer, tag, timeout_ns, is_send=True)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        return self._post(tensor, peer, tag, timeout_ns, is_send=False)

    def _post(
        self, tensor: torch.Tensor, peer: int, tag: int, timeout_ns: int, *, is_send: bool
    ) -> Ticket:
        message = Message(
            peer=peer,
            tag=tag,
            buffer=address_of(tensor),
            bytes=tensor.numel() * tensor.element_size(),
            timeout_ns=timeout_ns,
        )
        self.comm.post(message, is_send=is_send)
        return _MessageTicket(self.comm, message, tensor)

    def post_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        self.send(torch.tensor([number]), peer, _SIGNAL_TAG, timeout_ns=timeout_ns).wait()

    def await_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        received = torch.tensor([-1])
        deadline = time.monotonic_ns() + timeout_ns
        while received.item() < number:
            left = max(deadline - time.monotonic_ns(), 1)
            self.recv(received, peer, _SIGNAL_TAG, timeout_ns=left).wait()

    # --- buckets ----------------------------------------------------------------------------------
    def open_arena(self, bytes_per_rank: int, buckets: int) -> BucketArena:
        """Shared memory in which this group's gradients can lie; the same call on all ranks."""
        return BucketArena.open(self.comm, bytes_per_rank, buckets)

    # --- life -------------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        self.comm.set_timeout(timeout)

    def abort(self) -> None:
        self.comm.abort()

    def close(self) -> None:
        self.comm.leave()

    def _run_or_start(self, request: Request, keep: object, wait: bool) -> Ticket | None:
        if wait:
            self.comm.run(request)
            return None
        return self._start(request, keep)

    def _start(self, request: Request, keep: object) -> Ticket:
        self.comm.submit(request)
        return _RequestTicket(self.comm, request, keep)

    def _check_one_per_rank(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.rank}: {call} needs one tensor for each of the {self.size} ranks, "
                f"got {len(tensors)}"
            )


def dtype_label(tensor: torch.Tensor) -> int:
    """A number for an element type, the same on every rank; torch itself offers none."""
    return _LABELS[tensor.dtype]


def core_dtype(tensor: torch.Tensor) -> int:
    """The core's number for a tensor's element type."""
    try:
        return DTYPE_CODES[tensor.dtype]
    except KeyError:
        raise ConfigError(
            f"{tensor.dtype} cannot be reduced in torch; cast the tensor first"
        ) from None


def _reduction(kind: int, tensor: torch.Tensor, op: Reduction, timeout_ns: int) -> Request:
    address = address_of(tensor)
    return Request(
        kind=kind,
        dtype=core_dtype(tensor),
        op=op.code,
        root=-1,
        count=tensor.numel(),
        input=address,
        output=address,
        factor=op.scalar,
        timeout_ns=timeout_ns,
    )


def _movement(kind: int, tensor: torch.Tensor, timeout_ns: int, root: int = -1) -> Request:
    """Data that is only moved goes as bytes; the label lets peers notice another element type."""
    return Request(
        kind=kind,
        dtype=BYTES,
        root=root,
        label=dtype_label(tensor),
        count=tensor.numel() * tensor.element_size(),
        timeout_ns=timeout_ns,
    )


_LABELS = {
    dtype: int.from_bytes(str(dtype).removeprefix("torch.").encode()[-8:].rjust(8, b"\0"), "little")
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
}


def _table(
    tensors: Sequence[torch.Tensor], *, in_bytes: bool = False
) -> tuple[C.Array[C.c_void_p], C.Array[C.c_uint64]]:
    pointers = (C.c_void_p * len(tensors))(*[address_of(tensor) for tensor in tensors])
    sizes = [tensor.numel() * (tensor.element_size() if in_bytes else 1) for tensor in tensors]
    return pointers, (C.c_uint64 * len(tensors))(*sizes)
