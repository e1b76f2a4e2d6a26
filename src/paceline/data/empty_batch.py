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
    "this rank's share of the last global batch has no samples, and no empty batch can be derived "
    "from the output of your collate_fn"
)
_CURE = (
    "Give the loader `empty_batch=function`, which makes a batch of zero samples from a batch of "
    "one, or use drop_last=True"
)


def empty_batch(single: Any, double: Any) -> Any:
    """The collated batch of zero samples, from those of one sample and of the same sample twice.

    Raises:
        ConfigError: the two differ in more than sizes, or hold something that cannot be cut.
    """
    if type(single) is not type(double):
        raise ConfigError(
            f"{_PROBLEM}: one sample gives {type(single).__name__} and two give "
            f"{type(double).__name__}. {_CURE}"
        )
    if isinstance(single, torch.Tensor):
        return _empty_tensor(single, double)
    if isinstance(single, Mapping):
        return {name: empty_batch(part, double[name]) for name, part in single.items()}
    if isinstance(single, list | tuple):
        return _empty_sequence(single, double)
    if single is None or isinstance(single, str | bytes | numbers.Number):
        return single
    raise ConfigError(f"{_PROBLEM}: it holds {type(single).__name__}. {_CURE}")


def _empty_tensor(single: torch.Tensor, double: torch.Tensor) -> torch.Tensor:
    if single.dim() != double.dim():
        raise ConfigError(
            f"{_PROBLEM}: one sample has shape {tuple(single.shape)} and two have "
            f"{tuple(double.shape)}. {_CURE}"
        )
    for dimension, size in enumerate(single.shape):
        single = single.narrow(dimension, 0, max(0, 2 * size - double.shape[dimension]))
    return single


def _empty_sequence(single: Any, double: Any) -> Any:
    # A list with an entry for each sample; otherwise every entry is a batch of its own.
    if len(single) != len(double):
        return type(single)(single[: max(0, 2 * len(single) - len(double))])
    parts = [empty_batch(*pair) for pair in zip(single, double, strict=True)]
    return type(single)(*parts) if hasattr(single, "_fields") else type(single)(parts)
