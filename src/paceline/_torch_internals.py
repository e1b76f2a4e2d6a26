"""The one place for torch's private names.

Each entry says why a public name does not do, where torch has it, and what happens where a version
of torch lacks it. `tests/unit/test_torch_internals.py` calls every one of them, so that a version
of torch that changes one fails there first and not in a training run.

Names that are called for every gradient are bound as they are: a wrapper would cost more than they
do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Torch's own DDP asks the same question before every forward, to name a region in a profile
# (torch/nn/parallel/distributed.py uses the public record_function, which costs microseconds even
# when nobody profiles). Missing: the import fails, and so does its guard test.
from torch._C._autograd import _profiler_enabled as is_profiling

# Public under `torch.distributed` at run time; only the private module has types for them.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BuiltinCommHookType,
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)
from torch._C._distributed_c10d import Backend as _Backend

__all__ = [
    "AllgatherOptions",
    "BackendOptions",
    "AffineBatchNorm",
    "BatchNormBase",
    "BuiltinCommHookType",
    "FutureBase",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "Work",
    "cpp_reference_count",
    "autograd_context",
    "backend_plugin",
    "apply_optimizer_hook",
    "cast_inputs",
    "context_gradients",
    "compiler_of_frames",
    "current_graph_task",
    "default_store",
    "device_types_of",
    "drop_empty_hook_tables",
    "flatten_dense",
    "forget_inherited_compile_threads",
    "foreach_add",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "hidden_worker_info",
    "in_distributed_backward",
    "implementation_of",
    "is_profiling",
    "keeps_graph",
    "make_parameters_local",
    "member_tables",
    "methods_not_compiled",
    "move_inputs",
    "not_compiled",
    "preserve_version",
    "pytree_node",
    "queue_end_of_backward",
    "run_backward",
    "register_overlapped_optimizer",
    "remove_optimizer_hooks",
    "storage_users",
    "store_of",
    "tell_scaler_of_inf",
    "timeouts_of",
    "unflatten_dense",
    "version_of",
]

# -------------------------------------------------------------------- autograd

# Which backward is running, -1 for none: tells nested backwards (re-entrant checkpoints) from the
# outermost one. torch/csrc/autograd/init.cpp; used by torch.utils.checkpoint in the same way.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

# Whether the backward that is running keeps its graph (retain_graph). torch/csrc/autograd/init.cpp.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# How often a tensor was changed in place. Public in autograd's documentation ("in-place correctness
# checks") though its name has an underscore.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the outermost backward is through; it is dropped uncalled if that raises.

    There is no public way to run code at the end of a backward. FSDP and torch's own DDP rely on
    this one (torch/csrc/autograd/python_engine.cpp).
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


try:
    from torch._C._distributed_rpc import _is_current_rpc_agent_set
except ImportError:  # a build of torch without RPC

    def _is_current_rpc_agent_set() -> bool:
        return False


def autograd_context() -> int | None:
    """The context of torch.distributed.autograd that this thread is in, by its number.

    Torch has no public name for it (torch/csrc/distributed/autograd/init.cpp). Asking is slow
    outside of a context, but only a program that uses RPC can be in one.
    """
    if not _is_current_rpc_agent_set():
        return None
    try:
        number: int = torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:
        return None
    return number


def context_gradients(context: int) -> dict[torch.Tensor, torch.Tensor]:
    """What a context has gathered: the tensors themselves, so that writing them changes it."""
    import torch.distributed.autograd

    gradients: dict[torch.Tensor, torch.Tensor]
    gradients = torch.distributed.autograd.get_gradients(context)  # type: ignore[attr-defined]  # from C++
    return gradients


def in_distributed_backward() -> bool:
    """Whether a backward of torch.distributed.autograd is running in this process.

    Torch counts them for its own tests (torch/csrc/distributed/autograd/init.cpp).
    """
    if not _is_current_rpc_agent_set():
        return False
    info = torch._C._distributed_autograd._get_debug_info()
    return int(info["num_current_backward_passes"]) > 0


def preserve_version(
    tensors: torch.Tensor | tuple[torch.Tensor, ...],
) -> AbstractContextManager[None]:
    """Changes inside are not counted: buffers are synchronised between forward and backward.

    torch/autograd/grad_mode.py; torch's DDP does the same with buffers.
    """
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensors)


def drop_empty_hook_tables(tensor: torch.Tensor) -> None:
    """Hooks that were removed leave an empty table behind, which autograd goes on calling.

    torch/_tensor.py makes the tables and has no way to drop them. A table in use is left alone.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        table = getattr(tensor, name, None)
        if table is not None and not table:
            setattr(tensor, name, None)


# --------------------------------------------------------------------- tensors

# Which C++ tensor is behind a Python one: torch.utils.swap_tensors, which module conversions use if
# torch.__future__.set_swap_module_params_on_conversion asks for it, replaces it together with its
# hooks. torch/csrc/autograd/python_variable.cpp; there is no public name for it.
implementation_of: Callable[[Any], int] = attrgetter("_cdata")

