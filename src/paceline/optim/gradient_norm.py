"""`max_norm=`: the norm of all gradients of an optimizer, and the factor that clips them.

The squares of gradients are summed by blocks (`csrc/norm.c`), and the sum of all blocks is rounded
once. Ranks that step together sum the blocks of one part each (`StepExchange`), and each of them
adds all blocks: the same bits at any number of ranks, given the same gradients.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.optim.parameter_table import GradientArrays, ParameterTable

__all__ = ["check_max_norm", "clip_factor", "squares_of", "squares_of_tables", "total_of"]

_EPS = 1e-6  # that of torch.nn.utils.clip_grad_norm_
_Tables = Sequence[tuple[ParameterTable, GradientArrays]]


def check_max_norm(max_norm: Any) -> float | None:
    """The argument as a number; raises if it is none that gradients can be clipped to."""
    if max_norm is None:
        return None
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ConfigError(
            f"max_norm={max_norm!r}: expected a positive number, to which the norm of all "
            "gradients is clipped, or None"
        )
    return float(max_norm)


def clip_factor(squares: float, grad_scale: float, max_norm: float) -> float:
    """What gradients, divided by the scale, are multiplied by; 1 if they are short enough. NaN and
    infinity have the effect they have in torch: all gradients become NaN.
    """
    factor = max_norm / (math.sqrt(squares) / grad_scale + _EPS)
    return 1.0 if factor > 1.0 else factor


def total_of(squares: Iterable[float]) -> float:
    """Their sum, rounded once: however ranks have divided them, and in whatever order, it has the
    same bits.
    """
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def squares_of(parameters: Sequence[torch.Tensor]) -> list[float]:
    """The sums of squares of gradients that torch's own code takes."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            found.append(float(torch.linalg.vector_norm(values.detach()).double()) ** 2)
    return found


def squares_of_tables(tables: _Tables) -> list[float]:
    """The sums of squares of gradients that this process has to itself, block by block."""
    found: list[float] = []
    for table, gradients in tables:
        blocks = array("d", bytes(8 * table.update.norm_blocks))
        table.sum_squares(gradients, blocks.buffer_info()[0])
        found += blocks
    return found
