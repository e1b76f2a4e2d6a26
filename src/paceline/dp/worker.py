"""What a worker process does: forward on its share, keep the graph, backward when asked.

    wait for a raised flag --> seed, or order --> forward | backward --> answer --> wait ...

The main process is the only one that waits for a worker, and a worker waits for nothing but the
next order (and, with global batch normalisation, for sums). Tensors of an order are copied before
the module sees them, because graphs outlive the order. Graphs are kept by the number of the call
until its backward, or until a later order releases them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline._pytree import (
    flatten,
    is_flat_call,
    is_taken_apart_by_attributes,
    leaf_paths,
    unflatten,
)
from paceline._torch_internals import run_backward
from paceline.dp import serialization
from paceline.dp.channel import Channel, Inbox, Message, MessageLayout, Outbox
from paceline.dp.global_batch_norm import GlobalBatchNorm, StatisticsExchange
from paceline.dp.gradients import GradientCapture, GradientRegion, encode_gradients
from paceline.dp.module_buffers import ModuleBuffers
from paceline.dp.module_snapshot import apply_updates
from paceline.dp.protocol import Answer, Modes, Order, TensorMeta, Update, meta_of, source_of
from paceline.dp.replica_scope import stay_inside_replica
from paceline.dp.shared_parameters import SharedParameters
from paceline.errors import ConfigError

__all__ = ["WorkerSetup", "serve"]

_DONE = (Answer.DONE.value,)
_NO_CONTEXT: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """What workers inherit from the main process."""

    module: nn.Module
    parameters: SharedParameters
    regions: Sequence[GradientRegion]  # for gradients, one per worker
    buffers: ModuleBuffers
    exchange: StatisticsExchange | None
    threads: int


@dataclasses.dataclass
class _Graph:
    """What a forward left for its backward."""

    outputs: Sequence[torch.Tensor]
    capture: GradientCapture
    inputs: Sequence[torch.Tensor]


class _Reply(NamedTuple):
    layout: MessageLayout
    tensors: Sequence[torch.Tensor] = ()
    objects: Sequence[Any] = ()


def serve(
    setup: WorkerSetup, replica: int, channel: Channel, main_pid: int, main_pidfd: int
) -> None:
    """Follow orders until the main process ends."""
    stay_inside_replica()

    def loop() -> None:
        torch.set_num_threads(setup.threads)
        # The main process may have forked in the middle of other modes; each forward brings its
        # own.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            _follow_orders(setup, replica, channel, main_pid, main_pidfd)

    if setup.threads == 1:
        # Before anything else: the OpenMP threads of the parent do not exist here.
        torch.set_num_threads(1)
        loop()
    else:
        # A new thread has no OpenMP team yet and starts one; the forked thread would use its
        # parent's team, whose threads do not exist here, and hang.
        fresh = threading.Thread(target=loop, name="paceline-replica")
        fresh.start()
        fresh.join()


def _follow_orders(
    setup: WorkerSetup, replica: int, channel: Channel, main_pid: int, main_pidfd: int
) -> None:
    inbox = Inbox(main_pid, channel.order_notice)
    outbox = Outbox(channel.answers, channel.answer_notice)
    exchange = setup.exchange
    batch_norm = _NO_CONTEXT
    if exchange is not None:
        batch_norm = GlobalBatchNorm(
            lambda vector: exchange.sum_in_worker(vector, replica, main_pidfd)
        )
    worker = _Replica(setup, setup.regions[replica - 1], outbox, batch_norm)
    orders, spin_ns = channel.orders, channel.spin_ns
    while orders.wait(main_pidfd, spin_ns):
        seed = inbox.seed(orders.seen)
        if seed is not None:
            _seed_generators(seed + replica)
            continue
        succeeded = _answer(worker, inbox, outbox)
        # Freeing a graph takes time. Done after the answer, it overlaps with the main process's
        # work and is not part of the step.
        worker.spent.clear()
        if exchange is not None and not succeeded:
            exchange.report_failure(replica)


def _answer(worker: _Replica, inbox: Inbox, outbox: Outbox) -> bool:
    """Follow one order; False if that failed."""
    call = 0
    try:
        order = inbox.read()
        call = order.call
        layout, tensors, objects = worker.follow(order, inbox)
        sources = [*map(source_of, tensors)]
        _flush_output()
        try:
            outbox.send(_DONE, call, layout, sources, objects, is_repeatable=True)
        except ConfigError as error:
            raise _named(error, layout, objects) from error
        return True
    except serialization.UnknownObject as unknown:
        values: tuple[Any, ...] = (Answer.STALE.value, str(unknown), b"")
    except BaseException as error:
        text = traceback.format_exc()
        values = (Answer.FAILED.value, text, serialization.dump_exception(error))
        del error
    _flush_output()
    outbox.send(values, call, outbox.layout((), ()))
    return False


def _named(error: ConfigError, layout: MessageLayout, objects: Sequence[Any]) -> ConfigError:
    """Which output it is that cannot be sent to the main process."""
    spec, are_tensors = layout.spec
    leaves = zip(leaf_paths(spec, "outputs"), are_tensors, strict=True)
    paths = [path for path, is_tensor in leaves if not is_tensor]
    for path, value in zip(paths, objects, strict=True):
        try:
            serialization.dumps(value)
        except ConfigError as reason:
            return ConfigError(
                f"{path}, a {type(value).__name__}, cannot be gathered from the workers of "
                f"DataParallel: {reason.__cause__}. Return tensors, or objects that can be pickled "
                "and are equal in all replicas"
            )
    return error


def _flush_output() -> None:
    """What the module printed is there before the forward returns."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or replaced by the user; contextlib.suppress would take longer
            continue


