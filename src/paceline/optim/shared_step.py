"""Parameters and state of one optimizer once per host, in memory that its ranks share.

    begin    all ranks that had data are here: nobody reads the parameters any more
    update   each rank makes its part of every update
    end      all parts are made: everybody sees the whole

What a rank brings to `begin` says what it is about to do; ranks that are about to do different
things all raise, and nothing is touched. A rank without data is not waited for: its peers know from
the signals of the step that it has none, and it sees the result because the memory is one.

To the program each rank has a replica: what it writes to its parameters stays its own until the
next `begin`, where ranks that have written find out that all wrote the same, and publish it.

A rank that is lost in the middle leaves no block half-written: `settle` finishes what its journal
holds, and tells how far everybody got.

Numbers of steps are the exception. Each rank counts its own while it makes its part; a rank that
missed some steps goes on from the shared ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import mmap
import sys
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from paceline._linux import can_find_written_pages
from paceline._malloc import return_freed_memory
from paceline.core.communicator import Communicator
from paceline.core.journal import Journal, StepProgress, journal_bytes
from paceline.core.kernels import digest
from paceline.core.meeting import Meeting, meeting_bytes
from paceline.core.shared_memory import open_with_private_view, sums_over
from paceline.core.update import ArrayUpdate
from paceline.ddp.consistency import check_same_model, describe
from paceline.errors import ConfigError, MismatchError
from paceline.optim.averaging_ranks import AveragingRanks
from paceline.optim.replica_view import ReplicaView, can_be_moved, lay_out
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import WaitLabel

__all__ = [
    "SettledStep",
    "SharedParameter",
    "SharedStep",
    "Verdict",
    "is_worth_sharing",
    "refuse_shared_twice",
    "refuse_to_share",
    "why_not_shared",
]

_State = MutableMapping[str, Any]
_CACHE_LINE = 64
# Fewer bytes of parameters a rank has updated by the time two ranks have met twice.
_WORTH_SHARING_BYTES = 1024 * 1024
# Of meetings: six for each call of an optimizer's step between two averages, at most.
_NUMBERS_PER_STEP = 64
# By then gradients are where they will be: what the heap keeps of parameters and gradients before
# they were shared can be returned.
_SETTLED_STEPS = 2
# A program that writes its weights in so many steps in a row does so in every step.
_MOST_DISTURBED_STEPS = 8
_SHOWN = 3
# Ranks that still make their parts of a step that has failed are waited for as long.
_SETTLE_S = 2.0
_SETTLE_POLL_S = 0.001


_live: weakref.WeakSet[SharedStep] = weakref.WeakSet()


class Verdict(enum.Enum):
    """What the ranks that have met conclude, all the same."""

    GO = "go"
    SHARE_AGAIN = "share again"  # some rank has parameters or state that there is no place for
    SEPARATE = "separate"  # each rank goes on with parameters and state of its own
    FAILED = "failed"  # some rank has given the step up


class _Flag(enum.IntFlag):
    """What a rank brings, beside what it is about to do."""

    REPLACED = 1
    FAILED = 2
    WRITTEN = 4  # by the program, in its replica
    SEPARATE = 8


@dataclasses.dataclass(frozen=True)
class SettledStep:
    """How far the ranks that made a step together got in it."""

    progress: Mapping[int, StepProgress | None]  # by rank; None: nothing was begun
    unsettled: frozenset[int]  # ranks that may go on: alive, and not heard of


@dataclasses.dataclass(frozen=True)
class SharedParameter:
    """A parameter that is to be shared, and the names of its arrays of state."""

    name: str
    parameter: torch.Tensor
    state_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A parameter's place in the shared memory, with room for its state."""

    parameter: torch.Tensor
    state_names: tuple[str, ...]
    index: int  # of the parameter's array; those of its state follow
    counter: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def arrays(self, state: _State) -> list[tuple[int, str, torch.Tensor]]:
        """The arrays of this state that there are: number, name, tensor."""
        found = ((i, name, state.get(name)) for i, name in self._numbered_names())
        return [(index, name, value) for index, name, value in found if value is not None]

    def _numbered_names(self) -> list[tuple[int, str]]:
        return list(enumerate(self.state_names, self.index + 1))

    def adopt_counter(self, state: _State) -> None:
        if "step" in state and state["step"] is not self.counter:
            self.counter.fill_(float(state["step"]))
            state["step"] = self.counter


