"""Random numbers for loading samples: a function of the sample, not of the rank, the worker or what
was loaded before.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import get_worker_info

from paceline.data.rng import UInt64s, derive_keys, random_bits

__all__ = ["sample_seeds", "collate_seed", "seed_all", "RngState", "isolated_rng"]

_BITS_32, _BITS_63 = (1 << 32) - 1, (1 << 63) - 1


def sample_seeds(
    seed: int, epoch: int, indices: Sequence[object], draws: UInt64s | None = None
) -> list[int]:
    """One seed for each sample, from the loader's seed, the epoch and the sample's index.

    `draws` distinguishes repeated draws of one index, where an epoch can hold some.
    """
    keys = derive_keys("sample", seed, epoch, 2)
    numbers = np.array([_as_bits(index) for index in indices], dtype=np.uint64)
    seeds = random_bits(keys[0], numbers)
    if draws is not None:
        seeds ^= random_bits(keys[1], draws)
    values: list[int] = seeds.tolist()
    return values


def collate_seed(first_sample: int) -> int:
    """The seed for `collate_fn`, from that of the first sample in the batch."""
    bits: int = random_bits(np.uint64(1), np.array([first_sample], dtype=np.uint64)).item()
    return bits


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator of this process."""
    # Each generator takes as many bits as it can.
    random.seed(seed)
    np.random.seed(seed & _BITS_32)
    # Not torch.manual_seed: that visits every accelerator too, which samples have no business with.
    torch.default_generator.manual_seed(seed & _BITS_63)


class RngState:
    """A copy of Python's, numpy's and torch's CPU generator of this process."""

    def __init__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Set the generators back to the copy."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """Put the generators back afterwards, unless this is a worker process: without workers, the
    training loop draws from the same ones.
    """
    if get_worker_info() is not None:
        yield
        return
    before = RngState()
    try:
        yield
    finally:
        before.restore()


def _as_bits(index: object) -> int:
    """64 bits for an index; samplers may yield keys of any kind."""
    if isinstance(index, int):
        return index % 2**64
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")
