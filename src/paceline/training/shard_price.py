"""What it costs that a global batch is cut into more shards than there are ranks: estimated in a
few of the first steps, on rank 0.

A shard takes a while that does not depend on how many samples it has - Python, the start of
kernels, reading the weights - and that is paid for every shard. It shows when the model is run with
half of a shard's samples: the half takes more than half of the time. For this the model's forward
and backward run again after the shards of a step, with inputs that the model was called with: once
as they were, once with the first half of the samples. None of the script's own code runs, no more
memory is needed than for a shard, and what is computed is dropped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline._pytree import map_leaves, tensors_in

__all__ = ["ShardPrice", "fixed_part", "price_of"]

# The first steps of a program are slower than the rest; so is the first batch of a new size.
_FIRST_STEPS = 2
_TRIALS = 5
_WORTH_SAYING = 1.1


class ShardPrice:
    """The estimate for one training.

    Args:
        model: what is trained.
        shards: how many there are.
        samples: of a shard, at least; a batch that is not full ends with fewer, and is passed over.
        ranks: how many share them.
    """

    def __init__(self, model: nn.Module, shards: int, samples: int, ranks: int) -> None:
        self._model, self._shards, self._ranks = model, shards, ranks
        self._samples = samples
        self._steps, self._trials = 0, 0
        self._shard_s = self._whole_s = self._half_s = float("inf")
        self._calls_per_shard = 1.0
        self._last_call: _Call | None = None
        self._calls = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return self._trials >= _TRIALS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the shards of a step: see what the model is called with."""
        self._steps += 1
        if self._steps <= _FIRST_STEPS or self.is_done:
            yield
            return
        hook = self._model.register_forward_pre_hook(self._note_call, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._last_call, self._calls = None, 0

    def _note_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._last_call = _Call.noted(args, kwargs)
            self._calls += 1

    def measure(self, samples: int, seconds: Sequence[float]) -> None:
        """After the shards of a step on this rank, which have taken so long each; the last had so
        many samples. Buffers and random generators are the caller's to put right.
        """
        shards = len(seconds)
        call = self._last_call
        if call is None or shards < 2 or samples < max(2, self._samples):
            return
        half = call.first(_fewer(samples), of=samples)
        if half is None:
            return
        try:
            whole_s, half_s = call.seconds(self._model), half.seconds(self._model)
        except Exception:
            # A model that does not take half of a batch: BatchNorm with a single sample, sizes that
            # stand in other arguments. Then there is nothing to say, and nothing wrong.
            self._trials = _TRIALS
            return
        self._trials += 1
        self._calls_per_shard = self._calls / shards
        # What else runs on a machine only makes it longer.
        self._shard_s = min(self._shard_s, *seconds)
        self._whole_s, self._half_s = min(self._whole_s, whole_s), min(self._half_s, half_s)
        if self.is_done:
            self._say(samples, shards)

    def _say(self, samples: int, shards: int) -> None:
        fixed_s = fixed_part(samples, self._whole_s, _fewer(samples), self._half_s)
        factor = price_of(shards, self._shard_s, fixed_s * self._calls_per_shard)
        if factor > _WORTH_SAYING:
            ranks = "1 rank" if self._ranks == 1 else f"{self._ranks} ranks"
            sys.stderr.write(
                f"paceline: {self._shards} shards on {ranks} take about {factor:.1f} times as long "
                f"as {self._ranks} would: use fewer shards if you will never have as many ranks as "
                "that (another number of shards gives other bits; measure_shards=False says "
                "nothing)\n"
            )


def _fewer(samples: int) -> int:
    """Half of the samples, but two if possible, which BatchNorm needs."""
    return max(samples // 2, min(2, samples - 1))


def fixed_part(samples: int, whole_s: float, fewer: int, fewer_s: float) -> float:
    """What of the time for a batch does not depend on its size, from the times for two sizes."""
    per_sample = max(0.0, whole_s - fewer_s) / (samples - fewer)
    return max(0.0, whole_s - per_sample * samples)


def price_of(shards: int, shard_s: float, fixed_s: float) -> float:
    """How many times as long some shards take as all of them in one, which would have the fixed
    part of their time once.
    """
    apart_s = shards * shard_s
    # No shard consists of more than itself.
    return apart_s / (apart_s - (shards - 1) * min(fixed_s, shard_s))


class _Call(NamedTuple):
    """What a model was called with, and how."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    @classmethod
    def noted(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        kind = _device_type(args, kwargs)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(map_leaves(_detached, args), map_leaves(_detached, kwargs), dtype)

    def first(self, count: int, *, of: int) -> _Call | None:
        """The same with the first samples only; None if no input has one row for each sample."""
        found = False

        def cut(leaf: Any) -> Any:
            nonlocal found
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != of:
                return leaf
            found = True
            return leaf[:count].clone()

        args, kwargs = map_leaves(cut, self.args), map_leaves(cut, self.kwargs)
        return _Call(args, kwargs, self.autocast) if found else None

    def seconds(self, model: nn.Module) -> float:
        """How long forward and backward take. `.grad` is not touched."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        kind = _device_type(self.args, self.kwargs)
        started = time.perf_counter()
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            # Not `model(...)`: hooks of the script have seen this call.
            results = tensors_in(model.forward(*self.args, **self.kwargs))
        outputs = [each for each in results if each.requires_grad]
        weights = [torch.ones_like(each) for each in outputs]
        torch.autograd.grad(outputs, parameters, weights, allow_unused=True)
        if kind != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - started


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
