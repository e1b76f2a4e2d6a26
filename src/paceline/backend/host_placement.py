"""`Placement`: which ranks of a group are on which host. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

__all__ = ["Placement", "cut_range"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which ranks are on which host, seen from one of them."""

    rank: int
    host_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, host_of: Sequence[int]) -> Placement:
        """`host_of[r]` is the index of rank r's host; hosts are numbered without gaps."""
        members = tuple(
            tuple(r for r, h in enumerate(host_of) if h == host) for host in range(max(host_of) + 1)
        )
        return cls(rank, tuple(host_of), members)

    @cached_property
    def size(self) -> int:
        return len(self.host_of)

    @cached_property
    def hosts(self) -> int:
        return len(self.members)

    @cached_property
    def host(self) -> int:
        return self.host_of[self.rank]

    @cached_property
    def other_hosts(self) -> tuple[int, ...]:
        return tuple(host for host in range(self.hosts) if host != self.host)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.members[self.host]

    @cached_property
    def local_index(self) -> int:
        return self.local.index(self.rank)

    @cached_property
    def lanes(self) -> int:
        """As many as the smallest host has ranks."""
        return min(map(len, self.members))

    @cached_property
    def is_even(self) -> bool:
        """Whether all hosts have as many ranks."""
        return all(len(of_host) == self.lanes for of_host in self.members)

    @cached_property
    def has_lane(self) -> bool:
        """Whether this rank is in a lane: on a host with more ranks than lanes, some are not."""
        return self.local_index < self.lanes

    @cached_property
    def all_have_lanes(self) -> bool:
        """Whether all ranks of this host are in lanes."""
        return len(self.local) == self.lanes


def cut_range(start: int, count: int, parts: int) -> list[tuple[int, int]]:
    """Where each part of a range begins and how long it is: as equal as can be, longer ones
    first.
    """
    length = -(-count // parts)
    return [
        (start + min(part * length, count), max(min(length, count - part * length), 0))
        for part in range(parts)
    ]
