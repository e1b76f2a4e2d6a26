"""`simccl`: a process group for `sim` tensors that is ordered like NCCL's.

A collective is one launch on a communication stream of its own: it starts after what the caller's
stream was given before, and the caller's stream goes on at once. `Work.wait()` and the Future order
streams, not the host. A Work holds on to its tensors until someone waits; dropped before that, it
leaves them recorded on the communication stream. So callers need no `record_stream` of their own.
The bytes travel through Gloo, in the launching thread, over private copies.

CPU tensors are exchanged in place of a second backend: they go straight to Gloo, and are done when
the call returns.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.sim.device import kernel

__all__ = ["BACKEND", "StreamOrderedGroup", "StreamWork", "register"]

BACKEND = "simccl"
Exchange = Callable[[list[Tensor]], None]


def register() -> None:
    """Make `init_process_group("simccl")` work in this process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, StreamOrderedGroup, devices=["sim"])


class StreamWork(dist.Work):
    """A collective on its way: `wait` makes the caller's stream wait for it and lets go of the
    tensors.
    """

    def __init__(
        self,
        device: torch.device,
        future: Any,
        stream: torch.Stream | None = None,  # None: done when the call returned
        held: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._device, self._future = device, future
        self._stream, self._held = stream, list(held)
        self._done = stream.record_event() if stream is not None else None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._done is not None:
            torch.accelerator.current_stream(self._device.index).wait_event(self._done)
        self._held.clear()
        return True

    def __del__(self) -> None:
        for tensor in self._held:
            tensor.record_stream(self._stream)

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def get_future(self) -> Any:
        return self._future


class StreamOrderedGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._wire = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._name = self._description = ""
        self._sending: list[Any] = []

    # ---- how a collective is ordered; the mutation tests replace these one by one

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def _start_after_caller(self, stream: torch.Stream) -> None:
        stream.wait_stream(torch.accelerator.current_stream(stream.device.index))

    def _future(self, device: torch.device) -> Any:
        return torch.futures.Future(devices=[device])

    def _held(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    # ---- one collective

    def _launch(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        exchange: Exchange,
        result: Any,
    ) -> StreamWork:
        device = _one_device([*reads, *writes])
        if device.type == "cpu":
            exchange([*reads, *writes])
            return StreamWork(device, _completed(torch.futures.Future(), result))
        stream = self._stream(device)
        self._start_after_caller(stream)
        with stream:
            with kernel(name, reads, writes) as views:
                _exchange_copies(views, len(reads), exchange)
            future = _completed(self._future(device), result)
        return StreamWork(device, future, stream, self._held([*reads, *writes]))

    # ---- collectives; the first ones also in torch's short forms: one tensor and a plain operation

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> StreamWork:
        tensors, op = _listed(tensors), getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)
        if tensors[0].is_sparse:
            return self._allreduce_sparse(tensors, op)
        return self._launch(
            "all_reduce", [], tensors, lambda views: self._reduce_each(views, op), tensors
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> StreamWork:
        tensors, root = _listed(tensors), getattr(opts, "rootRank", opts or 0)

        def exchange(views: list[Tensor]) -> None:
            for view in views:
                request = dist.BroadcastOptions()
                request.rootRank = root
                self._wire.broadcast([view], request).wait()

        am_root = self.rank() == root
        return self._launch(
            "broadcast", tensors if am_root else [], [] if am_root else tensors, exchange, tensors
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            for view in views:
                self._reduce_each([total := view.clone()], opts.reduceOp)
                if self.rank() == opts.rootRank:
                    view.copy_(total)

        am_root = self.rank() == opts.rootRank
        return self._launch(
            "reduce", [] if am_root else tensors, tensors if am_root else [], exchange, tensors
        )

    def allgather(
        self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None
    ) -> StreamWork:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]

        def exchange(views: list[Tensor]) -> None:
            self._wire.allgather([views[1:]], [views[0]]).wait()

        return self._launch("all_gather", inputs[:1], outputs[0], exchange, outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            self._wire._allgather_base(views[1], views[0]).wait()

        return self._launch("all_gather_single", [given], [output], exchange, [output])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StreamWork:
        return self._allgather_base(output, given, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            pieces = [piece.clone() for piece in views[:-1]]
            self._reduce_each(pieces, opts.reduceOp)
            views[-1].copy_(pieces[self.rank()])

        return self._launch("reduce_scatter", inputs[0], outputs[:1], exchange, outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> StreamWork:
        return self.reduce_scatter([output], [list(given.chunk(self.size()))], opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> StreamWork:
        return self._reduce_scatter_base(output, given, opts)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            self._wire.alltoall_base(views[1], views[0], output_sizes, input_sizes).wait()

        return self._launch("all_to_all", [given], [output], exchange, [output])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            self._sending.append(
                self._wire.send([views[0].clone()], to, tag)
            )  # the peer may not have asked yet

        return self._launch("send", tensors[:1], [], exchange, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> StreamWork:
        def exchange(views: list[Tensor]) -> None:
            self._wire.recv([views[0]], source, tag).wait()

        return self._launch("recv", [], tensors[:1], exchange, tensors)

    def barrier(self, opts: Any = None) -> StreamWork:
        self._wire.barrier().wait()
        return StreamWork(torch.device("cpu"), _completed(torch.futures.Future(), []))

    # ---- sums

    def _reduce_each(self, views: list[Tensor], op: Any) -> None:
        average = op == dist.ReduceOp.AVG  # NCCL has it, Gloo has not
        for view in views:
            request = dist.AllreduceOptions()
            request.reduceOp = dist.ReduceOp.SUM if average else op
            self._wire.allreduce([view], request).wait()
            if average:
                view.div_(self.size())

    def _allreduce_sparse(self, tensors: list[Tensor], op: Any) -> StreamWork:
        """The number of entries changes, so the host takes part: it waits, as every library does
        here.
        """
        device = tensors[0].device
        for tensor in tensors:
            total = tensor.cpu()
            request = dist.AllreduceOptions()
            request.reduceOp = op
            self._wire.allreduce([total], request).wait()
            tensor.copy_(total.to(device))
        return StreamWork(device, _completed(self._future(device), tensors))

    # ---- names, which torch.distributed insists on

    def getBackendName(self) -> str:  # noqa: N802 - the C++ name
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _one_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"{BACKEND}: the tensors of one collective live on one device, "
            f"found {sorted(map(str, devices))}"
        )
    return devices.pop()


def _completed(future: Any, result: Any) -> Any:
    future.set_result(
        result
    )  # notes the current streams of the future's devices, for whoever waits
    return future


def _exchange_copies(views: list[Tensor], reads: int, exchange: Exchange) -> None:
    """Gloo works in threads of its own, where accesses would look like the host's: give it private
    memory.
    """
    copies = [view.clone(memory_format=torch.contiguous_format) for view in views]
    exchange(copies)
    for view, copy in zip(views[reads:], copies[reads:], strict=True):
        view.copy_(copy)
