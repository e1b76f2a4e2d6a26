"""Parameters and state of one optimizer once per host, in memory that its ranks share.

    begin    all ranks that had data are here: nobody reads the parameters any more
    update   each rank makes its part of every update
    end      all parts are made: everybody sees the whole

What a rank brings to `begin` says what it is about to do; ranks that are about to do different
things all raise, and nothing is touched. A rank without data is not waited for: its peers know from
the signals of the step that it has none, and it sees the result because the memory is one.

Numbers of steps are the exception. Each rank counts its own while it makes its part; a rank that
missed some steps goes on from the shared ones.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import weakref
import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline._malloc import return_freed_memory
from paceline.core.meeting import Meeting, meeting_bytes
from paceline.core.shared_memory import open_shared_memory, sums_over
from paceline.ddp import DistributedDataParallel
from paceline.ddp.consistency import check_same_model, describe
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_partners import models_of
from paceline.dp.shared_parameters import aligned_bytes, view_like
from paceline.errors import ConfigError, MismatchError
from paceline.optim.parameter_table import ParameterTable
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import WaitLabel

__all__ = ["SharedStep", "Verdict", "find_model", "is_worth_sharing", "refuse_to_share"]

_State = MutableMapping[str, Any]
_CACHE_LINE = 64
# Fewer bytes of parameters a rank has updated by the time two ranks have met twice.
_WORTH_SHARING_BYTES = 1024 * 1024
_NUMBERS_PER_STEP = 64  # of meetings; two for each call of an optimizer's step between two averages


_live: weakref.WeakSet[SharedStep] = weakref.WeakSet()


class Verdict(enum.Enum):
    """What the ranks that have met conclude, all the same."""

    GO = "go"
    SHARE_AGAIN = "share again"  # on some rank parameters or state were replaced
    FAILED = "failed"  # some rank has given the step up


class _Flag(enum.IntFlag):
    """What a rank brings, beside what it is about to do."""

    REPLACED = 1
    FAILED = 2


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A parameter's place in the shared memory, with room for its state."""

    parameter: torch.Tensor
    state_names: tuple[str, ...]
    view: torch.Tensor
    state_views: tuple[torch.Tensor, ...]
    counter: torch.Tensor

    def adopt_state(self, state: _State) -> None:
        """Move the state into its place. What has no memory yet becomes zeros."""
        for name, view in zip(self.state_names, self.state_views, strict=True):
            value = state.get(name)
            if value is not None and value is not view:
                if value.is_meta:
                    view.zero_()
                else:
                    view.copy_(value)
                state[name] = view
        self.adopt_counter(state)

    def point_to_shared(self, state: _State) -> None:
        """What is in the shared memory is the parameter and its state from now on."""
        self.parameter.data = self.view
        for name, view in zip(self.state_names, self.state_views, strict=True):
            if state.get(name) is not None:
                state[name] = view
        self.adopt_counter(state)

    def adopt_counter(self, state: _State) -> None:
        if "step" in state and state["step"] is not self.counter:
            self.counter.fill_(float(state["step"]))
            state["step"] = self.counter


