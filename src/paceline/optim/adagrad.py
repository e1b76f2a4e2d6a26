"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.abi import Update
from paceline.core.update import Rule
from paceline.optim.native_optimizer import NativeOptimizer, new_step_counter, write_common_numbers

__all__ = ["Adagrad"]


class Adagrad(NativeOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad`, its step in one pass over memory."""

    stock = torch.optim.Adagrad

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
