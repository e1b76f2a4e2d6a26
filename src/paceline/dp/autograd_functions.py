"""Where the replicas meet the user's autograd graph.

    parameters --> Parameters --> [module on share 0] --> Join --> gathered outputs
    inputs     --> Share -----/                          /
                       [module on shares 1.. elsewhere] -

Backward goes from right to left: `Join` hands each replica its part of the gradient and lets the
others start, autograd runs share 0, `Parameters` and `Share` then add what the others found. Hooks,
accumulation, `inputs=`, `autograd.grad`, `retain_graph` and optimizers see an ordinary graph.
`Parameters` is one node for all forwards: what it gives out lasts.

In a worker there are no parameters to go on to: gradients end in `Caught`, all in one place.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import FunctionCtx

__all__ = [
    "Caught",
    "Gradients",
    "Join",
    "Parameters",
    "RemoteCall",
    "Share",
    "Summing",
    "not_shared",
    "refuse_create_graph",
]

Gradients = Sequence[torch.Tensor | None]
_uses: Callable[[torch.Tensor], int] = operator.methodcaller(
    "_use_count"
)  # of the tensor, outside of Python


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

    def input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the whole input leaf `index`."""


class Summing(Protocol):
    """Who adds up the gradients of parameters."""

    def sums(self, own: Gradients) -> Gradients:
        """The sums over all replicas of what the calls of this backward found."""


class Parameters(torch.autograd.Function):
    """Parameters on their way into share 0. The last output is an anchor: it ties a `Join` to this
    node.
    """

    @staticmethod
    def forward(ctx: Any, summing: Summing, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.summing = summing
        ctx.set_materialize_grads(False)
        _references_of_a_backward(), _references_of_a_base()
        return (*(parameter.detach() for parameter in parameters), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return (None, *ctx.summing.sums(gradients[:-1]))


class Caught(torch.autograd.Function):
    """Parameters of a worker: `found` is given the gradients of each backward that comes here."""

    @staticmethod
    def forward(
        ctx: Any, found: list[Gradients], parameters: Sequence[torch.Tensor], root: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.found.append(gradients)
        return None, None, None


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
    def forward(
        ctx: Any, call: RemoteCall, anchor: torch.Tensor, *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        joined = call.join_outputs(own)
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, differs in zip(joined, call.differentiable(), strict=True)
                if not differs
            )
        )
        return joined

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Any:
        refuse_create_graph()
        return (None, None, *ctx.call.start_backward(gradients))  # type: ignore[attr-defined]  # set in forward


def not_shared(gradients: Gradients) -> list[bool]:
    """Which of them only the backward that was called with them refers to: they may be added to in
    place.

    Another node's input, a hook that kept it, a view of it would each be one reference more. To be
    called with the tuple that `Parameters.backward` got, without its last.
    """
    limit, base_limit = _references_of_a_backward(), _references_of_a_base()
    uses_of_storage = torch._C._storage_Use_Count
    found = []
    for references, gradient in zip(_references(gradients), gradients, strict=True):
        if references > limit or gradient is None or gradient.is_sparse:
            found.append(False)
            continue
        base = (
            gradient._base
        )  # the gradient of a Linear's weight is a transposed view of a tensor nobody else has
        # The tensor's reference, its base's, and that of the storage made for this question.
        holders = 2 if base is None else 3
        found.append(
            uses_of_storage(gradient.untyped_storage()._cdata) <= holders
            and (base is None or sys.getrefcount(base) + _uses(base) <= base_limit)
        )
    return found


@functools.cache
def _references_of_a_base() -> int:
    """How many references the base of a view has that only the view refers to, as `not_shared`
    counts.
    """
    with torch.no_grad():
        view = torch.zeros(2, 2).t()
    base = view._base
    assert base is not None
    return sys.getrefcount(base) + _uses(base)


@functools.cache
def _references_of_a_backward() -> int:
    """How many references a gradient has that nobody keeps, as `_references` counts: depends on
    torch's version.
    """
    with torch.enable_grad():
        _Probe.apply(torch.zeros(1, requires_grad=True))[0].sum().mul(2).backward()  # type: ignore[no-untyped-call]  # torch's
    return _Probe.found


class _Probe(torch.autograd.Function):
    """Counts the references of a gradient in the way, and at the depth, that `Parameters` does."""

    found = 0

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.clone(), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _Probe.found = min(_references(gradients[:-1]))
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
