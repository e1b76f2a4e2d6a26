"""`DistributedDataParallel`: the module a training script sees. Arguments and methods are those of
torch's class.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from paceline._malloc import keep_freed_memory
from paceline.backend import PacelineGroup
from paceline.ddp.atomic_step import Policy, StepGuard
from paceline.ddp.buffers import BufferHook, broadcast, sync_buffers
from paceline.ddp.comm_hooks import CommHook, builtin_hook, check_hook
from paceline.ddp.consistency import DriftCheck, check_same_model, describe
from paceline.ddp.delayed_parameters import DelayedParameters
from paceline.ddp.mixed_precision import LowPrecision
from paceline.ddp.plan import MIB, BucketLimits
from paceline.ddp.reducer import GradientSnapshot, ManagedParameter, Reducer
from paceline.ddp.shm_transport import ShmTransport
from paceline.ddp.signals import Call, Signal
from paceline.ddp.structure import first_batch_size, tensors_in
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.ddp.transport import GroupTransport, Transport
from paceline.errors import ConfigError, PacelineError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Field, Phase

__all__ = ["DistributedDataParallel"]

_logger = logging.getLogger("paceline")

_Average = Literal["samples", "ranks"]
_CHECK_REPLICAS_EVERY = 200
_FORWARD, _FORWARDS = int(Phase.FORWARD), int(Field.FORWARDS)


class _Active:
    """The module whose forward is running, for torch.compile. No attribute of the class itself:
    setting one in every step would throw away all that the interpreter has cached about the
    class."""

    __slots__ = ("module",)

    def __init__(self) -> None:
        self.module: DistributedDataParallel | None = None


_active = _Active()


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Data-parallel training: every rank runs its part of the batch, gradients are averaged during
    backward.

    The first twenty arguments are torch's, with the same meaning and defaults. Paceline's own:

    average: "samples" weighs each rank by the number of samples it saw, so that the gradient is
    that of the global
        batch whatever its split; "ranks" is torch's plain average. Equal counts give the same bits
        either way.
    check_replicas_every: compare a digest of the weights over ranks every so many steps; 0 turns it
    off. check_finite: look for non-finite gradients before they are averaged, and fail the step on
    every rank. on_error: the default policy of `all_or_none()`.
    """

    def __init__(  # noqa: PLR0915 - one line or block per argument, in torch's order
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        average: _Average = "samples",
        check_replicas_every: int | None = None,
        check_finite: bool = False,
        on_error: Policy = "raise",
        **unknown: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _refuse_unknown(unknown, average, on_error)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ConfigError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self._choose_group(module, process_group, device_mesh)
        delayed = list(delay_all_reduce_named_params or [])
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        named = list(module.named_parameters())
        managed_names = [
            (name, one) for name, one in named if name not in self.parameters_to_ignore
        ]
        self._module_parameters = [parameter for _, parameter in managed_names]
        self._refuse_uninitialized(named)
        everything = self._module_parameters or [parameter for _, parameter in delayed]
        if not everything:
            self._refuse_untrainable()
        self.device = everything[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in everything}) > 1
        self._choose_devices(device_ids, output_device)
        self.dim = dim
        self.module = module
        sync_now = self._choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.static_graph = False
        self.average = average
        self.on_error: Policy = on_error
        self.check_finite = check_finite
        self.init_sync = init_sync
        self._check_every = check_replicas_every
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self._limits = BucketLimits.create(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._limits.bytes)
        self.bucket_bytes_cap_list = [int(mb * MIB) for mb in bucket_cap_mb_list or ()]
        self.mixed_precision = mixed_precision
        self.use_side_stream_for_tensor_copies = False
        self._stated_count: float | None = None
        self._divide_by_initial_world_size: bool | None = None
        self._buffer_hook: BufferHook | None = None
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._hook_name: str | None = None
        self._ddp_sink_clone = True
        self._lazy_init_ran = False
        self._is_transparent = (
            False  # one rank, and nothing happens before or after forward; known at the first one
        )
        self._buffer_futures: list[Any] = []

        self._check_replicas(managed_names, sync_now)
        if not delayed and not any(
            parameter.requires_grad for parameter in self._module_parameters
        ):
            self._refuse_untrainable()  # on all ranks: they have been compared
        managed = self._managed_parameters(managed_names)
        self._build_transport(managed)
        self._delayed = DelayedParameters.create(
            delayed, param_to_hook_all_reduce, self.process_group
        )
        self._build_reducer(managed)
        self._low_precision: LowPrecision | None = None
        if mixed_precision is not None:
            self._low_precision = LowPrecision(mixed_precision, self.module)
            self._use_low_precision()
        self._prepare_sync_batchnorm()
        if static_graph:
            self._set_static_graph()

    # ------------------------------------------------------------------------------------------ construction

    def _choose_group(self, module: torch.nn.Module, process_group: Any, device_mesh: Any) -> None:
        if process_group is not None and device_mesh is not None:
            raise ConfigError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is None:
            self.process_group = process_group if process_group is not None else _default_group()
            return
        if device_mesh.ndim != 1:
            raise ConfigError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        self.device_mesh = device_mesh
        self.process_group = device_mesh.get_group(mesh_dim=0)
        if device_mesh._get_root_mesh() != device_mesh:
            # A slice of a larger mesh: tensor-parallel parameters become local tensors, as in
            # torch's class.
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)

    def _refuse_untrainable(self) -> None:
        raise ConfigError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )

    def _refuse_uninitialized(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        for name, parameter in named:
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ConfigError(
                    f"{name} has no shape yet: Modules with uninitialized parameters can't be used with "
                    "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the modules"
                )

    def _choose_devices(self, device_ids: Any, output_device: Any) -> None:
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if device_ids is not None and len(device_ids) > 1:
            raise ConfigError("device_ids can only be None or contain a single element.")
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                devices = {parameter.device for parameter in self._module_parameters}
                raise ConfigError(
                    "DistributedDataParallel device_ids and output_device arguments only work with modules on one "
                    f"accelerator, but got device_ids {device_ids}, output_device {output_device}, and module "
                    f"parameters {devices}. Leave both out and put the inputs where the module is."
                )
            return
        self.device_ids = [_device_index(one) for one in device_ids]
        self.output_device = (
            self.device_ids[0] if output_device is None else _device_index(output_device)
        )

    def _choose_buffer_sync(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
    ) -> bool:
        """Sets `forward_sync_buffers`; returns whether buffers are made equal now."""
        if broadcast_buffers is not None:
            ignored = (
                " and is ignored here because `forward_sync_buffers` is given"
                if forward_sync_buffers
                else ""
            )
            warnings.warn(
                f"`broadcast_buffers` is deprecated{ignored}. Use `forward_sync_buffers` instead, which synchronises "
                "buffers before forward and leaves the initial synchronisation to `init_sync`.",
                FutureWarning,
                stacklevel=3,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        return self.forward_sync_buffers

    def _build_transport(self, managed: Sequence[ManagedParameter]) -> None:
        self._world: int = self.process_group.size()
        if any(one.parameter.is_cpu for one in managed):
            on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
            keep_freed_memory(int(on_host) if on_host.isdigit() else self._world)
        self._transport: Transport | None = None
        if self._world > 1:
            self._transport = self._new_transport(managed)

    def _new_transport(
        self, managed: Sequence[ManagedParameter], *, shared: bool = True
    ) -> Transport:
        transport: Transport
        if shared and managed and ShmTransport.serves(self.process_group, managed):
            assert isinstance(self.process_group, PacelineGroup)
            transport = ShmTransport(self.process_group, managed)
        else:
            transport = GroupTransport(
                self.process_group, _signal_device(self.process_group, self.device)
            )
        transport.by_samples = self.average == "samples"
        transport.divide_by_world = self.average == "ranks"
        return transport

    def _check_replicas(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], with_buffers: bool
    ) -> None:
        """Every rank has the same model; then, unless init_sync is off, every rank has rank 0's
        values.
        """
        if self.process_group.size() == 1:
            return
        transport = GroupTransport(
            self.process_group, _signal_device(self.process_group, self.device)
        )
        buffers = self._named_buffers()
        found = describe(parameters, buffers.items() if with_buffers else ())
        check_same_model(transport, found | self._shared_arguments())
        if not self.init_sync:
            return
        tensors: list[torch.Tensor] = [parameter for _, parameter in parameters]
        broadcast(self.process_group, tensors + (list(buffers.values()) if with_buffers else []), 0)

    def _shared_arguments(self) -> dict[str, str]:
        """Arguments that decide what ranks say to each other: different ones would end in a hang or
        in nonsense.
        """
        chosen = {
            "init_sync": self.init_sync,
            "average": self.average,
            "forward_sync_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "bucket_cap_mb": ", ".join(f"{size / MIB:g}" for size in self._limits.bytes),
            "check_replicas_every": self._check_every,
            "mixed_precision": self.mixed_precision,
        }
        return {f"argument {name}": str(value) for name, value in chosen.items()}

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: one
            for name, one in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _managed_parameters(
        self, named: Iterable[tuple[str, torch.nn.Parameter]] | None = None
    ) -> list[ManagedParameter]:
        """Parameters that require a gradient, each once, by the first name it has."""
        sparse = {
            id(one.weight)
            for one in self.module.modules()
            if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) and one.sparse
        }
        return [
            ManagedParameter(name, parameter, id(parameter) in sparse)
            for name, parameter in named or self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    def _build_reducer(self, managed: Sequence[ManagedParameter]) -> None:
        self._frozen = [one for one in self._module_parameters if not one.requires_grad]
        self.modules_buffers = list(self._named_buffers().values())
        self.reducer = Reducer(
            managed,
            self._transport if managed else None,
            limits=self._limits,
            replan=not self.find_unused_parameters or self.static_graph,
            bucketed_from_start=self.find_unused_parameters or bool(self.bucket_bytes_cap_list),
            skip_unused=self.skip_all_reduce_unused_params,
            check_finite=self.check_finite,
            label=type(self.module).__name__,
        )
        self.reducer.by_samples_alone = self.average == "samples"
        self.reducer.on_unequal_counts = (self._say_what_is_weighted,)
        self._watch_replicas(managed)

    def _follow_unfreezing(self) -> None:
        """Parameters that were frozen when the buckets were planned need a gradient now: plan anew,
        on every rank.
        """
        hook = self.reducer.hook
        self.reducer.remove_hooks()
        managed = self._managed_parameters()
        if self._transport is not None:
            check_same_model(
                self._transport, describe([(one.name, one.parameter) for one in managed], ())
            )
            self._transport = self._new_transport(managed, shared=hook is None)
        self._build_reducer(managed)
        self.reducer.hook = hook

    def _watch_replicas(self, managed: Sequence[ManagedParameter]) -> None:
        every = self._check_every
        if (
            every is None
        ):  # replicas that were never made equal, or that a hook may keep apart, are not compared
            every = _CHECK_REPLICAS_EVERY if self.init_sync else 0
        self._drift: DriftCheck | None = None
        if every and self._transport is not None and managed:
            self._drift = DriftCheck(
                self._transport, [(one.name, one.parameter) for one in managed], every
            )
            self.reducer.after_step.append(self._drift.after_step)

    @property
    def compares_replicas_every(self) -> int:
        """How many steps pass between two looks at whether the replicas are still equal; 0: none is
        taken.
        """
        return 0 if self._drift is None else self._drift.every

    def compare_replicas(self) -> None:
        """Look now, on every rank, whether the replicas are equal; raises `MismatchError` if they
        drifted apart.
        """
        if self._drift is not None:
            self._drift.compare()

    def _use_low_precision(self) -> None:
        assert self._low_precision is not None
        self.reducer.before_scatter.append(self._low_precision.restore)
        self.reducer.use_bucket_dtype(self._low_precision.reduce_dtype)

    def _prepare_sync_batchnorm(self) -> None:
        for name, layer in self.module.named_modules():
            if isinstance(layer, SyncBatchNorm):
                layer.weigh_samples = self.average == "samples"
            elif isinstance(layer, torch.nn.SyncBatchNorm) and self.device_type == "cpu":
                raise ConfigError(
                    f"{name or 'the module'} is torch's SyncBatchNorm: SyncBatchNorm layers only work with GPU "
                    "modules. paceline.SyncBatchNorm.convert_sync_batchnorm(module) makes it work on CPU too."
                )

    # ------------------------------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # One rank, nothing to weigh, nobody looking: a forward is that of the module, at no cost.
        if (
            self._is_transparent
            and self.require_backward_grad_sync
            and not (self.reducer.window.open or recorder.watched or _profiler_enabled())
        ):
            return self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # there is a module
        if _profiler_enabled():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = recorder.current
        recorder.phase(_FORWARD)
        previous, _active.module = _active.module, self
        try:
            inputs, kwargs = self._before_forward(inputs, kwargs)
            output = self._run_module(inputs, kwargs)
            return self._after_forward(output)
        finally:
            _active.module = previous
            recorder.phase(before, again=True)

    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # there is a module
        except Exception as error:
            self._forward_failed(error)
            raise

    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled():
            watched = self._frozen or self.reducer.unhooked
            if watched and any(
                one.requires_grad for one in (*self._frozen, *self.reducer.unhooked)
            ):
                self._follow_unfreezing()
            stated = self._stated_count
            # Kept by the reducer: setting an attribute of a torch module costs more than the rest
            # of this line.
            self.reducer.upcoming = first_batch_size(inputs, kwargs) if stated is None else stated
        if (
            self._transport is not None and not self.reducer.in_backward
        ):  # a checkpoint computes again what it had
            self._meet_peers()
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._low_precision is not None:
            self._low_precision.apply()
            if self._low_precision.param_dtype is not None:
                inputs, kwargs = _cast_forward_inputs(
                    self._low_precision.param_dtype, *inputs, **kwargs
                )
        return inputs, kwargs

    def _meet_peers(self) -> None:
        """Collectives that come before a forward: torch's join protocol, then buffers."""
        joining = self._join_config.enable
        if joining:
            Join.notify_join_context(self)
        if torch.is_grad_enabled() and self.reducer.follow_plan():
            size = max(self.reducer.limits.bytes) / MIB
            _logger.debug(
                "%d buckets of %g MiB, in the order gradients arrived",
                len(self.reducer.buckets),
                size,
            )
        buffers = self._syncs_buffers_before_forward()
        if buffers or joining:
            follows = torch.is_grad_enabled() and self.require_backward_grad_sync
            signal = Signal(Call.FORWARD, buffers=buffers, backward_follows=follows)
            signals = self.reducer.meet(signal)
            self._refuse_absence_from_batchnorm(signals)
            if buffers:
                self._sync_buffers(signals)

    def _refuse_absence_from_batchnorm(self, signals: Sequence[Signal]) -> None:
        """Called on all ranks together, before a forward that some of them will not run."""
        absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
        if absent and len(absent) < len(signals) and self._synchronises_batchnorm():
            raise ConfigError(
                f"rank {', '.join(map(str, absent))} ran out of data, but this model has SyncBatchNorm layers, whose "
                "forward needs all ranks. Give such a rank empty batches (x[:0]) until the others are through, as "
                "paceline.DataLoader does, instead of no_more_data() or join()."
            )

    def _synchronises_batchnorm(self) -> bool:
        return any(
            isinstance(layer, torch.nn.SyncBatchNorm) and layer.training
            for layer in self.module.modules()
        )

    def _after_forward(self, output: Any) -> Any:
        enabled = torch.is_grad_enabled()
        if self._low_precision is not None and not enabled:
            self._low_precision.restore()
        if (
            self._buffer_hook is not None
            and self._buffer_hook.after_forward
            and self.will_sync_module_buffers()
        ):
            self._run_buffer_hook(self._buffer_hook)
        sync = self.require_backward_grad_sync
        if enabled:
            recorder.count(_FORWARDS)
            if self.require_forward_param_sync is not sync:
                self.require_forward_param_sync = sync
            if self._transport is not None or not sync or self.reducer.accumulating:
                self.reducer.watch(tensors_in(output), self.reducer.upcoming, sync)
        else:
            self.require_forward_param_sync = False
        if self._delayed is not None:
            self._delayed.prepare_gradients()
        return output

    def _forward_failed(self, error: Exception) -> None:
        if self.reducer.in_backward:
            # a checkpoint computes again: it may stop early, and if this is an error backward will
            # tell
            return
        if self._low_precision is not None:
            self._low_precision.restore()
        if torch.is_grad_enabled() and self._transport is not None:
            with contextlib.suppress(
                PacelineError
            ):  # the peers are gone: what is raised is the error at hand
                self.reducer.fail(error, "forward")

    def _lazy_init(self) -> None:
        self._lazy_init_ran = True
        busy = (
            self.device_ids
            or self._low_precision
            or self._delayed
            or self._buffer_hook
            or self._frozen
        )
        self._is_transparent = self._transport is None and not busy
        if any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters
        ):
            self._step_in_backward()

    def _step_in_backward(self) -> None:
        """Torch's apply_optimizer_in_backward: the optimizer of a bucket's parameters runs when it
        is averaged.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for parameter in self._module_parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self.reducer.optimizer_in_backward = True

    def _say_what_is_weighted(self, totals: list[float]) -> None:
        if self.process_group.rank() == 0:
            counts = ", ".join(f"rank {rank}: {total:g}" for rank, total in enumerate(totals))
            _logger.warning(
                "%s: ranks hold different numbers of samples (%s); each gradient is weighted by its rank's number, so "
                "that the average is that of the global batch. State another weight with `with model.count(n):`, or "
                'average ranks equally with average="ranks".',
                type(self.module).__name__,
                counts,
            )

    # ------------------------------------------------------------------------------------------ samples

    @contextlib.contextmanager
    def count(self, samples: float) -> Iterator[None]:
        """State what this rank's gradient weighs (samples, tokens, ...), instead of the input's
        leading dimension.
        """
        if samples < 0:
            raise ConfigError(f"count({samples!r}): a number of samples is not negative")
        previous, self._stated_count = self._stated_count, float(samples)
        try:
            yield
        finally:
            self._stated_count = previous

    def no_more_data(
        self, optimizer: torch.optim.Optimizer | Callable[[], None] | None = None
    ) -> None:
        """This rank has run out of data: answer the others until they have too.

        With an optimizer (or a function that steps it), this rank takes their steps along and stays
        equal in every respect. Without one, the weights are copied at the end, and only they.
        """
        if self._transport is None:
            return
        last_active: list[int] = [0]
        own = GradientSnapshot(self.reducer.managed)
        if optimizer is not None:
            # a parameter the others do not use must not be stepped by a gradient of this rank's
            self.zero_grad()
        while True:
            signals = self.reducer.answer(self._answer_forward)
            active = [rank for rank, signal in enumerate(signals) if signal.call is not Call.ANSWER]
            if not active:
                break
            last_active = active
            if optimizer is not None and signals[active[0]].call is Call.BACKWARD:
                _take_step(optimizer)
        own.put_back()
        alone = self._transport.all_reduce_small(
            torch.tensor([0 if optimizer is not None else 1], dtype=torch.int64)
        )
        self._copy_model_from(last_active, weights=bool(alone))

    def _copy_model_from(self, active: list[int], *, weights: bool) -> None:
        """The rank that trained last is right; ranks that trained to the end themselves propose it.

        Only forwards change buffers, and those the others ran alone: buffers are always copied.
        """
        assert self._transport is not None
        buffers = self._named_buffers() if self.forward_sync_buffers else {}
        if not weights and not buffers:
            return
        source = int(self._transport.all_gather_small(torch.tensor([max(active)])).max())
        if weights:
            self._broadcast_everything(source)
        else:
            broadcast(self.process_group, list(buffers.values()), source)

    def _broadcast_everything(self, source: int) -> None:
        named = dict(self.module.named_parameters())
        tensors: list[torch.Tensor] = [
            one for name, one in named.items() if name not in self.parameters_to_ignore
        ]
        if self.forward_sync_buffers:
            tensors += list(self._named_buffers().values())
        broadcast(self.process_group, tensors, source)

    # ------------------------------------------------------------------------------------------ all or none

    def all_or_none(self, on_error: Policy | None = None) -> StepGuard:
        """`with model.all_or_none():` around one step: if it fails on any rank, it counts on none.

        on_error="raise": every rank raises. "skip": every rank goes on after the block, weights,
        gradients and buffers as they were before it.
        """
        return StepGuard(self, self.reducer, on_error or self.on_error)

    # ------------------------------------------------------------------------------------------ no_sync, join

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forwards inside only accumulate; the first after it averages what has
        gathered.
        """
        previous, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    def join(
        self,
        divide_by_initial_world_size: bool | None = None,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: ranks that leave the block early answer the others.

        By default the average is over the samples there are. `divide_by_initial_world_size=True`
        gives torch's scaling: gradients shrink as ranks run out of data.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        asked = kwargs.get("divide_by_initial_world_size")
        if self._transport is not None:
            self._transport.divide_by_world = (
                self.average == "ranks" if asked is None else bool(asked)
            )
        return _JoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # ------------------------------------------------------------------------------------------ buffers

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def last_sync_seconds(self) -> float:
        """How long the last backward went on synchronising after its own work was done; hidden
        parts do not count.
        """
        return self.reducer.last_sync_seconds

    def will_sync_module_buffers(self) -> bool:
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    def _syncs_buffers_before_forward(self) -> bool:
        hook = self._buffer_hook
        return self.will_sync_module_buffers() and (hook is None or not hook.after_forward)

    def _answer_forward(self, signals: Sequence[Signal]) -> None:
        """The others begin a forward, this rank has no data."""
        self._refuse_absence_from_batchnorm(signals)
        if any(signal.buffers for signal in signals):
            self._sync_buffers(signals)

    def _sync_buffers(self, signals: Sequence[Signal]) -> None:
        """Buffers follow the lowest rank that has data."""
        buffers = self._named_buffers()
        self.modules_buffers = list(buffers.values())
        if self._buffer_hook is not None:
            self._run_buffer_hook(self._buffer_hook)
            return
        source = next(rank for rank, signal in enumerate(signals) if signal.call is not Call.ANSWER)
        sync_buffers(self.process_group, buffers, source)

    broadcast_bucket_size = (
        250 * MIB
    )  # torch's, for programs that pass it on; messages here have their own size

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

    def _run_buffer_hook(self, hook: BufferHook) -> None:
        with torch.no_grad():
            futures = hook.hook(hook.state, self._named_buffers())
        for future in futures or ():
            self.reducer.pending_futures.append(future)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = None
    ) -> None:
        """Synchronise buffers with `hook(state, named_buffers)` before or (default) after forward."""
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        after = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._buffer_hook = BufferHook(hook, state, after)
        self._is_transparent = False

    # ------------------------------------------------------------------------------------------ hooks

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average with `hook(state, bucket) -> Future` instead, as in torch's class. Once, and
        before training.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self.reducer.last_error = str(error)
            raise
        if self.reducer.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._comm_hooks.append((hook, state))
        self._use_hook(state, hook)
        self._hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        if self.reducer.hook is not None:
            raise RuntimeError(
                "register_builtin_comm_hook or register_comm_hook can only be called once."
            )
        self._use_hook(None, builtin_hook(comm_hook_type, self.process_group))
        self._hook_name = str(comm_hook_type)

    def _use_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        if not isinstance(
            self._transport, GroupTransport
        ):  # one rank, or shared memory: the hook decides instead
            self.reducer.remove_hooks()
            managed = self._managed_parameters()
            self._transport = self._new_transport(managed, shared=False)
            self._build_reducer(managed)
        self.reducer.hook = CommHook(state, hook)
        if self._check_every is None and self._drift is not None:
            self.reducer.after_step.remove(
                self._drift.after_step
            )  # local SGD and the like keep replicas apart

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import (
            _as_overlapped_optim,
        )

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP") from error

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    # ------------------------------------------------------------------------------------------ torch's small methods

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    def _set_static_graph(self) -> None:
        """Accepted: nothing here needs the promise, and keeping it costs nothing."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.static_graph = True
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect "
                "unused parameters automatically, so you do not need to set find_unused_parameters=true",
                stacklevel=2,
            )

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
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

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        return _active.module

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What this instance was built with and has done, under torch's names."""
        managed = self.reducer.managed
        return {
            "world_size": self._world,
            "rank": self.process_group.rank(),
            "backend_name": self.process_group.name(),
            "module_name": type(self.module).__name__,
            "iteration": self.reducer.steps,
            "num_parameter_tensors": len(managed),
            "total_parameter_size_bytes": sum(
                one.parameter.numel() * one.parameter.element_size() for one in managed
            ),
            "bucket_cap_bytes": max(self.reducer.limits.bytes),
            "find_unused_parameters": int(self.find_unused_parameters),
            "forward_sync_buffers": int(self.forward_sync_buffers),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "is_multi_device_module": int(self.is_multi_device_module),
            "has_rebuilt_buckets": int(self.reducer.replanned),
            "can_set_static_graph": 1,
            "comm_hook": self._hook_name,
            "has_error": int(bool(self.reducer.last_error)),
            "error": self.reducer.last_error,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ConfigError("DDP runtime logging sample rate should be equal or greater than 1")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val  # outputs are never cloned here

    def _check_reducer_finalized(self) -> None:
        if self.reducer.in_backward:
            raise RuntimeError("the last backward has not finished: its gradients are not averaged")

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on in another group (shrunk or grown)."""
        self.process_group = new_process_group
        hook = self.reducer.hook
        self.reducer.remove_hooks()
        managed = self._managed_parameters()
        self._build_transport(managed)
        self._build_reducer(managed)
        self.reducer.hook = hook

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    # ------------------------------------------------------------------------------------------ transparency

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "module" and "_modules" in self.__dict__ and "module" in self._modules:
                try:
                    return getattr(self._modules["module"], name)
                except AttributeError:
                    pass
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Accepts keys with and without the `module.` prefix."""
        if state_dict and self._is_without_prefix(state_dict):
            metadata = getattr(state_dict, "_metadata", None)
            prefixed = type(state_dict)(
                (f"module.{key}", value) for key, value in state_dict.items()
            )  # type: ignore[call-arg]
            if metadata is not None:
                described = {
                    f"module.{key}" if key else "module": value for key, value in metadata.items()
                }
                prefixed._metadata = described  # type: ignore[attr-defined]
            state_dict = prefixed
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _is_without_prefix(self, state_dict: Mapping[str, Any]) -> bool:
        if not any(key.startswith("module.") for key in state_dict):
            return True
        own = (
            self.module.state_dict()
        )  # the wrapped module may have a child of the name `module` itself
        return sum(key in own for key in state_dict) > sum(
            key.removeprefix("module.") in own for key in state_dict
        )

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        state = copy.copy(self.__dict__)
        for name in ("process_group", "reducer", "_transport", "_drift", "_delayed"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.process_group = _default_group()
        self._delayed = None
        managed = self._managed_parameters()
        self._build_transport(managed)
        self._build_reducer(managed)
        for hook, hook_state in self._comm_hooks:
            self._use_hook(hook_state, hook)
        if self._low_precision is not None:
            self._use_low_precision()


class _JoinHook(JoinHook):
    """What a rank without data does for torch's Join: one answer per step of the others."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._own: GradientSnapshot | None = None

    def main_hook(self) -> None:
        ddp = self._ddp
        if ddp._transport is None:
            return
        if self._own is None:
            self._own = GradientSnapshot(ddp.reducer.managed)
        signals = ddp.reducer.answer(ddp._answer_forward)
        follows = any(signal.backward_follows for signal in signals)
        ddp.require_forward_param_sync = follows
        if follows:
            ddp.reducer.answer(ddp._answer_forward)

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self._ddp
        transport = ddp._transport
        if transport is None:
            return
        if self._own is not None:
            self._own.put_back()
        proposed = torch.tensor([transport.rank if is_last_joiner else -1])
        ddp._broadcast_everything(int(transport.all_gather_small(proposed).max()))
        transport.divide_by_world = ddp.average == "ranks"


def _refuse_unknown(unknown: Mapping[str, Any], average: str, on_error: str) -> None:
    if unknown:
        raise ConfigError(
            f"DistributedDataParallel has no argument {', '.join(sorted(unknown))}. It takes torch's arguments and "
            "average, check_replicas_every, check_finite, on_error."
        )
    if average not in ("samples", "ranks"):
        raise ConfigError(
            f'average={average!r}: it is "samples" (exact) or "ranks" (torch\'s plain average)'
        )
    if on_error not in ("raise", "skip"):
        raise ConfigError(f'on_error={on_error!r}: it is "raise" or "skip"')


def _default_group() -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "DistributedDataParallel needs a process group: call torch.distributed.init_process_group() (or "
            "paceline.init_process_group()) first, or pass process_group."
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _signal_device(group: dist.ProcessGroup, fallback: torch.device) -> torch.device:
    """Host memory if the group can move it; otherwise (NCCL alone) the device of the model."""
    kinds = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in kinds else fallback


def _device_index(device: int | torch.device) -> int:
    if isinstance(device, torch.device):
        return device.index or 0
    return int(device)


def _take_step(optimizer: torch.optim.Optimizer | Callable[[], None]) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer()
