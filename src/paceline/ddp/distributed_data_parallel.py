"""`DistributedDataParallel`: the module a training script sees. Arguments and methods are those of
torch's class; its private ones are in `torch_compat`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from paceline._malloc import keep_freed_memory
from paceline._pytree import first_tensor, tensors_in
from paceline._state_dict import align_names
from paceline._torch_internals import (
    cast_inputs,
    device_types_of,
    is_profiling,
    make_parameters_local,
    not_compiled,
    remove_optimizer_hooks,
)
from paceline.backend import PacelineGroup
from paceline.core import Communicator
from paceline.data.received_batches import weight_of_input
from paceline.ddp.atomic_step import StepGuard
from paceline.ddp.backward_observer import StepActions
from paceline.ddp.buffers import BufferHook, broadcast, sync_buffers
from paceline.ddp.comm_hooks import Hook, HookSpec, check_hook
from paceline.ddp.config import (
    Average,
    DDPConfig,
    Policy,
    bucket_limits,
    check_devices,
    check_dim,
    check_flags,
    check_group,
    check_mesh,
    check_module,
    check_policy,
    check_rounds,
    delayed_names,
    refuse_unknown,
    syncs_buffers,
    warn_of_check_reduction,
)
from paceline.ddp.consistency import DriftCheck, check_same_model, describe
from paceline.ddp.deferred_sum import DeferredSum, average
from paceline.ddp.delayed_parameters import DelayedParameters
from paceline.ddp.failures import StepHistory
from paceline.ddp.group_transport import GroupTransport
from paceline.ddp.mixed_precision import LowPrecision
from paceline.ddp.model_watch import ModelWatch, PlannedParameter, changes_between
from paceline.ddp.multi_host_transport import MultiHostTransport
from paceline.ddp.plan import MIB, ManagedParameter
from paceline.ddp.reducer import Reducer
from paceline.ddp.shm_transport import ShmTransport
from paceline.ddp.signals import Call, Signal
from paceline.ddp.single_rank import SingleRank
from paceline.ddp.step_partners import StepPartners, register_model
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.ddp.torch_compat import TorchCompat
from paceline.ddp.transport import Transport
from paceline.ddp.weighting import NO_SAMPLES, Basis, SampleCount
from paceline.errors import ConfigError, PacelineError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Field, Phase

__all__ = ["DistributedDataParallel", "GradientSnapshot", "first_batch_size"]

_logger = logging.getLogger("paceline")
_FORWARD, _FORWARDS = int(Phase.FORWARD), int(Field.FORWARDS)
_CHANGES_SHOWN = 10
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_NEEDLESS = (
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
    "a gradient."
)
_AVERAGED_EQUALLY = (
    "How many samples these are is not known, so the ranks' gradients were averaged equally, as "
    "torch does. If ranks hold different numbers of samples, load them with paceline.DataLoader, "
    "or state the number with `with model.count(n):` around forward: then the average is exact. "
    'If they do not, average="ranks" says so.'
)
_TAKEN_FOR_SAMPLES = (
    'average="samples" takes them for numbers of samples and weighs each rank by its own. State '
    'another weight with `with model.count(n):`, or average ranks equally with average="ranks".'
)
# Why torch.compile stays out of what is done around the module's own forward.
_BOOKKEEPING = "DistributedDataParallel prepares and follows the forward that is compiled"
# What cannot be pickled, and is made anew from what can.
_NOT_PICKLED = (
    "process_group",
    "reducer",
    "step_partners",
    "_deferred_sums",
    "_drift",
    "_delayed",
    "_history",
    "_watch",
)


class _Active:
    """The module whose forward is running, for torch.compile. No attribute of the class itself:
    setting one in every step would throw away all that the interpreter has cached about the
    class."""

    __slots__ = ("module",)

    def __init__(self) -> None:
        self.module: DistributedDataParallel | None = None


_active = _Active()

# A DistributedDataParallel is an instance of torch's class, because torch (state dicts of
# checkpoints, pipelines) and other libraries (Accelerate, Lightning) ask for it with isinstance.
# Nothing else is taken over: its constructor does not run, and whatever is called on an instance is
# overridden. A type checker sees what it is made of instead.
if TYPE_CHECKING:

    class _TorchClass(torch.nn.Module, Joinable):
        """What torch's class is made of."""

else:
    _TorchClass = torch.nn.parallel.DistributedDataParallel


