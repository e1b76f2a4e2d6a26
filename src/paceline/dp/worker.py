"""What a worker process does: forward on its share, keep the graph, backward when asked."""

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

from paceline.dp import serialization
from paceline.dp.autograd_functions import Caught, Gradients
from paceline.dp.channel import Form, Inbox, Message, Outbox, meta_of, source_of
from paceline.dp.gather import TensorMeta
from paceline.dp.global_batch_norm import MeetingPoint, WholeBatch
from paceline.dp.module_snapshot import apply_updates
from paceline.dp.shared_parameters import GradientPlaces, GradientRoom, SharedParameters, Slot
from paceline.dp.structure import flatten, is_flat_call, unflatten
from paceline.dp.worker_pool import Link

__all__ = [
    "ALL_DENSE",
    "BACKWARD",
    "DENSE",
    "DONE",
    "FAILED",
    "FORWARD",
    "NOTHING",
    "STALE",
    "Modes",
    "serve",
]

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
ALL_DENSE = -1  # in place of a list of kinds: of every parameter, and no input wants one


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
        autocast = torch.is_autocast_enabled("cpu")
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            str(torch.get_autocast_dtype("cpu")).removeprefix("torch.") if autocast else "",
            autocast and torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def are_usual(self) -> bool:
        """Whether they are those of a worker that does nothing."""
        return self.grad and not self.inference and not self.autocast

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The same settings in this process."""
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)
        if not self.inference and not self.autocast:
            return torch.set_grad_enabled(self.grad)
        stack = contextlib.ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        if self.autocast:
            dtype = getattr(torch, self.autocast_dtype)
            stack.enter_context(
                torch.autocast("cpu", dtype=dtype, cache_enabled=self.autocast_cache)
            )
        stack.enter_context(torch.set_grad_enabled(self.grad))
        return stack


@dataclasses.dataclass
class _Net:
    """Catches the gradients of the parameters that require one. The module computes with stand-ins
    that lead here.
    """

    parameters: list[torch.Tensor]
    places: GradientPlaces
    found: list[
        Gradients
    ]  # one for each time a backward came here: once, unless the module's own backwards do
    direct: list[
        torch.Tensor
    ]  # parameters that code had itself, as LSTMs do: their gradients did not come here

    @classmethod
    def spread(cls, slots: Sequence[Slot], room: GradientRoom) -> _Net:
        wanted = [index for index, slot in enumerate(slots) if slot.parameter.requires_grad]
        net = cls(
            [slots[index].parameter for index in wanted], GradientPlaces(room, wanted), [], []
        )
        root = torch.empty(0, requires_grad=True)
        stand_ins = iter(Caught.apply(net.found, net.parameters, root) if wanted else ())  # type: ignore[no-untyped-call]  # torch's
        for parameter in net.parameters:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                hooks.clear()  # of an earlier net
            parameter.register_post_accumulate_grad_hook(net.direct.append)
        for slot in slots:
            tensor = next(stand_ins) if slot.parameter.requires_grad else slot.parameter
            for holder, name in slot.places:
                holder[name] = tensor
        return net

    def take(self) -> Gradients:
        """What was found since the last time, for each parameter."""
        if len(self.found) == 1 and not self.direct:
            return self.found.pop()  # the usual case
        sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        for more in self.found:
            _add(sums, more)
        if self.direct:
            _add(sums, [parameter.grad for parameter in self.parameters])
            for parameter in self.direct:
                parameter.grad = None
        self.found.clear()
        self.direct.clear()
        return sums


def _add(sums: list[torch.Tensor | None], more: Gradients) -> None:
    for index, term in enumerate(more):
        if term is not None:
            before = sums[index]
            sums[index] = term if before is None else before + term


@dataclasses.dataclass
class _Graph:
    """What a forward left for its backward."""

    outputs: Sequence[torch.Tensor]
    net: _Net
    inputs: Sequence[torch.Tensor]


_run_backward = (
    torch.autograd.Variable._execution_engine.run_backward
)  # what torch.autograd.backward ends in
_NO_CONTEXT: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class _Reply(NamedTuple):
    form: Form
    tensors: Sequence[torch.Tensor] = ()
    objects: Sequence[Any] = ()


def serve(
    module: nn.Module,
    parameters: SharedParameters,
    room: GradientRoom,
    buffers: Sequence[tuple[dict[str, Any], str]],
    meeting: MeetingPoint | None,
    threads: int,
    replica: int,
    link: Link,
    main_pid: int,
    main_pidfd: int,
) -> None:
    """Follow orders until the main process ends."""

    def loop() -> None:
        torch.set_num_threads(threads)
        # The main process may have forked in the middle of other modes; each forward's are told.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            follow_orders()

    def follow_orders() -> None:
        inbox, outbox = Inbox(main_pid, link.to_worker), Outbox(link.to_main)
        worker = _Replica(module, parameters, room, buffers, outbox)
        if meeting is not None:
            worker.whole_batch = WholeBatch(
                lambda vector: meeting.sum_in_worker(vector, replica, main_pidfd)
            )
        while link.go.wait(main_pidfd, link.spin_ns):
            seed = inbox.seed(link.go.seen)
            if seed is not None:
                _seed_replica(seed, replica)
                continue
            is_well = _answer(worker, inbox, outbox)
            link.done.raise_()
            worker.spent.clear()
            if meeting is not None and not is_well:
                meeting.give_up(replica)

    if threads == 1:
        torch.set_num_threads(
            1
        )  # before anything else: the OpenMP threads of the parent do not exist here
        loop()
    else:
        # A thread that is new has no OpenMP team yet and starts one; the forked one believes in its
        # parent's.
        fresh = threading.Thread(target=loop, name="paceline-replica")
        fresh.start()
        fresh.join()


def _answer(worker: _Replica, inbox: Inbox, outbox: Outbox) -> bool:
    """Follow one order; False if that failed."""
    is_well = False
    try:
        reply = worker.follow(inbox.read(), inbox)
        outbox.write((DONE,), reply.form, [*map(source_of, reply.tensors)], reply.objects)
        is_well = True
    except serialization.Unknown as unknown:
        outbox.write((STALE, str(unknown), b""), outbox.form((), ()))
    except BaseException as error:
        text = traceback.format_exc()
        outbox.write((FAILED, text, _pickled(error)), outbox.form((), ()))
        del error
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or replaced by the user; contextlib.suppress would take longer
            continue
    return is_well


def _pickled(error: BaseException) -> bytes:
    """The exception as it survives the journey: itself, or its class, arguments and attributes, or
    nothing.
    """
    for parts in (
        error,
        serialization.Bare.of(error),
        serialization.Bare(type(error), error.args, {}),
    ):
        try:
            data = serialization.dumps([parts])
            if type(serialization.rebuilt(serialization.loads(data)[0])) is type(error):
                return data
        except Exception:
            continue
    return b""


class _Replica:
    def __init__(
        self,
        module: nn.Module,
        parameters: SharedParameters,
        room: GradientRoom,
        buffers: Sequence[tuple[dict[str, Any], str]],
        outbox: Outbox,
    ) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._slots = parameters.slots
        self._room = room
        self._buffers = buffers
        self._outbox = outbox
        self.whole_batch = _NO_CONTEXT
        self._graphs: dict[int, _Graph] = {}
        self._usual: tuple[Any, ...] = ()  # modes that hold anyway
        self.spent: list[Any] = []  # freed when the main process has its answer
        for parameter in parameters.tensors:
            parameter.grad = None
            # Hooks are for the sum over all replicas and run in the main process.
            for hooks in (
                parameter._backward_hooks,
                getattr(parameter, "_post_accumulate_grad_hooks", None),
            ):
                if hooks:
                    hooks.clear()
        self._net = _Net.spread(self._slots, room)

    def follow(self, order: Message, inbox: Inbox) -> _Reply:
        kind, releases = order.fixed[0], order.fixed[1]
        for token in releases:
            self._graphs.pop(token, None)
        return self._forward(order, inbox) if kind == FORWARD else self._backward(order, inbox)

    def _forward(self, order: Message, inbox: Inbox) -> _Reply:
        _, _, token, modes, updates, thawed, buffers = order.fixed
        structure, kinds = order.form.spec
        tensors = inbox.tensors(order.form)
        shares = len(tensors) - len(buffers)
        if updates or thawed or buffers:
            self._take_over(updates, thawed, buffers, tensors[shares:])
        with self._under(modes), self.whole_batch:
            given = [*map(_own, tensors[:shares], order.form.metas)]
            leaves = given if shares == len(kinds) else _interleaved(kinds, given, order.objects)
            if order.form.is_flat is None:
                order.form.is_flat = is_flat_call(structure)
            if order.form.is_flat:
                outputs = self._module(*leaves)
            else:
                args, kwargs = unflatten(structure, leaves)
                outputs = self._module(*args, **kwargs)
                del args, kwargs
            del leaves
        spec, leaves = flatten(outputs)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = (
            [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
            if len(found) < len(leaves)
            else ()
        )
        out_metas = tuple(map(meta_of, found))
        if any(meta.requires_grad for meta in out_metas):
            inputs = [tensor for tensor in given if tensor.requires_grad]
            self._graphs[token] = _Graph(found, self._net, inputs)
        return _Reply(self._outbox.form(spec, out_metas), found, others)

    def _under(self, told: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
        if told == self._usual:
            return _NO_CONTEXT
        modes = Modes(*told)
        entered = modes.entered()
        self._usual = told if modes.are_usual() else ()
        return entered

    def _take_over(
        self, updates: Any, thawed: Any, buffers: Sequence[int], values: Sequence[torch.Tensor]
    ) -> None:
        apply_updates(self._parts, updates)
        for index, requires_grad in thawed:
            self._slots[index].parameter.requires_grad_(requires_grad)
        if thawed:
            self._net = _Net.spread(
                self._slots, self._room
            )  # a new one: graphs keep that of their forward
        with torch.no_grad():
            for index, value in zip(buffers, values, strict=True):
                holder, name = self._buffers[index]
                holder[name] = value.clone()  # not in place: a graph may still use the old one

    def _backward(self, order: Message, inbox: Inbox) -> _Reply:
        _, _, token, keep = order.fixed
        (present,) = order.form.spec
        graph = self._graphs[token] if keep else self._graphs.pop(token)
        self.spent.append(graph)
        asked = [output for output, there in zip(graph.outputs, present, strict=True) if there]
        given = zip(asked, inbox.tensors(order.form), strict=True)
        pairs = [(output, gradient) for output, gradient in given if output.requires_grad]
        try:
            if pairs:
                _run_backward(
                    tuple(output for output, _ in pairs),
                    tuple(gradient for _, gradient in pairs),
                    keep,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            inputs = [tensor.grad for tensor in graph.inputs]
        finally:
            found = graph.net.take()
            self.spent.append(found)
            for tensor in graph.inputs:
                tensor.grad = None
        return self._gradients(graph.net.places, found, inputs)

    def _gradients(
        self, places: GradientPlaces, parameters: Gradients, inputs: Gradients
    ) -> _Reply:
        """Dense gradients of parameters into their places, the others into the message."""
        count = len(parameters)
        if not inputs and (addresses := places.like_these(parameters)) is not None:
            places.fill(addresses)  # the usual case, in as few steps as possible
            return _Reply(self._outbox.form((ALL_DENSE, count), ()))
        kinds: list[Any] = []  # a sparse gradient is told by its shape
        dense: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        for index, gradient in enumerate((*parameters, *inputs)):
            if gradient is None:
                kinds.append(NOTHING)
            elif gradient.is_sparse:
                kinds.append(tuple(gradient.shape))
                together = gradient.coalesce()
                sent += [together.indices(), together.values()]
            else:
                kinds.append(DENSE)
                if index < count:
                    dense.append(gradient)
                    targets.append(places.tensors[index])
                else:
                    sent.append(gradient)
        if dense:
            with torch.no_grad():
                torch._foreach_copy_(targets, dense)
        metas = tuple(TensorMeta(tensor.dtype, tuple(tensor.shape)) for tensor in sent)
        return _Reply(self._outbox.form((tuple(kinds), count), metas), sent)


def _interleaved(
    kinds: Sequence[bool], tensors: Sequence[torch.Tensor], objects: Sequence[Any]
) -> list[Any]:
    shares, others = iter(tensors), iter(objects)
    return [next(shares) if is_tensor else next(others) for is_tensor in kinds]


def _own(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy: the box is used for the next message while graphs still hold this one."""
    copy = tensor.clone()
    return copy.requires_grad_() if meta.requires_grad else copy


def _seed_replica(seed: int, replica: int) -> None:
    """All generators that a module may draw from, so that replicas differ and a run can be
    repeated.
    """
    torch.default_generator.manual_seed(seed + replica)
    random.seed(seed + replica)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + replica) % 2**32)
