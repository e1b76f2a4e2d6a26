"""Whose code steps an optimizer on the CPU, and how much it has to step.

Torch's default there is a loop over parameters that passes over memory once for each operation;
four of its classes also have fused code, which has to be asked for. Programs that do not know pay
for it in every step, and nothing shows it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["FUSED_CLASSES", "OptimizerFacts", "StepCode", "facts_of"]

# What decides how much is read and written.
_OPTIONS = ("momentum", "nesterov", "amsgrad", "weight_decay")
# Torch's classes that have fused code for the CPU, and whose names `paceline.optim` has.
FUSED_CLASSES = ("SGD", "Adam", "AdamW", "Adagrad")


class StepCode(enum.StrEnum):
    """How parameters on the CPU are stepped."""

    LOOP = "loop"  # torch's default, one operation after the other
    FOREACH = "foreach"  # on the CPU a loop as well
    FUSED = "fused"
    PACELINE = "paceline"
    OTHER = "other"  # classes that torch has no other code for, or that are not torch's

    @property
    def could_be_fused(self) -> bool:
        return self in (StepCode.LOOP, StepCode.FOREACH)


@dataclasses.dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer, as far as its parameters are on the CPU and stepped by the same code."""

    name: str
    code: StepCode
    tensors: int
    elements: int
    threads: int
    options: tuple[tuple[str, float], ...] = ()  # those that are not off

    def dump(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, values: dict[str, Any]) -> OptimizerFacts:
        options = tuple((name, value) for name, value in values["options"])
        return cls(**{**values, "code": StepCode(values["code"]), "options": options})

    def describe(self) -> str:
        many = "" if self.tensors == 1 else "s"
        return f"{self.name} ({self.tensors:,} tensor{many}, {_millions(self.elements)} numbers)"


def facts_of(optimizer: torch.optim.Optimizer) -> OptimizerFacts | None:
    """None if it has no parameters on the CPU. If groups differ, those that are stepped slowest."""
    import torch

    stock = _torch_class_of(optimizer)
    by_code: dict[StepCode, list[dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        if _parameters_on_cpu(group):
            by_code.setdefault(_code_of(optimizer, stock, group), []).append(group)
    for code in StepCode:
        if groups := by_code.get(code, []):
            parameters = [p for group in groups for p in _parameters_on_cpu(group)]
            return OptimizerFacts(
                stock.__name__ if code.could_be_fused and stock else type(optimizer).__name__,
                code,
                len(parameters),
                sum(parameter.numel() for parameter in parameters),
                torch.get_num_threads(),
                tuple((name, groups[0][name]) for name in _OPTIONS if groups[0].get(name)),
            )
    return None


def _parameters_on_cpu(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.device.type == "cpu" and p.requires_grad]


def _torch_class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Torch's class whose step this optimizer makes, if it is one that has fused code."""
    import torch

    kind: type[torch.optim.Optimizer] = type(optimizer)
    stock: list[type[torch.optim.Optimizer]] = [getattr(torch.optim, n) for n in FUSED_CLASSES]
    # The first is the most derived: AdamW is an Adam.
    found = next((each for base in kind.__mro__ for each in stock if each is base), None)
    # Torch wraps the step of every class that is used, inherited or not.
    if found is None or inspect.unwrap(kind.step) is not inspect.unwrap(found.step):
        return None
    return found


def _code_of(
    optimizer: torch.optim.Optimizer,
    stock: type[torch.optim.Optimizer] | None,
    group: dict[str, Any],
) -> StepCode:
    if any(base.__module__.startswith("paceline.optim") for base in type(optimizer).__mro__):
        return StepCode.PACELINE
    if stock is None:
        return StepCode.OTHER
    if group.get("fused"):
        return StepCode.FUSED
    return StepCode.FOREACH if group.get("foreach") else StepCode.LOOP


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
