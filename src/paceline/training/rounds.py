"""What the ranks of a new generation do first: a round, in which each says how far it is; pure.

When a rank dies, the others may be apart: one has the gradient of a pass and has stepped, another
has lost the exchange of that pass. A replacement has nothing at all. All hear what all say, and all
follow one rule, so that nobody needs to be told:

    all are equally far, nobody is new      SETTLED     go on together
    ... somebody is new, all are between    HAND_OVER   the first rank that is not new gives its
        two batches                                     state to those that are; then go on together
    all are new                             START       begin together
    otherwise, those furthest behind        ALONE       end the batch alone, then meet again
    ... and the others                      WAIT        meet again, when those have ended it

How far a rank is: how many passes it has completed and how many batches it has ended, counted
together. The script does both in one order, so that equal numbers are equal places. A pass that one
rank computes alone has the bits of one that many have shared, which is why those behind catch up by
computing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Standing", "Turn", "decide", "giver"]


class Standing(NamedTuple):
    """What a rank says in a round: its progress, None if it is new, and whether it is between two
    batches.
    """

    progress: int | None
    between_batches: bool


class Turn(enum.Enum):
    """What a rank does after a round; see the module's description."""

    SETTLED = enum.auto()
    HAND_OVER = enum.auto()
    START = enum.auto()
    ALONE = enum.auto()
    WAIT = enum.auto()


def decide(standings: Sequence[Standing], rank: int) -> Turn:
    """What `rank` does next, from what all have said."""
    behind = min((each.progress for each in standings if each.progress is not None), default=None)
    if behind is None:
        return Turn.START
    trained = [each for each in standings if each.progress is not None]
    if all(each.progress == behind for each in trained):
        if len(trained) == len(standings):
            return Turn.SETTLED
        if all(each.between_batches for each in trained):
            return Turn.HAND_OVER
    return Turn.ALONE if standings[rank].progress == behind else Turn.WAIT


def giver(standings: Sequence[Standing]) -> int:
    """The rank that hands its state over."""
    return next(rank for rank, each in enumerate(standings) if each.progress is not None)
