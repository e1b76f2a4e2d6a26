"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.abi import Update
from paceline.core.update import Option, Rule
from paceline.optim.native_optimizer import NativeOptimizer, new_step_counter, write_common_numbers

__all__ = ["Adam", "AdamW"]


class _AdamStep(NativeOptimizer):
    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        averages = ("exp_avg", "exp_avg_sq")
        return (*averages, "max_exp_avg_sq") if group["amsgrad"] else averages

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        zeros = {name: torch.zeros_like(parameter) for name in self.state_names(group)}
        return {"step": new_step_counter(group), **zeros}

    def write_numbers(self, numbers: Update, group: dict[str, Any]) -> None:
        write_common_numbers(numbers, group)
        numbers.rule = Rule.ADAM
        beta1, beta2 = group["betas"]
        numbers.beta1, numbers.beta2 = float(beta1), float(beta2)
        numbers.eps = group["eps"]
        if group["amsgrad"]:
            numbers.options |= Option.AMSGRAD
        if group["decoupled_weight_decay"]:
            numbers.options |= Option.DECOUPLED_DECAY


class Adam(_AdamStep, torch.optim.Adam):
    """`torch.optim.Adam`, its step in one pass over memory.

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
        optimizer = paceline.optim.Adam(model.parameters(), lr=1e-3)
        model(x).sum().backward()
        optimizer.step()
        ```
    """

    stock = torch.optim.Adam


class AdamW(_AdamStep, torch.optim.AdamW):
    """`torch.optim.AdamW`, its step in one pass over memory.

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
        optimizer = paceline.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)
        model(x).sum().backward()
        optimizer.step()
        ```
    """

    stock = torch.optim.AdamW
