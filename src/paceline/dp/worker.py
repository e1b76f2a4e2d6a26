"""What a worker process does: forward on its share, keep the graph, backward when asked."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.dp import wire
from paceline.dp.combine import TensorMeta
from paceline.dp.crew import Link
from paceline.dp.mailbox import Inbox, Message, Outbox, meta_of
from paceline.dp.parameters import SharedParameters
from paceline.dp.structure import flatten, unflatten
from paceline.dp.watch import apply_updates

__all__ = ["BACKWARD", "DENSE", "DONE", "FAILED", "FORWARD", "NOTHING", "STALE", "Modes", "serve"]

# Orders.
FORWARD = 1
BACKWARD = 2
# Answers.
DONE = 0
FAILED = 1
STALE = 2
# Kinds of gradients.
NOTHING = 0
DENSE = 1


@dataclasses.dataclass
class Modes:
    """Torch's settings that a forward runs under."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: str
    autocast_cache: bool
    deterministic: bool

    @classmethod
    def here(cls) -> tuple[Any, ...]:
        """The main process's settings, as plain values."""
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")).removeprefix("torch."),
            torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Any:
        """The same settings in this process."""
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)
        dtype = getattr(torch, self.autocast_dtype)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=self.autocast_cache))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


@dataclasses.dataclass
class _Graph:
    """What a forward left for its backward."""

    outputs: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]


def serve(
    module: nn.Module,
    parameters: SharedParameters,
    buffers: Sequence[tuple[dict[str, Any], str]],
    threads: int,
    replica: int,
    link: Link,
    main_pid: int,
    main_pidfd: int,
) -> None:
    """Follow orders until the main process ends."""
    worker = _Replica(module, parameters, buffers, replica)

    def loop() -> None:
        torch.set_num_threads(threads)
        inbox, outbox = Inbox(main_pid, link.to_worker), Outbox(link.to_main)
        while link.go.wait(main_pidfd, link.spin_ns):
            _answer(worker, inbox, outbox)
            link.done.raise_()

    if threads == 1:
        torch.set_num_threads(1)  # before anything else: the OpenMP threads of the parent do not exist here
        loop()
    else:
        # A thread that is new has no OpenMP team yet and starts one; the forked one believes in its parent's.
        fresh = threading.Thread(target=loop, name="paceline-replica")
        fresh.start()
        fresh.join()


def _answer(worker: _Replica, inbox: Inbox, outbox: Outbox) -> None:
    try:
        order = inbox.read()
        reply, tensors, metas = worker.follow(order, inbox)
        outbox.write(reply, tensors, metas)
    except wire.Unknown as unknown:
        outbox.write(Message((STALE, str(unknown), b""), (), []), [], [])
    except BaseException as error:
        text = traceback.format_exc()
        outbox.write(Message((FAILED, text, _pickled(error)), (), []), [], [])
        del error
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _pickled(error: BaseException) -> bytes:
    """The exception itself where it survives the journey, else nothing."""
    try:
        data = wire.dumps([error])
        found = wire.loads(data)[0]
        return data if type(found) is type(error) else b""
    except Exception:
        return b""


class _Replica:
    def __init__(
        self,
        module: nn.Module,
        parameters: SharedParameters,
        buffers: Sequence[tuple[dict[str, Any], str]],
        replica: int,
    ) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._parameters = parameters.tensors
        self._buffers = buffers
        self._replica = replica
        self._graphs: dict[int, _Graph] = {}
        for parameter in self._parameters:
            parameter.grad = None
            # Hooks are for the sum over all replicas and run in the main process.
            for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                if hooks:
                    hooks.clear()
        _seed_numpy(replica)

    def follow(self, order: Message, inbox: Inbox) -> tuple[Message, list[torch.Tensor], list[TensorMeta]]:
        kind, releases = order.fixed[0], order.fixed[1]
        for token in releases:
            self._graphs.pop(token, None)
        return self._forward(order, inbox) if kind == FORWARD else self._backward(order, inbox)

    def _forward(self, order: Message, inbox: Inbox) -> tuple[Message, list[torch.Tensor], list[TensorMeta]]:
        _, _, token, seed, modes, updates, thawed, buffers = order.fixed
        structure, kinds, metas, buffer_metas = order.spec
        tensors = inbox.tensors((*metas, *buffer_metas))
        self._take_over(updates, thawed, buffers, tensors[len(metas) :])
        torch.default_generator.manual_seed(seed + self._replica)
        random.seed(seed + self._replica)
        modes = Modes(*modes)
        with modes.entered():
            given = [_own(tensor, meta) for tensor, meta in zip(tensors, metas, strict=False)]
            objects, shares = iter(order.objects), iter(given)
            args, kwargs = unflatten(structure, [next(shares) if is_tensor else next(objects) for is_tensor in kinds])
            outputs = self._module(*args, **kwargs)
            del args, kwargs
        spec, leaves = flatten(outputs)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs = [tensor for tensor in given if tensor.requires_grad]
        if any(tensor.requires_grad for tensor in found):
            wanted = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._graphs[token] = _Graph(found, wanted, inputs)
        out_metas = tuple(meta_of(tensor) for tensor in found)
        out_kinds = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        return Message((DONE,), (spec, out_kinds, out_metas), others), found, list(out_metas)

    def _take_over(self, updates: Any, thawed: Any, buffers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        apply_updates(self._parts, updates)
        for index, requires_grad in thawed:
            self._parameters[index].requires_grad_(requires_grad)
        with torch.no_grad():
            for index, value in zip(buffers, values, strict=True):
                holder, name = self._buffers[index]
                holder[name] = value.clone()  # not in place: a graph may still use the old one

    def _backward(self, order: Message, inbox: Inbox) -> tuple[Message, list[torch.Tensor], list[TensorMeta]]:
        _, _, token, keep = order.fixed
        present, metas = order.spec
        graph = self._graphs[token] if keep else self._graphs.pop(token)
        asked = [output for output, there in zip(graph.outputs, present, strict=True) if there]
        given = zip(asked, inbox.tensors(metas), strict=True)
        pairs = [(output, gradient) for output, gradient in given if output.requires_grad]
        wanted = [*graph.parameters, *graph.inputs]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                retain_graph=keep,
                allow_unused=True,
            )
        return _gradients(found, len(graph.parameters))


def _gradients(
    found: Sequence[torch.Tensor | None], parameters: int
) -> tuple[Message, list[torch.Tensor], list[TensorMeta]]:
    kinds: list[Any] = []  # a sparse gradient is told by its shape
    tensors: list[torch.Tensor] = []
    for gradient in found:
        if gradient is None:
            kinds.append(NOTHING)
        elif gradient.is_sparse:
            kinds.append(tuple(gradient.shape))
            together = gradient.coalesce()
            tensors += [together.indices(), together.values()]
        else:
            kinds.append(DENSE)
            tensors.append(gradient)
    metas = tuple(TensorMeta(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    return Message((DONE,), (tuple(kinds), metas, parameters), []), tensors, list(metas)


def _own(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy: the box is used for the next message while graphs still hold this one."""
    copy = tensor.clone(memory_format=torch.preserve_format)
    return copy.requires_grad_() if meta.requires_grad else copy


def _seed_numpy(replica: int) -> None:
    """Once: forked workers would all draw the same numbers. What torch draws is seeded at each forward."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()[1]
        numpy.random.seed((int(state[0]) + replica) % 2**32)
