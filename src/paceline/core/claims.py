"""Claims: things that are to be done once, by whichever rank of a host comes first."""

from __future__ import annotations

import ctypes as C

from paceline.core import abi
from paceline.core.communicator import Communicator
from paceline.core.shared_memory import open_shared_memory

__all__ = ["ClaimTable"]

_WORD_BYTES = 8
_RANK_BITS = 16  # PLC_CLAIM_RANK_BITS


class ClaimTable:
    """Claims of some things, numbered from 0, round after round; made by all ranks together.

    Beside it every rank has a number that the others can read.

    Args:
        comm: the ranks of the host.
        things: how many there are.
    """

    def __init__(self, comm: Communicator, things: int) -> None:
        self._rank, self._things = comm.rank, things
        memory = open_shared_memory(comm, _WORD_BYTES * (things + comm.size))
        self._address = C.addressof(C.c_char.from_buffer(memory))
        self._words = memoryview(memory).cast("Q")
        self._claim = abi.library_holding_gil().plc_claim

    def claim(self, thing: int, in_round: int) -> bool:
        """Claim a thing for this rank; False if it was claimed before in this round."""
        word = self._address + _WORD_BYTES * thing
        return bool(self._claim(word, in_round, self._rank))

    def is_claimed(self, thing: int, in_round: int) -> bool:
        """Whether a rank has claimed a thing in this round."""
        return self._words[thing] >> _RANK_BITS >= in_round

    def publish(self, number: int) -> None:
        """Let the others read a number of this rank's."""
        self._words[self._things + self._rank] = number

    def published(self, rank: int) -> int:
        """The number that a rank published last; 0 if none."""
        return self._words[self._things + rank]
