"""Random numbers of a shard: a function of (seed, step, shard), whichever rank draws them and
whatever was drawn before.
"""

from __future__ import annotations

import hashlib

import torch

from paceline.data.seeding import RngState, seed_all

__all__ = ["ShardSeeds", "TrainingRandomState", "seed_generators"]


class ShardSeeds:
    """The seeds for one pass over the shards of a global batch, and for the code around it."""

    def __init__(self, seed: int, step: int, number: int) -> None:
        self._prefix = f"paceline/1/training/{seed}/{step}/{number}/"

    def of_shard(self, number: int) -> int:
        """The seed for forward and backward of a shard."""
        return self._seed(str(number))

    @property
    def before(self) -> int:
        """The seed for what precedes the shards: the same on every rank."""
        return self._seed("before")

    @property
    def after(self) -> int:
        """The seed for what follows the shards: the same on every rank."""
        return self._seed("after")

    def _seed(self, what: str) -> int:
        digest = hashlib.blake2b((self._prefix + what).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


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
