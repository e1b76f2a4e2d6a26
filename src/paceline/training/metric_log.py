"""What `batch.log` collects, and the means over the global batch that become of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from paceline.data.exact_sum import ExactSum
from paceline.errors import StepError

__all__ = ["MetricLog", "ShardMetrics", "global_means"]

# By name: the sum of the logged values, and of how many values.
ShardMetrics: TypeAlias = dict[str, tuple[float, int]]


class MetricLog:
    """What was logged for one shard."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._values: dict[str, float | torch.Tensor] = {}

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """A number stands for the mean over the shard's samples; a tensor with dimensions for all
        of its elements.
        """
        if name in self._values:
            raise StepError(f"{name!r} was logged twice for one shard: log it once, or rename one")
        if isinstance(value, torch.Tensor):
            value = value.detach()
            # Fetching a value waits for its device: that comes at the end of the pass.
            if value.dim() == 0 and value.device.type == "cpu":
                value = value.item()
            else:
                value = value.clone()
        self._values[name] = value

    def sums(self) -> ShardMetrics:
        """The sum and the count for each name."""
        return {name: self._sum(value) for name, value in self._values.items()}

    def _sum(self, value: float | torch.Tensor) -> tuple[float, int]:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.double().sum().item(), value.numel()
        return float(value) * self._samples, self._samples


def global_means(shards: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """The mean for each name over all shards, given in their order. The sum is rounded once."""
    sums: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for metrics in shards:
        for name, (total, count) in metrics.items():
            sums.setdefault(name, []).append(total)
            counts[name] = counts.get(name, 0) + count
    return {
        name: ExactSum(sums[name]).value / counts[name] if counts[name] else math.nan
        for name in sorted(sums)
    }
