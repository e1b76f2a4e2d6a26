"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.abi import Update
from paceline.core.update import Option, Rule
from paceline.optim.native_optimizer import NativeOptimizer, write_common_numbers

__all__ = ["SGD"]


class SGD(NativeOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`, its step in one pass over memory.

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
        optimizer = paceline.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(x).sum().backward()
        optimizer.step()
        ```
    """

    stock = torch.optim.SGD
    starts_from_gradient = True

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(parameter) for name in self.state_names(group)}

    def write_numbers(self, numbers: Update, group: dict[str, Any]) -> None:
        write_common_numbers(numbers, group)
        numbers.rule = Rule.SGD
        numbers.momentum = group["momentum"]
        numbers.dampening = group["dampening"]
        if group["nesterov"]:
            numbers.options |= Option.NESTEROV