def is_worth_sharing(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a step in parts is sooner over than a whole one, and memory matters."""
    return sum(parameter.nbytes for parameter in parameters) >= _WORTH_SHARING_BYTES


def find_model(
    parameters: Sequence[torch.Tensor], asked_for: str
) -> DistributedDataParallel | None:
    """The model whose ranks can share these parameters; None if there is but one process.
    `asked_for`: the argument that asks for it, for messages.
    """
    models = [model for model in models_of(parameters) if model.process_group.size() > 1]
    if not models:
        return None
    if len(models) > 1:
        raise ConfigError(
            f"{asked_for}: these parameters belong to {len(models)} models wrapped in "
            "DistributedDataParallel, but their ranks meet in one. Make an optimizer for each model"
        )
    if models[0].shared_memory is None:
        raise ConfigError(
            f"{asked_for} needs a model whose gradients are averaged in shared memory, and this "
            f"{type(models[0].module).__name__}'s are not (backend "
            f"{dist.get_backend(models[0].process_group)!r}): all ranks on one host, backend "
            "'paceline', parameters on the CPU, no sparse gradients, no communication hook, no "
            f"mixed precision. Leave {asked_for} out"
        )
    return models[0]


def refuse_to_share(parameters: Sequence[torch.Tensor]) -> None:
    """Raise: these are in shared memory, and the core cannot step them now."""
    shown = ", ".join(f"{tuple(p.shape)} {p.dtype}" for p in parameters[:3])
    raise ConfigError(
        f"{len(parameters)} parameters in shared memory ({shown}) have a gradient or state that "
        "the core cannot take: sparse, or of another type, shape or layout than the parameter. "
        "Leave shared=True out for such parameters"
    )


def _refuse_shared_twice(
    parameters: Sequence[tuple[str, torch.Tensor, tuple[str, ...]]], replaced: SharedStep | None
) -> None:
    for other in _live:
        twice = [name for name, parameter, _ in parameters if parameter in other]
        if twice and other is not replaced and other.is_in_use:
            raise ConfigError(
                f"{twice[0]} and {len(twice) - 1} more belong to another optimizer with "
                "shared=True already. Give each parameter to one of them, or drop the other first"
            )


class SharedStep:
    """The shared memory of one optimizer's parameters and state, and the meetings around its
    steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Sequence[tuple[str, torch.Tensor, tuple[str, ...]]],
        states: MutableMapping[torch.Tensor, _State],
        counter_dtype: torch.dtype,
        replaced: SharedStep | None = None,
    ) -> None:
        """`parameters`: a name for messages, the parameter, the names of its arrays of state. All
        ranks make this together; what they have becomes what the first of them has. `replaced`:
        this optimizer's former one.
        """
        comm = model.shared_memory
        assert comm is not None
        self._model = weakref.ref(model)
        self._comm = comm
        _refuse_shared_twice(parameters, replaced)
        _check_same(model, parameters, states)
        count = len(parameters)
        arrays = [(p, aligned_bytes(p) * (1 + len(names))) for _, p, names in parameters]
        counters_at = -(-meeting_bytes(comm.size) // _CACHE_LINE) * _CACHE_LINE
        arrays_at = counters_at + -(-8 * count // _CACHE_LINE) * _CACHE_LINE
        self._memory = open_shared_memory(comm, arrays_at + sum(nbytes for _, nbytes in arrays))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._begin, self._end = whole.data_ptr(), whole.data_ptr() + whole.numel()
        self._meeting = Meeting(comm, self._begin)
        self._label = _wait_label(model)
        self._counters = torch.zeros(count, dtype=counter_dtype)
        self._shared_counters = torch.frombuffer(
            self._memory, dtype=counter_dtype, count=count, offset=counters_at
        )
        self._slots = {
            id(slot.parameter): slot
            for slot in _slots(parameters, self._memory, arrays_at, self._counters)
        }
        self._move_in(states)
        self._first_number = model.reducer.history.steps * _NUMBERS_PER_STEP
        self._number = 1
        self._open = False
        _live.add(self)

    def _move_in(self, states: MutableMapping[torch.Tensor, _State]) -> None:
        with torch.no_grad():
            if self._comm.rank == 0:
                for slot in self._slots.values():
                    slot.view.copy_(slot.parameter)
                    slot.adopt_state(states.get(slot.parameter, {}))
                self._shared_counters.copy_(self._counters)
            sums_over(self._comm)([0])  # the first rank's numbers are there
            for slot in self._slots.values():
                slot.point_to_shared(states.get(slot.parameter, {}))
            self._counters.copy_(self._shared_counters)
        return_freed_memory()  # of the parameters' former places

    # ----------------------------------------------------------------------------- what is where

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._slots

    def has_room(self, parameter: torch.Tensor, names: tuple[str, ...]) -> bool:
        """Whether there is a place for this state. If not, all ranks share anew."""
        slot = self._slots.get(id(parameter))
        return slot is not None and slot.state_names == names

    def adopt_state(self, parameter: torch.Tensor, state: _State) -> None:
        """A parameter's new state, made by all ranks before the same meeting, moves in. What it has
        on the meta device is made here.
        """
        with torch.no_grad():
            self._slots[id(parameter)].adopt_state(state)

    def holds(self, table: ParameterTable) -> bool:
        """Whether everything the table names is still where this object has put it."""
        counters = self._counters
        at = counters.data_ptr()
        return table.lies_in(range(self._begin, self._end), range(at, at + counters.nbytes))

    @property
    def is_in_use(self) -> bool:
        """Whether some parameter is still where this object has put it."""
        return any(
            slot.parameter.data_ptr() == slot.view.data_ptr() for slot in self._slots.values()
        )

    def release(self) -> None:
        """Give every parameter memory of its own again: the optimizer is gone, and whoever changes
        the parameters next does it on every rank.
        """
        with torch.no_grad():
            for slot in self._slots.values():
                if slot.parameter.data_ptr() == slot.view.data_ptr():
                    slot.parameter.data = slot.view.clone(memory_format=torch.preserve_format)

    # ----------------------------------------------------------------------------- meetings

    @property
    def model(self) -> DistributedDataParallel:
        model = self._model()
        if model is None:
            raise ConfigError(
                "the DistributedDataParallel whose parameters this optimizer shares is gone; make "
                "a new optimizer"
            )
        return model

    @property
    def present(self) -> list[int]:
        """The ranks that had data in the last step, and make the update."""
        absent = self.model.reducer.history.absent
        return [rank for rank in range(self._comm.size) if rank not in absent]

    @property
    def number(self) -> int:
        """That of the last meeting, the same on all who came."""
        return self._number

    @property
    def is_absent(self) -> bool:
        """Whether this rank had no data in the last step, so that the others make the update."""
        return self._comm.rank in self.model.reducer.history.absent

    def part(self, present: Sequence[int]) -> tuple[int, int]:
        """Which part of an update is this rank's, and how many there are."""
        return present.index(self._comm.rank), len(present)

    def begin(self, present: Sequence[int], content: bytes, *, intact: bool) -> Verdict:
        """Wait for the ranks that make the update; `content` is what this one will do."""
        self._open = True
        flags = _Flag(0) if intact else _Flag.REPLACED
        answers = self._meet(self._next_begin(), present, zlib.crc32(content), flags)
        if any(flag & _Flag.FAILED for _, flag in answers):
            self._open = False
            return Verdict.FAILED
        if any(flag & _Flag.REPLACED for _, flag in answers):
            return Verdict.SHARE_AGAIN
        if len({digest for digest, _ in answers}) > 1:
            self.end(present)
            values = {
                rank: f"{digest:08x}" for rank, (digest, _) in zip(present, answers, strict=True)
            }
            raise MismatchError(
                f"the ranks are about to make different optimizer steps (this is rank "
                f"{self._comm.rank}; digests {values}): parameters that have a gradient, and the "
                "settings of parameter groups, must be the same on every rank. Nothing was changed",
                values,
            )
        self._counters.copy_(self._shared_counters)
        return Verdict.GO

    def end(self, present: Sequence[int]) -> None:
        """Wait until all parts are made."""
        self._meet(self._number + 1, present, 0, _Flag(0))
        self._open = False
        if present[0] == self._comm.rank:
            self._shared_counters.copy_(self._counters)

    def step_failed(self) -> None:
        """This rank gives the step up: whoever waits for it in `begin` hears of it."""
        if not self._open and not self.is_absent:
            self._meet(self._next_begin(), [self._comm.rank], 0, _Flag.FAILED)

    def raise_failure(self) -> None:
        """Take part in what the rank that failed does, and raise what it says."""
        reducer = self.model.reducer
        assert isinstance(reducer, Reducer)
        reducer.participate_without_data(lambda _signals: None)

    def catch_up(self) -> None:
        """A rank that missed steps learns how many were made."""
        if self.is_absent:
            self._counters.copy_(self._shared_counters)

    def _next_begin(self) -> int:
        """The number of the next meeting that begins a step: even. All who come know how many steps
        were averaged, also those who missed a meeting.
        """
        steps = self.model.reducer.history.steps * _NUMBERS_PER_STEP - self._first_number
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


def _wait_label(model: DistributedDataParallel) -> WaitLabel:
    kind = f"the optimizer step of {type(model.module).__name__}"
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    return WaitLabel(kind, "", group_number(kind), reducer.transport.members).packed()


def _slots(
    parameters: Sequence[tuple[str, torch.Tensor, tuple[str, ...]]],
    memory: mmap.mmap,
    offset: int,
    counters: torch.Tensor,
) -> Iterator[_Slot]:
    for index, (_, parameter, names) in enumerate(parameters):
        nbytes = aligned_bytes(parameter)
        views = [view_like(parameter, memory, offset + i * nbytes) for i in range(1 + len(names))]
        offset += (1 + len(names)) * nbytes
        yield _Slot(parameter, names, views[0], tuple(views[1:]), counters[index])


def _check_same(
    model: DistributedDataParallel,
    parameters: Sequence[tuple[str, torch.Tensor, tuple[str, ...]]],
    states: MutableMapping[torch.Tensor, _State],
) -> None:
    """All ranks share the same parameters, with the same state."""
    description = describe([(name, parameter) for name, parameter, _ in parameters], ())
    for name, parameter, names in parameters:
        present = [key for key in names if states.get(parameter, {}).get(key) is not None]
        description[name] += f", state {', '.join(present) or 'none'}"
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    check_same_model(reducer.transport, description)
