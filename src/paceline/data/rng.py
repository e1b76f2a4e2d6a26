"""Random bits as a pure function of (purpose, seed, epoch, number): the same on every platform,
rank and worker.

Two steps. BLAKE2b turns the purpose, the seed and the epoch into 64-bit keys, once per epoch. A
64-bit finaliser (splitmix64's) then turns key + number into bits, for whole arrays of numbers at
once.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.data.argument_checks import check_whole_number
from paceline.errors import ConfigError

__all__ = ["UInt64s", "Int64s", "derive_keys", "random_bits", "check_seed"]

UInt64s: TypeAlias = npt.NDArray[np.uint64]
Int64s: TypeAlias = npt.NDArray[np.int64]

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def derive_keys(purpose: str, seed: int, epoch: int, count: int) -> UInt64s:
    """`count` independent 64-bit keys (at most 8) for one purpose, seed and epoch."""
    text = f"paceline/1/{purpose}/{seed}/{epoch}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * count).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def random_bits(key: np.uint64, numbers: UInt64s) -> UInt64s:
    """64 well-mixed bits for each number. `numbers` is not changed."""
    bits = numbers * _GOLDEN_RATIO
    bits += key
    bits ^= bits >> _SHIFT_1
    bits *= _MULTIPLY_1
    bits ^= bits >> _SHIFT_2
    bits *= _MULTIPLY_2
    bits ^= bits >> _SHIFT_3
    return bits


def check_seed(seed: int) -> int:
    """The seed as an int, if it is a whole number in range; raises `ConfigError` otherwise."""
    seed = check_whole_number("seed", seed)
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be an integer from 0 to 2**64 - 1, found {seed!r}")
    return seed
