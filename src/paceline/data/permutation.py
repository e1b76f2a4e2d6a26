"""A keyed permutation of 0..n-1 that is evaluated where it is needed and never stored.

Algorithm `paceline-permutation/1`, part of what a saved state promises:

- n > 16,384: write x = left * b + right with a = ceil(sqrt(n)) and b = ceil(n / a), and alternate
  eight rounds of

      left  = (left  + bits(key, right) / 2) mod a      and
      right = (right + bits(key, left)  / 2) mod b,

  a Feistel network on Z_a x Z_b. Each round can be undone, so the whole is a bijection of
  0..a*b-1. A result of n or more is sent through again (cycle walking: it must come back below n,
  since the input was). As a*b - n < a, that concerns fewer than one position in sqrt(n).
- n <= 16,384: Feistel networks on tiny domains are visibly not uniform; here the numbers are sorted
  by their random bits, which is a uniform permutation. The table is bounded by the constant, not by
  the dataset.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.data.rng import Int64s, UInt64s, derive_keys, random_bits

__all__ = ["ALGORITHM", "Permutation"]

ALGORITHM = "paceline-permutation/1"
_ROUNDS = 8
_SORTED_UP_TO = 1 << 14
# Positions at a time: all temporaries stay in the core's own cache.
_CHUNK = 1 << 13
_ONE_BIT = np.uint64(1)


class Permutation:
    """`Permutation(n, seed, epoch)(positions)`: what stands at these positions of the shuffled
    0..n-1.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.length = length
        self._keys = derive_keys("permutation", seed, epoch, _ROUNDS)
        self._table: Int64s | None = None
        if length <= _SORTED_UP_TO:
            bits = random_bits(self._keys[0], np.arange(length, dtype=np.uint64))
            self._table = np.argsort(bits, kind="stable").astype(np.int64)
        rows = max(1, math.isqrt(max(0, length - 1)) + 1)  # ceil(sqrt(length))
        self._rows = np.uint64(rows)
        self._columns = np.uint64(max(1, -(-length // rows)))

    def __call__(self, positions: Int64s) -> Int64s:
        if self._table is not None:
            return self._table[positions]
        result = np.empty(positions.shape, dtype=np.int64)
        for start in range(0, positions.size, _CHUNK):
            chunk = positions[start : start + _CHUNK].astype(np.uint64)
            result[start : start + _CHUNK] = self._walk(chunk)
        return result

    def _walk(self, x: UInt64s) -> UInt64s:
        x = self._network(x)
        # Cycle walking: only the few results outside go through the network again.
        outside = np.flatnonzero(x >= np.uint64(self.length))
        while outside.size:
            x[outside] = self._network(x[outside])
            outside = outside[x[outside] >= np.uint64(self.length)]
        return x

    def _network(self, x: UInt64s) -> UInt64s:
        left = x // self._columns
        right = x - left * self._columns
        for index in range(0, _ROUNDS, 2):
            left = self._round(left, right, self._keys[index], self._rows)
            right = self._round(right, left, self._keys[index + 1], self._columns)
        return left * self._columns + right

    @staticmethod
    def _round(half: UInt64s, other: UInt64s, key: np.uint64, modulus: np.uint64) -> UInt64s:
        total = random_bits(key, other)
        # Half of the range, so that the addition cannot overflow.
        total >>= _ONE_BIT
        total += half
        # `total % modulus`, but numpy divides by a constant several times faster than it takes `%`.
        total -= (total // modulus) * modulus
        return total
