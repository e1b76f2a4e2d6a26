"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.abi import Update
from paceline.core.update import Rule
from paceline.optim.native_optimizer import NativeOptimizer, new_step_counter, write_common_numbers

__all__ = ["Adagrad"]


class Adagrad(NativeOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad`, its step in one pass over memory.

    Args:
        *arguments: those of torch's class, as are the other options.
        shared: keep parameters and state once per host and split the step over its ranks. None:
            where it can be and pays; True: an error where it cannot be; False: never.
        one_pass: sum gradients over ranks in the step instead of averaging them in backward.
        max_norm: clip gradients in the step to this norm of all of them.

    Raises:
        ConfigError: arguments contradict one another.

    Example:
        ```python
        optimizer = paceline.optim.Adagrad(model.parameters(), lr=0.01)
        model(x).sum().backward()
        optimizer.step()
        ```
    """

    stock = torch.optim.Adagrad
    starts_empty = False  # but at `initial_accumulator_value`

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        # Torch makes the state with the optimizer; this is for parameters that came later.
        initial = group["initial_accumulator_value"]
        return {"step": new_step_counter(group), "sum": torch.full_like(parameter, initial)}

    def write_numbers(self, numbers: Update, group: dict[str, Any]) -> None:
        write_common_numbers(numbers, group)
        numbers.rule = Rule.ADAGRAD
        numbers.eps = group["eps"]
        numbers.lr_decay = group["lr_decay"]
