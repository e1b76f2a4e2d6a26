"""Which shards fall to this rank in one pass, one after the other: those dealt to it, then the one
it audits, then what it takes over from ranks that are behind.

On one host a shard belongs to the rank that claims it first. A rank claims its own from the first
one on; a rank that is through claims the last one of a rank that has some left: so each has few
sums of neighbouring shards. Who claims what has no influence on bits.
"""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from paceline.core.claims import ClaimTable
from paceline.core.communicator import Communicator
from paceline.training.audit import Audit
from paceline.training.balance import Balance, Pace
from paceline.training.shard_plan import Shard

__all__ = [
    "Backlog",
    "HostClaims",
    "NoClaims",
    "ShardClaims",
    "ShardQueue",
    "RankClock",
    "Task",
    "TaskKind",
    "shard_to_take",
]

_REMEMBERED = 0.8


class TaskKind(enum.Enum):
    """Why a rank computes a shard."""

    DEALT = enum.auto()
    AUDIT = enum.auto()  # for its digests only
    TAKEN_OVER = enum.auto()  # from a rank that is behind, by a claim
    HANDED_OVER = enum.auto()  # by an agreement of all ranks


class Task(NamedTuple):
    """A shard to compute."""

    shard: Shard
    kind: TaskKind


# --- claims -----------------------------------------------------------------------------------


