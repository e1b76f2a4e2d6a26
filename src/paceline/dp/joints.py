"""Where the replicas meet the user's autograd graph.

    parameters --> Parameters --> [module on share 0] --> Join --> gathered outputs
    inputs     --> Share -----/                          /
                       [module on shares 1.. elsewhere] -

Backward goes from right to left: `Join` hands each replica its part of the gradient and lets the others start, autograd
runs share 0, `Parameters` and `Share` then add what the others found. Hooks, accumulation, `inputs=`, `autograd.grad`,
`retain_graph` and optimizers see an ordinary graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import FunctionCtx

__all__ = ["Gradients", "Join", "Parameters", "RemoteCall", "Share", "refuse_create_graph"]

Gradients = Sequence[torch.Tensor | None]


class RemoteCall(Protocol):
    """One forward that runs on several replicas."""

    def own_share(self, index: int) -> torch.Tensor:
        """Share 0 of input leaf `index`, as a tensor of its own."""

    def join_outputs(self, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of all replicas, joined."""

    def differentiable(self) -> Sequence[bool]:
        """Which joined outputs have gradients."""

    def start_backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Let the other replicas start; the gradients of share 0."""

    def parameter_gradients(self, own: Gradients, needed: Sequence[bool], mine: set[int]) -> Gradients:
        """The sums over all replicas. `mine`: which of our own nobody else refers to."""

    def large_parameters(self) -> Sequence[int]:
        """Which of them are worth a thought about where the sum is written."""

    def input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the whole input leaf `index`."""


class Parameters(torch.autograd.Function):
    """Parameters on their way into share 0. The last output is an anchor: it ties `Join` to this node."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.large_parameters():
            _references_of_a_backward()
        return (*(parameter.detach() for parameter in parameters), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        mine = _nobody_elses(gradients, ctx.call.large_parameters())
        return (None, *ctx.call.parameter_gradients(gradients[:-1], ctx.needs_input_grad[1:], mine))


class Share(torch.autograd.Function):
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


class Join(torch.autograd.Function):
    """Outputs of share 0 in, outputs of the whole batch out."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, anchor: torch.Tensor, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        joined = call.join_outputs(own)
        ctx.mark_non_differentiable(
            *(tensor for tensor, differs in zip(joined, call.differentiable(), strict=True) if not differs)
        )
        return joined

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return (None, torch.zeros(0), *ctx.call.start_backward(gradients))  # type: ignore[attr-defined]  # set in forward


def _nobody_elses(gradients: Gradients, candidates: Sequence[int]) -> set[int]:
    """Which of the candidates only the backward that was called with them refers to: they may be added to in place.

    Another node's input, a hook that kept it, a view of it would each be one reference more.
    """
    if not candidates:
        return set()
    references, limit = _references(gradients), _references_of_a_backward()
    return {
        index
        for index in candidates
        if references[index] <= limit and (gradient := gradients[index]) is not None and _has_storage_alone(gradient)
    }


def _has_storage_alone(gradient: torch.Tensor) -> bool:
    # Two: the tensor's reference, and that of the storage made for this question.
    return not gradient.is_sparse and torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) <= 2


@functools.cache
def _references_of_a_backward() -> int:
    """How many references a gradient has that nobody keeps, as `_references` counts: depends on torch's version."""
    with torch.enable_grad():
        _Probe.apply(torch.zeros(1, requires_grad=True)).sum().mul(2).backward()  # type: ignore[no-untyped-call]  # torch's
    return _Probe.found


class _Probe(torch.autograd.Function):
    """Counts the references of a gradient in the way, and at the depth, that `Parameters` does."""

    found = 0

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _Probe.found = min(_references(gradients))
        return gradients[0]


def _references(gradients: Gradients) -> list[int]:
    return [sys.getrefcount(gradient) for gradient in gradients]


def refuse_create_graph() -> None:
    """Raise if this backward was asked for a graph of itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "DataParallel cannot be differentiated twice: create_graph=True needs the graphs of all replicas in this "
            "process. Take second derivatives inside the module's forward, or call `model.module` for such steps"
        )
