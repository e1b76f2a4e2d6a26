"""What it costs that a global batch is cut into more shards than there are ranks: measured on
request, in a few of the first steps, on rank 0.

There the loop over the shards gets one more batch, all of the rank's shards in one. Both are timed,
and what the large one computes is forgotten. Nothing else can tell: a model's time is no linear
function of the number of samples, and the body of the loop is the script's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from paceline._pytree import flatten, unflatten

__all__ = ["ShardPrice"]

# The first steps of a program are slower than the rest; so is the first batch of a new size.
_FIRST_STEPS = 2
_TRIALS = 3
_WORTH_SAYING = 1.1


class ShardPrice:
    """The measurement of one training."""

    def __init__(self, shards: int, ranks: int) -> None:
        self._shards, self._ranks = shards, ranks
        self._steps = 0
        self._ratios: list[float] = []

    def merged(self, inputs: Sequence[Any]) -> Any | None:
        """The inputs of several shards as those of one; None if this step measures nothing, or they
        cannot be joined.
        """
        self._steps += 1
        if self._steps <= _FIRST_STEPS or self.is_complete or len(inputs) < 2:
            return None
        specs, leaves = zip(*map(flatten, inputs), strict=True)
        if any(spec != specs[0] for spec in specs):
            return None
        try:
            return unflatten(specs[0], [_joined(each) for each in zip(*leaves, strict=True)])
        except (TypeError, RuntimeError):
            return None

    def add(self, apart_s: float, together_s: float) -> None:
        """How long the shards took, one after the other, and as one. Says what comes of it."""
        self._ratios.append(apart_s / together_s)
        if self.is_complete and self.factor > _WORTH_SAYING:
            sys.stderr.write(f"paceline: {self}\n")

    @property
    def is_complete(self) -> bool:
        """Whether enough was measured."""
        return len(self._ratios) >= _TRIALS

    @property
    def factor(self) -> float:
        """How many times as long the shards take."""
        return statistics.median(self._ratios)

    def __str__(self) -> str:
        ranks = "1 rank" if self._ranks == 1 else f"{self._ranks} ranks"
        return (
            f"{self._shards} shards on {ranks} take {self.factor:.1f} times as long as "
            f"{self._ranks} would: use fewer shards if you will never have as many ranks as that "
            "(another number of shards gives other bits)"
        )


def _joined(leaves: Sequence[Any]) -> torch.Tensor:
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise TypeError("only tensors can be joined")
    return torch.cat(list(leaves))
