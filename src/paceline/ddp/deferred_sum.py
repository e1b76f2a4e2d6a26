"""Gradients that backward leaves as they are on each rank, for an optimizer's step to sum.

Ranks exchange their signals at the end of backward as ever, so that everybody knows who has failed,
which parameters were used and what each rank weighs. Only the sum itself is left: the step takes it
together with the update, in one pass over memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.ddp.buckets.base import gradient_of
from paceline.ddp.group_calls import all_reduce
from paceline.errors import ConfigError

__all__ = ["DeferredSum", "average"]


class DeferredSum:
    """The parameters whose gradients one optimizer sums, and how much each rank's weigh."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], owner: object, *, in_shared_memory: bool = True
    ) -> None:
        """in_shared_memory: the step reads the gradients of other ranks where they are, instead of
        having them sent.
        """
        self.in_shared_memory = in_shared_memory
        self._parameters = list(parameters)
        self._ids = frozenset(map(id, self._parameters))
        self._owner = weakref.ref(owner)
        # Every rank's factor in the sum of the gradients there are. None: they are no rank's own,
        # but averages, or there are none.
        self.weights: list[float] | None = None
        self._carried: list[float] | None = None

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def __len__(self) -> int:
        return len(self._parameters)

    def overlaps(self, other: DeferredSum) -> bool:
        """Whether both have some parameter."""
        return not self._ids.isdisjoint(other._ids)

    @property
    def is_wanted(self) -> bool:
        """Whether there is still somebody who will sum."""
        return self._owner() is not None

    def begin(self) -> None:
        """A backward begins: what it computes may be added to gradients of the one before."""
        has_gradients = any(map(_is_there, map(gradient_of, self._parameters)))
        self._carried = self.weights if has_gradients else None

    def leave(self, weights: Sequence[float], label: str) -> None:
        """A backward has ended, and its gradients are left to the step."""
        if self._carried is not None and self._carried != list(weights):
            shown = [", ".join(f"{w:.4g}" for w in each) for each in (self._carried, weights)]
            raise ConfigError(
                f"{label}: gradients of two averaged backwards were added up, and the ranks weigh "
                f"differently in them ({shown[0]}, then {shown[1]}), so one_pass=True cannot sum "
                "them. Wrap all but the last backward in `with model.no_sync():`, or call "
                "optimizer.zero_grad() before the next one"
            )
        self.weights = list(weights)

    def forget(self) -> None:
        """The gradients were zeroed."""
        self.weights = None


def average(
    group: dist.ProcessGroup, gradient: torch.Tensor, weights: Sequence[float]
) -> torch.Tensor:
    """The sum over ranks of gradients times weights, with the bits that a bucket or a step has."""
    weight = weights[group.rank()]
    if gradient.dtype not in (torch.float16, torch.bfloat16):
        value = gradient * weight
    elif len(set(filter(None, weights))) > 1:
        value = (gradient * weight).float()  # rounded before it is added
    else:
        value = gradient.float() * weight
    all_reduce(group, value).wait()
    return value.to(gradient.dtype)


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None
