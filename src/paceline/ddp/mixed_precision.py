"""`mixed_precision=`: forward and backward in a small dtype, weights and steps in the full one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LowPrecision"]


class LowPrecision:
    """Swaps the parameters of a module for low-precision copies around forward and backward."""

    def __init__(self, settings: Any, module: torch.nn.Module) -> None:
        self.param_dtype: torch.dtype | None = settings.param_dtype
        self.reduce_dtype: torch.dtype | None = settings.reduce_dtype or settings.param_dtype
        self._parameters = [
            parameter for parameter in module.parameters() if not hasattr(parameter, "_ddp_ignored")
        ]
        self._swapped = False
        for parameter in self._parameters:
            low = torch.zeros_like(parameter, dtype=self.param_dtype)
            parameter._mp_param, parameter._fp_param = low.detach(), parameter.data  # type: ignore[attr-defined]
        if settings.buffer_dtype is not None:
            for buffer in module.buffers():
                if not hasattr(buffer, "_ddp_ignored"):
                    buffer.data = buffer.to(dtype=settings.buffer_dtype)

    @property
    def is_applied(self) -> bool:
        """The parameters are low-precision copies now."""
        return self._swapped

    def apply(self) -> None:
        """Before forward."""
        if self._swapped or self.param_dtype is None:
            return
        self._swapped = True
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.is_floating_point():
                    parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                    parameter.data = parameter.data.to(self.param_dtype)
                    parameter._mp_param = parameter.data  # type: ignore[attr-defined]

    def restore(self) -> None:
        """After backward: full-precision weights, gradients in their dtype."""
        if not self._swapped:
            return
        self._swapped = False
        for parameter in self._parameters:
            if parameter.is_floating_point():
                parameter.data = parameter._fp_param  # type: ignore[attr-defined]
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    parameter.grad = parameter.grad.to(parameter.dtype)
