"""Fused LSTM and GRU cells: torch asks every accelerator for them and has no CPU kernel to
borrow.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["register"]

_registered: list[
    torch.library.Library
] = []  # an implementation lives as long as its Library object


def register() -> None:
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_thnn_fused_lstm_cell", _lstm_cell, "PrivateUse1")
    aten.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "PrivateUse1")
    aten.impl("_thnn_fused_gru_cell", _gru_cell, "PrivateUse1")
    aten.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "PrivateUse1")
    _registered.append(aten)


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = (
        _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    ).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cell = grad_hy * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        grad_cell = grad_cell + grad_cy
    grad_gates = torch.cat(
        [
            grad_cell * g * i * (1 - i),
            grad_cell * cx * f * (1 - f),
            grad_cell * i * (1 - g * g),
            grad_hy * tanh_cy * o * (1 - o),
        ],
        1,
    )
    return grad_gates, grad_cell * f, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input_r, input_z, input_n = _with_bias(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hidden_n], 1)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * hidden_n * r * (1 - r)
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *biases