# One call for many tensors, which optimizers use under the same names (torch/optim); public
# counterparts exist in no version of torch yet.
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_add: Callable[..., Any] = torch._foreach_add
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_div_: Callable[..., Any] = torch._foreach_div_
foreach_mul_: Callable[..., Any] = torch._foreach_mul_


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and storage objects refer to the memory of a tensor.

    Whether somebody holds a slice of a gradient that is about to be overwritten. CUDA graphs'
    memory pools ask the same way (torch/_inductor/cudagraph_trees.py).
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def member_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The tables in which a module and its children keep their parameters and their children.

    Whether any was replaced is asked before every forward; named_parameters() would take a hundred
    times as long. torch/nn/modules/module.py; every module has both, or named_parameters() itself
    would fail.
    """
    return [table for layer in module.modules() for table in (layer._parameters, layer._modules)]


def flatten_dense(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Many tensors of one dtype as one. torch/_utils.py, as torch's DDP and optimizers use it."""
    from torch._utils import _flatten_dense_tensors

    flat: torch.Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten_dense(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Undo `flatten_dense`."""
    from torch._utils import _unflatten_dense_tensors

    parts: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)
    return parts


# ------------------------------------------------------------------ structures

# How to take containers of a class apart and put them back, if it was registered with torch
# (`register_pytree_node` in torch/utils/_pytree.py); None if it was not. Torch's functions that
# walk structures know nothing of our marks. Missing: the import fails, and so does its guard test.
pytree_node: Callable[[type], Any] = torch.utils._pytree.SUPPORTED_NODES.get

# -------------------------------------------------------------- process groups


def default_store() -> Store:
    """The store of the default process group. torch/distributed/distributed_c10d.py."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store a group was made with; None for a group that torch has no record of."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return store


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """The kinds of devices whose tensors a group takes. torch/csrc/distributed/c10d/init.cpp."""
    return {device.type for device in group._device_types}


# ----------------------------------------------------- DistributedDataParallel

# What a communication hook may return: also a future made in C++, which is none of the public
# class (torch/futures/__init__.py derives from it).
FutureBase = torch._C.Future

# The layers that `convert_sync_batchnorm` replaces; torch's own asks for the same class.
AffineBatchNorm = torch.nn.modules.batchnorm._BatchNorm

# Torch's functions that are public neither in name nor in documentation, but that its class is made
# of; a script that moves from torch's class to ours relies on what they do. Each is imported where
# it is called: some load much of torch, or warn of their own deprecation. Missing: the argument or
# method that needs it raises ImportError, all others work.


def apply_optimizer_hook(gradients_are_views: bool) -> Callable[[Any, Any], Any]:
    """The communication hook that steps optimizers inside backward.

    torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py, which torch's DDP
    registers for models prepared by `_apply_optimizer_in_backward`.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _apply_optim_in_backward_hook,
    )

    hook: Callable[[Any, Any], Any] = _apply_optim_in_backward_hook(
        gradient_is_bucket_view=gradients_are_views
    )
    return hook


def remove_optimizer_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Optimizers run when a bucket is averaged, no longer when a gradient arrives.

    torch/distributed/optim/apply_optimizer_in_backward.py; torch's DDP does the same.
    """
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()


def register_overlapped_optimizer(
    model: torch.nn.Module, optimizer: type, parameters: Any, *args: Any, **kwargs: Any
) -> None:
    """`_register_fused_optim` of torch's DDP: torch/distributed/algorithms/_optimizer_overlap."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import (
        _as_overlapped_optim,
    )

    overlapped = _as_overlapped_optim(optimizer, parameters, *args, **kwargs)
    try:
        overlapped.register_ddp(model)
    except NotImplementedError as error:
        raise RuntimeError(f"{optimizer} does not support overlapped DDP") from error


def make_parameters_local(module: torch.nn.Module, mesh: Any) -> None:
    """In a slice of a larger mesh, tensor-parallel parameters become local tensors.

    torch/distributed/tensor/parallel/ddp.py, as torch's DDP calls it for `device_mesh`.
    """
    if mesh._get_root_mesh() != mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)


def cast_inputs(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating-point inputs in another dtype: torch/distributed/utils.py, for mixed precision."""
    from torch.distributed.utils import _cast_forward_inputs

    cast_args, cast_kwargs = _cast_forward_inputs(dtype, *args, **kwargs)
    return cast_args, cast_kwargs


def move_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, device: torch.device, side_stream: bool
) -> tuple[Any, Any]:
    """Inputs on another device: torch/distributed/utils.py, for `device_ids`."""
    from torch.distributed.utils import _to_kwargs

    moved_args, moved_kwargs = _to_kwargs(args, kwargs, device, side_stream)
    return moved_args, moved_kwargs


# ---------------------------------------------------------------- DataParallel

# What all batch normalisations have in common; torch's SyncBatchNorm and ours included. The public
# classes have no common public base (torch/nn/modules/batchnorm.py).
BatchNormBase = torch.nn.modules.batchnorm._NormBase

