"""Which shards fall to this rank in one pass, one after the other."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.training.audit import Audit
from paceline.training.shard_plan import Shard

__all__ = ["ShardQueue", "Task"]


class Task(NamedTuple):
    """A shard to compute; if `is_audit`, for its digests only."""

    shard: Shard
    is_audit: bool


class ShardQueue:
    """The tasks of one rank in one pass: the shards dealt to it, then the one it audits, then what
    was handed over to it since.

    Args:
        deals: the shards of each rank.
        rank: this one.
        audit: that of the pass, if there is one.
    """

    def __init__(self, deals: Sequence[Sequence[Shard]], rank: int, audit: Audit | None) -> None:
        self._tasks = collections.deque(Task(shard, False) for shard in deals[rank])
        if audit is not None and audit.auditor == rank:
            self._tasks.append(Task(audit.shard, True))

    def next(self) -> Task | None:
        """What to compute next; None if there is nothing now."""
        return self._tasks.popleft() if self._tasks else None

    def hand_over(self, shards: Iterable[Shard]) -> None:
        """Shards of other ranks that this one is to compute as well."""
        self._tasks.extend(Task(shard, False) for shard in shards)
