"""A batch of zero samples with the structure and types of a real one.

How a collated batch depends on the number of samples is read off two of them, of one sample and of
the same sample twice. A dimension or list that grows from 1 to 2 had one entry for each sample and
is cut to 0; one that grows from 7 to 14 held seven entries of a sample and is cut to 0; one that
grows from 2 to 3 (for example offsets) is cut to 1; and what does not grow is kept. In short: a
size that is s for one sample and t for two is 2 s - t for none.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ConfigError

__all__ = ["empty_batch"]

_PROBLEM = (
    "this rank's share of the last global batch has no samples, and your batches cannot be cut to "
    "zero samples"
)
_CURE = (
    "Give the loader `empty_batch=function`, which makes a batch of zero samples from a batch of "
    "one, or use drop_last=True"
)


def empty_batch(one: Any, two: Any) -> Any:
    """The collated batch of zero samples, from those of one sample and of the same sample twice.

    Raises:
        ConfigError: the two differ in more than sizes, or hold something that cannot be cut.
    """
    if type(one) is not type(two):
        raise ConfigError(
            f"{_PROBLEM}: one sample makes {type(one).__name__} and two make "
            f"{type(two).__name__}. {_CURE}"
        )
    if isinstance(one, torch.Tensor):
        return _empty_tensor(one, two)
    if isinstance(one, Mapping):
        return {name: empty_batch(part, two[name]) for name, part in one.items()}
    if isinstance(one, list | tuple):
        return _empty_sequence(one, two)
    if one is None or isinstance(one, str | bytes | numbers.Number):
        return one
    raise ConfigError(f"{_PROBLEM}: they hold {type(one).__name__}. {_CURE}")


def _empty_tensor(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    if one.dim() != two.dim():
        raise ConfigError(
            f"{_PROBLEM}: one sample has shape {tuple(one.shape)} and two have "
            f"{tuple(two.shape)}. {_CURE}"
        )
    for dimension, size in enumerate(one.shape):
        one = one.narrow(dimension, 0, max(0, 2 * size - two.shape[dimension]))
    return one


def _empty_sequence(one: Any, two: Any) -> Any:
    if len(one) != len(two):
        return type(one)(one[: max(0, 2 * len(one) - len(two))])
    parts = [empty_batch(*pair) for pair in zip(one, two, strict=True)]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
