"""A generation: which processes train together, from one change of members to the next.

The fork server of an elastic job numbers generations from 0 and publishes them, one after the
other, on the job page (`launch/job_page.py`). A *slot* is a rank's place in the job - its number in
front of its output; each host has some slots in a row. A *member* is one process's life in a slot;
its id is never used again.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Generation", "Member"]


@dataclasses.dataclass(frozen=True, order=True)
class Member:
    """One process that takes part, and where it runs."""

    slot: int
    id: int
    host: int = 0


@dataclasses.dataclass(frozen=True)
class Generation:
    """The members of one generation, in the order of their slots, and why it began."""

    number: int
    members: tuple[Member, ...]
    reason: str = ""

    def rank_of(self, member_id: int) -> int | None:
        """The rank that a member has in this generation's group; None if it is not in it."""
        ids = [member.id for member in self.members]
        return ids.index(member_id) if member_id in ids else None

    @property
    def spans_hosts(self) -> bool:
        """Whether its members are on several hosts."""
        return len({member.host for member in self.members}) > 1

    @property
    def store_prefix(self) -> str:
        """The part of the job's store in which the members of this generation meet."""
        return f"paceline/generation/{self.number}/group"
