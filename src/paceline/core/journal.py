"""The journal of one rank: how far it is in a step that several ranks make in shared memory."""

from __future__ import annotations

import ctypes as C
import dataclasses

from paceline.core import abi

__all__ = ["Journal", "StepProgress", "journal_bytes"]


def journal_bytes() -> int:
    """The shared memory that a rank's journal needs, all zeros at first."""
    nbytes: int = abi.library().plc_journal_bytes()
    return nbytes


@dataclasses.dataclass(frozen=True)
class StepProgress:
    """How far a rank is in a step: some updates are made, then at most one more is begun."""

    step: int
    made: int
    begun: int
    lines: tuple[range, ...]  # of the update begun last: these are made
    has_ended: bool  # the rank does not go on


class Journal:
    """A rank's journal, in memory that all ranks have mapped."""

    def __init__(self, address: int) -> None:
        self.address = address
        library = abi.library_holding_gil()
        self._begin, self._end = library.plc_journal_begin, library.plc_journal_end

    def begin(self, step: int) -> None:
        """This rank is about to make its part of a step; steps are numbered from 1 on."""
        self._begin(self.address, step)

    def note(self, begun: int, made: int) -> None:
        """Write down how many updates are begun and made that are not the core's."""
        abi.library().plc_journal_note(self.address, begun, made)

    def end(self) -> None:
        """This rank does not go on with the step, whether it has made its part or not."""
        self._end(self.address)

    def read(self) -> StepProgress:
        """How far the rank is; final if it has ended the step, or itself."""
        state = abi.JournalState()
        abi.library().plc_journal_read(self.address, C.byref(state))
        lines = tuple(range(first, end) for first, end in state.lines if first < end)
        return StepProgress(state.step, state.made, state.begun, lines, bool(state.ended))
