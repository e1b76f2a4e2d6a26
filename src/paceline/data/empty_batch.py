"""A batch of zero samples with the structure and types of a real one.

How a collated batch depends on the number of samples is read off two of them, of one sample and of
the same sample twice. A dimension or list that grows from 1 to 2 had one entry for each sample and
is cut to 0; one that grows from 7 to 14 held seven entries of a sample and is cut to 0; one that
grows from 2 to 3 (offsets, say) is cut to 1; and what does not grow is kept. In short: a size s of
one sample and t of two is 2 s - t of none.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ConfigError

__all__ = ["empty_batch"]


def empty_batch(one: Any, two: Any) -> Any:
    """The collated batch of no samples, from those of one sample and of the same sample twice."""
    if type(one) is not type(two):
        raise ConfigError(
            f"{_WHAT}: one sample makes {type(one).__name__} and two make {type(two).__name__}. {_CURE}"
        )
    if isinstance(one, torch.Tensor):
        return _empty_tensor(one, two)
    if isinstance(one, Mapping):
        return {name: empty_batch(part, two[name]) for name, part in one.items()}
    if isinstance(one, list | tuple):
        return _empty_sequence(one, two)
    if one is None or isinstance(one, str | bytes | numbers.Number):
        return one
    raise ConfigError(f"{_WHAT}, which hold {type(one).__name__}. {_CURE}")


def _empty_tensor(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    if one.dim() != two.dim():
        raise ConfigError(
            f"{_WHAT}: one sample has shape {tuple(one.shape)} and two {tuple(two.shape)}. {_CURE}"
        )
    for dimension, size in enumerate(one.shape):
        one = one.narrow(dimension, 0, max(0, 2 * size - two.shape[dimension]))
    return one


def _empty_sequence(one: Any, two: Any) -> Any:
    if len(one) != len(two):
        return type(one)(one[: max(0, 2 * len(one) - len(two))])
    parts = [empty_batch(*pair) for pair in zip(one, two, strict=True)]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)


_WHAT = "this rank's share of the last global batch has no samples, and it is not known how to cut your batches to none"
_CURE = "Give the loader `empty_batch=function`, which makes it from a batch of one sample, or use drop_last=True"