class _Replica:
    """The module in this process, and the graphs of forwards whose backward may come.

    `spent` is freed when the main process has its answer.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        region: GradientRegion,
        outbox: Outbox,
        batch_norm: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._module = setup.module
        self._parts = list(setup.module.modules())
        self._slots = setup.parameters.slots
        self._buffers = setup.buffers
        self._region = region
        self._outbox = outbox
        self._batch_norm = batch_norm
        self._graphs: dict[int, _Graph] = {}
        self._modes_in_force: tuple[Any, ...] = ()  # default ones, which need no context
        self.spent: list[Any] = []
        for parameter in setup.parameters.tensors:
            parameter.grad = None
            # Hooks are for the sum over all replicas and run in the main process.
            for hooks in (
                parameter._backward_hooks,
                getattr(parameter, "_post_accumulate_grad_hooks", None),
            ):
                if hooks:
                    hooks.clear()
        self._capture = GradientCapture.install(self._slots, region)

    def follow(self, order: Message, inbox: Inbox) -> _Reply:
        kind, releases, *details = order.values
        for call in releases:
            self._graphs.pop(call, None)
        if kind == Order.FORWARD:
            return self._forward(order, inbox, *details)
        return self._backward(order, inbox, *details)

    def _forward(
        self,
        order: Message,
        inbox: Inbox,
        modes: tuple[Any, ...],
        updates: Sequence[Update],
        requires_grad: Sequence[tuple[int, bool]],
    ) -> _Reply:
        layout = order.layout
        structure, are_tensors = layout.spec
        tensors = inbox.tensors(layout)
        if updates or requires_grad:
            self._apply_changes(updates, requires_grad)
        self._buffers.restore()
        with self._in_modes(modes), self._batch_norm:
            inputs = [*map(_own_copy, tensors, layout.metas)]
            leaves: list[Any] = inputs
            if len(tensors) < len(are_tensors):
                leaves = _interleaved(are_tensors, inputs, order.objects)
            if layout.is_flat_call is None:
                layout.is_flat_call = is_flat_call(structure)
            if layout.is_flat_call:
                outputs = self._module(*leaves)
            else:
                args, kwargs = unflatten(structure, leaves)
                outputs = self._module(*args, **kwargs)
                del args, kwargs
            del leaves
        return self._reply_with(order.call, outputs, inputs)

    def _reply_with(self, call: int, outputs: Any, inputs: Sequence[torch.Tensor]) -> _Reply:
        spec, leaves = flatten(outputs, opens=is_taken_apart_by_attributes)
        are_tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        objects: Sequence[Any] = ()
        if len(tensors) < len(leaves):
            objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        metas = tuple(map(meta_of, tensors))
        if any(meta.requires_grad for meta in metas):
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            self._graphs[call] = _Graph(tensors, self._capture, wanted)
        return _Reply(self._outbox.layout((spec, are_tensors), metas), tensors, objects)

    def _in_modes(self, values: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
        if values == self._modes_in_force:
            return _NO_CONTEXT
        modes = Modes(*values)
        context = modes.entered()
        self._modes_in_force = values if modes.are_default() else ()
        return context

    def _apply_changes(
        self, updates: Sequence[Update], requires_grad: Sequence[tuple[int, bool]]
    ) -> None:
        apply_updates(self._parts, updates)
        for index, flag in requires_grad:
            self._slots[index].parameter.requires_grad_(flag)
        if requires_grad:
            # A new one: graphs keep that of their forward.
            self._capture = GradientCapture.install(self._slots, self._region)

    def _backward(self, order: Message, inbox: Inbox, keeps_graph: bool) -> _Reply:
        (present,) = order.layout.spec
        graph = self._graphs[order.call] if keeps_graph else self._graphs.pop(order.call)
        self.spent.append(graph)
        reached = [
            output for output, is_there in zip(graph.outputs, present, strict=True) if is_there
        ]
        pairs = [
            (output, gradient)
            for output, gradient in zip(reached, inbox.tensors(order.layout), strict=True)
            if output.requires_grad
        ]
        try:
            if pairs:
                run_backward(
                    tuple(output for output, _ in pairs),
                    tuple(gradient for _, gradient in pairs),
                    keeps_graph,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            input_gradients = [tensor.grad for tensor in graph.inputs]
        finally:
            # Also after a failure: gradients that stayed would be added to the next backward's.
            gradients = graph.capture.take()
            self.spent.append(gradients)
            for tensor in graph.inputs:
                tensor.grad = None
        spec, sent = encode_gradients(graph.capture.views, gradients, input_gradients)
        metas = tuple(TensorMeta(tensor.dtype, tuple(tensor.shape)) for tensor in sent)
        return _Reply(self._outbox.layout(spec, metas), sent)


def _interleaved(
    are_tensors: Sequence[bool], tensors: Sequence[torch.Tensor], objects: Sequence[Any]
) -> list[Any]:
    next_tensor, next_object = iter(tensors), iter(objects)
    return [next(next_tensor) if is_tensor else next(next_object) for is_tensor in are_tensors]


def _own_copy(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy: the channel is used for the next order while graphs still hold this one."""
    copy = tensor.clone()
    return copy.requires_grad_() if meta.requires_grad else copy


def _seed_generators(seed: int) -> None:
    """All generators a module may draw from: replicas differ, and a run can be repeated."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
