"""`PacelineGroup`: what torch.distributed sees.

The names and forms of the methods are torch's: those its Python front calls, those its C++ side
looks up, and the short forms of its own bindings (`group.allreduce(tensor)`). Every method is the
same four steps: parse the options (`call_options`) and check the arguments, lay the tensors out
(`tensor_layout`), call the engine, return a `Work`. Tensors of other devices are delegated to the
backend of their device before the second step.

The most frequent call, an all-reduce of one plain tensor that is waited for, takes none of these
steps: see `_allreduce_at_once`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline._torch_internals import (
    AllgatherOptions,
    BackendOptions,
    Store,
    Work,
    methods_not_compiled,
)
from paceline.backend import sparse_all_reduce
from paceline.backend.call_options import (
    REDUCTIONS,
    CallOptions,
    TorchOptions,
    parse_options,
    torch_options,
)
from paceline.backend.engine import Engine, Reduction, Ticket
from paceline.backend.host_engine import DTYPE_CODES, HostEngine
from paceline.backend.monitored_barrier import monitored_barrier
from paceline.backend.tensor_layout import (
    Finish,
    TensorLists,
    all_tensors,
    check_non_empty,
    check_same_dtype,
    contiguous,
    copy_back,
    flat_list,
    lay_out,
    lay_out_reduced,
    run_each,
    single,
    single_tensor,
)
from paceline.backend.tensor_lists import (
    check_alike,
    check_gather_lists,
    combine,
    copy_to_all,
    is_several,
)
from paceline.backend.work import CallResult, Completer, DoneWork, PendingWork, timeout_to_ns
from paceline.core.abi import ANY_SOURCE
from paceline.core.dtypes import Op
from paceline.errors import ConfigError

__all__ = ["PacelineGroup"]

_CPU = torch.device("cpu")
_STRIDED = torch.strided
_AllreduceOptions = dist.AllreduceOptions
_UNSET = _AllreduceOptions().timeout
_REAL_DTYPES = {dtype: code for dtype, code in DTYPE_CODES.items() if not dtype.is_complex}
_DONE = DoneWork([])


def _hash_of(code: int) -> int:
    options = _AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(code))
    return hash(options.reduceOp)


# An operation's hash takes a quarter of a microsecond, its number three quarters. PREMUL_SUM is not
# among them.
_CODE_OF_HASH = {_hash_of(code): code for code in REDUCTIONS}

# torch's stubs give each method several overloads, which one Python method serves; restating them
# would say nothing.
_ProcessGroup: Any = dist.ProcessGroup


@methods_not_compiled("a process group moves data; the compiler cannot look into it")
class PacelineGroup(_ProcessGroup):  # type: ignore[misc]  # see above
    """A process group whose CPU tensors travel through shared memory.

    Tensors of other devices go to the backend registered for their device
    (`cpu:paceline,cuda:nccl`).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        engine: Engine,
        timeout: timedelta,
        split: Callable[[Sequence[int], timedelta, str], PacelineGroup] | None = None,
    ) -> None:
        # torch's other constructor, with a store, cannot be inherited from Python.
        super().__init__(rank, size)
        self._store = store
        self._engine = engine
        self._timeout_ns = timeout_to_ns(timeout)
        self._completer = Completer(f"paceline-futures-{rank}")
        self._split = split
        self._splits: Counter[str] = Counter()
        self._coalescing: list[Work] | None = None
        self._host_allreduce = engine.comm.allreduce if isinstance(engine, HostEngine) else None
        self._monitored_barriers = 0
        self._calls = 0  # collectives started
        self.wrapped_models: Counter[str] = Counter()  # by description
        self._name = self._desc = ""
        # Device type -> torch's backend of another kind, a `Backend` or a `ProcessGroup`.
        self._device_backends: dict[str, Any] = {}
        self.options = BackendOptions("paceline", timeout)
        self.supports_splitting = True
        self.supports_coalescing = False
        self.supports_time_estimate = False

    # --- what torch asks about a group ------------------------------------------------------------
    def name(self) -> str:
        return "paceline"

    getBackendName = name  # noqa: N815 - torch's C++ side looks this name up

    def _get_backend_name(self) -> str:
        return "paceline"

    def getGroupName(self) -> str:  # noqa: N802 - likewise
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

    @property
    def engine(self) -> Engine:
        """How this group moves data; `paceline.ddp` uses its shared memory directly."""
        return self._engine

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(torch.device(kind) for kind in self._device_backends)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type in self._device_backends:
            return self._device_backends[device.type]
        raise RuntimeError(
            f"this process group has no backend for {device.type} tensors; name one when it is "
            f"created, for example init_process_group('cpu:paceline,{device.type}:...')"
        )

    def add_backend(self, device_type: str, backend: Any) -> None:
        """Serve tensors of another device with a backend of another kind."""
        self._device_backends[device_type] = backend

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    @staticmethod
    def create_device(
        hostname: str = "", interface: str = "", lazy_init: bool | None = None
    ) -> Any:
        """A network device of Gloo, which ranks on different hosts talk through, for programs
        written for Gloo.
        """
        return dist.ProcessGroupGloo.create_device(hostname, interface, lazy_init)

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ns = timeout_to_ns(timeout)
        self.options._timeout = timeout
        self._engine.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._engine.close()
        self._completer.close()
        for backend in self._device_backends.values():
            backend.shutdown()

    def abort(self) -> None:
        self._engine.abort()
        for backend in self._device_backends.values():
            backend.abort()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PacelineGroup | None:
        """A group of some of this group's ranks; None on the others."""
        if self.rank() not in ranks:
            return None
        if self._split is None:
            raise ConfigError("this group cannot be split: it has no store of its own")
        name = group_name or f"{self._name}:split:{','.join(map(str, ranks))}"
        # The keys in the store of a group of the same name and ranks must not be read again.
        # Counted by name: ranks outside of a split need not call.
        uses = self._splits[name]
        self._splits[name] += 1
        limit = timeout or timedelta(microseconds=self._timeout_ns / 1000)
        group = self._split(sorted(ranks), limit, f"{name}#{uses}" if uses else name)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    # --- reductions -------------------------------------------------------------------------------
    def allreduce(
        self,
        tensors: TensorLists,
        opts: TorchOptions = None,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if (
            opts.__class__ is _AllreduceOptions
            and not opts.asyncOp
            and self._allreduce_at_once(tensors, opts)
        ):
            return _DONE
        several = is_several(tensors)
        tensor = tensors[0] if several else single_tensor(tensors)
        if not tensor.is_cpu:
            options = torch_options(dist.AllreduceOptions(), opts, op=op, timeout=timeout)
            return self._delegate(tensor, "allreduce", tensors if several else [tensor], options)
        if several:
            check_alike("all_reduce", tensors)
            return self._allreduce_several(tensors, self._options(opts, op=op, timeout=timeout))
        return self._allreduce(tensor, self._options(opts, op=op, timeout=timeout))

    def allreduce_scaled(
        self, tensor: torch.Tensor, factor: float, wire_dtype: torch.dtype | None = None
    ) -> Work:
        """Start the sum of a CPU tensor, in place, times a factor that is the same on all ranks.
        Sums of float32 travel between hosts as `wire_dtype`.
        """
        self._calls += 1
        flat, finish = lay_out(tensor)
        ticket = self._engine.allreduce(
            flat, Reduction.scaled(factor, wire_dtype), wait=False, timeout_ns=self._timeout_ns
        )
        return self._work(ticket, [tensor], finish)

    def _allreduce_at_once(self, tensors: TensorLists, opts: TorchOptions) -> bool:
        """The short way for the most frequent call, a plain tensor that is waited for: saves ten
        microseconds. False: the call is not that simple, and nothing was done.
        """
        if self._host_allreduce is None or self._coalescing is not None or len(tensors) != 1:
            return False
        tensor = tensors[0]
        dtype = _REAL_DTYPES.get(tensor.dtype)
        code = _CODE_OF_HASH.get(hash(opts.reduceOp))
        if dtype is None or code is None or not tensor.is_cpu or tensor.layout is not _STRIDED:
            return False
        if tensor.is_neg() or not tensor.is_contiguous():
            return False
        limit = opts.timeout
        timeout_ns = self._timeout_ns
        if limit != _UNSET:
            ns = timeout_to_ns(limit)
            timeout_ns = ns if ns > 0 else timeout_ns
        self._calls += 1
        self._host_allreduce(tensor.data_ptr(), tensor.numel(), dtype, code, timeout_ns)
        return True

    def _allreduce(self, tensor: torch.Tensor, options: CallOptions) -> Work:
        ticket, finish = self._start_allreduce(tensor, options)
        return self._work(ticket, [tensor], finish)

    def _allreduce_several(self, tensors: list[torch.Tensor], options: CallOptions) -> Work:
        combined = combine(tensors, options.reduction)
        ticket, finish = self._start_allreduce(combined, options)
        return self._work(ticket, tensors, run_each([finish, copy_to_all(tensors, combined)]))

    def _start_allreduce(
        self, tensor: torch.Tensor, options: CallOptions
    ) -> tuple[Ticket | None, Finish | None]:
        timeout_ns, reduction = options.timeout_ns, options.reduction
        if tensor.is_sparse:
            sparse_all_reduce.allreduce(self._engine, tensor, reduction, timeout_ns)
            return None, None
        flat, reduction, finish = lay_out_reduced(tensor, reduction)
        ticket = self._engine.allreduce(flat, reduction, wait=options.wait, timeout_ns=timeout_ns)
        return ticket, finish

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: TorchOptions = None) -> Work:
        """One call for many tensors of one dtype, through a flat copy."""
        check_non_empty("all_reduce_coalesced", tensors)
        if not tensors[0].is_cpu:
            coalesced = torch_options(dist.AllreduceCoalescedOptions(), opts)
            return self._delegate(tensors[0], "allreduce_coalesced", tensors, coalesced)
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        options = self._options(opts)
        check_same_dtype("all_reduce_coalesced", tensors)
        if options.reduction.code == Op.PREMUL_SUM:
            return self._combined(self._allreduce(tensor, options) for tensor in tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

        def finish() -> None:
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, part in zip(tensors, flat.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

        ticket = self._engine.allreduce(
            flat, options.reduction, wait=options.wait, timeout_ns=options.timeout_ns
        )
        return self._work(ticket, tensors, finish)

    def reduce(
        self,
        tensors: TensorLists,
        opts: TorchOptions = None,
        root: int | None = None,
        op: Any = None,
    ) -> Work:
        tensor = single_tensor(tensors)
        if not tensor.is_cpu:
            reduce_options = torch_options(dist.ReduceOptions(), opts, op=op, root=root)
            return self._delegate(tensor, "reduce", [tensor], reduce_options)
        self._check_root_tensor("reduce", opts, 1)
        options = self._options(opts, op=op, root=root, rooted="reduce")
        flat, reduction, finish = lay_out_reduced(tensor, options.reduction)
        ticket = self._engine.reduce(
            flat, options.root, reduction, wait=options.wait, timeout_ns=options.timeout_ns
        )
        return self._work(ticket, [tensor], finish if self.rank() == options.root else None)

    def reduce_scatter(
        self,
        output_tensors: TensorLists,
        input_tensors: TensorLists,
        opts: TorchOptions = None,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        output, inputs = single_tensor(output_tensors), flat_list(input_tensors)
        if not output.is_cpu:
            options = torch_options(dist.ReduceScatterOptions(), opts, op=op, timeout=timeout)
            return self._delegate(output, "reduce_scatter", [output], [inputs], options)
        return self._reduce_scatter(output, inputs, self._options(opts, op=op, timeout=timeout))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name for it
        opts: TorchOptions = None,
    ) -> Work:
        if not output.is_cpu:
            options = torch_options(dist.ReduceScatterOptions(), opts)
            return self._delegate(output, "_reduce_scatter_base", output, input, options)
        flat = input.contiguous().view(-1)
        self._check_divides("reduce_scatter", flat.numel(), output.numel())
        return self._reduce_scatter(output, self._blocks(flat), self._options(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: TorchOptions = None,
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._combined(self.reduce_scatter_single(*pair, opts) for pair in pairs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], options: CallOptions
    ) -> Work:
        check_same_dtype("reduce_scatter", [output, *inputs])
        out, finish = lay_out(output, read=False)
        blocks = [contiguous(block) for block in inputs]
        reduction: Reduction = options.reduction
        if reduction.code == Op.PREMUL_SUM:
            blocks = [block * reduction.factor for block in blocks]
            reduction = REDUCTIONS[Op.SUM]
        ticket = self._engine.reduce_scatter(
            out, blocks, reduction, wait=options.wait, timeout_ns=options.timeout_ns
        )
        return self._work(ticket, [output], finish)

    # --- moving data ------------------------------------------------------------------------------
    def broadcast(
        self,
        tensors: TensorLists,
        opts: TorchOptions = None,
        root: int | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        several = is_several(tensors)
        tensor = tensors[0] if several else single_tensor(tensors)
        if not tensor.is_cpu:
            broadcast_options = torch_options(
                dist.BroadcastOptions(), opts, root=root, timeout=timeout
            )
            given = tensors if several else [tensor]
            return self._delegate(tensor, "broadcast", given, broadcast_options)
        index = self._check_root_tensor("broadcast", opts, len(tensors) if several else 1)
        if several:
            check_alike("broadcast", tensors)
            tensor = tensors[index]
        options = self._options(opts, root=root, timeout=timeout, rooted="broadcast")
        is_root = self.rank() == options.root
        flat, finish = lay_out(tensor, read=is_root)
        ticket = self._engine.broadcast(
            flat, options.root, wait=options.wait, timeout_ns=options.timeout_ns
        )
        received = None if is_root else finish
        if several:
            return self._work(ticket, tensors, run_each([received, copy_to_all(tensors, tensor)]))
        return self._work(ticket, [tensor], received)

    def _check_root_tensor(self, call: str, opts: TorchOptions, count: int) -> int:
        """Which of the root's tensors a call is about."""
        index: int = getattr(opts, "rootTensor", 0)
        if not 0 <= index < count:
            raise ConfigError(
                f"rank {self.rank()}: {call}: invalid root tensor: {index}; this process gave "
                f"{count} {'tensor' if count == 1 else 'tensors'}"
            )
        return index

    def allgather(
        self,
        output_tensors: TensorLists,
        input_tensors: TensorLists,
        opts: TorchOptions = None,
        timeout: timedelta | None = None,
    ) -> Work:
        if is_several(input_tensors):
            return self._allgather_several(output_tensors, input_tensors, opts, timeout)
        tensor, outputs = single_tensor(input_tensors), flat_list(output_tensors)
        if not tensor.is_cpu:
            gather_options = torch_options(AllgatherOptions(), opts, timeout=timeout)
            return self._delegate(tensor, "allgather", [outputs], [tensor], gather_options)
        check_same_dtype("all_gather", [tensor, *outputs])
        options = self._options(opts, timeout=timeout)
        laid = [lay_out(output, read=False) for output in outputs]
        ticket = self._engine.allgather(
            [flat for flat, _ in laid],
            contiguous(tensor),
            wait=options.wait,
            timeout_ns=options.timeout_ns,
        )
        return self._work(ticket, list(outputs), run_each(finish for _, finish in laid))

    def _allgather_several(
        self,
        output_lists: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: TorchOptions,
        timeout: timedelta | None,
    ) -> Work:
        """The inputs travel as one; every output list gets all inputs of all ranks."""
        if not inputs[0].is_cpu:
            gather_options = torch_options(AllgatherOptions(), opts, timeout=timeout)
            return self._delegate(inputs[0], "allgather", output_lists, inputs, gather_options)
        check_gather_lists(output_lists, inputs, self.size())
        outputs = all_tensors(output_lists)
        check_alike("all_gather", [*inputs, *outputs])
        options = self._options(opts, timeout=timeout)
        given = torch.stack([contiguous(tensor) for tensor in inputs])
        received = [torch.empty_like(given) for _ in range(self.size())]
        gathered = [tensor for block in received for tensor in block.unbind()]
        ticket = self._engine.allgather(
            received, given, wait=options.wait, timeout_ns=options.timeout_ns
        )
        copies = [
            copy_back(output, tensor)
            for outputs in output_lists
            for output, tensor in zip(outputs, gathered, strict=True)
        ]
        return self._work(ticket, output_lists, run_each(copies))

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name for it
        opts: TorchOptions = None,
    ) -> Work:
        if not input.is_cpu:
            gather_options = torch_options(AllgatherOptions(), opts)
            return self._delegate(input, "_allgather_base", output, input, gather_options)
        check_same_dtype("all_gather_into_tensor", [output, input])
        self._check_divides("all_gather_into_tensor", output.numel(), input.numel())
        flat, finish = lay_out(output, read=False)
        options = self._options(opts)
        ticket = self._engine.allgather(
            self._blocks(flat.view(-1)),
            contiguous(input),
            wait=options.wait,
            timeout_ns=options.timeout_ns,
        )
        return self._work(ticket, [output], finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: TorchOptions = None,
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._combined(self.all_gather_single(*pair, opts) for pair in pairs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self,
        output_lists: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: TorchOptions = None,
    ) -> Work:
        # torch gives one list per rank, each holding one tensor per input.
        return self._combined(
            self.allgather([[outputs[i] for outputs in output_lists]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        )

    def gather(
        self,
        output_tensors: TensorLists,
        input_tensors: TensorLists,
        opts: TorchOptions = None,
        root: int | None = None,
    ) -> Work:
        tensor = single_tensor(input_tensors)
        if not tensor.is_cpu:
            gather_options = torch_options(dist.GatherOptions(), opts, root=root)
            return self._delegate(tensor, "gather", output_tensors, [tensor], gather_options)
        options = self._options(opts, root=root, rooted="gather")
        outputs: Sequence[torch.Tensor] = []
        is_root = self.rank() == options.root
        if is_root:
            outputs = flat_list(output_tensors)
            check_same_dtype("gather", [tensor, *outputs])
        elif all_tensors(output_tensors):
            raise ConfigError(
                f"rank {self.rank()}: gather: only the root, rank {options.root}, gives output "
                "tensors"
            )
        laid = [lay_out(output, read=False) for output in outputs]
        ticket = self._engine.gather(
            [flat for flat, _ in laid] if is_root else None,
            contiguous(tensor),
            options.root,
            wait=options.wait,
            timeout_ns=options.timeout_ns,
        )
        return self._work(ticket, list(outputs), run_each(finish for _, finish in laid))

    def scatter(
        self,
        output_tensors: TensorLists,
        input_tensors: TensorLists,
        opts: TorchOptions = None,
        root: int | None = None,
    ) -> Work:
        output = single_tensor(output_tensors)
        if not output.is_cpu:
            scatter_options = torch_options(dist.ScatterOptions(), opts, root=root)
            return self._delegate(output, "scatter", [output], input_tensors, scatter_options)
        options = self._options(opts, root=root, rooted="scatter")
        inputs: list[torch.Tensor] | None = None
        if self.rank() == options.root:
            given = flat_list(input_tensors)
            check_same_dtype("scatter", [output, *given])
            inputs = [contiguous(tensor) for tensor in given]
        elif all_tensors(input_tensors):
            raise ConfigError(
                f"rank {self.rank()}: scatter: only the root, rank {options.root}, gives input "
                "tensors"
            )
        flat, finish = lay_out(output, read=False)
        ticket = self._engine.scatter(
            flat, inputs, options.root, wait=options.wait, timeout_ns=options.timeout_ns
        )
        return self._work(ticket, [output], finish)

    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: TorchOptions = None,
    ) -> Work:
        check_non_empty("all_to_all", input_tensors)
        first = input_tensors[0]
        if not first.is_cpu:
            all_options = torch_options(dist.AllToAllOptions(), opts)
            return self._delegate(first, "alltoall", output_tensors, input_tensors, all_options)
        for name, tensors in (("output", output_tensors), ("input", input_tensors)):
            if len(tensors) != self.size():
                raise ConfigError(
                    f"rank {self.rank()}: all_to_all: expected {self.size()} {name} tensors, one "
                    f"for every rank, got {len(tensors)}"
                )
        check_same_dtype("all_to_all", [*output_tensors, *input_tensors])
        laid = [lay_out(output, read=False) for output in output_tensors]
        options = self._options(opts)
        ticket = self._engine.alltoall(
            [flat for flat, _ in laid],
            [contiguous(tensor) for tensor in input_tensors],
            wait=options.wait,
            timeout_ns=options.timeout_ns,
        )
        return self._work(ticket, output_tensors, run_each(finish for _, finish in laid))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: TorchOptions = None,
    ) -> Work:
        if not input.is_cpu:
            sizes = (output_split_sizes or [], input_split_sizes or [])
            all_options = torch_options(dist.AllToAllOptions(), opts)
            return self._delegate(input, "alltoall_base", output, input, *sizes, all_options)
        check_same_dtype("all_to_all_single", [output, input])
        self._check_exchange(output, input, even=not output_split_sizes and not input_split_sizes)
        flat, finish = lay_out(output, read=False)
        options = self._options(opts)
        ticket = self._engine.alltoall(
            self._split_rows("output", flat, output_split_sizes),
            self._split_rows("input", contiguous(input), input_split_sizes),
            wait=options.wait,
            timeout_ns=options.timeout_ns,
        )
        return self._work(ticket, [output], finish)

    alltoall_base = all_to_all_single

    def barrier(self, opts: TorchOptions = None, timeout: timedelta | None = None) -> Work:
        options = self._options(opts, timeout=timeout)
        ticket = self._engine.barrier(wait=options.wait, timeout_ns=options.timeout_ns)
        return self._work(ticket, [])

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names every rank that did not come, within its own time limit."""
        limit_ns = self._timeout_ns
        if timeout is not None:
            limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            limit_ns = int(limit.total_seconds() * 1e9)
        self._monitored_barriers += 1
        monitored_barrier(
            self._engine, self._monitored_barriers, limit_ns, wait_all_ranks=wait_all_ranks
        )

    # --- messages ---------------------------------------------------------------------------------
    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Work:
        tensor: torch.Tensor = single(tensors)
        if not tensor.is_cpu:
            return self._delegate(tensor, "send", tensors, dst_rank, tag)
        ticket = self._engine.send(contiguous(tensor), dst_rank, tag, timeout_ns=self._timeout_ns)
        return self._work(ticket, [tensor])

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Work:
        tensor: torch.Tensor = single(tensors)
        if not tensor.is_cpu:
            return self._delegate(tensor, "recv", tensors, src_rank, tag)
        flat, finish = lay_out(tensor, read=False)
        ticket = self._engine.recv(flat, src_rank, tag, timeout_ns=self._timeout_ns)
        return self._work(ticket, [tensor], finish)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # --- coalescing: calls made between start and end are waited for together ---------------------
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return self._combined(works)

    # --- steps ------------------------------------------------------------------------------------
    def _options(
        self,
        opts: TorchOptions,
        *,
        op: Any = None,
        root: int | None = None,
        timeout: timedelta | None = None,
        rooted: str = "",
    ) -> CallOptions:
        """Parse the options of a call and count it. `rooted`: the name of a call that has a root.

        torch waits by itself after a call that returned a `Work`, as the calls of a coalesced block
        do.
        """
        options = parse_options(opts, self._timeout_ns, op=op, root=root, timeout=timeout)
        if rooted and not 0 <= options.root < self.size():
            raise ConfigError(
                f"rank {self.rank()}: {rooted}: invalid root rank: {options.root}; the ranks of "
                f"this group are 0..{self.size() - 1}"
            )
        self._calls += 1
        if options.wait and self._coalescing is not None:
            return CallOptions(False, options.timeout_ns, options.reduction, options.root)
        return options

    def _work(
        self, ticket: Ticket | None, result: CallResult, finish: Finish | None = None
    ) -> Work:
        if ticket is None:
            if finish is not None:
                finish()
            return DoneWork(result)
        work = PendingWork(ticket, result, self._completer, finish)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _combined(self, works: Iterable[Work]) -> Work:
        started = list(works)
        result = [tensor for work in started for tensor in work.result()]
        return self._work(_CombinedTicket(started), result)

    def _delegate(self, tensor: torch.Tensor, method: str, *args: Any) -> Work:
        """Pass a call on to the backend of the tensor's device."""
        work: Work = getattr(self._get_backend(tensor.device), method)(*args)
        return work

    def _blocks(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """One equal part per rank."""
        return flat.view(self.size(), -1).unbind() if flat.numel() else [flat] * self.size()

    def _check_exchange(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        *,
        even: bool,
    ) -> None:
        """What can be wrong with the two tensors of all_to_all_single, whatever the peers give.
        `even`: ranks exchange equal parts, so that each gets as much as it gives.
        """
        shapes = f"output of shape {tuple(output.shape)}, input of shape {tuple(input.shape)}"
        if output.shape[1:].numel() != input.shape[1:].numel():
            raise ConfigError(
                f"rank {self.rank()}: all_to_all_single: the rows of input and output must have "
                f"one size, got {shapes}"
            )
        if even and output.numel() != input.numel():
            raise ConfigError(
                f"rank {self.rank()}: all_to_all_single: without split sizes input and output must "
                f"have one size, got {shapes}"
            )

    def _split_rows(
        self, name: str, tensor: torch.Tensor, sizes: Sequence[int] | None
    ) -> list[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        call = f"rank {self.rank()}: all_to_all_single"
        if not sizes:
            if rows % self.size():
                raise ConfigError(
                    f"{call}: dimension 0 of the {name} has {rows} rows, which {self.size()} ranks "
                    f"cannot share equally; give {name}_split_sizes"
                )
            sizes = [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows or min(sizes) < 0:
            raise ConfigError(
                f"{call}: {name}_split_sizes {list(sizes)} must be {self.size()} numbers that add "
                f"up to the {rows} rows of the {name}, none of them negative"
            )
        return list(tensor.split(list(sizes)))

    def _check_divides(self, call: str, whole: int, part: int) -> None:
        if whole != part * self.size():
            raise ConfigError(
                f"rank {self.rank()}: {call}: {whole} elements on one side are not {self.size()} "
                f"ranks times {part} on the other"
            )


class _CombinedTicket:
    """Several calls as one."""

    source = ANY_SOURCE

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout_ns: int = -1) -> bool:
        limit = timedelta(microseconds=timeout_ns / 1000) if timeout_ns > 0 else timedelta(0)
        for work in self._works:
            work.wait(limit)
        return True

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)
