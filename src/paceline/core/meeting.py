"""Meetings: some ranks of a communicator wait for each other, and see what each of them brings.

A collective needs every rank. A meeting needs those it is held for; they all know its number.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

from paceline.core import abi
from paceline.core.abi import Kind
from paceline.core.communicator import Communicator

__all__ = ["Meeting", "meeting_bytes"]

_NUMBERS = 2  # PLC_MEETING_NUMBERS


def meeting_bytes(ranks: int) -> int:
    """The shared memory that a meeting of so many ranks needs, all zeros at first."""
    nbytes: int = abi.library().plc_meeting_bytes(ranks)
    return nbytes


class Meeting:
    """One rank's part in the meetings held in a piece of shared memory."""

    def __init__(self, comm: Communicator, address: int) -> None:
        self._comm, self._address = comm, address
        self._meet = abi.library_holding_gil().plc_meet
        self._present = (C.c_uint8 * comm.size)()
        self._own = (C.c_uint64 * _NUMBERS)()
        self._all = (C.c_uint64 * (_NUMBERS * comm.size))()

    def meet(
        self, number: int, ranks: Sequence[int], brought: tuple[int, int] = (0, 0)
    ) -> list[tuple[int, int]]:
        """Wait for these ranks, this one among them; returns what each of them brought.

        Numbers grow from meeting to meeting, even and odd in turn.
        """
        self._present[:] = [rank in ranks for rank in range(self._comm.size)]
        self._own[:] = list(brought)
        status = self._meet(
            self._comm.handle,
            self._address,
            number % 2**32,
            self._present,
            self._own,
            self._all,
            -1,
        )
        if status:
            raise self._comm.error(status, Kind.BARRIER)
        return [(self._all[_NUMBERS * rank], self._all[_NUMBERS * rank + 1]) for rank in ranks]
