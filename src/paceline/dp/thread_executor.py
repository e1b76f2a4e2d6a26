"""The thread executor: one thread per accelerator.

Written against `torch.accelerator`, streams and events alone. One forward, step by step:
 1. refresh: parameters are copied to the replicas on each device's own stream
 2. scatter: shares of the inputs are copied on a side stream of each device, while 1 is under way
 3. run: each device's thread runs its replica, under the caller's modes and streams
 4. gather: outputs meet on `output_device`
Inputs and outputs travel by differentiable copies; `BroadcastParameters` brings the parameters'
gradients back, summed in the order of the devices.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline._pytree import Spec, Whole, flatten, is_taken_apart_by_attributes, unflatten
from paceline.dp.autograd_functions import refuse_create_graph
from paceline.dp.gather import GatherKind, GatherPlan, ReplicaOutputs, ScalarGather, plan_outputs
from paceline.dp.protocol import meta_of
from paceline.dp.replica_scope import ReplicaScope
from paceline.dp.scatter import SplitInputs, Splitter, split_inputs
from paceline.errors import ConfigError

__all__ = ["BroadcastParameters", "ThreadExecutor"]


class ThreadExecutor:
    """Runs a module on several devices of this process."""

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        output_device: torch.device,
        dim: int,
        scalars: ScalarGather,
        splitters: Mapping[type, Splitter],
    ) -> None:
        self._module = module
        self._devices = list(devices)
        self._output_device = output_device
        self._dim = dim
        self._scalars = scalars
        self._splitters = splitters
        self._leaf_types = (Whole, *splitters)
        self._sides: dict[torch.device, torch.Stream] = {}
        self._threads = ThreadPoolExecutor(
            max(1, len(devices) - 1), thread_name_prefix="paceline-device"
        )
        self._finalizer = weakref.finalize(self, self._threads.shutdown, wait=False)
        self.workers = len(devices)
        self.pids: list[int] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward on the whole batch."""
        self._check_shapes()
        self._check_devices()
        split = split_inputs(
            (args, kwargs), self.workers, self._dim, self._splitters, self._leaf_types
        )
        used = self._devices[: len(split.ranges)]
        streams = [torch.accelerator.current_stream(device) for device in used]
        shares = [self._scatter(split, replica, streams) for replica in range(len(used))]
        modules = self._refresh(streams)
        outputs = self._run_all(modules, shares, streams)
        return self._gather(outputs, split, streams)

    def refresh(self) -> None:
        """Replicas are made anew for each forward and see every change."""

    def end(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True)

    def _check_shapes(self) -> None:
        for name, part in self._module.named_modules():
            # The hook is gone once it has run.
            if isinstance(part, LazyModuleMixin) and hasattr(part, "_initialize_hook"):
                raise ConfigError(
                    f"Attempted to use an uninitialized parameter: those of {name or 'the module'} "
                    f"({type(part).__name__}) have no shape yet and cannot be copied to the "
                    "replicas of DataParallel. Run a dummy forward pass of the module first"
                )

    def _check_devices(self) -> None:
        first = self._devices[0]
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if tensor.device != first:
                raise ConfigError(
                    f"module must have its parameters and buffers on device {first} "
                    "(device_ids[0]) but found one of them on device: "
                    f"{tensor.device} ({name}). Call module.to('{first}') before wrapping it"
                )

    # --- 1: refresh ------------------------------------------------------------------------------
    def _refresh(self, streams: Sequence[torch.Stream]) -> list[nn.Module]:
        parameters = [
            *self._module.parameters(),
            *(buffer for buffer in self._module.buffers() if buffer.requires_grad),
        ]
        copies = [_copies_on(parameters, stream, streams[0]) for stream in streams]
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            apply: Callable[..., tuple[torch.Tensor, ...]] = BroadcastParameters.apply
            flat = apply(copies, list(streams), *parameters)
            copies = [
                list(flat[i : i + len(parameters)])
                for i in range(0, len(flat), max(1, len(parameters)))
            ]
        return [
            _replica(
                self._module,
                dict(zip(map(id, parameters), tensors, strict=True)),
                device,
                stream,
                streams[0],
            )
            for tensors, device, stream in zip(copies, self._devices, streams, strict=False)
        ]

    # --- 2: scatter ------------------------------------------------------------------------------
    def _scatter(
        self, split: SplitInputs, replica: int, streams: Sequence[torch.Stream]
    ) -> tuple[Any, Any]:
        device, stream = self._devices[replica], streams[replica]
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = torch.Stream(device)
        shares = [
            _transfer(split.share(index, replica), device, side, stream)
            for index in range(len(split.leaves))
        ]
        args_and_kwargs: tuple[Any, Any] = unflatten(split.spec, shares)
        return args_and_kwargs

    # --- 3: run ----------------------------------------------------------------------------------
    def _run_all(
        self,
        modules: Sequence[nn.Module],
        shares: Sequence[tuple[Any, Any]],
        streams: Sequence[torch.Stream],
    ) -> list[Any]:
        modes = _CallerModes(streams[0].device.type)
        seed = (
            int(torch.randint(2**62, (), dtype=torch.int64))
            if self._module.training and len(streams) > 1
            else None
        )
        others: list[Future[Any]] = [
            self._threads.submit(
                _run, module, share, stream, modes, None if seed is None else seed + replica
            )
            for replica, (module, share, stream) in enumerate(
                zip(modules, shares, streams, strict=True)
            )
            if replica
        ]
        try:
            outputs = [_run(modules[0], shares[0], streams[0], None, None)]
        finally:
            # Waits for them: none may run on behind an exception.
            failures = [other.exception() for other in others]
        for replica, failure in enumerate(failures, 1):
            if failure is not None:
                failure.add_note(
                    f"raised in replica {replica} of DataParallel, on {self._devices[replica]}"
                )
                raise failure
        return outputs + [other.result() for other in others]

    # --- 4: gather -------------------------------------------------------------------------------
    def _gather(
        self, outputs: Sequence[Any], split: SplitInputs, streams: Sequence[torch.Stream]
    ) -> Any:
        flat = [flatten(output, opens=is_taken_apart_by_attributes) for output in outputs]
        for device, (_, leaves) in zip(self._devices, flat, strict=False):
            # Objects that know their device: it is where their tensors will be.
            leaves[:] = [
                self._output_device if isinstance(leaf, torch.device) and leaf == device else leaf
                for leaf in leaves
            ]
        replicas = [_described(spec, leaves) for spec, leaves in flat]
        plans = iter(plan_outputs(replicas, split, self._scalars))
        target = torch.accelerator.current_stream(self._output_device)
        for stream in streams:
            if stream != target:
                target.wait_stream(stream)
        gathered = []
        for parts in zip(*(leaves for _, leaves in flat), strict=True):
            if not isinstance(parts[0], torch.Tensor):
                gathered.append(parts[0])
                continue
            plan = next(plans)
            here = [
                part.to(self._output_device, non_blocking=part.device.type != "cpu")
                for part in parts
            ]
            for part in parts:
                if part.device != self._output_device and part.device.type != "cpu":
                    part.record_stream(target)
            gathered.append(_gather_leaf(plan, here))
        for stream in streams:  # the next step may overwrite what is still being read from
            if stream != target:
                stream.wait_stream(target)
        return unflatten(flat[0][0], gathered)


