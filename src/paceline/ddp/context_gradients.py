"""Backwards of `torch.distributed.autograd`: their gradients are in a context, not in `.grad`.

Such a backward can pass through several processes (RPC). Autograd's engine leaves gradients of
parameters to the context: hooks that run after accumulation are not called, and `.grad` stays as it
is. So at the end of backward we look into the context. Gradients that are new there take the place
of `.grad` while they are averaged like any others, and the averages go back into the context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from paceline._torch_internals import context_gradients, version_of
from paceline.ddp.plan import ManagedParameter

__all__ = ["ContextGradients"]


class ContextGradients:
    """The gradients of one model in one context, from the beginning of a backward on."""

    def __init__(self, context: int, managed: Sequence[ManagedParameter]) -> None:
        self._context = context
        self._parameters = [entry.parameter for entry in managed]
        gradients = self._gradients()
        self._before = [(gradient, _version_of(gradient)) for gradient in gradients]

    def _gradients(self) -> list[torch.Tensor | None]:
        found = context_gradients(self._context)
        return [found.get(parameter) for parameter in self._parameters]

    def arrived(self) -> dict[int, torch.Tensor]:
        """Gradients that are new or have changed since then, by the number of their parameter."""
        pairs = zip(self._gradients(), self._before, strict=True)
        return {
            index: gradient
            for index, (gradient, (before, version)) in enumerate(pairs)
            if gradient is not None and (gradient is not before or _version_of(gradient) != version)
        }

    @contextlib.contextmanager
    def in_place_of_grad(self, arrived: dict[int, torch.Tensor]) -> Iterator[None]:
        """`.grad` is the context's gradient inside; whatever it is in the end goes to the context.
        Afterwards `.grad` is what it was before.
        """
        kept = [_Kept(parameter) for parameter in self._parameters]
        for index, parameter in enumerate(self._parameters):
            parameter.grad = arrived.get(index)
        try:
            yield
            with torch.no_grad():
                for index, gradient in arrived.items():
                    averaged = self._parameters[index].grad
                    if averaged is not None and averaged is not gradient:
                        gradient.copy_(averaged)
        finally:
            for own in kept:
                own.restore()


class _Kept:
    """A parameter's own gradient. Its values are kept too: it may lie in the memory of a bucket,
    which is used meanwhile.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self._gradient = parameter, parameter.grad
        self._values = None if parameter.grad is None else parameter.grad.detach().clone()

    def restore(self) -> None:
        self._parameter.grad = self._gradient
        if self._gradient is not None and self._values is not None:
            with torch.no_grad():
                self._gradient.copy_(self._values)


def _version_of(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else version_of(gradient)
