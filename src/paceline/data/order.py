"""In which order an epoch visits the samples: pure functions from (epoch, positions) to dataset
indices.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.permutation import ALGORITHM, Permutation
from paceline.data.rng import Int64s, derive_keys, random_bits
from paceline.errors import ConfigError

__all__ = ["Order", "SequentialOrder", "ShuffledOrder", "WeightedOrder", "SubsetOrder"]

# Sums of up to 2**62 numbers below 2**900 are finite, and 2**-53 of one above 2**-900 is not zero.
_ORDINARY_EXPONENT = 900


class Order(Protocol):
    """What stands at which position of an epoch. `name` identifies the order in saved states;
    `repeats` is whether an index can come twice in an epoch.
    """

    length: int
    name: str
    repeats: bool

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """The dataset indices at these positions of the epoch."""


class SequentialOrder:
    """0, 1, 2, ..."""

    name = "sequential"
    repeats = False

    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        return positions


class ShuffledOrder:
    """A new permutation in each epoch."""

    name = ALGORITHM
    repeats = False

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self._epoch: int | None = None
        self._permutation: Permutation

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        # Passes of two epochs may run side by side, but mostly one epoch is asked for many times.
        if epoch != self._epoch:
            self._permutation, self._epoch = Permutation(self.length, self.seed, epoch), epoch
        return self._permutation(positions)


class WeightedOrder:
    """`draws` independent draws in each epoch, each index with a probability in proportion to its
    weight.
    """

    repeats = True

    def __init__(self, weights: npt.NDArray[Any], draws: int, seed: int) -> None:
        values = _as_floats(weights)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ConfigError(
                "weights must be one finite number for each sample, none negative and not all "
                f"zero, found {values.size} of them, smallest {values.min(initial=np.inf)}, "
                f"largest {values.max(initial=-np.inf)}"
            )
        self.length, self.seed = draws, seed
        self.name = f"weighted/1:{_digest(values)}"
        self._sums = np.cumsum(_scaled(values))

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        key = derive_keys("weighted", self.seed, epoch, 1)[0]
        total = self._sums[-1]
        # 53 random bits make a number in [0, 1); scaled, it falls into some weight's interval of
        # the cumulative sums.
        bits = random_bits(key, positions.astype(np.uint64)) >> np.uint64(11)
        points = bits.astype(np.float64) * (total * 2.0**-53)
        # The product may round up to the total itself, which belongs to no index.
        np.minimum(points, np.nextafter(total, 0.0), out=points)
        indices: Int64s = np.searchsorted(self._sums, points, side="right").astype(np.int64)
        return indices


def _as_floats(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    try:
        if weights.dtype.kind == "c":
            raise TypeError("they are complex")
        return np.ascontiguousarray(weights, dtype="<f8")
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"weights must be numbers: {error}") from error


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same proportions, far from where sums overflow or the smallest steps vanish. Ordinary
    weights stay as they are, to the bit: they decide which order a saved position belongs to.
    """
    _, exponent = np.frexp(values.max())
    return values if abs(exponent) < _ORDINARY_EXPONENT else np.ldexp(values, -exponent)


class SubsetOrder:
    """Another order over a choice of dataset indices instead of all."""

    def __init__(self, inner: Order, indices: Int64s) -> None:
        self.length, self.repeats = inner.length, inner.repeats
        self.name = f"{inner.name}+subset:{_digest(indices.astype('<i8'))}"
        self._inner, self._indices = inner, indices

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        return self._indices[self._inner.at(epoch, positions)]


def _digest(values: npt.NDArray[np.generic]) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
