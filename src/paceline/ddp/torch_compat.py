"""Torch's private face: what PyTorch's own code and tests, and libraries built on torch's class,
call on a DistributedDataParallel. Nothing in here is needed to train; whatever does something hands
it to the public methods.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from paceline._torch_internals import (
    BuiltinCommHookType,
    move_inputs,
    register_overlapped_optimizer,
)
from paceline.ddp.buffers import BufferHook, sync_buffers
from paceline.ddp.comm_hooks import Hook, HookSpec
from paceline.ddp.config import Average, DDPConfig, Policy, check_group
from paceline.ddp.failures import StepHistory
from paceline.ddp.plan import MIB
from paceline.ddp.reducer import Reducer
from paceline.ddp.single_rank import SingleRank
from paceline.errors import ConfigError

__all__ = ["LoggerCompat", "LoggingData", "TorchCompat"]


class TorchCompat:
    """Mixed into `DistributedDataParallel`."""

    module: torch.nn.Module
    process_group: dist.ProcessGroup
    reducer: Reducer | SingleRank
    device_type: str
    dim: int
    is_multi_device_module: bool
    modules_buffers: list[torch.Tensor]
    _config: DDPConfig
    _history: StepHistory
    _hook_spec: HookSpec | None
    _buffer_hook: BufferHook | None
    _is_transparent: bool
    _twin: int

    # Torch's value, for programs that pass it on; messages here have their own size.
    broadcast_bucket_size = 250 * MIB
    use_side_stream_for_tensor_copies = False

    def _rebuild(self) -> None:
        raise NotImplementedError

    def _use_hook(self, spec: HookSpec) -> None:
        raise NotImplementedError

    # ----------------------------------------------------------------------------- arguments

    @property
    def average(self) -> Average:
        return self._config.average

    @property
    def on_error(self) -> Policy:
        return self._config.on_error

    @property
    def check_finite(self) -> bool:
        return self._config.check_finite

    @property
    def init_sync(self) -> bool:
        return self._config.init_sync

    @property
    def find_unused_parameters(self) -> bool:
        return self._config.find_unused_parameters

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        return self._config.skip_unused

    @property
    def gradient_as_bucket_view(self) -> bool:
        return self._config.gradient_as_bucket_view

    @property
    def static_graph(self) -> bool:
        return self._config.static_graph

    @property
    def mixed_precision(self) -> Any:
        return self._config.mixed_precision

    @property
    def bucket_bytes_cap(self) -> int:
        return max(self._config.limits.bytes)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        return list(self._config.bucket_bytes_list)

    @property
    def forward_sync_buffers(self) -> bool:
        return self._config.forward_sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._config = dataclasses.replace(self._config, forward_sync_buffers=value)

    @property
    def broadcast_buffers(self) -> bool:
        return self._config.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """Buckets are planned from the first step on, also with `find_unused_parameters`; nothing
        else here needs the promise.
        """
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self._history.steps:
            message = (
                "_set_static_graph() should be called before training loop starts: buckets are "
                f"planned already, after {self._history.steps} steps"
            )
            self._history.note_error(message)
            raise RuntimeError(message)
        self._config = dataclasses.replace(self._config, static_graph=True)
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set find_unused_parameters=true",
                stacklevel=2,
            )

    # ----------------------------------------------------------------------------- hooks

    @property
    def _comm_hooks(self) -> list[tuple[Hook, Any]]:
        spec = self._hook_spec
        return [] if spec is None or spec.hook is None else [(spec.hook, spec.state)]

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._use_hook(HookSpec.of_builtin(comm_hook_type))

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = None
    ) -> None:
        """Synchronise buffers with `hook(state, named_buffers)`, by default after forward."""
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        after = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._buffer_hook = BufferHook(hook, state, after)
        self._is_transparent = False

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        assert isinstance(self, torch.nn.Module)
        register_overlapped_optimizer(self, optim, optim_params, *args, **kwargs)

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    # ----------------------------------------------------------------------------- the group

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on in another group (shrunk or grown)."""
        check_group(new_process_group)
        self.process_group = new_process_group
        self._twin = 0  # its ranks may have wrapped others before
        self._rebuild()

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    # ----------------------------------------------------------------------------- inputs, outputs

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        device = torch.device(self.device_type, device_id)
        return move_inputs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here."""

    # ----------------------------------------------------------------------------- parameters

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        setattr(module, "_ddp_params_and_buffers_to_ignore", params_and_buffers_to_ignore)  # noqa: B010
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(
        module: torch.nn.Module, named_params: bool = False
    ) -> Iterator[Any]:
        for item in module.named_parameters() if named_params else module.parameters():
            if not hasattr(item, "_ddp_ignored"):
                yield item

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """What torch's class calls to make buffers equal, for buffer hooks that want just that."""
        del bucket_size
        tensors = self.modules_buffers if bufs is None else bufs
        sync_buffers(
            self.process_group,
            dict(zip(map(str, range(len(tensors))), tensors, strict=True)),
            authoritative_rank,
        )

    # ----------------------------------------------------------------------------- looking inside

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What this instance was built with and has done, under torch's names."""
        config, reducer, history = self._config, self.reducer, self._history
        parameters = [managed.parameter for managed in reducer.managed]
        limits = reducer.limits if isinstance(reducer, Reducer) else config.limits
        hook = {} if self._hook_spec is None else {"comm_hook": self._hook_spec.name}
        return hook | {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": self.process_group.name(),
            "module_name": type(self.module).__name__,
            "iteration": history.steps,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "bucket_cap_bytes": max(limits.bytes),
            "find_unused_parameters": int(config.find_unused_parameters),
            "forward_sync_buffers": int(config.forward_sync_buffers),
            "broadcast_buffers": int(config.forward_sync_buffers),
            "gradient_as_bucket_view": int(config.gradient_as_bucket_view),
            "static_graph": int(config.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "has_rebuilt_buckets": int(reducer.was_replanned),
            "can_set_static_graph": 0,  # it changes nothing here: no reason to be advised to
            "has_error": int(bool(history.last_error)),
            "error": history.last_error,
        }

    @property
    def logger(self) -> LoggerCompat:
        return LoggerCompat(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.was_replanned

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ConfigError("DDP runtime logging sample rate should be equal or greater than 1")

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()


class LoggingData(NamedTuple):
    """What torch's logger returns."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class LoggerCompat:
    """Torch's private logger, as far as others call it."""

    def __init__(self, model: TorchCompat) -> None:
        self._model = model

    def _get_ddp_logging_data(self) -> LoggingData:
        data = self._model._get_ddp_logging_data()
        return LoggingData(
            {name: value for name, value in data.items() if isinstance(value, str)},
            {name: value for name, value in data.items() if isinstance(value, int)},
        )

    def set_error_and_log(self, text: str) -> None:
        self._model._history.note_error(text)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing has to be asked for: steps are always recorded, see `paceline.diagnostics`."""