def _new_slot(shared: SharedParameter, index: int, counter: torch.Tensor) -> _Slot:
    tensor = shared.parameter
    return _Slot(
        tensor, shared.state_names, index, counter, tensor.dtype, tensor.shape, tensor.stride()
    )


def is_worth_sharing(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a step in parts is sooner over than a whole one, and memory matters."""
    return sum(parameter.nbytes for parameter in parameters) >= _WORTH_SHARING_BYTES


def why_not_shared(ranks: AveragingRanks, asked_for: str = "shared=True") -> str | None:
    """What keeps these ranks from sharing parameters, as a sentence with the cure. `asked_for`: the
    argument that asks for it.
    """
    if not can_find_written_pages():
        return (
            f"{asked_for} needs /proc/self/pagemap, to notice what the program writes to its "
            f"parameters, and this system does not offer it. Leave {asked_for} out"
        )
    return ranks.why_not_shared(asked_for) if ranks.shared_memory is None else None


def refuse_to_share(parameters: Sequence[torch.Tensor]) -> None:
    """Raise: these are in shared memory, and the core cannot step them now."""
    shown = ", ".join(f"{tuple(p.shape)} {p.dtype}" for p in parameters[:_SHOWN])
    raise ConfigError(
        f"{len(parameters)} parameters in shared memory ({shown}) have a gradient or state that "
        "the core cannot take: sparse, or of another type, shape or layout than the parameter. "
        "Leave shared=True out for such parameters"
    )


def refuse_shared_twice(parameters: Sequence[torch.Tensor]) -> None:
    """Raise if another optimizer has some of these parameters in shared memory."""
    for other in _live:
        twice = sum(parameter in other for parameter in parameters)
        if twice and other.is_in_use:
            raise ConfigError(
                f"{twice} parameters belong to another optimizer that shares them already. Give "
                "each parameter to one of them, or drop the other first"
            )


class SharedStep:
    """The shared memory of one optimizer's parameters and state, and the meetings around its
    steps.
    """

    def __init__(
        self,
        ranks: AveragingRanks,
        parameters: Sequence[SharedParameter],
        states: MutableMapping[torch.Tensor, _State],
        counter_dtype: torch.dtype,
        replaced: SharedStep | None = None,
    ) -> None:
        """All ranks make this together, and have the same in their parameters and state. Whatever
        shared some of them before is released. `replaced`: this optimizer's former one.
        """
        comm = ranks.shared_memory
        assert comm is not None
        self.ranks = ranks
        self.comm = comm
        _check_same(ranks, parameters, states)
        # In a row, in which programs have written to parameters or state.
        self.disturbed_steps: int = 0 if replaced is None else replaced.disturbed_steps
        for other in list(_live):
            if any(shared.parameter in other for shared in parameters):
                other.release()
        self._make_memory(comm, parameters, counter_dtype)
        self._meeting = Meeting(comm, self._notes.address)
        self._journals = [Journal(address) for address in self._notes.journals]
        self._step_number = 0  # that of the meeting that begins it
        self._label = _wait_label(ranks)
        self._move_in(states)
        self.steps_made = 0  # as far as this rank knows
        self._state_was_read = False
        averages = ranks.history.steps
        self._averages_used = averages - 1
        self._first_number = averages * _NUMBERS_PER_STEP
        self._number = 1
        self._open = False
        self.is_released = False
        _live.add(self)
        ranks.add_partner(self)

    def _make_memory(
        self,
        comm: Communicator,
        parameters: Sequence[SharedParameter],
        counter_dtype: torch.dtype,
    ) -> None:
        arrays: list[tuple[str, int]] = []
        indices = []
        for shared in parameters:
            indices.append(len(arrays))
            arrays.append((shared.name, shared.parameter.nbytes))
            arrays += [
                (f"{name} of {shared.name}", shared.parameter.nbytes) for name in shared.state_names
            ]
        layout = lay_out(arrays, _Notes.nbytes(comm.size, len(arrays), len(parameters)))
        memory, private = open_with_private_view(
            comm, layout.nbytes, layout.mapped_begin, layout.mapped_end
        )
        self._names = [name for name, _ in arrays]
        self._notes = _Notes(memory, comm.size, len(arrays), len(parameters), counter_dtype)
        self._view = ReplicaView(layout, memory, private)
        self._counters = torch.zeros(len(parameters), dtype=counter_dtype)
        self._slots = {
            id(shared.parameter): _new_slot(shared, index, counter)
            for shared, index, counter in zip(parameters, indices, self._counters, strict=True)
        }

    def _move_in(self, states: MutableMapping[torch.Tensor, _State]) -> None:
        contents = [
            (index, tensor)
            for slot in self._slots.values()
            for index, tensor in (
                (slot.index, slot.parameter),
                *((i, value) for i, _, value in slot.arrays(states.get(slot.parameter, {}))),
            )
        ]
        with torch.no_grad():
            if self.comm.rank == 0:
                for index, tensor in contents:
                    self._view.shared_tensor(index, tensor).copy_(tensor)
            sums_over(self.comm)([0])  # the first rank's numbers are there
            for slot in self._slots.values():
                self._place_parameter(slot)
                if slot.parameter in states:
                    self._place_state(slot, states[slot.parameter])
            self._notes.counters.copy_(self._counters)
        return_freed_memory()  # of the parameters' former places

    def _place_parameter(self, slot: _Slot) -> None:
        parameter = slot.parameter
        pages = self._view.map(slot.index, parameter) if can_be_moved(parameter) else None
        if pages is None:
            self._view.copy(slot.index, parameter)
        else:
            parameter.data = pages

    def _place_state(self, slot: _Slot, state: _State) -> None:
        """See to it that arrays of state are those of the view. Their content is there."""
        for index, name, value in slot.arrays(state):
            pages = self._view.map(index, slot.parameter)
            if pages is None:
                self._view.copy(index, value)
            else:
                state[name] = pages
        slot.adopt_counter(state)

    # ----------------------------------------------------------------------------- what is where

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._slots

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[self._slots[id(parameter)].index]

    def has_room(self, parameter: torch.Tensor, names: tuple[str, ...]) -> bool:
        """Whether there is a place for this state. If not, all ranks share anew."""
        slot = self._slots.get(id(parameter))
        return slot is not None and slot.state_names == names

    def adopt_state(self, parameter: torch.Tensor, state: _State) -> None:
        """A parameter's new state, made by all ranks before the same meeting, moves in. What it has
        on the meta device is made here.
        """
        slot = self._slots[id(parameter)]
        with torch.no_grad():
            for index, name, value in slot.arrays(state):
                # New memory is zeros; what is made a second time is written as a program writes.
                is_new = not self._view.address(index)
                pages = self._view.map(index, parameter)
                if pages is None:
                    own = torch.zeros_like(parameter) if value.is_meta else value
                    self._view.copy(index, own)
                    state[name] = own
                    continue
                target = self._view.shared_tensor(index, parameter) if is_new else pages
                if not value.is_meta:
                    target.copy_(value)
                elif not is_new:
                    target.zero_()
                state[name] = pages
            slot.adopt_counter(state)

    def take_back(self, states: Mapping[torch.Tensor, _State]) -> None:
        """Parameters and state that the program has replaced go back to their places, as if it had
        written there. What has another type or size by now is left alone.
        """
        with torch.no_grad():
            for slot in self._slots.values():
                self._take_back_parameter(slot)
                state = states.get(slot.parameter, {})
                for index, name, value in slot.arrays(state):
                    if value.data_ptr() != self._view.address(index) and _fits(value, slot):
                        state[name] = self._taken_back(index, value)
                slot.adopt_counter(state)

    def _take_back_parameter(self, slot: _Slot) -> None:
        parameter = slot.parameter
        if parameter.data_ptr() == self._view.address(slot.index):
            return
        if not _fits(parameter, slot):
            return
        if can_be_moved(parameter):
            parameter.data = self._taken_back(slot.index, parameter.data)
        else:
            self._view.copy(slot.index, parameter)

    def _taken_back(self, index: int, value: torch.Tensor) -> torch.Tensor:
        pages = self._view.map(index, value)
        if pages is None:
            self._view.copy(index, value)
            return value
        return pages.copy_(value)

    def shared_addresses(self) -> dict[int, int]:
        """From where this rank sees arrays and numbers of steps to where a step changes them."""
        counters = (counter.data_ptr() for counter in self._counters)
        return {**self._view.shared_addresses(), **{at: at for at in counters}}

    def is_in_place(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is still where this object has put it."""
        return parameter.data_ptr() == self._view.address(self._slots[id(parameter)].index)

    @contextlib.contextmanager
    def writing(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let these parameters be those in the shared memory, so that what is written to them is
        seen by all: between `begin` and `end`, by one rank each.
        """
        kept = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = self.shared_tensor(parameter)
            yield
        finally:
            for parameter, data in zip(parameters, kept, strict=True):
                parameter.data = data

    def shared_tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter as all ranks see it: what is written there is a step."""
        return self._view.shared_tensor(self._slots[id(parameter)].index, parameter)

    @property
    def is_in_use(self) -> bool:
        """Whether some parameter is still where this object has put it."""
        return any(self.is_in_place(slot.parameter) for slot in self._slots.values())

    def release(self) -> None:
        """Each rank has its parameters and state to itself from now on, where they are."""
        if self.is_released:
            return
        self.catch_up()
        self.is_released = True
        self._view.keep()
        self._notes.released[self.comm.rank] = 1
        if bool(self._notes.released.all()):
            self._view.drop_shared()
        _live.discard(self)

    # ----------------------------------------------------------------------------- meetings

    @property
    def is_cut_off(self) -> bool:
        """Whether gradients are averaged elsewhere by now, or not at all: a hook, another group,
        the end of a training's loop.
        """
        return self.ranks.shared_memory is not self.comm

    @property
    def is_of_past_loop(self) -> bool:
        """Whether the loop of a training in which this was shared is over: the next one may share
        anew.
        """
        return self.is_cut_off and self.ranks.have_loops

    @property
    def is_disturbed(self) -> bool:
        """Whether the program writes its weights again and again, so that sharing costs more than
        it saves.
        """
        return self.disturbed_steps >= _MOST_DISTURBED_STEPS

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients may differ between ranks, so that no step can be one for all."""
        return self.ranks.has_local_gradients(self._averages_used)

    def refuse_local_gradients(self) -> None:
        """Raise if a backward inside `no_sync()` was the last."""
        if self.ranks.has_local_gradients(averages_used=-1):
            raise ConfigError(
                f"shared=True: the last backward on rank {self.comm.rank} was inside no_sync(), "
                "so gradients differ between ranks, but a step in shared memory is one for all. "
                "Run the last backward before a step outside of no_sync(), or leave shared=True out"
            )

    @property
    def present(self) -> list[int]:
        """The ranks that had data in the last step, and make the update."""
        absent = self.ranks.history.absent
        return [rank for rank in range(self.comm.size) if rank not in absent]

    @property
    def number(self) -> int:
        """That of the last meeting, the same on all who came."""
        return self._number

    @property
    def is_absent(self) -> bool:
        """Whether this rank had no data in the last step, so that the others make the update."""
        return self.comm.rank in self.ranks.history.absent

    def part(self, present: Sequence[int]) -> tuple[int, int]:
        """Which part of an update is this rank's, and how many there are."""
        return present.index(self.comm.rank), len(present)

    def begin(
        self, present: Sequence[int], content: bytes, *, intact: bool, separate: bool = False
    ) -> Verdict:
        """Wait for the ranks that make the update; `content` is what this one will do.

        separate: this rank cannot share any longer.
        """
        self._open = True
        self.catch_up()
        intact = intact and not self._view.is_moved()
        written = self._written() if intact else []
        flags = _Flag.WRITTEN if written else _Flag(0)
        flags |= _Flag(0) if intact else _Flag.REPLACED
        flags |= _Flag.SEPARATE if separate else _Flag(0)
        self._step_number = self._next_begin()
        answers = self._meet(self._step_number, present, zlib.crc32(content), flags)
        if any(flag & _Flag.FAILED for _, flag in answers):
            self._open = False
            return Verdict.FAILED
        if any(flag & _Flag.SEPARATE for _, flag in answers):
            self._open = False
            self._refuse_to_separate_without(present)
            return Verdict.SEPARATE
        is_disturbed = any(flag & (_Flag.WRITTEN | _Flag.REPLACED) for _, flag in answers)
        self.disturbed_steps = self.disturbed_steps + 1 if is_disturbed else 0
        if any(flag & _Flag.REPLACED for _, flag in answers):
            self._open = False
            return Verdict.SHARE_AGAIN
        if len({digest for digest, _ in answers}) > 1:
            self.end(present)
            values = {
                rank: f"{digest:08x}" for rank, (digest, _) in zip(present, answers, strict=True)
            }
            raise MismatchError(
                f"the ranks are about to make different optimizer steps (this is rank "
                f"{self.comm.rank}; digests {values}): parameters that have a gradient, and the "
                "settings of parameter groups, must be the same on every rank. Nothing was changed",
                values,
            )
        if is_disturbed:
            self._publish(present, written)
        self._counters.copy_(self._notes.counters)
        self._averages_used = self.ranks.history.steps
        self.journal.begin(self._step_number)
        return Verdict.GO

    def end(self, present: Sequence[int], note: int = 0) -> list[int]:
        """Wait until all parts are made; returns every rank's note."""
        answers = self._meet(self._number + 1, present, note, _Flag(0))
        self._open = False
        self.steps_made += 1
        if present[0] == self.comm.rank:
            self._publish_counters()
        self._view.refresh()
        self.journal.end()
        if self.steps_made == _SETTLED_STEPS:
            return_freed_memory()
        return [note for note, _ in answers]

    def _publish_counters(self) -> None:
        self._notes.counters.copy_(self._counters)
        self._notes.steps_made.fill_(self.steps_made)

    # ----------------------------------------------------------------------------- lost ranks

    @property
    def journal(self) -> Journal:
        """This rank's."""
        return self._journals[self.comm.rank]

    def settle(self, present: Sequence[int], updates: Sequence[ArrayUpdate] = ()) -> SettledStep:
        """The group has failed in a step. Wait until no rank writes to the shared memory any more,
        finish the blocks that lost ranks were writing, and tell how far each of them got.

        updates: those of the step, in order, if the core makes it.
        """
        if self.journal.read().step != self._step_number:
            self.journal.begin(self._step_number)  # it failed before anything was begun
        self.journal.end()
        waiting_for, deadline = set(present), time.monotonic() + _SETTLE_S
        while waiting_for and time.monotonic() < deadline:
            waiting_for = {rank for rank in waiting_for if not self._is_through(rank)}
            if waiting_for:
                time.sleep(_SETTLE_POLL_S)
        for rank in set(present) - waiting_for:
            reached = self._reached(rank)
            if reached is not None and reached.made < reached.begun <= len(updates):
                updates[reached.made].repair(self._journals[rank].address)
        self._view.refresh()
        return SettledStep({rank: self._reached(rank) for rank in present}, frozenset(waiting_for))

    def _is_through(self, rank: int) -> bool:
        """Whether a rank makes no more of this step."""
        if self.comm.is_open and self.comm.is_gone(rank):
            return True
        progress = self._journals[rank].read()
        return progress.step > self._step_number or (
            progress.step == self._step_number and progress.has_ended
        )

    def _reached(self, rank: int) -> StepProgress | None:
        """How far a rank is in this step; None if it has not begun."""
        progress = self._journals[rank].read()
        if progress.step > self._step_number:  # it is in a later one
            return StepProgress(progress.step, sys.maxsize, sys.maxsize, (), has_ended=True)
        return progress if progress.step == self._step_number else None

    def adopt_settled(self, *, is_complete: bool) -> None:
        """Numbers of steps are what they were before the step that was settled, unless all of it is
        made.
        """
        if is_complete:
            self.steps_made += 1
            self._publish_counters()  # by all who are left, the same numbers
        else:
            self._counters.copy_(self._notes.counters)

    def step_failed(self) -> None:
        """This rank gives the step up: whoever waits for it in `begin` hears of it."""
        if not (self._open or self.is_released or self.is_absent):
            self._meet(self._next_begin(), [self.comm.rank], 0, _Flag.FAILED)

    def raise_failure(self) -> None:
        """Take part in what the rank that failed does, and raise what it says."""
        self.ranks.raise_failure()

    def catch_up(self) -> None:
        """A rank that missed steps sees what the others have made. To be called when they are not
        in a step; what this rank wrote before is of steps ago.
        """
        made = 0 if self.is_released else int(self._notes.steps_made)
        if made > self.steps_made:
            self._view.discard_all()
            self._counters.copy_(self._notes.counters)
            self.steps_made = made

    def prepare_reading(self) -> None:
        """The program is about to read the state."""
        self.catch_up()
        self._state_was_read = True

    def _refuse_to_separate_without(self, present: Sequence[int]) -> None:
        if len(present) < self.comm.size:
            raise ConfigError(
                f"rank {self.comm.rank} and others step with gradients that were not averaged, or "
                "that the core cannot take, while ranks without data share their parameters. Make "
                "the optimizer with shared=False"
            )

    # ----------------------------------------------------------------------------- own writes

    def _written(self) -> list[int]:
        """Arrays that this rank's program has written to; one more than there are: the numbers of
        steps.
        """
        written = self._view.written()
        if self._state_was_read:
            # Pages that nobody looks at cost nothing the next time.
            parameters = {slot.index for slot in self._slots.values()}
            self._view.discard(set(range(len(self._names))) - parameters - set(written))
            self._state_was_read = False
        if not torch.equal(self._counters, self._notes.counters):
            written.append(len(self._names))
        return written

    def _publish(self, present: Sequence[int], written: list[int]) -> None:
        """What programs have written to their replicas becomes what is shared, if all ranks have
        the same.
        """
        rank, notes, number = self.comm.rank, self._notes, self._number
        notes.marks[rank].zero_()
        notes.marks[rank, written] = 1
        self._meet(number + 1, present, 0, _Flag(0))
        concerned = notes.marks[present].any(0).nonzero().flatten().tolist()
        for index in concerned:
            notes.digests[rank, index] = _signed(self._digest(index))
        self._meet(number + 2, present, 0, _Flag(0))
        differing = [i for i in concerned if len(set(notes.digests[present, i].tolist())) > 1]
        self._meet(number + 3, present, 0, _Flag(0))
        if differing:
            self._open = False
            self._raise_drift(present, differing)
        arrays = [index for index in concerned if index < len(self._names)]
        if rank == present[0]:
            self._view.publish(arrays)
            notes.counters.copy_(self._counters)
        self._meet(number + 4, present, 0, _Flag(0))
        self._view.discard(arrays)

    def _digest(self, index: int) -> int:
        if index == len(self._names):
            return digest(self._counters.data_ptr(), self._counters.nbytes)
        return self._view.digest(index)

    def _raise_drift(self, present: Sequence[int], differing: Sequence[int]) -> None:
        names = [*self._names, "the number of steps made"]
        shown = ", ".join(names[index] for index in differing[:_SHOWN])
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        values = {
            rank: f"{int(self._notes.digests[rank, differing[0]]) & (2**64 - 1):016x}"
            for rank in present
        }
        raise MismatchError(
            f"the program has changed {shown}{more} to other values on some ranks than on others "
            f"(this is rank {self.comm.rank}; digests of the first: {values}), so that the "
            "replicas would drift apart. Make the same change on every rank, or make the optimizer "
            "with shared=False. Nothing was changed by this step",
            values,
        )

    # ----------------------------------------------------------------------------- numbers

    def _next_begin(self) -> int:
        """The number of the next meeting that begins a step: even. All who come know how many steps
        were averaged, also those who missed a meeting.
        """
        steps = self.ranks.history.steps * _NUMBERS_PER_STEP - self._first_number
        return max((self._number + 2) // 2 * 2, steps + 2)

    def _meet(
        self, number: int, ranks: Sequence[int], digest: int, flags: _Flag
    ) -> list[tuple[int, int]]:
        self._number = number
        recorder.enter(self._label, number)
        try:
            return self._meeting.meet(number, ranks, (digest, int(flags)))
        finally:
            recorder.leave()


def _fits(tensor: torch.Tensor, slot: _Slot) -> bool:
    """Whether a tensor that stands for one of a slot's arrays has their type and layout."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype == slot.dtype
        and tensor.shape == slot.shape
        and tensor.stride() == slot.stride
    )


class _Notes:
    """What ranks write down for each other before the arrays: beside the meetings, their journals,
    how many steps were made and how often each parameter was stepped, who has released the memory,
    and, when programs have written to their replicas, by rank which arrays and digests of them.
    """

    def __init__(
        self, memory: mmap.mmap, ranks: int, arrays: int, parameters: int, counters: torch.dtype
    ) -> None:
        offsets = self._offsets(ranks, arrays, parameters)

        def numbers(part: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            flat = torch.frombuffer(
                memory, dtype=dtype, count=math.prod(shape), offset=offsets[part]
            )
            return flat.view(shape)

        self.address = numbers("meeting", torch.uint8, 1).data_ptr()
        journals = numbers("journals", torch.uint8, ranks, journal_bytes())
        self.journals = [journal.data_ptr() for journal in journals]
        self.steps_made = numbers("steps made", torch.int64, 1)
        self.released = numbers("released", torch.uint8, ranks)
        self.counters = numbers("counters", counters, parameters)
        # One column more than there are arrays, for the numbers of steps.
        self.marks = numbers("marks", torch.uint8, ranks, arrays + 1)
        self.digests = numbers("digests", torch.int64, ranks, arrays + 1)

    @classmethod
    def nbytes(cls, ranks: int, arrays: int, parameters: int) -> int:
        return cls._offsets(ranks, arrays, parameters)["end"]

    @staticmethod
    def _offsets(ranks: int, arrays: int, parameters: int) -> dict[str, int]:
        sizes = {
            "meeting": meeting_bytes(ranks),
            "journals": ranks * journal_bytes(),
            "steps made": 8,
            "released": ranks,
            "counters": 8 * parameters,
            "marks": ranks * (arrays + 1),
            "digests": 8 * ranks * (arrays + 1),
        }
        offsets, at = {}, 0
        for part, nbytes in sizes.items():
            offsets[part], at = at, at + -(-nbytes // _CACHE_LINE) * _CACHE_LINE
        return {**offsets, "end": at}


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _wait_label(ranks: AveragingRanks) -> WaitLabel:
    kind = f"the optimizer step of {ranks.model_name}"
    return WaitLabel(kind, "", group_number(kind), ranks.gathers.members).packed()


def _check_same(
    ranks: AveragingRanks,
    parameters: Sequence[SharedParameter],
    states: MutableMapping[torch.Tensor, _State],
) -> None:
    """All ranks share the same parameters, with the same state and the same numbers in them."""
    description = describe([(shared.name, shared.parameter) for shared in parameters], ())
    for shared in parameters:
        state = states.get(shared.parameter, {})
        for name in shared.state_names:
            value = state.get(name)
            description[f"{name} of {shared.name}"] = (
                "none" if value is None else _digest_text(value)
            )
        description[shared.name] += f", content {_digest_text(shared.parameter)}"
    check_same_model(ranks.gathers, description)


def _digest_text(tensor: torch.Tensor) -> str:
    return f"{digest(tensor.data_ptr(), tensor.nbytes):016x}"
