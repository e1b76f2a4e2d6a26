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

__all__ = ["MeetingPoint", "PeerFailed", "WholeBatch"]

_VALUES = 1 << 16  # of float64: channels of a layer, and one for the count
_SPIN_NS = 200_000


class PeerFailed(Exception):
    """Another replica failed or ended; its own answer says why."""


class _Seat:
    """One worker's part of the memory."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.given = Flag(memory, offset)
        self.taken = Flag(memory, offset + FLAG_BYTES)
        start = offset + 2 * FLAG_BYTES
        self.vector = torch.frombuffer(memory, dtype=torch.float64, count=_VALUES, offset=start)


class MeetingPoint:
    """Where the replicas of one team add up vectors; made before the fork."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        each = 2 * FLAG_BYTES + _VALUES * 8
        memory = mmap.mmap(-1, workers * each + FLAG_BYTES)
        self._seats = [_Seat(memory, index * each) for index in range(workers)]
        self._failed = memoryview(memory)[workers * each :]
        self._timeout_s = timeout_s

    def give_up(self, replica: int) -> None:
        """In a worker that failed: the main process does not wait for it. Sums are out of step from
        now on.
        """
        self._failed[0] = 1
        self._seats[replica - 1].given.raise_()

    @property
    def is_broken(self) -> bool:
        """Whether a worker failed in between."""
        return bool(self._failed[0])

    def sum_in_main(self, vector: torch.Tensor, pidfds: list[int]) -> torch.Tensor:
        """Add what the workers behind `pidfds`, the first ones, bring; all get the sum."""
        used = list(zip(self._seats, pidfds, strict=False))
        total = vector.clone()
        for replica, (seat, pidfd) in enumerate(used, 1):
            try:
                lives = seat.given.wait(pidfd, _SPIN_NS, self._timeout_s)
            except TimeoutError:
                raise CollectiveTimeout(
                    f"replica {replica} of DataParallel brought no batch statistics within {self._timeout_s:g} s; "
                    "all replicas must run the same layers",
                    missing=[replica],
                ) from None
            if not lives or self.is_broken:
                raise PeerFailed
            total += seat.vector[: len(vector)]
        for seat, _ in used:
            seat.vector[: len(vector)] = total
            seat.taken.raise_()
        return total

    def sum_in_worker(self, vector: torch.Tensor, replica: int, main_pidfd: int) -> torch.Tensor:
        """Bring ours, take the sum."""
        seat = self._seats[replica - 1]
        seat.vector[: len(vector)] = vector
        seat.given.raise_()
        if not seat.taken.wait(main_pidfd, _SPIN_NS):
            os._exit(1)  # the main process ended, and so do we
        return seat.vector[: len(vector)].clone()


_Summed = Callable[[torch.Tensor], torch.Tensor]


class _Sum(torch.autograd.Function):
    """The sum over replicas. Each has it, so that the gradient is the sum of what all replicas find
    for it.
    """

    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, summed: _Summed) -> torch.Tensor:
        ctx.summed = summed
        return summed(vector)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_create_graph()
        return ctx.summed(gradients[0]), None


class WholeBatch(TorchFunctionMode):
    """Inside, batch normalisation in training takes mean and variance of the whole batch."""

    def __init__(self, summed: _Summed) -> None:
        super().__init__()
        self._summed = summed

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return function(*args, **kwargs)

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
                f"batch_norm='global' takes at most {_VALUES - 1} channels; this layer has {channels}"
            )
        others = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.double()
        ones = wide.new_full((1,), x.numel() / channels)
        first: torch.Tensor = _Sum.apply(torch.cat([ones, wide.sum(others)]), self._summed)  # type: ignore[no-untyped-call]  # torch's
        count, mean = first[0].detach(), first[1:] / first[0].detach()
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape}"
            )
        shape = [1, channels, *[1] * (x.dim() - 2)]
        centred = wide - mean.view(shape)
        squares: torch.Tensor = _Sum.apply(centred.square().sum(others), self._summed)  # type: ignore[no-untyped-call]  # torch's
        variance = squares / count
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, squares / (count - 1))):
                if running is not None:
                    running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
        found = centred * (variance + eps).rsqrt().view(shape)
        if weight is not None:
            found = found * weight.view(shape)
        if bias is not None:
            found = found + bias.view(shape)
        return found.to(x.dtype)