class BroadcastParameters(torch.autograd.Function):
    """Parameters in, their copies on all devices out.

    Backward sums the copies' gradients in the order of the devices. As in torch's class, a
    parameter that backward does not reach gets a gradient of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        copies: list[list[torch.Tensor]],
        streams: list[torch.Stream],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.streams, ctx.count, ctx.own = streams, len(parameters), copies[0]
        ctx.set_materialize_grads(False)
        outputs = tuple(copy.detach() for tensors in copies for copy in tensors)
        ctx.mark_non_differentiable(
            *(
                copy
                for index, copy in enumerate(outputs)
                if not parameters[index % len(parameters)].requires_grad
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        first = ctx.streams[0]
        here = torch.accelerator.current_stream(first.device)
        for stream in ctx.streams:
            if stream != here:
                here.wait_stream(stream)
        sums: list[torch.Tensor | None] = []
        for index in range(ctx.count):
            if not ctx.needs_input_grad[2 + index]:
                sums.append(None)
                continue
            terms = [term for term in gradients[index :: ctx.count] if term is not None]
            if not terms:
                sums.append(torch.zeros_like(ctx.own[index]))
                continue
            moved = [_to_device(term, first.device, here) for term in terms]
            total = moved[0]
            for term in moved[1:]:
                total = total + term
            sums.append(total)
        for stream in ctx.streams[1:]:
            stream.wait_stream(here)
        return (None, None, *sums)


def _to_device(gradient: torch.Tensor, device: torch.device, here: torch.Stream) -> torch.Tensor:
    if gradient.device == device:
        return gradient
    moved = gradient.to(device, non_blocking=True)
    for memory in (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,):
        memory.record_stream(here)
    return moved


def _copies_on(
    parameters: Sequence[torch.Tensor], stream: torch.Stream, home: torch.Stream
) -> list[torch.Tensor]:
    """The parameters on the device of `stream`, as they are now in the order of `home`.

    New ones for each forward: a change through `parameter.data` leaves no trace by which an earlier
    copy could be told to be up to date, and a graph may still hold it.
    """
    if stream.device == home.device:
        return [parameter.detach() for parameter in parameters]
    stream.wait_stream(home)
    with torch.no_grad(), stream:
        copies = [
            torch.empty_like(parameter, device=stream.device, requires_grad=False).copy_(
                parameter.detach(), non_blocking=True
            )
            for parameter in parameters
        ]
    # An optimizer step must not overwrite what is still being copied.
    home.wait_stream(stream)
    return copies


def _replica(
    module: nn.Module,
    tensors: Mapping[int, torch.Tensor],
    device: torch.device,
    stream: torch.Stream,
    home: torch.Stream,
) -> nn.Module:
    """A shallow copy of the module around other parameters.

    Attributes, hooks and modes are those of this moment.
    """
    parts = list(module.modules())
    copies = {id(part): part._replicate_for_data_parallel() for part in parts}
    buffers: dict[int, torch.Tensor] = {}
    is_home = stream.device == home.device
    for part in parts:
        copy = copies[id(part)]
        for name, child in part._modules.items():
            if child is not None:
                copy._modules[name] = copies[id(child)]
        for name, parameter in part._parameters.items():
            setattr(copy, name, None if parameter is None else tensors[id(parameter)])
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) in tensors:
                copy._buffers[name] = tensors[id(buffer)]
            elif buffer is not None and not is_home:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = _fresh_copy(buffer, device, stream, home)
                copy._buffers[name] = buffers[id(buffer)]
    whole: nn.Module = copies[id(module)]
    return whole


def _fresh_copy(
    buffer: torch.Tensor, device: torch.device, stream: torch.Stream, home: torch.Stream
) -> torch.Tensor:
    """Not kept: a graph may still hold the last one."""
    stream.wait_stream(home)
    with torch.no_grad(), stream:
        copy = torch.empty_like(buffer, device=device).copy_(buffer, non_blocking=True)
    home.wait_stream(stream)
    return copy


def _transfer(share: Any, device: torch.device, side: torch.Stream, stream: torch.Stream) -> Any:
    """Bring a tensor to its device, on the side stream; other objects stay what they are."""
    if not isinstance(share, torch.Tensor) or share.device == device:
        return share
    source = torch.accelerator.current_stream(share.device) if share.device.type != "cpu" else None
    if source is not None:
        side.wait_stream(source)
    side.wait_stream(stream)  # memory that is taken now may have been used there until now
    with side:
        transferred = share.to(device, non_blocking=True)
    stream.wait_stream(side)
    transferred.record_stream(stream)
    if source is not None:
        share.record_stream(side)
        source.wait_stream(side)
    return transferred


class _CallerModes:
    """Settings of the calling thread that hold in the device threads too."""

    def __init__(self, device_type: str) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in (device_type, "cpu")
            if torch.is_autocast_enabled(kind)
        ]

    def enter(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, cache in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))


def _run(
    module: nn.Module,
    share: tuple[Any, Any],
    stream: torch.Stream,
    modes: _CallerModes | None,
    seed: int | None,
) -> Any:
    args, kwargs = share
    with contextlib.ExitStack() as stack:
        stack.enter_context(ReplicaScope())
        if modes is not None:  # in a thread of ours, which knows nothing of the caller's settings
            torch.accelerator.set_device_index(stream.device.index)
            modes.enter(stack)
        stack.enter_context(stream)
        if seed is not None:
            state = torch.Generator(device=stream.device).manual_seed(seed).get_state()
            torch.get_device_module(stream.device).set_rng_state(state, stream.device)
        return module(*args, **kwargs)


def _described(spec: Spec, leaves: Sequence[Any]) -> ReplicaOutputs:
    are_tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return ReplicaOutputs(
        spec,
        are_tensors,
        [meta_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)],
        [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
    )


def _gather_leaf(plan: GatherPlan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if plan.kind is GatherKind.STACK:
        return torch.stack(tuple(tensors))
    if plan.kind is GatherKind.SAME:
        return plan.gather(tensors)
    if plan.kind is GatherKind.MEAN:
        terms = [tensor * weight for tensor, weight in zip(tensors, plan.weights, strict=True)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total
    return torch.cat(list(tensors), plan.dim)
