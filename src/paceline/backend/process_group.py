"""`PacelineGroup`: what torch.distributed sees. Checks arguments, lays tensors out, and hands them
to an engine.

The names and forms of the methods are torch's: those its Python front calls, those its C++ side
looks up, and the short forms of its own bindings (`group.allreduce(tensor)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Store, Work
from torch._C._distributed_c10d import Backend as _Backend

from paceline.backend import sparse_all_reduce
from paceline.backend.engine import Engine, Reduction, Ticket
from paceline.backend.host_engine import DTYPE_CODES, HostEngine
from paceline.backend.monitored_barrier import monitored_barrier
from paceline.backend.work import Completer, DoneWork, PendingWork, timeout_to_ns
from paceline.core.abi import ANY_SOURCE
from paceline.errors import ConfigError

__all__ = ["PacelineGroup"]

_PREMUL_SUM = 8
_Options = _Backend.Options
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_AllreduceOptions = dist.AllreduceOptions
_UNSET = _AllreduceOptions().timeout
_REAL_DTYPES = {dtype: code for dtype, code in DTYPE_CODES.items() if not dtype.is_complex}
_DONE = DoneWork([])
_REDUCTIONS = {code: Reduction(code) for code in range(_PREMUL_SUM)}


def _hash_of(code: int) -> int:
    options = _AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(code))
    return hash(options.reduceOp)


# An operation's hash is had in a quarter of a microsecond, its number in three quarters. PREMUL_SUM
# is not among them.
_CODE_OF_HASH = {_hash_of(code): code for code in _REDUCTIONS}

_Tensors = Sequence[torch.Tensor]


# torch's stubs give each method several overloads, which one Python method serves; restating them
# would say nothing.
_ProcessGroup: Any = dist.ProcessGroup


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
        super().__init__(
            rank, size
        )  # torch's other constructor, with a store, cannot be inherited from Python
        self._store = store
        self._engine = engine
        self._timeout_ns = timeout_to_ns(timeout)
        self._completer = Completer(f"paceline-futures-{rank}")
        self._split = split
        self._coalescing: list[Work] | None = None
        self._host_allreduce = engine.comm.allreduce if isinstance(engine, HostEngine) else None
        self._monitored_barriers = 0
        self._calls = 0  # collectives started
        self._name = self._desc = ""
        self._others: dict[str, Any] = {}  # device type -> backend of another kind
        self.options = _Options("paceline", timeout)
        self.supports_splitting = True
        self.supports_coalescing = False
        self.supports_time_estimate = False

    # --- what torch asks about a group -------------------------------------------------------------
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
        return [_CPU, *(torch.device(kind) for kind in self._others)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type in self._others:
            return self._others[device.type]
        raise RuntimeError(
            f"this process group has no backend for {device.type} tensors; name one when it is created, "
            f"for example init_process_group('cpu:paceline,{device.type}:...')"
        )

    def add_backend(self, device_type: str, backend: Any) -> None:
        """Serve tensors of another device with a backend of another kind."""
        self._others[device_type] = backend

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
        for backend in self._others.values():
            backend.shutdown()

    def abort(self) -> None:
        self._engine.abort()
        for backend in self._others.values():
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
        group = self._split(
            sorted(ranks), timeout or timedelta(microseconds=self._timeout_ns / 1000), name
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    # --- reductions --------------------------------------------------------------------------------
    def allreduce(
        self,
        tensors: torch.Tensor | list[torch.Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
    ) -> Work:
        if (
            opts.__class__ is _AllreduceOptions
            and not opts.asyncOp
            and self._allreduced_at_once(tensors, opts)
        ):
            return _DONE
        tensor = tensors if isinstance(tensors, torch.Tensor) else _only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(
                tensor, "allreduce", [tensor], _options(dist.AllreduceOptions(), opts, op, timeout)
            )
        reduction, wait, timeout_ns = self._reduce_options(opts, op, timeout)
        if tensor.is_sparse:
            return DoneWork(
                [sparse_all_reduce.allreduce(self._engine, tensor, reduction, timeout_ns)]
            )
        flat, finish = _laid_out(tensor)
        flat, reduction = _scaled(flat, tensor, reduction)
        if flat is not tensor and finish is None:
            finish = _copy_back(tensor, flat)
        ticket = self._engine.allreduce(flat, reduction, wait=wait, timeout_ns=timeout_ns)
        return self._work(ticket, [tensor], finish)

    def _allreduced_at_once(self, tensors: Any, opts: Any) -> bool:
        """The short road of the most frequent call, a plain tensor that is waited for: saves ten
        microseconds.
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
        timeout_ns = self._timeout_ns if limit == _UNSET else self._timeout(limit)
        self._calls += 1
        self._host_allreduce(tensor.data_ptr(), tensor.numel(), dtype, code, timeout_ns)
        return True

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        if not tensors[0].is_cpu:
            return self._elsewhere(
                tensors[0], "allreduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
            )
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        reduction, wait, timeout_ns = self._reduce_options(opts, None, None)
        return self._together(
            tensors,
            lambda flat, wait: self._engine.allreduce(
                flat, reduction, wait=wait, timeout_ns=timeout_ns
            ),
            tensors,
            wait,
            reduction,
        )

    def reduce(
        self,
        tensors: torch.Tensor | list[torch.Tensor],
        opts: Any = None,
        root: Any = None,
        op: Any = None,
    ) -> Work:
        tensor = tensors if isinstance(tensors, torch.Tensor) else _only(tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        if not tensor.is_cpu:
            return self._elsewhere(tensor, "reduce", [tensor], opts)
        reduction, wait, timeout_ns = self._reduce_options(opts, op, None)
        root = self._root("reduce", opts, root)
        flat, finish = _laid_out(tensor)
        flat, reduction = _scaled(flat, tensor, reduction)
        if flat is not tensor and finish is None:
            finish = _copy_back(tensor, flat)
        if self.rank() != root:
            finish = None
        ticket = self._engine.reduce(flat, root, reduction, wait=wait, timeout_ns=timeout_ns)
        return self._work(ticket, [tensor], finish)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
    ) -> Work:
        output = (
            output_tensors if isinstance(output_tensors, torch.Tensor) else _only(output_tensors)
        )
        inputs = input_tensors if _is_flat(input_tensors) else _only(input_tensors)
        if not output.is_cpu:
            return self._elsewhere(
                output,
                "reduce_scatter",
                [output],
                [inputs],
                _options(dist.ReduceScatterOptions(), opts, op, timeout),
            )
        return self._reduce_scatter(output, inputs, *self._reduce_options(opts, op, timeout))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name for it
        opts: Any = None,
    ) -> Work:
        if not output.is_cpu:
            return self._elsewhere(
                output, "_reduce_scatter_base", output, input, opts or dist.ReduceScatterOptions()
            )
        flat = input.contiguous().view(-1)
        self._check_whole("reduce_scatter", flat.numel(), output.numel())
        inputs = flat.view(self.size(), -1).unbind() if flat.numel() else [flat] * self.size()
        return self._reduce_scatter(output, inputs, *self._reduce_options(opts, None, None))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_of(
            self.reduce_scatter_single(out, given, opts)
            for out, given in zip(outputs, inputs, strict=True)
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: _Tensors,
        reduction: Reduction,
        wait: bool,
        timeout_ns: int,
    ) -> Work:
        _check_same_dtype("reduce_scatter", [output, *inputs])
        out, finish = _laid_out(output, read=False)
        blocks = [_contiguous(block) for block in inputs]
        if reduction.code == _PREMUL_SUM:
            blocks = [block * reduction.factor for block in blocks]
            reduction = _REDUCTIONS[0]
        ticket = self._engine.reduce_scatter(
            out, blocks, reduction, wait=wait, timeout_ns=timeout_ns
        )
        return self._work(ticket, [output], finish)

    # --- moving data -------------------------------------------------------------------------------
    def broadcast(
        self,
        tensors: torch.Tensor | list[torch.Tensor],
        opts: Any = None,
        root: int | None = None,
        timeout: Any = None,
    ) -> Work:
        tensor = tensors if isinstance(tensors, torch.Tensor) else _only(tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        if not tensor.is_cpu:
            options = opts or dist.BroadcastOptions()
            options.rootRank = opts.rootRank if opts is not None else root or 0
            return self._elsewhere(tensor, "broadcast", [tensor], options)
        source = self._root("broadcast", opts, root)
        flat, finish = _laid_out(tensor, read=self.rank() == source)
        if self.rank() == source:
            finish = None
        wait, timeout_ns = self._call_options(opts, timeout)
        ticket = self._engine.broadcast(flat, source, wait=wait, timeout_ns=timeout_ns)
        return self._work(ticket, [tensor], finish)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        tensor = input_tensors if isinstance(input_tensors, torch.Tensor) else _only(input_tensors)
        outputs = output_tensors if _is_flat(output_tensors) else _only(output_tensors)
        if not tensor.is_cpu:
            return self._elsewhere(
                tensor, "allgather", [outputs], [tensor], opts or AllgatherOptions()
            )
        _check_same_dtype("all_gather", [tensor, *outputs])
        wait, timeout_ns = self._call_options(opts, timeout)
        laid = [_laid_out(output, read=False) for output in outputs]
        ticket = self._engine.allgather(
            [flat for flat, _ in laid], _contiguous(tensor), wait=wait, timeout_ns=timeout_ns
        )
        return self._work(ticket, list(outputs), _each(finish for _, finish in laid))

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name for it
        opts: Any = None,
    ) -> Work:
        if not input.is_cpu:
            return self._elsewhere(
                input, "_allgather_base", output, input, opts or AllgatherOptions()
            )
        _check_same_dtype("all_gather_into_tensor", [output, input])
        self._check_whole("all_gather_into_tensor", output.numel(), input.numel())
        flat, finish = _laid_out(output, read=False)
        parts = (
            flat.view(-1).view(self.size(), -1).unbind() if flat.numel() else [flat] * self.size()
        )
        wait, timeout_ns = self._call_options(opts, None)
        ticket = self._engine.allgather(parts, _contiguous(input), wait=wait, timeout_ns=timeout_ns)
        return self._work(ticket, [output], finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_of(
            self.all_gather_single(out, given, opts)
            for out, given in zip(outputs, inputs, strict=True)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        # torch gives one list per rank, each holding one tensor per input.
        return self._all_of(
            self.allgather([[outputs[i] for outputs in output_lists]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        )

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None
    ) -> Work:
        tensor = input_tensors if isinstance(input_tensors, torch.Tensor) else _only(input_tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        if not tensor.is_cpu:
            return self._elsewhere(tensor, "gather", output_tensors, [tensor], opts)
        goal = self._root("gather", opts, root)
        outputs = None
        if self.rank() == goal:
            outputs = output_tensors if _is_flat(output_tensors) else _only(output_tensors)
            _check_same_dtype("gather", [tensor, *outputs])
        elif _flattened(output_tensors):
            raise ConfigError(
                f"rank {self.rank()}: gather: only the root, rank {goal}, gives output tensors"
            )
        laid = [_laid_out(output, read=False) for output in outputs or []]
        wait, timeout_ns = self._call_options(opts, None)
        ticket = self._engine.gather(
            [flat for flat, _ in laid] if outputs is not None else None,
            _contiguous(tensor),
            goal,
            wait=wait,
            timeout_ns=timeout_ns,
        )
        return self._work(ticket, list(outputs or []), _each(finish for _, finish in laid))

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, root: int | None = None
    ) -> Work:
        output = (
            output_tensors if isinstance(output_tensors, torch.Tensor) else _only(output_tensors)
        )
        if isinstance(opts, int):
            opts, root = None, opts
        if not output.is_cpu:
            return self._elsewhere(output, "scatter", [output], input_tensors, opts)
        source = self._root("scatter", opts, root)
        inputs = None
        if self.rank() == source:
            inputs = input_tensors if _is_flat(input_tensors) else _only(input_tensors)
            _check_same_dtype("scatter", [output, *inputs])
            inputs = [_contiguous(tensor) for tensor in inputs]
        elif _flattened(input_tensors):
            raise ConfigError(
                f"rank {self.rank()}: scatter: only the root, rank {source}, gives input tensors"
            )
        flat, finish = _laid_out(output, read=False)
        wait, timeout_ns = self._call_options(opts, None)
        ticket = self._engine.scatter(flat, inputs, source, wait=wait, timeout_ns=timeout_ns)
        return self._work(ticket, [output], finish)

    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        if not input_tensors[0].is_cpu:
            return self._elsewhere(
                input_tensors[0],
                "alltoall",
                output_tensors,
                input_tensors,
                opts or dist.AllToAllOptions(),
            )
        _check_same_dtype("all_to_all", [*output_tensors, *input_tensors])
        laid = [_laid_out(output, read=False) for output in output_tensors]
        wait, timeout_ns = self._call_options(opts, None)
        ticket = self._engine.alltoall(
            [flat for flat, _ in laid],
            [_contiguous(tensor) for tensor in input_tensors],
            wait=wait,
            timeout_ns=timeout_ns,
        )
        return self._work(ticket, output_tensors, _each(finish for _, finish in laid))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        if not input.is_cpu:
            return self._elsewhere(
                input,
                "alltoall_base",
                output,
                input,
                output_split_sizes or [],
                input_split_sizes or [],
                opts or dist.AllToAllOptions(),
            )
        _check_same_dtype("all_to_all_single", [output, input])
        flat, finish = _laid_out(output, read=False)
        wait, timeout_ns = self._call_options(opts, None)
        ticket = self._engine.alltoall(
            self._parts("output", flat, output_split_sizes),
            self._parts("input", _contiguous(input), input_split_sizes),
            wait=wait,
            timeout_ns=timeout_ns,
        )
        return self._work(ticket, [output], finish)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        wait, timeout_ns = self._call_options(opts, timeout)
        return self._work(self._engine.barrier(wait=wait, timeout_ns=timeout_ns), [])

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names every rank that did not come, within its own time limit."""
        if timeout is None:
            limit = self._timeout_ns
        else:
            limit = int(
                (
                    timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
                ).total_seconds()
                * 1e9
            )
        self._monitored_barriers += 1
        monitored_barrier(
            self._engine, self._monitored_barriers, limit, wait_all_ranks=wait_all_ranks
        )

    # --- messages ----------------------------------------------------------------------------------
    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Work:
        tensor = _only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor, "send", tensors, dst_rank, tag)
        ticket = self._engine.send(_contiguous(tensor), dst_rank, tag, timeout_ns=self._timeout_ns)
        return self._work(ticket, [tensor])

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Work:
        tensor = _only(tensors)
        if not tensor.is_cpu:
            return self._elsewhere(tensor, "recv", tensors, src_rank, tag)
        flat, finish = _laid_out(tensor, read=False)
        ticket = self._engine.recv(flat, src_rank, tag, timeout_ns=self._timeout_ns)
        return self._work(ticket, [tensor], finish)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # --- coalescing: calls made between start and end are waited for together ----------------------
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return self._all_of(works)

    # --- steps -------------------------------------------------------------------------------------
    def _work(
        self,
        ticket: Ticket | None,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        if ticket is None:
            if finish is not None:
                finish()
            return DoneWork(result)
        work = PendingWork(ticket, result, self._completer, finish)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _all_of(self, works: Any) -> Work:
        started = list(works)
        return self._work(_AllOf(started), [tensor for work in started for tensor in work.result()])

    def _together(
        self,
        tensors: _Tensors,
        start: Callable[[torch.Tensor, bool], Ticket | None],
        result: list[torch.Tensor],
        wait: bool,
        reduction: Reduction,
    ) -> Work:
        """One call for many tensors of one type, through a flat copy."""
        _check_same_dtype("all_reduce_coalesced", tensors)
        if reduction.code == _PREMUL_SUM:
            return self._all_of(self.allreduce([tensor], op=reduction) for tensor in tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])

        def finish() -> None:
            for tensor, part in zip(
                tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(part.view_as(tensor))

        return self._work(start(flat, wait), result, finish)

    def _parts(
        self, name: str, tensor: torch.Tensor, sizes: Sequence[int] | None
    ) -> list[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.size():
                raise ConfigError(
                    f"rank {self.rank()}: all_to_all_single: dimension 0 of the {name} has {rows} rows, "
                    f"which {self.size()} ranks cannot share equally; give {name}_split_sizes"
                )
            sizes = [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            raise ConfigError(
                f"rank {self.rank()}: all_to_all_single: {name}_split_sizes {list(sizes)} must be {self.size()} "
                f"numbers that add up to the {rows} rows of the {name}"
            )
        return list(tensor.split(list(sizes)))

    def _elsewhere(self, tensor: torch.Tensor, method: str, *args: Any) -> Work:
        """Hand a call over to the backend of the tensor's device."""
        work: Work = getattr(self._get_backend(tensor.device), method)(*args)
        return work

    def _check_whole(self, call: str, whole: int, part: int) -> None:
        if whole != part * self.size():
            raise ConfigError(
                f"rank {self.rank()}: {call}: {whole} elements on one side are not {self.size()} ranks times "
                f"{part} on the other"
            )

    def _root(self, call: str, opts: Any, given: int | None) -> int:
        root: int = opts.rootRank if opts is not None else given or 0
        if not 0 <= root < self.size():
            raise ConfigError(
                f"rank {self.rank()}: {call}: invalid root rank: {root}; the ranks of this group are "
                f"0..{self.size() - 1}"
            )
        return root

    def _timeout(self, timeout: Any) -> int:
        ns = timeout_to_ns(timeout)
        return ns if ns > 0 else self._timeout_ns

    def _call_options(self, opts: Any, timeout: Any) -> tuple[bool, int]:
        """(whether to wait, time limit) of a call. torch waits by itself after a call that returned
        a `Work`.
        """
        self._calls += 1
        if opts is None:
            return False, self._timeout(timeout)
        return not opts.asyncOp and self._coalescing is None, self._timeout(opts.timeout)

    def _reduce_options(self, opts: Any, op: Any, timeout: Any) -> tuple[Reduction, bool, int]:
        if isinstance(opts, Reduction) or isinstance(op, Reduction):
            return (op or opts), True, self._timeout(timeout)
        if opts is not None and not hasattr(
            opts, "reduceOp"
        ):  # group.allreduce(tensor, ReduceOp.SUM)
            opts, op = None, opts
        wait, timeout_ns = self._call_options(opts, timeout)
        chosen = opts.reduceOp if opts is not None else op if op is not None else dist.ReduceOp.SUM
        return _reduction(chosen), wait, timeout_ns


class _AllOf:
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


def _reduction(op: Any) -> Reduction:
    kind = getattr(op, "op", op)
    code = int(kind)
    if code != _PREMUL_SUM:
        return _REDUCTIONS[code]
    return Reduction(code, op.factor)


def _scaled(
    flat: torch.Tensor, original: torch.Tensor, reduction: Reduction
) -> tuple[torch.Tensor, Reduction]:
    """PREMUL_SUM: each rank multiplies its own data by its own factor, a number or a tensor; then
    it is a sum.
    """
    if reduction.code != _PREMUL_SUM:
        return flat, reduction
    scaled = flat * reduction.factor
    return (scaled if flat is original else flat.copy_(scaled)), _REDUCTIONS[0]


def _only(tensors: Any) -> Any:
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        return tensors[0]
    count = len(tensors) if isinstance(tensors, list | tuple) else type(tensors).__name__
    raise ConfigError(f"expected a list with one entry (one tensor per process), got {count}")


def _is_flat(tensors: Any) -> bool:
    return (
        isinstance(tensors, list | tuple)
        and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and tensors != []
    )


def _flattened(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for inner in tensors or [] for tensor in _flattened(inner)]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _laid_out(
    tensor: torch.Tensor, *, read: bool = True
) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor to work on, and what to do afterwards if it is not the tensor itself."""
    if tensor.is_sparse:
        raise ConfigError("only all_reduce takes sparse tensors; give tensor.to_dense()")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor, None
    flat = _contiguous(tensor) if read else torch.empty(tensor.shape, dtype=tensor.dtype)
    if flat.data_ptr() == tensor.data_ptr() and read:
        flat = flat.clone()
    return flat, _copy_back(tensor, flat)


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(flat)

    return copy


def _each(steps: Any) -> Callable[[], None] | None:
    todo = [step for step in steps if step is not None]
    if not todo:
        return None

    def run() -> None:
        for step in todo:
            step()

    return run


def _check_same_dtype(call: str, tensors: _Tensors) -> None:
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise ConfigError(
            f"{call}: all tensors of a call must have one dtype, got {sorted(map(str, kinds))}"
        )
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ConfigError(
                f"{call}: all tensors of a call must be on one device, got one on {tensor.device}"
            )


def _options(options: Any, given: Any, op: Any, timeout: Any) -> Any:
    """torch's options object for a call made in the short form."""
    if given is not None and hasattr(given, "reduceOp"):
        return given
    chosen = op if op is not None else given
    if chosen is not None:
        options.reduceOp = chosen
    if timeout is not None:
        options.timeout = timeout
    return options
