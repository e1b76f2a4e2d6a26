"""Random numbers of a shard: a function of (seed, step, shard), whichever rank draws them and
whatever was drawn before.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.data.rng import derive_keys, random_bits
from paceline.data.seeding import RngState, seed_all

__all__ = ["ShardSeeds", "TrainingRandomState", "seed_generators"]


class ShardSeeds:
    """The seeds for one pass over the shards of a global batch, and for the code around it."""

    def __init__(self, seed: int, step: int, number: int, shards: int) -> None:
        key = derive_keys(f"training/{number}", seed, step, 1)[0]
        self._seeds: list[int] = random_bits(key, np.arange(shards + 2, dtype=np.uint64)).tolist()

    def of_shard(self, number: int) -> int:
        """The seed for forward and backward of a shard."""
        return self._seeds[number]

    @property
    def before(self) -> int:
        """The seed for what precedes the shards: the same on every rank."""
        return self._seeds[-2]

    @property
    def after(self) -> int:
        """The seed for what follows the shards: the same on every rank."""
        return self._seeds[-1]


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and all of torch's generators."""
    seed_all(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed % 2**63)


class TrainingRandomState:
    """The script's own generators, kept while training seeds them for every shard."""

    def __init__(self) -> None:
        self._host = RngState()
        self._device = _accelerator()
        if self._device is not None:
            self._device_state = torch.get_device_module(self._device).get_rng_state()

    def restore(self) -> None:
        """Set the generators back to where they were."""
        self._host.restore()
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)
