"""Random numbers for loading samples: a function of the sample, not of the rank, the worker or what
came before.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from paceline.data.rng import UInt64s, derive_keys, random_bits

__all__ = ["sample_seeds", "collate_seed", "seed_all", "RandomState", "own_randomness"]

_BITS_32, _BITS_63 = (1 << 32) - 1, (1 << 63) - 1


def sample_seeds(
    seed: int, epoch: int, indices: Sequence[Any], draws: UInt64s | None = None
) -> list[int]:
    """One seed for each sample, from the loader's seed, the epoch and the sample's index.

    `draws` tells repeated draws of one index apart, where an epoch can hold some.
    """
    keys = derive_keys("sample", seed, epoch, 2)
    numbers = np.array([_number(index) for index in indices], dtype=np.uint64)
    seeds = random_bits(keys[0], numbers)
    if draws is not None:
        seeds ^= random_bits(keys[1], draws)
    return seeds.tolist()  # type: ignore[no-any-return]  # numpy types tolist() as Any


def collate_seed(first_sample: int) -> int:
    """The seed for `collate_fn`, from that of the first sample in the batch."""
    bits: int = random_bits(np.uint64(1), np.array([first_sample], dtype=np.uint64)).item()
    return bits


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator of this process."""
    random.seed(seed)
    np.random.seed(seed & _BITS_32)
    # Not torch.manual_seed: that visits every accelerator too, which samples have no business with.
    torch.default_generator.manual_seed(seed & _BITS_63)


class RandomState:
    """A copy of Python's, numpy's and torch's CPU generator of this process."""

    def __init__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Keep what is seeded inside from the training loop, which shares the generators if there are
    no workers.
    """
    if get_worker_info() is not None:
        yield
        return
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


def _number(index: Any) -> int:
    """64 bits for an index; samplers may hand out keys of any kind."""
    if isinstance(index, int):
        return index % 2**64
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")