# References to a tensor from C++, beside the one its Python object holds: together with Python's
# own count they show whether anybody else has the tensor. torch/csrc/autograd/python_variable.cpp.
cpp_reference_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")

# What torch.autograd.backward ends in (torch/autograd/graph.py), without its checks of arguments,
# which cost a worker as much as the backward of a small layer.
run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

# ------------------------------------------------------------------- compiling

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(reason: str, including_calls: bool = True) -> Callable[[_Function], _Function]:
    """`torch.compile` runs the function, and what it calls, as it is, between two graphs.

    `torch.compiler.disable` does the same, but imports the compiler, which takes seconds, and costs
    microseconds for each call. The attributes are those that it sets, for a trace that comes to the
    call (torch/_dynamo/symbolic_convert.py); the strategy is for a trace that would begin in the
    function (torch/csrc/dynamo/eval_frame.c). Missing: the import fails, and so does its guard
    test.
    """
    eval_frame = torch._C._dynamo.eval_frame
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(
        action.SKIP, action.SKIP if including_calls else action.DEFAULT
    )

    def mark(function: _Function) -> _Function:
        marked: Any = function
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        eval_frame.set_code_exec_strategy(marked.__code__, strategy)
        return function

    return mark


_Class = TypeVar("_Class", bound=type)


def methods_not_compiled(reason: str) -> Callable[[_Class], _Class]:
    """The same for every method that a class defines."""
    mark = not_compiled(reason)

    def mark_methods(cls: _Class) -> _Class:
        for attribute in vars(cls).values():
            if isinstance(attribute, FunctionType):
                mark(attribute)
        return cls

    return mark_methods


# What torch.compile calls for each frame that begins now; None where nothing is being compiled
# (torch/csrc/dynamo/eval_frame.c). `torch.compiler.is_compiling` is only true inside a graph.
compiler_of_frames: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def forget_inherited_compile_threads() -> None:
    """In a forked process: the threads of the compiler's pool do not exist here.

    What is handed to the pool would wait for ever. Torch itself forgets its pool of processes after
    a fork, but not that of threads (torch/_inductor/async_compile.py). Missing: nothing is
    forgotten, which the guard test notices.
    """
    async_compile = sys.modules.get("torch._inductor.async_compile")
    if async_compile is not None:
        with suppress(AttributeError):
            async_compile.AsyncCompile.pool.cache_clear()


# --------------------------------------------------------------------- backend

# The type of `group.options`, which torch reads of every group; public nowhere
# (torch/csrc/distributed/c10d/Backend.hpp). Missing: the import fails, and so does its guard test.
BackendOptions = _Backend.Options


def backend_plugin(name: str) -> Any:
    """What was registered for a backend with `Backend.register_backend`; None if nothing was.

    torch/distributed/distributed_c10d.py. A group that serves other devices too makes their
    backends itself (`paceline.backend.device_backends`); torch has no public look-up.
    """
    return dist.Backend._plugins.get(name.upper())


# ------------------------------------------------------------------------ data


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """`torch.utils.data.get_worker_info()` is None inside, as it is outside of a worker.

    Many iterable datasets yield only their worker's part when they find themselves in one. There is
    no public way to ask them for everything. torch/utils/data/_utils/worker.py. Missing: setting
    the name would have no effect, which the guard test notices.
    """
    from torch.utils.data._utils import worker

    hidden, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = hidden


# ------------------------------------------------------------------- optimizers


def tell_scaler_of_inf(optimizer: torch.optim.Optimizer, frame: FrameType | None) -> bool:
    """Let the GradScaler that is making this optimizer's step believe that it has found a gradient
    that is not finite: another rank has. False: no such scaler is found. `frame`: that of the
    step, which the scaler is among the callers of.

    torch/amp/grad_scaler.py: `update()` reads what `step()` has kept by optimizer; a scaler has no
    public way to be told, and gives itself only to optimizers that ask in a deprecated way.
    Missing: the answer is False, and the caller says that scales will differ.
    """
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            with suppress(AttributeError, KeyError):
                for found in scaler._per_optimizer_states[id(optimizer)][
                    "found_inf_per_device"
                ].values():
                    found.fill_(1.0)
                return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------------- launch

# ------------------------------------------------------------------- telemetry


def timeouts_of(group: dist.ProcessGroup) -> list[timedelta]:
    """After how long each backend of a group gives a call up, for those that tell.

    A stall is reported before that. There is no public way to ask a group; torch reads and sets the
    same fields (`_set_pg_timeout` in torch/distributed/distributed_c10d.py, the backends' options
    in torch/csrc/distributed/c10d/init.cpp). Missing, or a group that was made by hand without
    backends: the list is empty, and only the limit of the stall watch counts.
    """
    timeouts = []
    with suppress(AttributeError, RuntimeError):
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if (timeout := getattr(options, "_timeout", None)) is not None:
                timeouts.append(timeout)
    return timeouts