class DistributedDataParallel(TorchCompat, _TorchClass):
    """Data-parallel training: every rank runs its part of the batch, gradients are averaged during
    backward.

    The first twenty arguments are torch's, with the same meaning and defaults.

    Args:
        module: the model, the same on every rank; compared when this object is made.
        average: "auto" weighs each rank by its samples where their number is known: stated with
            `count(n)`, or the batch came from `paceline.DataLoader` or `GlobalBatchSampler`. Then
            the gradient is that of the global batch, whatever its split. Where it is not known,
            ranks are averaged equally, as torch does, to the bit. "samples" takes the leading
            dimension of the first input for the number, "ranks" is torch's average always. Equal
            numbers give the same bits in every case.
        check_replicas_every: compare a digest of the weights over ranks every so many steps; 0
            turns it off.
        check_finite: look for non-finite gradients before they are averaged, and fail the step on
            every rank.
        on_error: the default policy of `all_or_none()`.
        wire_dtype: `torch.bfloat16` lets gradients of float32 cross from host to host in half the
            bytes. Each host's sum is rounded once, all other arithmetic stays float32, and all
            ranks get the same bits. Ranks of one host exchange what they always do. Needs a group
            of backend `paceline`.

    Raises:
        MismatchError: the model, or an argument, is not the same on all ranks.
        ConfigError: an argument is wrong, or there is no process group.

    Example:
        ```python
        paceline.init_process_group()
        model = paceline.DistributedDataParallel(torch.nn.Linear(10, 1))
        ```
    """

    def __init__(
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
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        average: Average = "auto",
        check_replicas_every: int | None = None,
        check_finite: bool = False,
        on_error: Policy = "raise",
        wire_dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        refuse_unknown(unknown)
        check_module(module)
        check_devices(device_ids)
        check_dim(dim)
        check_flags(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
            check_finite=check_finite,
        )
        if check_reduction:
            warn_of_check_reduction()
        sync_always, sync_now = syncs_buffers(broadcast_buffers, forward_sync_buffers)
        limits, bucket_bytes_list = bucket_limits(bucket_cap_mb, bucket_cap_mb_list)
        self._config = DDPConfig(
            average=average,
            on_error=on_error,
            check_finite=check_finite,
            check_replicas_every=check_replicas_every,
            init_sync=init_sync,
            forward_sync_buffers=sync_always,
            find_unused_parameters=find_unused_parameters,
            skip_unused=skip_all_reduce_unused_params,
            gradient_as_bucket_view=gradient_as_bucket_view,
            limits=limits,
            bucket_bytes_list=bucket_bytes_list,
            mixed_precision=mixed_precision,
            wire_dtype=wire_dtype,
            delayed=delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
        )
        self.process_group = self._choose_group(module, process_group, device_mesh)
        self.module = module
        self.dim = dim
        self.batched_grad_copy = batched_grad_copy
        self._choose_parameters()
        self._choose_devices(device_ids, output_device)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._stated_count: float | None = None
        self._buffer_hook: BufferHook | None = None
        self._hook_spec: HookSpec | None = None
        self._lazy_init_ran = False
        self._twin = 0
        self._make_replicas_equal(sync_now)
        if mixed_precision is None:
            self._low_precision: LowPrecision | None = None
        else:
            self._low_precision = LowPrecision(mixed_precision, module)
        self._prepare_sync_batchnorm()
        self._history = StepHistory()
        if static_graph:
            self._set_static_graph()
        self.step_partners = StepPartners()
        self._deferred_sums: list[DeferredSum] = []
        self._delayed: DelayedParameters | None = None
        self._rebuild()
        register_model(self)

    # ------------------------------------------------------------------- construction

    def _choose_group(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        device_mesh: DeviceMesh | None,
    ) -> dist.ProcessGroup:
        if process_group is not None and device_mesh is not None:
            raise ConfigError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is None:
            if process_group is None:
                return _default_group()
            check_group(process_group)
            return process_group
        check_mesh(device_mesh)
        if device_mesh.ndim != 1:
            raise ConfigError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        self.device_mesh = device_mesh
        make_parameters_local(module, device_mesh)
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group

    def _choose_parameters(self) -> None:
        """Which parameters are averaged, and where they are."""
        delayed = self._config.delayed
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        )
        self.parameters_to_ignore.update(delayed.names if delayed is not None else ())
        named = list(self.module.named_parameters())
        for name, parameter in named:
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ConfigError(
                    f"{name} has no shape yet: Modules with uninitialized parameters can't be used "
                    "with `DistributedDataParallel`. Run a dummy forward pass to correctly "
                    "initialize the modules"
                )
        self._module_parameters = [
            parameter for name, parameter in named if name not in self.parameters_to_ignore
        ]
        everything = self._module_parameters or [
            parameter for name, parameter in named if delayed is not None and name in delayed.names
        ]
        if not everything:
            raise ConfigError(_NEEDLESS)
        self.device = everything[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in everything}) > 1

    def _choose_devices(
        self,
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> None:
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if device_ids is not None and len(device_ids) > 1:
            raise ConfigError("device_ids can only be None or contain a single element.")
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                devices = {parameter.device for parameter in self._module_parameters}
                raise ConfigError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    f"modules on one accelerator, but got device_ids {device_ids}, output_device "
                    f"{output_device}, and module parameters {devices}. Leave both out and put the "
                    "inputs where the module is."
                )
            return
        self.device_ids = [_device_index(device) for device in device_ids]
        self.output_device = (
            self.device_ids[0] if output_device is None else _device_index(output_device)
        )

    def _make_replicas_equal(self, with_buffers: bool) -> None:
        """Every rank has the same model; then, unless init_sync is off, every rank has rank 0's
        values.
        """
        config = self._config
        if self.process_group.size() > 1:
            named = [
                (name, parameter)
                for name, parameter in self.module.named_parameters()
                if name not in self.parameters_to_ignore
            ]
            buffers = self._named_buffers() if with_buffers else {}
            description = describe(named, buffers.items()) | config.shared_arguments()
            check_same_model(self._group_transport(), description)
            self._twin = self._count_twins(description)
            if config.init_sync:
                broadcast(self.process_group, [*self._module_parameters, *buffers.values()], 0)
        delayed = config.delayed
        if delayed is not None:
            tensors = [self.module.get_parameter(name) for name in delayed.names]
            broadcast(self.process_group, tensors, 0)
        elif not any(parameter.requires_grad for parameter in self._module_parameters):
            raise ConfigError(_NEEDLESS)  # on all ranks: they have been compared

    def _count_twins(self, description: Mapping[str, str]) -> int:
        """How many models of this description were wrapped in this group before: the same number
        on all its ranks, which have just compared it. Ranks that step one model while others step
        its twin are told apart by it.
        """
        if not isinstance(self.process_group, PacelineGroup):
            return 0
        wrapped, key = self.process_group.wrapped_models, repr(description)
        wrapped[key] += 1
        return wrapped[key] - 1

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _managed_parameters(self) -> list[ManagedParameter]:
        """Parameters that require a gradient, each once, by the first name it has."""
        sparse = {
            id(layer.weight)
            for layer in self.module.modules()
            if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse
        }
        return [
            ManagedParameter(
                name,
                parameter,
                id(parameter) in sparse,
                deferred=any(parameter in deferred for deferred in self._deferred_sums),
            )
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    def _prepare_sync_batchnorm(self) -> None:
        self._sync_batchnorm: list[SyncBatchNorm] = []
        for name, layer in self.module.named_modules():
            if isinstance(layer, SyncBatchNorm):
                self._sync_batchnorm.append(layer)
            elif isinstance(layer, torch.nn.SyncBatchNorm) and self.device_type == "cpu":
                raise ConfigError(
                    f"{name or 'the module'} is torch's SyncBatchNorm: SyncBatchNorm layers only "
                    "work with GPU modules. paceline.SyncBatchNorm.convert_sync_batchnorm(module) "
                    "makes it work on CPU too."
                )

    # ------------------------------------------------------------------- rebuild

    def _rebuild(self) -> None:
        """Make the reducer, or another one instead of it: the model has other parameters, a hook
        was registered, the group was replaced, the model was unpickled. Whatever it needs is kept
        by this module, so that nothing is lost on the way.
        """
        if self._config.wire_dtype is not None:
            check_rounds(self.process_group, self.device)
        previous: Reducer | SingleRank | None = self.__dict__.get("reducer")
        if previous is not None:
            previous.abandon_step()
            previous.remove_hooks()
        config = self._config
        managed = self._managed_parameters()
        self.modules_buffers = list(self._named_buffers().values())
        self._rebuild_delayed()
        transport = self._new_transport(managed)
        if not isinstance(transport, ShmTransport):
            managed = self._without_unreachable_sums(managed)
        self._drift = self._new_drift_check(managed, transport)
        low = self._low_precision
        actions = StepActions(
            before_scatter=None if low is None else low.restore,
            after_step=None if self._drift is None else self._drift.after_step,
            on_unequal_counts=self._report_unequal_counts,
        )
        label = type(self.module).__name__
        rule = config.average_rule if previous is None else previous.rule
        self.reducer: Reducer | SingleRank
        if transport is None:
            self.reducer = SingleRank(label, managed, rule, self._history, actions)
        else:
            hook = self._hook_spec
            self.reducer = Reducer(
                config,
                label,
                managed,
                transport,
                history=self._history,
                actions=actions,
                comm_hook=None
                if hook is None
                else hook.create(
                    self,
                    self.process_group,
                    gradients_are_views=config.gradient_as_bucket_view,
                ),
                bucket_dtype=None if low is None else low.reduce_dtype,
                deferred_sums=self._deferred_sums,
            )
            self.reducer.use_rule(rule)
        self._watch_model()

    def _without_unreachable_sums(
        self, managed: Sequence[ManagedParameter]
    ) -> list[ManagedParameter]:
        """Where ranks share no memory, gradients that a step would look for there are averaged in
        backward; so are all if a hook or another type stands between them and the step.
        """
        plain = self._hook_spec is None and self._low_precision is None
        anywhere = [each for each in self._deferred_sums if plain and not each.in_shared_memory]
        return [
            dataclasses.replace(entry, deferred=any(entry.parameter in each for each in anywhere))
            for entry in managed
        ]

    def _watch_model(self) -> None:
        """Remember what the plan was made for, to see before a forward whether it still fits."""
        self._frozen = [
            parameter for parameter in self._module_parameters if not parameter.requires_grad
        ]
        planned = [(entry.name, entry.parameter) for entry in self.reducer.managed]
        if self._delayed is not None:
            planned += self._delayed.named
        reducer = self.reducer
        self._watch = ModelWatch(
            self,
            [PlannedParameter.of(*named) for named in planned],
            relies_on_hooks=isinstance(reducer, Reducer) and reducer.relies_on_hooks,
        )
        self._settle_transparency()

    def _settle_transparency(self) -> None:
        """One rank, and nothing happens before or after forward: then it costs nothing."""
        self._is_transparent = isinstance(self.reducer, SingleRank) and not (
            self.device_ids
            or self._low_precision
            or self._delayed
            or self._buffer_hook
            or self._frozen
        )

    def _new_transport(self, managed: Sequence[ManagedParameter]) -> Transport | None:
        """How these gradients travel; None if they do not. A hook decides itself how: it needs the
        group, also if there is one rank only.
        """
        world = self.process_group.size()
        if any(entry.parameter.is_cpu for entry in managed):
            on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
            keep_freed_memory(int(on_host) if on_host.isdigit() else world)
        if not managed or (world == 1 and self._hook_spec is None):
            return None
        if self._hook_spec is None and ShmTransport.serves(self.process_group, managed):
            assert isinstance(self.process_group, PacelineGroup)
            return ShmTransport(self.process_group, managed, self._twin)
        return self._group_transport(managed)

    def _group_transport(self, managed: Sequence[ManagedParameter] = ()) -> GroupTransport:
        if MultiHostTransport.serves(self.process_group):
            assert isinstance(self.process_group, PacelineGroup)
            return MultiHostTransport(
                self.process_group, self._config.wire_dtype, managed, self._twin
            )
        # Signals travel in host memory if the group can move it; otherwise (NCCL alone) where the
        # model is.
        on_host = "cpu" in device_types_of(self.process_group)
        device = torch.device("cpu") if on_host else self.device
        return GroupTransport(self.process_group, device, self._config.wire_dtype)

    def _new_drift_check(
        self, managed: Sequence[ManagedParameter], transport: Transport | None
    ) -> DriftCheck | None:
        every = self._config.drift_interval(has_comm_hook=self._hook_spec is not None)
        if not every or transport is None:
            return None
        names = {entry.name for entry in managed}
        module = self.module

        def weights() -> list[tuple[str, torch.Tensor]]:
            self.step_partners.catch_up()
            return [named for named in module.named_parameters() if named[0] in names]

        return DriftCheck(transport, weights, every)

    def _rebuild_delayed(self) -> None:
        if self._delayed is not None:
            self._delayed.remove()
        names = self._config.delayed
        if names is not None:
            self._delayed = DelayedParameters(self.module, names, self.process_group)

    # ------------------------------------------------------------------- changes of the model

    def _model_may_have_changed(self) -> bool:
        # Between forward and backward, `mixed_precision` has parameters of another dtype in place.
        low = self._low_precision
        if low is not None and low.is_applied:
            return False
        if self._watch.has_changed():
            return True
        reducer = self.reducer
        return bool(self._frozen or reducer.frozen) and any(
            map(_requires_grad, (*self._frozen, *reducer.frozen))
        )

    def _follow_model(self) -> None:
        """Something about the model is not as it was: if the plan no longer fits, make another, on
        every rank.
        """
        reducer = self.reducer
        self._choose_parameters()
        frozen = [*self._frozen, *reducer.frozen]
        trainable = self._trainable_parameters()
        changes = changes_between(self._watch.planned, trainable, self.module.parameters(), frozen)
        if not changes:
            reducer.renew_hooks()
            self._watch_model()
            return
        if isinstance(reducer, Reducer):
            signals = reducer.agree_on_new_plan(changes)
            self._refuse_absence_from_new_plan(signals, changes)
        self._make_new_parameters_equal(trainable, changes)
        if self._low_precision is not None:
            self._low_precision = LowPrecision(self._config.mixed_precision, self.module)
        self._prepare_sync_batchnorm()
        self._rebuild()
        if self.process_group.rank() == 0:
            _logger.info(
                "%s: buckets planned anew: %s", type(self.module).__name__, _shorten(changes)
            )

    def _trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters whose gradients are averaged, at once or delayed."""
        delayed = self._config.delayed
        names = delayed.names if delayed is not None else ()
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and (name not in self.parameters_to_ignore or name in names)
        }

    def _make_new_parameters_equal(
        self, trainable: Mapping[str, torch.nn.Parameter], changes: Sequence[str]
    ) -> None:
        """As when the model was wrapped: every rank has the same parameters, and those that were
        not in the plan get rank 0's values.
        """
        if self.process_group.size() == 1:
            return
        description = describe(trainable.items(), ()) | {"changes": "; ".join(changes)}
        check_same_model(self._group_transport(), description)
        planned = {id(entry.parameter) for entry in self._watch.planned}
        new = [parameter for parameter in trainable.values() if id(parameter) not in planned]
        if self._config.init_sync and new:
            broadcast(self.process_group, new, 0)

    def _refuse_absence_from_new_plan(
        self, signals: Sequence[Signal], changes: Sequence[str]
    ) -> None:
        absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
        if absent:
            raise ConfigError(
                f"rank {', '.join(map(str, absent))} ran out of data, but the model was changed "
                f"({_shorten(changes)}), which needs all ranks. Change it when all ranks have "
                "data, or when none has."
            )

    @property
    def shared_memory(self) -> Communicator | None:
        """What joins the ranks, if they are all on one host and their gradients, as those of this
        model's parameters, are averaged in shared memory; None if not.
        """
        reducer = self.reducer
        if (
            isinstance(reducer, Reducer)
            and isinstance(reducer.transport, ShmTransport)
            and self._low_precision is None
        ):
            return reducer.transport.comm
        return None

    def defer_sums(self, deferred: DeferredSum) -> None:
        """From the next backward on, leave the gradients of these parameters as they are on each
        rank. On every rank together. Whoever summed some of them before no longer does.
        """
        for each in self._deferred_sums:
            each.forget()
        others = [each for each in self._deferred_sums if not each.overlaps(deferred)]
        self._deferred_sums = [*others, deferred]
        self._rebuild()

    def averaged_gradients(self) -> dict[str, torch.Tensor]:
        """A copy of every gradient's average over ranks, by the parameter's name. To be called on
        every rank, after backward.

        Where an optimizer with one_pass=True sums gradients, `.grad` is this rank's own, and this
        is the way to look at the average. Elsewhere it is what `.grad` has.

        Raises:
            ConfigError: a rank had no data in this step, and gradients are summed in the step.
        """
        reducer = self.reducer
        absent = reducer.history.absent
        weights = {
            id(entry.parameter): deferred.weights
            for deferred in self._deferred_sums
            for entry in reducer.managed
            if entry.deferred and entry.parameter in deferred and deferred.weights is not None
        }
        if weights and absent:
            raise ConfigError(
                f"averaged_gradients() needs all ranks, and rank {', '.join(map(str, absent))} had "
                "no data in this step"
            )
        averages = {}
        for entry in reducer.managed:
            gradient = entry.parameter.grad
            if gradient is not None:
                own = weights.get(id(entry.parameter))
                gradient = gradient.detach()
                averages[entry.name] = (
                    gradient.clone() if own is None else average(self.process_group, gradient, own)
                )
        return averages

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for deferred in self._deferred_sums:
            deferred.forget()

    @property
    def compares_replicas_every(self) -> int:
        """How many steps pass between two comparisons of the replicas; 0: none is made."""
        return 0 if self._drift is None else self._drift.every

    def compare_replicas(self) -> None:
        """Compare the replicas now, on every rank; raises `MismatchError` if they drifted apart."""
        if self._drift is not None:
            self._drift.compare()

    # ------------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # One rank, nothing to weigh, nobody looking: a forward is that of the module, at no cost.
        if (
            self._is_transparent
            and self._lazy_init_ran
            and self.require_backward_grad_sync
            and not (self.reducer.window.open or recorder.watched or is_profiling())
        ):
            return self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # there is a module
        if is_profiling():
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

    @not_compiled(_BOOKKEEPING)
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if not self._lazy_init_ran:
            self._lazy_init()
        reducer = self.reducer
        if reducer.step is not None:
            reducer.settle_dropped()
        if torch.is_grad_enabled():
            if reducer.step is None and self._model_may_have_changed():
                self._follow_model()
                reducer = self.reducer
            # Kept by the reducer: setting an attribute of a torch module costs more than the rest
            # of this line.
            reducer.begin_forward(self._sample_count(inputs, kwargs))
            if self._sync_batchnorm:
                self._weigh_batchnorm(reducer.forwards.sample_count)
        if reducer.step is None and isinstance(reducer, Reducer):
            # Not in backward: there a checkpoint computes again what it had.
            self._meet_peers(reducer)
        if self.device_ids:
            moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._low_precision is not None:
            self._low_precision.apply()
            if self._low_precision.param_dtype is not None:
                inputs, kwargs = cast_inputs(self._low_precision.param_dtype, inputs, kwargs)
        return inputs, kwargs

    def _meet_peers(self, reducer: Reducer) -> None:
        """Collectives that come before a forward: torch's join protocol, then buffers."""
        joining = self._join_config.enable
        if joining:
            Join.notify_join_context(self)
        if torch.is_grad_enabled() and reducer.follow_plan():
            size = max(reducer.limits.bytes) / MIB
            _logger.debug(
                "%d buckets of %g MiB, in the order gradients arrived", len(reducer.buckets), size
            )
        buffers = self._syncs_buffers_before_forward()
        if buffers or joining:
            follows = torch.is_grad_enabled() and self.require_backward_grad_sync
            signal = Signal(Call.FORWARD, buffers=buffers, backward_follows=follows)
            signals = reducer.exchange_signals(signal)
            self._refuse_absence_from_batchnorm(signals)
            if buffers:
                self._sync_buffers(signals)

    def _refuse_absence_from_batchnorm(self, signals: Sequence[Signal]) -> None:
        """Called on all ranks together, before a forward that some of them will not run."""
        absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
        if absent and len(absent) < len(signals) and self._synchronises_batchnorm():
            raise ConfigError(
                f"rank {', '.join(map(str, absent))} ran out of data, but this model has "
                "SyncBatchNorm layers, whose forward needs all ranks. Give such a rank empty "
                "batches (x[:0]) until the others are through, as paceline.DataLoader does, "
                "instead of no_more_data() or join()."
            )

    def _synchronises_batchnorm(self) -> bool:
        return any(
            isinstance(layer, torch.nn.SyncBatchNorm) and layer.training
            for layer in self.module.modules()
        )

    @not_compiled(_BOOKKEEPING)
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
            if self.reducer.tracks(sync):
                self.reducer.track_outputs(tensors_in(output), sync)
        else:
            self.require_forward_param_sync = False
        if self._delayed is not None:
            self._delayed.prepare_gradients()
        return output

    def _forward_failed(self, error: Exception) -> None:
        if self.reducer.in_backward:
            # A checkpoint computes again: it may stop early, and if this is an error backward
            # raises it.
            return
        if self._low_precision is not None:
            self._low_precision.restore()
        if torch.is_grad_enabled():
            # If the peers are gone, what is raised is the error at hand.
            with contextlib.suppress(PacelineError):
                self.reducer.fail(error, "forward")

    def _lazy_init(self) -> None:
        """At the first forward: torch's apply_optimizer_in_backward may have come after wrapping.
        The optimizer of a bucket's parameters then runs when the bucket is averaged.
        """
        self._lazy_init_ran = True
        if any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters
        ):
            remove_optimizer_hooks(self._module_parameters)
            self._use_hook(HookSpec.of_optimizer())

    def _report_unequal_counts(self, leading: list[float]) -> None:
        if self.process_group.rank() != 0:
            return
        _logger.warning(
            "%s: the ranks' inputs have different leading dimensions (%s). %s",
            type(self.module).__name__,
            ", ".join(f"rank {rank}: {size:g}" for rank, size in enumerate(leading)),
            _TAKEN_FOR_SAMPLES if self._config.average == "samples" else _AVERAGED_EQUALLY,
        )

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        """The module whose forward is running, for torch.compile."""
        return _active.module

    # ------------------------------------------------------------------- samples

    def _sample_count(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SampleCount:
        """What a forward of these inputs weighs."""
        if self._stated_count is not None:
            return SampleCount(self._stated_count)
        leading = first_batch_size(inputs, kwargs)
        average = self._config.average
        reported = 0 if self._history.unequal_counts_reported else leading
        if average == "samples":
            return SampleCount(leading, Basis.SAMPLES, reported)
        if average == "auto":
            weight = weight_of_input(leading)
            if weight is not None:
                return SampleCount(weight, Basis.SHARE)
            if not leading and not any(map(torch.numel, tensors_in((inputs, kwargs)))):
                return NO_SAMPLES
        return SampleCount(1.0, Basis.RANK, reported)

    def _weigh_batchnorm(self, count: SampleCount) -> None:
        # In average="ranks" every rank's loss counts the same, whatever was stated.
        weight = 1.0 if self._config.average == "ranks" else count.value
        for layer in self._sync_batchnorm:
            layer.loss_weight = weight

    @contextlib.contextmanager
    def count(self, samples: float) -> Iterator[None]:
        """State what this rank's gradient weighs: the samples (or tokens, graphs, ...) over which
        its loss is a mean. On every rank; 0 contributes nothing. Ignored with average="ranks".
        """
        previous, self._stated_count = self._stated_count, _checked_count(samples)
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

        Raises:
            TypeError: `optimizer` is neither an optimizer nor a function.
        """
        if optimizer is not None and not (
            isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)
        ):
            raise TypeError(
                f"no_more_data() takes an optimizer or a function that steps it, got {optimizer!r}"
            )
        reducer = self.reducer
        if not isinstance(reducer, Reducer):
            return
        last_active: list[int] = [0]
        own_gradients = GradientSnapshot(reducer.managed)
        if optimizer is not None:
            # A parameter the others do not use must not be stepped by a gradient of this rank's.
            self.zero_grad()
        while True:
            signals = reducer.participate_without_data(self._answer_forward)
            active = [rank for rank, signal in enumerate(signals) if signal.call is not Call.ANSWER]
            if not active:
                break
            last_active = active
            if optimizer is not None and signals[active[0]].call is Call.BACKWARD:
                _take_step(optimizer)
        own_gradients.restore()
        without_optimizer = reducer.transport.all_reduce_small(
            torch.tensor([0 if optimizer is not None else 1], dtype=torch.int64)
        )
        self._copy_model_from(last_active, reducer.transport, weights=bool(without_optimizer))

    def _copy_model_from(self, active: list[int], transport: Transport, *, weights: bool) -> None:
        """The rank that trained last is right; ranks that trained to the end themselves propose it.

        Only forwards change buffers, and those the others ran alone: buffers are always copied.
        """
        self.step_partners.catch_up()
        buffers = self._named_buffers() if self._config.forward_sync_buffers else {}
        if not weights and not buffers:
            return
        source = int(transport.all_gather_small(torch.tensor([max(active)])).max())
        if weights:
            self._broadcast_everything(source)
        else:
            broadcast(self.process_group, list(buffers.values()), source)

    def _broadcast_everything(self, source: int) -> None:
        self.step_partners.catch_up()
        tensors: list[torch.Tensor] = [
            parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        if self._config.forward_sync_buffers:
            tensors += list(self._named_buffers().values())
        broadcast(self.process_group, tensors, source)

    def _answer_forward(self, signals: Sequence[Signal]) -> None:
        """The others begin a forward, plan other buckets or step an optimizer of which this rank
        has a part, and this rank has no data.
        """
        if any(signal.call.is_of_optimizer for signal in signals):
            self.step_partners.answer(signals)
            return
        if any(signal.call is Call.REPLAN for signal in signals):
            self._refuse_absence_from_new_plan(signals, ("see the other ranks",))
        self._refuse_absence_from_batchnorm(signals)
        if any(signal.buffers for signal in signals):
            self._sync_buffers(signals)

    # ------------------------------------------------------------------- all or none

    def all_or_none(self, on_error: Policy | None = None) -> StepGuard:
        """`with model.all_or_none():` around one step: if it fails on any rank, it counts on none.

        on_error="raise": every rank raises. "skip": every rank goes on after the block, weights,
        gradients and buffers as they were before it. Only errors of the step are skipped: the loss
        of the group, ranks that disagree, Ctrl-C and exit always come through.
        """
        policy = self._config.on_error if on_error is None else check_policy(on_error)
        return StepGuard(self, lambda: self.reducer, policy, self.step_partners)

    # ------------------------------------------------------------------- no_sync, join

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

        By default the average is over the samples there are, where their numbers are known; where
        they are not, gradients shrink as ranks run out of data, as they do in torch.
        `divide_by_initial_world_size` asks for one or the other.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        divide = kwargs.get("divide_by_initial_world_size")
        rule = self._config.average_rule
        if divide is None:
            rule = dataclasses.replace(rule, divide_ranks_by_world=True)
        else:
            rule = dataclasses.replace(rule, divide_by_world=bool(divide))
        self.reducer.use_rule(rule)
        return _JoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # ------------------------------------------------------------------- buffers

    @property
    def last_sync_seconds(self) -> float:
        """How long the last backward went on synchronising after its own work was done; hidden
        parts do not count.
        """
        return self._history.last_sync_seconds

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes buffers equal on all ranks before it begins."""
        return (
            self.require_forward_param_sync
            and self._config.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    def _syncs_buffers_before_forward(self) -> bool:
        hook = self._buffer_hook
        return self.will_sync_module_buffers() and (hook is None or not hook.after_forward)

    def _sync_buffers(self, signals: Sequence[Signal]) -> None:
        """Buffers follow a rank that has data: the lowest, in a join the highest, as torch's."""
        buffers = self._named_buffers()
        self.modules_buffers = list(buffers.values())
        if self._buffer_hook is not None:
            self._run_buffer_hook(self._buffer_hook)
            return
        active = [rank for rank, signal in enumerate(signals) if signal.call is not Call.ANSWER]
        source = max(active) if self._join_config.enable else min(active)
        sync_buffers(self.process_group, buffers, source)

    def _run_buffer_hook(self, hook: BufferHook) -> None:
        with torch.no_grad():
            futures = hook.hook(hook.state, self._named_buffers())
        for future in futures or ():
            self.reducer.forwards.add_future(future)

    # ------------------------------------------------------------------- communication hooks

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Average with `hook(state, bucket) -> Future` instead, as in torch's class. Once, and
        before training.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._history.note_error(str(error))
            raise
        self._use_hook(HookSpec.of_caller(state, hook))

    def _use_hook(self, spec: HookSpec) -> None:
        if self._hook_spec is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self._config.wire_dtype is not None:
            raise ConfigError(
                "this model has wire_dtype, and a communication hook sends gradients in its own "
                "way: give one of the two"
            )
        self._hook_spec = spec
        self._rebuild()

    # ------------------------------------------------------------------- transparency

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
        own = [f"module.{name}" for name in self.module.state_dict()]
        return super().load_state_dict(align_names(state_dict, own), *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )
        state = copy.copy(self.__dict__)
        for name in _NOT_PICKLED:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self.process_group = _default_group()
        self._history = StepHistory()
        self.step_partners = StepPartners()
        self._deferred_sums = []
        self._delayed = None
        self._rebuild()
        register_model(self)


class GradientSnapshot:
    """A rank without data sees the others' averages in its `.grad`; afterwards it has its own
    gradients again.
    """

    def __init__(self, managed: Iterable[ManagedParameter]) -> None:
        self._kept = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in (entry.parameter for entry in managed)
        ]

    def restore(self) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient


class _JoinHook(JoinHook):
    """What a rank without data does for torch's Join: one answer per step of the others."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._own_gradients: GradientSnapshot | None = None

    def main_hook(self) -> None:
        ddp, reducer = self._ddp, self._ddp.reducer
        if not isinstance(reducer, Reducer):
            return
        if self._own_gradients is None:
            self._own_gradients = GradientSnapshot(reducer.managed)
        signals = reducer.participate_without_data(ddp._answer_forward)
        follows = any(signal.backward_follows for signal in signals)
        ddp.require_forward_param_sync = follows
        if follows:
            reducer.participate_without_data(ddp._answer_forward)
            # Unlike no_more_data(), torch's Join has to be told what comes: one step of each.
            for _ in range(ddp.step_partners.divided):
                reducer.participate_without_data(ddp._answer_forward)

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp, reducer = self._ddp, self._ddp.reducer
        if not isinstance(reducer, Reducer):
            return
        if self._own_gradients is not None:
            self._own_gradients.restore()
        transport = reducer.transport
        proposed = torch.tensor([transport.rank if is_last_joiner else -1])
        ddp._broadcast_everything(int(transport.all_gather_small(proposed).max()))
        reducer.use_rule(ddp._config.average_rule)


def first_batch_size(inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The leading dimension of the first tensor among the inputs; 1 if there is none."""
    if inputs and isinstance(inputs[0], torch.Tensor):
        first: torch.Tensor | None = inputs[0]
    else:
        first = first_tensor((inputs, kwargs))
    return first.shape[0] if first is not None and first.dim() > 0 else 1


def _checked_count(samples: float) -> float:
    try:
        count = float(samples)
    except (TypeError, ValueError):
        count = math.nan
    if not (math.isfinite(count) and count >= 0):
        raise ConfigError(
            f"count({samples!r}): expected a finite number of samples that is not negative"
        )
    return count


def _default_group() -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "DistributedDataParallel needs a process group: call "
            "torch.distributed.init_process_group() (or paceline.init_process_group()) first, or "
            "pass process_group. In an elastic job (paceline run --elastic) ranks come and go, and "
            "the model is trained with paceline.Training"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _shorten(changes: Sequence[str]) -> str:
    more = len(changes) - _CHANGES_SHOWN
    return "; ".join(changes[:_CHANGES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _device_index(device: int | torch.device) -> int:
    if isinstance(device, int):
        return device
    try:
        return torch.device(device).index or 0
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_ids and output_device should name devices by number or as torch.device does, "
            f"got {device!r}"
        ) from error


def _take_step(optimizer: torch.optim.Optimizer | Callable[[], None]) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer()
