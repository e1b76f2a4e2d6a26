"""What the optimizers of this package have in common: a step that the core makes.

    step            run the closure, look at what a GradScaler says, then group by group:
      same as last time?   the group's table still describes its parameters and their state
      if not, sort         each parameter: one for the core, or one for torch's own code
      update               one native call for all of the former

Torch's own code takes what the core does not: other devices, sparse gradients, complex numbers,
subclasses of tensors, memory with gaps, `differentiable`, `capturable`, and everything where the
core is not built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from paceline.core.abi import Update, native_status
from paceline.core.update import Option
from paceline.optim.parameter_table import ParameterTable, TableEntry, gradient_like, is_plain

__all__ = ["NativeOptimizer", "new_step_counter", "write_common_numbers"]


class NativeOptimizer(torch.optim.Optimizer):
    """Stands before one of torch's optimizers among the base classes and replaces its step."""

    # Torch's class, whose code steps what the core cannot.
    stock: ClassVar[type[torch.optim.Optimizer]]
    # New state is written by the first step, not read.
    starts_from_gradient: ClassVar[bool] = False
    # For GradScaler: the step divides gradients by the scale, and does nothing if one is not
    # finite.
    _step_supports_amp_scaling = True

    _tables: dict[int, ParameterTable]

    def __new__(cls, *_arguments: Any, **_options: Any) -> NativeOptimizer:
        # Here, because copies and unpickled optimizers have no other beginning in common.
        self = super().__new__(cls)
        self._tables = {}
        return self

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The arrays of a parameter's state, in the core's order."""
        raise NotImplementedError

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, as torch's class makes it."""
        raise NotImplementedError

    def write_numbers(self, numbers: Update, group: dict[str, Any]) -> None:
        """Write a group's hyperparameters for the core."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure` computes the loss and its gradients anew, and is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        attributes = vars(self)
        found_inf = attributes.get("found_inf")
        if found_inf is not None and found_inf.item():
            return loss
        grad_scale = attributes.get("grad_scale")
        for index, group in enumerate(self.param_groups):
            self._step_group(index, group, 1.0 if grad_scale is None else float(grad_scale))
        return loss

    def _step_group(self, index: int, group: dict[str, Any], grad_scale: float) -> None:
        if not _core_may_step(group):
            self._step_with_torch(group, group["params"], grad_scale)
            return
        parameters = group["params"]
        gradients = [parameter.grad for parameter in parameters]
        if not all(gradient is not None for gradient in gradients):
            parameters = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in parameters]
        names = self.state_names(group)
        table = self._tables.get(index)
        addresses = (
            None if table is None else table.matches(parameters, gradients, self.state, names)
        )
        if table is None or addresses is None:
            table, gradients, others = self._sort(group, parameters, names)
            self._tables[index] = table
            if others:
                self._step_with_torch(group, others, grad_scale)
            addresses = table.addresses_of(gradients)
        self.write_numbers(table.update.numbers, group)
        table.update.numbers.grad_scale = grad_scale
        table.run(addresses)
        increment_version(table.parameters)

    def _sort(
        self, group: dict[str, Any], parameters: list[torch.Tensor], names: tuple[str, ...]
    ) -> tuple[ParameterTable, list[torch.Tensor], list[torch.Tensor]]:
        """Which parameters the core steps, with gradients laid out as it needs them, and which
        torch does. Makes the state of the former.
        """
        entries, gradients, others = [], [], []
        for parameter in parameters:
            entry = self._entry(group, parameter, names) if is_plain(parameter) else None
            if entry is None:
                others.append(parameter)
                continue
            entries.append(entry)
            gradients.append(gradient_like(parameter))
        return ParameterTable(entries, names), gradients, others

    def _entry(
        self, group: dict[str, Any], parameter: torch.Tensor, names: tuple[str, ...]
    ) -> TableEntry | None:
        """This parameter and its state as the core sees them; None if it cannot."""
        if not names:
            return TableEntry(parameter, {}, (), None, False)
        state = self.state[parameter]
        is_new = any(state.get(name) is None for name in names)
        if not state or (is_new and self.starts_from_gradient):
            state.update(self.new_state(parameter, group))
        arrays = tuple(state[name] for name in names)
        entry = TableEntry(
            parameter, state, arrays, state.get("step"), is_new and self.starts_from_gradient
        )
        return entry if entry.is_uniform() else None

    def _step_with_torch(
        self, group: dict[str, Any], parameters: list[torch.Tensor], grad_scale: float
    ) -> None:
        """Step some parameters of a group with torch's own code."""
        if grad_scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale)
        # Another optimizer with the same state: hooks, and the scale, have been seen to.
        stand_in: Any = self.stock.__new__(self.stock)
        vars(stand_in).update(vars(self))
        vars(stand_in).update(
            param_groups=[{**group, "params": parameters}], grad_scale=None, found_inf=None
        )
        with torch.set_grad_enabled(group["differentiable"]):
            inspect.unwrap(self.stock.step)(stand_in)


def write_common_numbers(numbers: Update, group: dict[str, Any]) -> None:
    """What all rules have."""
    numbers.lr = float(group["lr"])
    numbers.weight_decay = float(group["weight_decay"])
    numbers.options = Option.MAXIMIZE if group["maximize"] else 0


def new_step_counter(group: dict[str, Any]) -> torch.Tensor:
    """The number of steps made, as torch's classes keep it."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


def _core_may_step(group: dict[str, Any]) -> bool:
    return not (
        group["differentiable"]
        or group.get("capturable")
        or torch.compiler.is_compiling()
        or not native_status().available
    )
