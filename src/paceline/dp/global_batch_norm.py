"""Batch normalisation over the whole batch: replicas add up their statistics in the middle of
forward and backward.

Sums travel through memory that all replicas map: each worker leaves its vector and raises a flag;
the main process adds all of them in the order of the replicas, leaves the sum and raises a flag for
each worker. Every replica runs the same layers, so the n-th sum of one is the n-th of all.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.core.wakeup import FLAG_BYTES, Flag
from paceline.dp.autograd_functions import refuse_create_graph
from paceline.errors import CollectiveTimeout, ConfigError

__all__ = ["GlobalBatchNorm", "ReplicaFailed", "StatisticsExchange"]

_VALUES = 1 << 16  # of float64: channels of a layer, and one for the count
_SPIN_NS = 200_000


class ReplicaFailed(Exception):
    """Another replica failed or ended; its own answer has the reason."""


class _WorkerSlot:
    """One worker's part of the memory."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.vector_ready = Flag(memory, offset)
        self.sum_ready = Flag(memory, offset + FLAG_BYTES)
        start = offset + 2 * FLAG_BYTES
        self.vector = torch.frombuffer(memory, dtype=torch.float64, count=_VALUES, offset=start)


class StatisticsExchange:
    """Where the replicas add up vectors; made before the fork."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        slot_bytes = 2 * FLAG_BYTES + _VALUES * 8
        memory = mmap.mmap(-1, workers * slot_bytes + FLAG_BYTES)
        self._slots = [_WorkerSlot(memory, index * slot_bytes) for index in range(workers)]
        self._failed = memoryview(memory)[workers * slot_bytes :]
        self._timeout_s = timeout_s

    def report_failure(self, replica: int) -> None:
        """In a worker that failed: the main process does not wait for it.

        The replicas' sums do not correspond any more; the exchange cannot be used again.
        """
        self._failed[0] = 1
        self._slots[replica - 1].vector_ready.raise_()

    def sum_in_main(self, vector: torch.Tensor, pidfds: list[int]) -> torch.Tensor:
        """Add the vectors of the workers behind `pidfds`, the first ones; all get the sum."""
        used = list(zip(self._slots, pidfds, strict=False))
        total = vector.clone()
        for replica, (slot, pidfd) in enumerate(used, 1):
            try:
                is_alive = slot.vector_ready.wait(pidfd, _SPIN_NS, self._timeout_s)
            except TimeoutError:
                raise CollectiveTimeout(
                    f"replica {replica} of DataParallel sent no batch statistics within "
                    f"{self._timeout_s:g} s; all replicas must run the same layers",
                    missing=[replica],
                ) from None
            if not is_alive or self._failed[0]:
                raise ReplicaFailed
            total += slot.vector[: len(vector)]
        for slot, _ in used:
            slot.vector[: len(vector)] = total
            slot.sum_ready.raise_()
        return total

    def sum_in_worker(self, vector: torch.Tensor, replica: int, main_pidfd: int) -> torch.Tensor:
        """Leave a worker's vector, wait for the sum."""
        slot = self._slots[replica - 1]
        slot.vector[: len(vector)] = vector
        slot.vector_ready.raise_()
        if not slot.sum_ready.wait(main_pidfd, _SPIN_NS):
            os._exit(1)  # the main process ended, and so do we
        return slot.vector[: len(vector)].clone()


_SumOverReplicas = Callable[[torch.Tensor], torch.Tensor]


class _Sum(torch.autograd.Function):
    """The sum over replicas. All have it, so its gradient is the sum of what all compute for it."""

    @staticmethod
    def forward(
        ctx: Any, vector: torch.Tensor, sum_over_replicas: _SumOverReplicas
    ) -> torch.Tensor:
        ctx.sum_over_replicas = sum_over_replicas
        return sum_over_replicas(vector)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_create_graph()
        return ctx.sum_over_replicas(gradients[0]), None


class GlobalBatchNorm(TorchFunctionMode):
    """Inside, batch normalisation in training takes mean and variance of the whole batch."""

    def __init__(self, sum_over_replicas: _SumOverReplicas) -> None:
        super().__init__()
        self._sum_over_replicas = sum_over_replicas

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return function(*args, **kwargs)

    def _sum(self, vector: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., torch.Tensor] = _Sum.apply
        return apply(vector, self._sum_over_replicas)

    def _batch_norm(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        channels = x.shape[1]
        if channels >= _VALUES:
            raise ConfigError(
                f"batch_norm='global' takes at most {_VALUES - 1} channels; this layer has "
                f"{channels}"
            )
        reduced = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.double()
        own_count = wide.new_full((1,), x.numel() / channels)
        count_and_sums = self._sum(torch.cat([own_count, wide.sum(reduced)]))
        count = count_and_sums[0].detach()
        mean = count_and_sums[1:] / count
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape}"
            )
        shape = [1, channels, *[1] * (x.dim() - 2)]
        centred = wide - mean.view(shape)
        squares = self._sum(centred.square().sum(reduced))
        variance = squares / count
        with torch.no_grad():
            for running, batch in ((running_mean, mean), (running_var, squares / (count - 1))):
                if running is not None:
                    running.mul_(1 - momentum).add_(batch.to(running.dtype), alpha=momentum)
        normalised = centred * (variance + eps).rsqrt().view(shape)
        if weight is not None:
            normalised = normalised * weight.view(shape)
        if bias is not None:
            normalised = normalised + bias.view(shape)
        return normalised.to(x.dtype)
