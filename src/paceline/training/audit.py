"""Audits: now and then another rank computes a shard a second time, and both must find the same
bytes. A shard is the same computation everywhere, so a difference is never a false alarm.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from paceline.errors import ConfigError, MismatchError
from paceline.training.shard_plan import Shard
from paceline.training.state_digest import tensor_digest

__all__ = ["Audit", "AuditPlan", "Digests", "check_audit", "digests_of"]

# One for each parameter, empty where there is no gradient.
Digests = list[str]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Which shard is computed twice, and by which rank the second time."""

    shard: Shard
    auditor: int


class AuditPlan:
    """Chooses shards and auditors: pure, so that loaders know ahead what their rank will need."""

    def __init__(self, every: int | None, seed: int) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"audit_every must be at least 1, found {every}")
        self._every, self._seed = every, seed

    def audit_of(self, step: int, deals: Sequence[Sequence[Shard]]) -> Audit | None:
        """The audit of a step whose shards are dealt out like this; None if it has none."""
        if self._every is None or (step + 1) % self._every:
            return None
        text = f"paceline/1/audit/{self._seed}/{step}".encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        chosen, skipped = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        owners = [(rank, shard) for rank, shards in enumerate(deals) for shard in shards]
        owner, shard = owners[chosen % len(owners)]
        # Any rank but the owner; alone, the same one again.
        auditor = (owner + 1 + skipped % max(1, len(deals) - 1)) % len(deals)
        return Audit(shard, auditor)


def digests_of(parameters: Sequence[torch.nn.Parameter]) -> Digests:
    """Digests of the gradients that a shard has left."""
    return [tensor_digest(parameter.grad) for parameter in parameters]


def check_audit(
    place: str, shard: int, found: Sequence[tuple[int, Digests]], names: Sequence[str]
) -> None:
    """Raise `MismatchError` if two ranks have computed different gradients of a shard.

    `found` has the ranks and what each computed, the shard's owner and its auditor.
    """
    (one, expected), *others = found
    for other, digests in others:
        for name, first, second in zip(names, expected, digests, strict=True):
            if first != second:
                values = {one: first or "no gradient", other: second or "no gradient"}
                raise MismatchError(
                    f"audit of {place}: ranks {one} and {other} computed different gradients of "
                    f"{name} in shard {shard}, with the digests {values[one]} and {values[other]}. "
                    "Either a processor or memory of one of them is broken, or the loop over "
                    "batch.shards() depends on something beside its shard, the parameters and "
                    "the buffers",
                    values,
                )