class ShardClaims(Protocol):
    """Decides who computes a shard, where several ranks may."""

    def begin_pass(self) -> None:
        """All shards are free again."""

    def claim(self, shard: Shard) -> bool:
        """Whether this rank is the one to compute it."""

    def unclaimed(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Those that no rank has begun and this one may claim."""

    def seconds_since_claim(self, rank: int) -> float:
        """How long ago a rank began its last shard; or how long the pass has lasted, if less."""


class NoClaims:
    """A shard belongs to the rank it is dealt to."""

    def begin_pass(self) -> None:
        pass

    def claim(self, shard: Shard) -> bool:
        return True

    def unclaimed(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        return ()

    def seconds_since_claim(self, rank: int) -> float:
        return 0.0


class HostClaims:
    """Claims in memory that the ranks of one host share; made by all of them together."""

    def __init__(self, comm: Communicator, shards: int) -> None:
        self._table = ClaimTable(comm, shards)
        self._round = 0
        self._began_ns = 0

    def begin_pass(self) -> None:
        # Nobody is in a later pass before all have made their claims of this one: they exchange
        # gradients in between.
        self._round += 1
        self._began_ns = time.monotonic_ns()

    def claim(self, shard: Shard) -> bool:
        if not self._table.claim(shard.number, self._round):
            return False
        self._table.publish(time.monotonic_ns())
        return True

    def unclaimed(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        return [s for s in shards if not self._table.is_claimed(s.number, self._round)]

    def seconds_since_claim(self, rank: int) -> float:
        since = max(self._began_ns, self._table.published(rank))
        return (time.monotonic_ns() - since) / 1e9


# --- what is worth taking over ----------------------------------------------------------------


class Backlog(NamedTuple):
    """What a rank has not begun, and how long a shard takes there."""

    shards: Sequence[Shard]
    shard_s: float


def shard_to_take(backlogs: Sequence[Backlog], cost_s: float) -> Shard | None:
    """The last shard of the rank that has the longest way to go, if the rank would not have come to
    it by the time it is computed here.

    Args:
        backlogs: of the ranks that are behind.
        cost_s: how long it takes here, with all that comes with it.
    """
    longest = max(backlogs, key=lambda each: len(each.shards) * each.shard_s)
    pays = len(longest.shards) * longest.shard_s > cost_s
    return longest.shards[-1] if pays else None


class RankClock:
    """How long this rank takes, from pass to pass."""

    def __init__(self) -> None:
        self.exchange_s = 0.0
        # What a shard that is taken over costs beyond a dealt one: it is loaded on demand.
        self.extra_s = 0.0

    def end_pass(
        self, dealt_s: Sequence[float], taken_s: Sequence[float], exchange_s: float
    ) -> None:
        """A pass is over, with these times."""
        self.exchange_s = exchange_s
        # Forgotten by and by: the first one may have had to start a worker.
        self.extra_s *= _REMEMBERED
        if dealt_s and taken_s:
            self.extra_s = max(0.0, min(taken_s) - sum(dealt_s) / len(dealt_s))


# --- the queue --------------------------------------------------------------------------------


class ShardQueue:
    """The tasks of one rank in one pass.

    Args:
        deals: the shards of each rank.
        rank: this one.
        audit: that of the pass, if there is one.
        claims: who may compute what.
        balance: the speed of the ranks.
        clock: that of this rank.
    """

    def __init__(
        self,
        deals: Sequence[Sequence[Shard]],
        rank: int,
        audit: Audit | None,
        claims: ShardClaims,
        balance: Balance,
        clock: RankClock,
    ) -> None:
        self._deals, self._rank, self._audit = deals, rank, audit
        self._claims, self._balance, self._clock = claims, balance, clock
        self._tasks = collections.deque(Task(shard, TaskKind.DEALT) for shard in deals[rank])
        if audit is not None and audit.auditor == rank:
            self._tasks.append(Task(audit.shard, TaskKind.AUDIT))
        self._dealt_s, self._taken_s = list[float](), list[float]()
        self._running: TaskKind | None = None
        claims.begin_pass()
        self._since = time.monotonic()

    def next(self) -> Task | None:
        """What to compute next, now that the task before is done; None if there is nothing."""
        now = time.monotonic()
        if self._running is TaskKind.DEALT:
            self._dealt_s.append(now - self._since)
        elif self._running is TaskKind.TAKEN_OVER:
            self._taken_s.append(now - self._since)
        self._since = now
        task = self._begin_next()
        self._running = None if task is None else task.kind
        return task

    def hand_over(self, shards: Iterable[Shard]) -> None:
        """Shards of other ranks that this one is to compute as well. From now on it is agreed who
        computes what, and nothing is taken over any more.
        """
        self._claims = NoClaims()
        self._tasks.extend(Task(shard, TaskKind.HANDED_OVER) for shard in shards)

    def pace(self) -> Pace:
        """What this rank tells the others."""
        return Pace(self._shard_s(), self._clock.exchange_s)

    def close(self) -> None:
        """The pass is complete on this rank."""
        exchange_s = time.monotonic() - self._since
        self._clock.end_pass(self._dealt_s, self._taken_s, exchange_s)

    def _begin_next(self) -> Task | None:
        while self._tasks:
            task = self._tasks.popleft()
            if task.kind is not TaskKind.DEALT or self._claims.claim(task.shard):
                return task
        while (shard := self._shard_to_take()) is not None:
            if self._claims.claim(shard):
                return Task(shard, TaskKind.TAKEN_OVER)
        return None

    def _shard_to_take(self) -> Shard | None:
        own_s = self._shard_s() or self._balance.shard_s(self._rank)
        if own_s is None:
            return None
        backlogs = list(self._backlogs(own_s))
        if not backlogs:
            return None
        # There will be a sum more on either side.
        cost_s = own_s + self._clock.extra_s + self._balance.extra_exchange_s(2)
        return shard_to_take(backlogs, cost_s)

    def _backlogs(self, own_s: float) -> Iterable[Backlog]:
        for rank, dealt in enumerate(self._deals):
            shards = self._claims.unclaimed(dealt) if rank != self._rank else ()
            if self._audit is not None and self._audit.auditor == self._rank:
                # Whoever audits a shard is not the one who computes it.
                shards = [shard for shard in shards if shard != self._audit.shard]
            if shards:
                usual_s = self._balance.shard_s(rank) or own_s
                yield Backlog(shards, max(usual_s, self._claims.seconds_since_claim(rank)))

    def _shard_s(self) -> float | None:
        """How long a dealt shard takes here."""
        return sum(self._dealt_s) / len(self._dealt_s) if self._dealt_s else None
