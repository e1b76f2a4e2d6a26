"""Who computes what, among the ranks of one exchange."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.training.audit import Audit
from paceline.training.balance import Balance, Pace
from paceline.training.shard_plan import Shard
from paceline.training.shard_queue import RankClock, ShardClaims, ShardQueue

__all__ = ["WorkSharing"]


class WorkSharing:
    """Deals shards out to the ranks of one exchange, and lets them take over from each other. What
    it learns of their speed is the same on every rank, and goes with the exchange.

    Args:
        rank: this one.
        ranks: how many there are.
        shards: of a full batch.
        claims: where ranks claim shards.
        follows_speed: whether slower ranks are dealt fewer shards.
    """

    def __init__(
        self, rank: int, ranks: int, shards: int, claims: ShardClaims, *, follows_speed: bool
    ) -> None:
        self._rank, self._ranks, self._shards, self._claims = rank, ranks, shards, claims
        self._balance = Balance(ranks, shards, follows_speed=follows_speed)
        self._clock = RankClock()

    def deal(self, shards: Sequence[Shard]) -> list[Sequence[Shard]]:
        """Each rank's shards of a batch."""
        return self._balance.deal(shards)

    def queue(self, deals: Sequence[Sequence[Shard]], audit: Audit | None) -> ShardQueue:
        """What this rank computes in a pass that begins now."""
        return ShardQueue(deals, self._rank, audit, self._claims, self._balance, self._clock)

    def join_pass(self) -> None:
        """This rank has begun the pass at hand in another exchange; it takes nothing over in it."""
        self._claims.begin_pass()

    def record(self, paces: Sequence[Pace], computed: Sequence[Sequence[int]]) -> None:
        """What the messages of a pass have told: of every rank its pace and its shards."""
        # Shards of a batch that is not full are smaller, or fewer.
        if self._ranks > 1 and sum(map(len, computed)) == self._shards:
            self._balance.record(paces, computed)
