"""Which samples of a dataset `indices=` means: their numbers, or a mask with True for each one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.argument_checks import check_whole_number
from paceline.data.rng import Int64s
from paceline.errors import ConfigError

__all__ = ["chosen_samples", "one_dimensional"]


def chosen_samples(indices: Any, length: int) -> Int64s:
    """The samples that `indices` means in a dataset of this length: those with these numbers, or
    for a mask, which has the length of the dataset, those where it is True, as NumPy does.

    Raises:
        ConfigError: it is neither, or a number is not that of a sample.
    """
    array = one_dimensional("indices", indices)
    if not array.size:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind == "b":
        return _chosen_by_mask(array, length)
    if array.dtype.kind == "O":
        for position, index in enumerate(array):
            check_whole_number(f"indices[{position}]", index)
    elif array.dtype.kind not in "iu":
        raise ConfigError(
            "indices must be whole numbers, or a mask of True and False, found "
            f"{array[0].item()!r} (of type {array.dtype})"
        )
    smallest, largest = array.min(), array.max()
    if smallest < 0 or largest >= length:
        raise ConfigError(
            f"indices from {smallest} to {largest} do not fit a dataset of length {length}: "
            f"0 to {length - 1} are possible"
        )
    return array.astype(np.int64)


def _chosen_by_mask(mask: npt.NDArray[np.bool_], length: int) -> Int64s:
    if mask.size != length:
        raise ConfigError(
            f"indices is a mask of {mask.size} values, but the dataset has {length} samples: one "
            "for each is needed"
        )
    return np.flatnonzero(mask).astype(np.int64)


def one_dimensional(name: str, values: Any) -> npt.NDArray[Any]:
    """A copy of the values of a sequence, an array or a tensor on any device. In a list that is no
    mask, True and False stay what they are; NumPy would take them for 1 and 0.

    Raises:
        ConfigError: it is something else, or has another number of dimensions.
    """
    array: npt.NDArray[Any]
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # NumPy does not know all of torch's types; float64 holds every value of the others.
        array = (values.double() if values.is_floating_point() else values).numpy().copy()
    elif hasattr(values, "__array__"):
        array = np.array(values)
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        array = _from_sequence(values)
    else:
        raise ConfigError(
            f"{name} must be a list, an array or a tensor of numbers, found {values!r}"
        )
    if array.ndim != 1:
        raise ConfigError(f"{name} must be one-dimensional, found shape {array.shape}")
    return array


def _from_sequence(values: Sequence[Any]) -> npt.NDArray[Any]:
    """A mask if all values are True or False, numbers if all are, else the objects themselves."""
    kinds = set() if isinstance(values, range) else set(map(type, values))
    if kinds and kinds <= {bool, np.bool_}:
        return np.array(values, dtype=np.bool_)
    if not kinds & {bool, np.bool_}:
        # Raises for nested lists of different lengths.
        with contextlib.suppress(ValueError):
            array: npt.NDArray[Any] = np.array(values)
            if array.dtype.kind in "iuf":
                return array
    objects: npt.NDArray[Any] = np.empty(len(values), dtype=object)
    objects[:] = [*values]
    return objects
