"""The parameters that a pass collects gradients of, and the form of each gradient."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.training.gradient_sums import DENSE, SUMMED_AS, SUMMED_AS_THEY_ARE, GradientKinds

__all__ = ["GradientForm", "Forms", "ParameterSet"]


@dataclasses.dataclass(frozen=True)
class GradientForm:
    """What a gradient looks like while it is summed: real numbers, laid out as its parameter is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self.numel * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Memory for one."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def laid_out(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """A gradient with the strides of this form: itself, nearly always. None becomes zeros."""
        if gradient is not None and gradient.stride() == self.strides:
            return gradient
        new = self.empty()
        return new.zero_() if gradient is None else new.copy_(gradient)


Forms: TypeAlias = tuple[GradientForm, ...]

_requires_grad = attrgetter("requires_grad")


class ParameterSet:
    """The parameters of a model that require gradients."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._all = {*self.parameters, *self._frozen}
        # Whether gradients are summed in the type of their parameters.
        self.are_summed_as_they_are = all(p.dtype in SUMMED_AS_THEY_ARE for p in self.parameters)
        self.are_on_host = all(p.device.type == "cpu" for p in self.parameters)
        self._counts: dict[Optimizer, int] = {}
        self._forms: dict[GradientKinds, Forms] = {}

    def has_changed(self) -> bool:
        """Whether a parameter was frozen or unfrozen since."""
        return not all(map(_requires_grad, self.parameters)) or any(
            map(_requires_grad, self._frozen)
        )

    def has_all_of(self, optimizer: Optimizer) -> bool:
        """Whether all of an optimizer's parameters are among these or frozen ones."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        # Looked at again when there are more or fewer of them.
        if self._counts.get(optimizer) != count:
            if not all(p in self._all for group in optimizer.param_groups for p in group["params"]):
                return False
            self._counts[optimizer] = count
        return True

    def has_late_gradients(self) -> bool:
        """Whether a parameter has a gradient that required none when the pass began."""
        return any(p.requires_grad and p.grad is not None for p in self._frozen)

    def dense_forms(self, kinds: GradientKinds) -> Forms:
        """The forms of the dense gradients: the same object for the same kinds."""
        if kinds not in self._forms:
            self._forms[kinds] = tuple(
                _form_of(parameter)
                for parameter, kind in zip(self.parameters, kinds, strict=True)
                if kind == DENSE
            )
        return self._forms[kinds]


def _form_of(parameter: torch.Tensor) -> GradientForm:
    # Dense memory in the order of the parameter's own; autograd lays gradients out like this too.
    like = torch.empty_like(parameter, device="meta")
    if like.is_complex():
        like = torch.view_as_real(like)
    return GradientForm(
        tuple(like.shape),
        like.stride(),
        like.numel(),
        SUMMED_AS.get(like.dtype, like.dtype),
        parameter.device,
    )
