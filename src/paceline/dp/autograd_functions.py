"""Where the replicas meet the user's autograd graph.

    parameters --> ReplicaParameters --> [module on share 0] --> GatherOutputs --> outputs
    inputs ------> ScatterInput ------/                         /
                             [module on shares 1.. in workers] -

Backward goes from right to left: `GatherOutputs` sends each worker its part of the gradient and
lets it start, autograd runs share 0, then `ReplicaParameters` and `ScatterInput` add what the
workers computed. Hooks, accumulation, `inputs=`, `autograd.grad`, `retain_graph` and optimizers see
an ordinary graph. `ReplicaParameters` is one node for all forwards: its outputs last.

A worker has no parameters to go on to: its gradients end in `CaptureGradients`, all in one place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline._interpreter import reference_count
from paceline._torch_internals import cpp_reference_count, storage_users

__all__ = [
    "CaptureGradients",
    "GatherOutputs",
    "Gradients",
    "GradientSummation",
    "RemoteCall",
    "ReplicaParameters",
    "ScatterInput",
    "exclusively_owned",
    "refuse_create_graph",
]

Gradients = Sequence[torch.Tensor | None]


class RemoteCall(Protocol):
    """One forward that runs on several replicas."""

    def own_share(self, index: int) -> torch.Tensor:
        """Share 0 of input leaf `index`, as a tensor of its own."""

    def gather_outputs(self, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of all replicas, gathered."""

    def differentiable(self) -> Sequence[bool]:
        """Which gathered outputs have gradients."""

    def start_backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Let the workers start; the gradients of share 0."""

    def input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the whole input leaf `index`."""


class GradientSummation(Protocol):
    """Who adds up the gradients of parameters."""

    def sums(self, own: Gradients) -> Gradients:
        """The sums over all replicas of what the calls of this backward computed."""


class ReplicaParameters(torch.autograd.Function):
    """Parameters on their way into share 0.

    The last output is an anchor, which ties `GatherOutputs` to this node.
    """

    @staticmethod
    def forward(
        ctx: Any, summation: GradientSummation, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.summation = summation
        ctx.set_materialize_grads(False)
        _references_of_fresh_gradient(), _references_of_base()
        return (*(parameter.detach() for parameter in parameters), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return (None, *ctx.summation.sums(gradients[:-1]))


class CaptureGradients(torch.autograd.Function):
    """Parameters of a worker: `captured` gets the gradients of each backward that comes here."""

    @staticmethod
    def forward(
        ctx: Any, captured: list[Gradients], parameters: Sequence[torch.Tensor], root: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.captured.append(gradients)
        return None, None, None


class ScatterInput(torch.autograd.Function):
    """An input that requires a gradient, on its way into share 0."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, index: int, whole: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.index = call, index
        ctx.set_materialize_grads(False)
        return call.own_share(index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return None, None, ctx.call.input_gradient(ctx.index, gradients[0])


class GatherOutputs(torch.autograd.Function):
    """Outputs of share 0 in, outputs of the whole batch out."""

    @staticmethod
    def forward(
        ctx: Any, call: RemoteCall, anchor: torch.Tensor, *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        gathered = call.gather_outputs(own)
        constant = [
            tensor
            for tensor, has_gradient in zip(gathered, call.differentiable(), strict=True)
            if not has_gradient
        ]
        if constant:
            ctx.mark_non_differentiable(*constant)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return (None, None, *ctx.call.start_backward(gradients))


def exclusively_owned(gradients: Gradients) -> list[bool]:
    """Which of them only the backward that was called with them refers to.

    Those may be added to in place. Another node's input, a hook that kept it, a view of it would
    each be one reference more. To be called with the tuple that `ReplicaParameters.backward` got,
    without its last.
    """
    limit, base_limit = _references_of_fresh_gradient(), _references_of_base()
    owned = []
    for references, gradient in zip(_references(gradients), gradients, strict=True):
        if references > limit or gradient is None or gradient.is_sparse:
            owned.append(False)
            continue
        # The gradient of a Linear's weight is a transposed view of a tensor nobody else has.
        base = gradient._base
        # The tensor's reference, its base's, and that of the storage made for this question.
        holders = 2 if base is None else 3
        owned.append(
            storage_users(gradient) <= holders
            and (base is None or reference_count(base) + cpp_reference_count(base) <= base_limit)
        )
    return owned


@functools.cache
def _references_of_base() -> int:
    """The references of a base that only its view has, as `exclusively_owned` counts."""
    with torch.no_grad():
        view = torch.zeros(2, 2).t()
    base = view._base
    assert base is not None
    return reference_count(base) + cpp_reference_count(base)


@functools.cache
def _references_of_fresh_gradient() -> int:
    """The references of a gradient that nobody keeps, as `_references` counts.

    It depends on the version of torch, so it is measured.
    """
    with torch.enable_grad():
        outputs = _Probe.apply(torch.zeros(1, requires_grad=True))  # type: ignore[no-untyped-call]
        outputs[0].sum().mul(2).backward()
    return _Probe.references


class _Probe(torch.autograd.Function):
    """Counts the references of a gradient in the way, and at the depth, of `ReplicaParameters`."""

    references = 0

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.clone(), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _Probe.references = min(_references(gradients[:-1]))
        return gradients[0]


def _references(gradients: Gradients) -> list[int]:
    return [reference_count(gradient) for gradient in gradients]


def refuse_create_graph() -> None:
    """Raise if this backward was asked for a graph of itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "DataParallel cannot be differentiated twice: create_graph=True needs the graphs of "
            "all replicas in this process. Take second derivatives inside the module's forward, or "
            "call `model.module` for such steps"
        )
