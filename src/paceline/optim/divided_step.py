"""An optimizer whose state is divided among ranks that share no memory: of several hosts, of other
backends, on accelerators.

    begin    all ranks say what they are about to do, and compare
    sum      with one_pass=True each rank gets the sum of its part of the gradients
    update   each rank steps its part of the parameters; it has the state of that part only
    gather   every rank gets the others' parts

Without one_pass=True gradients are averaged in backward as ever, and `.grad` is the average on
every rank. With it, backward leaves each rank's own gradient (`DeferredSum`). Parameters stay where
they are. What travels is copied through a buffer, portion by portion; where broadcasts overlap,
long pieces are sent from where they are to where they belong.

A rank without data has its part to do like the others. What they do to gradients between backward
and step, and to the settings of their groups, happens where there is data only: such a rank gets
both from the lowest rank that has some.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import json
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from paceline._torch_internals import foreach_copy_
from paceline.ddp import DistributedDataParallel
from paceline.ddp.buckets import DenseBucket
from paceline.ddp.consistency import check_same_model, describe
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.reducer import Reducer
from paceline.ddp.signals import Call, Signal
from paceline.ddp.step_partners import digest_of, models_of, refuse_absence_from_division
from paceline.ddp.transport import Transport
from paceline.errors import ConfigError, GroupError, MismatchError
from paceline.optim.gradient_norm import clip_factor
from paceline.optim.part_plan import Piece, plan_parts, plan_portions, without_long_pieces
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import WaitLabel

__all__ = ["DividedStep", "PartOptimizer", "find_model_to_divide", "why_not_summed"]

_State = MutableMapping[str, Any]
_Group = dict[str, Any]
# Of what all ranks send at once. Gloo's all-to-all of 68 MB took 43 ms with 8 MiB at a time, 54
# with 2, 60 with everything; libraries for accelerators want long messages.
_BUFFER_BYTES = 8 * 1024 * 1024
# A piece of this size is worth a call of its own. Broadcasts of Gloo took 40 ms where gathering in
# portions took 75: two ranks, 68 MB.
_LONG_PIECE_BYTES = 1024 * 1024
_DEVICE_BUFFER_BYTES = 32 * 1024 * 1024
_LINE_BYTES = 64


class _Gradient(enum.IntEnum):
    """What a rank brings of a parameter's gradient."""

    NONE = 0
    AVERAGED = 1  # the same on all ranks
    OWN = 2  # to be summed


class PartOptimizer(Protocol):
    """An optimizer of the pieces that are this rank's part."""

    state: defaultdict[torch.Tensor, Any]

    def step_groups(
        self,
        groups: Sequence[_Group],
        grad_scale: float,
        clip_by: Callable[[float], float] | None = None,
    ) -> None:
        """Make a step of these groups. `clip_by` is given the sum of squares of their gradients,
        and returns what those are multiplied by.
        """


class _Member(NamedTuple):
    """One parameter of which every rank has a part; `group` is that of the optimizer."""

    name: str
    parameter: torch.Tensor
    group: int


@dataclasses.dataclass(frozen=True)
class _Intention:
    """What a rank is about to do: settings of all groups, and which gradients parameters have.
    Without settings: nothing, because a gradient is not finite.
    """

    settings: list[dict[str, Any]]
    gradients: list[list[int]]  # of each row: `_Gradient`
    grad_scale: float
    weights: list[float] | None = None  # every rank's factor in the sum, if one is to be taken

    def dump(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def load(cls, text: str) -> _Intention:
        return cls(*json.loads(text))


_NOTHING = _Intention([], [], 1.0)


def find_model_to_divide(parameters: Sequence[torch.Tensor]) -> DistributedDataParallel | None:
    """The model among whose ranks the state of these parameters can be divided; None if there is
    one process only, or ranks that share memory, or more than one model.
    """
    models = [model for model in models_of(parameters) if model.process_group.size() > 1]
    return models[0] if len(models) == 1 and models[0].shared_memory is None else None


def why_not_summed(model: DistributedDataParallel) -> str | None:
    """What keeps the ranks of a model from leaving gradients to be summed in a divided step."""
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    converts = any(
        isinstance(bucket, DenseBucket) and bucket.dtype is not bucket.parameters[0].dtype
        for bucket in reducer.buckets
    )
    if reducer.comm_hook is None and not converts and not any(m.sparse for m in reducer.managed):
        return None
    return (
        "one_pass=True sums plain gradients, and those of this "
        f"{type(model.module).__name__} are sparse, or go through a communication hook or mixed "
        "precision. Leave one_pass=True out"
    )


class DividedStep:
    """The division of one optimizer's state, and the steps that are made with it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        groups: list[_Group],
        settings: Collection[str],
        part: PartOptimizer,
        states: MutableMapping[torch.Tensor, _State],
        max_norm: float | None = None,
    ) -> None:
        """All ranks make this together. `groups` are the optimizer's; `settings` are the keys in
        them that a step depends on. Takes the parameters' state out of `states`.
        """
        self._max_norm = max_norm
        self._model = weakref.ref(model)
        self._groups, self._settings, self._part = groups, settings, part
        self._members = _members(model, groups)
        self._member_ids = {id(member.parameter) for member in self._members}
        self._label = _wait_label(model)
        self._number = model.step_partners.add_divided(self)
        refuse_absence_from_division(self._exchange(Call.OPTIMIZER_DIVIDE))
        transport = self._transport
        _check_same(transport, self._members, states)
        rows: dict[tuple[torch.device, torch.dtype], list[_Member]] = {}
        for member in self._members:
            rows.setdefault((member.parameter.device, member.parameter.dtype), []).append(member)
        self._rows = [_Row(members, transport) for members in rows.values()]
        self._seen_averaged, self._seen_counts = self._reducer.managed, _counts(groups)
        with torch.no_grad():
            for row in self._rows:
                for array, tensor in row.tensors.items():
                    state = states.get(row.members[array].parameter)
                    if state:
                        part.state[tensor] = row.piece_of_state(array, state)
        for member in self._members:
            states.pop(member.parameter, None)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._member_ids

    def covers(self, groups: Sequence[_Group]) -> bool:
        """Whether the parameters of which every rank has a part are still those of these groups."""
        averaged, counts = self._reducer.managed, _counts(groups)
        if averaged is not self._seen_averaged or counts != self._seen_counts:
            now = [(id(p), group) for _, p, group in _members(self.model, groups)]
            if now != [(id(p), group) for _, p, group in self._members]:
                return False
            self._seen_averaged, self._seen_counts = averaged, counts
        return True

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of which every rank has a part."""
        return [member.parameter for member in self._members]

    @property
    def model(self) -> DistributedDataParallel:
        model = self._model()
        if model is None:
            raise ConfigError(
                "the DistributedDataParallel among whose ranks this optimizer's state is divided "
                "is gone; make a new optimizer"
            )
        return model

    @property
    def _reducer(self) -> Reducer:
        reducer = self.model.reducer
        assert isinstance(reducer, Reducer)
        return reducer

    @property
    def _transport(self) -> Transport:
        return self._reducer.transport

    @property
    def is_absent(self) -> bool:
        """Whether this rank had no data in the last step: it answers the others then."""
        return self._transport.rank in self._reducer.history.absent

    # ----------------------------------------------------------------------------- the step

    def step(
        self,
        grad_scale: float,
        squares_besides: float = 0.0,
        deferred: DeferredSum | None = None,
    ) -> float | None:
        """Make a step of all parameters, this rank its part. Returns what gradients were multiplied
        by to clip them; None if no rank has made the step, because on one of them a gradient is not
        finite.

        squares_besides: the sum of squares of gradients that each rank steps for itself, which are
            clipped with the others.
        deferred: of gradients that backward has left to be summed.
        """
        weights = None if deferred is None else deferred.weights
        summed = deferred if weights is not None else None
        kinds = [row.kinds_of_gradients(summed) for row in self._rows]
        intention = _Intention(
            [{key: _plain(group[key]) for key in sorted(self._settings)} for group in self._groups],
            kinds,
            grad_scale,
            weights,
        )
        for row, of_row in zip(self._rows, kinds, strict=True):
            row.attach_gradients(of_row)
        return self._step_with(intention, squares_besides)

    def skip(self) -> None:
        """Make no step, on any rank: a gradient is not finite."""
        self._step_with(_NOTHING, 0.0)

    def _step_with(self, intention: _Intention, squares_besides: float) -> float | None:
        text = intention.dump()
        signals = self._exchange(Call.OPTIMIZER_STEP, _digest(text))
        if _is_given_up(signals):
            return None
        self._refuse_different_steps(signals)
        absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
        if absent:
            self._transport.all_gather_text(text)
            self._send_gradients(intention, signals, absent)
        self._sum_gradients(intention)
        clipping = _Clipping(self._max_norm, intention.grad_scale, absent, squares_besides)
        self._step_part(intention, self._groups, clipping)
        return clipping.factor

    def answer(self, signals: Sequence[Signal]) -> None:
        """This rank has no data: do its part in what the others do."""
        if any(signal.call is Call.OPTIMIZER_STATE for signal in signals):
            self._gather_state()
            return
        if _is_given_up(signals):
            return
        self._refuse_different_steps(signals)
        absent = [rank for rank, signal in enumerate(signals) if signal.call is Call.ANSWER]
        texts = self._transport.all_gather_text("")
        intention = _Intention.load(texts[_source(signals)])
        self._send_gradients(intention, signals, absent)
        self._sum_gradients(intention)
        groups = [
            {**group, **settings}
            for group, settings in zip(self._groups, intention.settings, strict=False)
        ]
        clipping = _Clipping(self._max_norm, intention.grad_scale, absent)
        self._step_part(intention, groups, clipping)

    def _step_part(
        self, intention: _Intention, groups: Sequence[_Group], clipping: _Clipping
    ) -> None:
        pieces: list[list[torch.Tensor]] = [[] for _ in groups]
        for row in self._rows:
            for array, tensor in row.tensors.items():
                pieces[row.members[array].group].append(tensor)
        try:
            self._part.step_groups(
                [
                    {**group, "params": tensors}
                    for group, tensors in zip(groups, pieces, strict=True)
                    if tensors
                ],
                intention.grad_scale,
                clipping.function(self._transport),
            )
        except (GroupError, MismatchError):  # known to all
            raise
        except Exception as error:
            # The others have begun: they cannot be told by a signal any more, and wait for this
            # rank's part until it ends.
            raise GroupError(
                f"rank {self._transport.rank} could not make its part of an optimizer step, which "
                f"the other ranks wait for: {type(error).__name__}: {error}. Go on from a "
                "checkpoint"
            ) from error
        with torch.no_grad(), recorder.waiting(self._label, 2 * self._reducer.history.steps + 1):
            for row in self._rows:
                row.detach_gradients()
                row.gather(self._transport, dict(enumerate(row.flat_parameters())))
        increment_version([member.parameter for member in self._members])

    def _send_gradients(
        self, intention: _Intention, signals: Sequence[Signal], absent: Sequence[int]
    ) -> None:
        source = _source(signals)
        with torch.no_grad():
            for row, kinds in zip(self._rows, intention.gradients, strict=True):
                row.send_gradients(self._transport, kinds, source, absent)

    def _sum_gradients(self, intention: _Intention) -> None:
        if intention.weights is None:
            return
        weight = intention.weights[self._transport.rank]
        with torch.no_grad(), recorder.waiting(self._label, 2 * self._reducer.history.steps + 1):
            for row, kinds in zip(self._rows, intention.gradients, strict=True):
                row.sum_gradients(self._transport, kinds, weight)

    def _exchange(self, call: Call, digest: int = 0) -> list[Signal]:
        reducer = self._reducer
        signal = self.model.step_partners.divided_signal(call, self._number, digest)
        with recorder.waiting(self._label, 2 * reducer.history.steps):
            return reducer.exchange_signals(signal)

    def _refuse_different_steps(self, signals: Sequence[Signal]) -> None:
        digests = {
            rank: f"{signal.digest:08x}"
            for rank, signal in enumerate(signals)
            if signal.call is Call.OPTIMIZER_STEP
        }
        if len(set(digests.values())) > 1:
            raise MismatchError(
                f"the ranks are about to make different optimizer steps (this is rank "
                f"{self._transport.rank}; digests {digests}): parameters that have a gradient, and "
                "the settings of parameter groups, must be the same on every rank. Nothing was "
                "changed",
                digests,
            )

    # ----------------------------------------------------------------------------- the whole state

    def whole_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of all parameters, as an undivided optimizer has it. All ranks ask together."""
        try:
            self._exchange(Call.OPTIMIZER_STATE)
            return self._gather_state()
        except GroupError as error:
            error.add_note(
                "state_dict() of an optimizer whose state is divided among the ranks is called on "
                "every rank, also if only one of them saves it"
            )
            raise

    def _gather_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        own = [row.describe_state(self._part.state) for row in self._rows]
        texts = self._transport.all_gather_text(json.dumps(own))
        described: list[dict[int, _StateNames]] = [{} for _ in self._rows]
        for text in texts:
            for merged, rows in zip(described, json.loads(text), strict=True):
                merged.update({int(array): names for array, names in rows.items()})
        whole: dict[torch.Tensor, dict[str, Any]] = {}
        with torch.no_grad():
            for row, names in zip(self._rows, described, strict=True):
                whole.update(row.gather_state(self._transport, self._part.state, names))
        return whole


class _Clipping:
    """`max_norm=` in one step: each rank has the squares of its part of the gradients."""

    def __init__(
        self,
        max_norm: float | None,
        grad_scale: float,
        absent: Sequence[int],
        squares_besides: float = 0.0,
    ) -> None:
        self._max_norm, self._grad_scale = max_norm, grad_scale
        self._absent, self._besides = absent, squares_besides
        self.factor = 1.0

    def function(self, transport: Transport) -> Callable[[float], float] | None:
        """What a part of the step clips by, on all ranks together."""
        if self._max_norm is None:
            return None
        max_norm = self._max_norm

        def clip_by(squares: float) -> float:
            own = torch.tensor([squares, self._besides], dtype=torch.float64)
            table: list[list[float]] = transport.all_gather_small(own).tolist()
            besides = [row[1] for rank, row in enumerate(table) if rank not in self._absent]
            _refuse_different_norms(besides, transport.rank)
            # In the order of ranks: the same bits on all of them.
            total = sum((row[0] for row in table), besides[0])
            self.factor = clip_factor(total, self._grad_scale, max_norm)
            return self.factor

        return clip_by


def _refuse_different_norms(squares: Sequence[float], rank: int) -> None:
    """Of gradients that each rank steps for itself; NaN is not equal to itself."""
    norms = {str(each**0.5) for each in squares}
    if len(norms) > 1:
        raise MismatchError(
            f"max_norm: gradients that are not divided among the ranks have norms that differ "
            f"between ranks ({', '.join(sorted(norms))}; this is rank {rank}), so the ranks cannot "
            "clip alike. Give those parameters to an optimizer of their own"
        )


# By name: an array like the parameter (None), or the type of a number and its value.
_StateNames = dict[str, tuple[str, float] | None]


class _Row:
    """Parameters of one type on one device, and the pieces of them that are this rank's."""

    def __init__(self, members: Sequence[_Member], transport: Transport) -> None:
        self.members = members
        ranks = transport.world
        rank = self._rank = transport.rank
        first = members[0].parameter
        self._like = first.detach()
        size = first.element_size()
        parts = plan_parts([m.parameter.numel() for m in members], size, ranks)
        buffer = _BUFFER_BYTES if first.device.type == "cpu" else _DEVICE_BUFFER_BYTES
        lines = max(1, buffer // _LINE_BYTES // ranks)
        longest = lines * _LINE_BYTES // size
        self._portions = plan_portions(parts, longest)
        # What is gathered: pieces that are broadcast, and the rest.
        self._long_pieces: list[tuple[int, Piece]] = []
        self._gathered = self._portions
        if transport.overlaps_broadcasts:
            self._long_pieces, rest = without_long_pieces(parts, _LONG_PIECE_BYTES // size)
            self._gathered = plan_portions(rest, longest)
        self._longest = max((portion.length for portion in self._portions), default=0)
        self._ranks = ranks
        self._own: dict[int, Piece] = {piece.array: piece for piece in parts[rank]}
        self._described = [_description(member.parameter) for member in members]
        self._flats = [_flat(member.parameter) for member in members]
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums: dict[int, torch.Tensor] = {}  # of this rank's pieces, where they are summed
        # Of the parameters, by position: what the optimizer of this rank's part steps.
        self.tensors = {array: self._flats[array][p.elements] for array, p in self._own.items()}

    def flat_parameters(self) -> list[torch.Tensor]:
        """All elements of each parameter, as they lie in memory, wherever that is by now."""
        for array, member in enumerate(self.members):
            parameter = member.parameter
            if parameter.data_ptr() == self._flats[array].data_ptr():
                continue
            if _description(parameter) != self._described[array]:
                raise ConfigError(
                    f"{member.name} is {_description(parameter)} now and was "
                    f"{self._described[array]} when the optimizer's state was divided among the "
                    "ranks. Make a new optimizer after such changes"
                )
            self._flats[array] = _flat(parameter)
            if array in self.tensors:
                self.tensors[array].data = self._flats[array][self._own[array].elements]
        return self._flats

    def kinds_of_gradients(self, deferred: DeferredSum | None) -> list[int]:
        """What this rank has of each parameter's gradient; `deferred`: of those to be summed."""
        found = []
        for _, parameter, _ in self.members:
            kind = _Gradient.AVERAGED if parameter.grad is not None else _Gradient.NONE
            if kind and deferred is not None and parameter in deferred:
                kind = _Gradient.OWN
            found.append(int(kind))
        return found

    def attach_gradients(self, kinds: Sequence[int]) -> None:
        """Give this rank's pieces their part of the averaged gradients."""
        self.flat_parameters()
        for array, tensor in self.tensors.items():
            gradient = self._flat_gradient(array)
            if gradient is None or kinds[array] != _Gradient.AVERAGED:
                tensor.grad = None
            else:
                tensor.grad = gradient[self._own[array].elements]

    def detach_gradients(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    def _flat_gradient(self, array: int) -> torch.Tensor | None:
        name, parameter, _ = self.members[array]
        gradient = parameter.grad
        if gradient is None:
            return None
        if (
            gradient.layout is not torch.strided
            or gradient.dtype != parameter.dtype
            or gradient.shape != parameter.shape
            or gradient.device != parameter.device
        ):
            raise ConfigError(
                f"{name} has a gradient that cannot be divided among the ranks: "
                f"{_description(gradient)}, for a parameter {_description(parameter)}. Give such "
                "parameters to an optimizer without shared=True"
            )
        return _flat_like(gradient.detach(), parameter)

    def send_gradients(
        self,
        transport: Transport,
        kinds: Sequence[int],
        source: int,
        absent: Sequence[int],
    ) -> None:
        """From a rank with data, give those without their part of the averaged gradients."""
        is_absent = self._rank in absent
        averaged = {array for array, kind in enumerate(kinds) if kind == _Gradient.AVERAGED}
        if is_absent:
            self.flat_parameters()
            for array, tensor in self.tensors.items():
                tensor.grad = torch.empty_like(tensor) if array in averaged else None
        flats = {
            array: flat
            for array in range(len(self.members))
            if not is_absent and (flat := self._flat_gradient(array)) is not None
        }
        buffer, _ = self._exchange_buffers()
        for rank in absent:
            for portion in self._portions:
                pieces = [p for p in portion.pieces[rank] if p.array in averaged]
                if not pieces:
                    continue
                places = [buffer[piece.place()] for piece in pieces]
                if self._rank == source:
                    foreach_copy_(places, [flats[p.array][p.elements] for p in pieces])
                transport.broadcast_from(source, buffer[: portion.length])
                if self._rank == rank:
                    foreach_copy_([self._gradient_piece(piece) for piece in pieces], places)

    def sum_gradients(self, transport: Transport, kinds: Sequence[int], weight: float) -> None:
        """Give each rank the sum of its part of the gradients that are still each rank's own;
        `weight` is this rank's factor. One that has no data brings zeros.
        """
        summed = {array for array, kind in enumerate(kinds) if kind == _Gradient.OWN}
        flats = {array: self._flat_gradient(array) for array in summed} if weight else {}
        for array, tensor in self.tensors.items():
            if array in summed:
                if array not in self._sums:
                    self._sums[array] = torch.empty_like(tensor)
                tensor.grad = self._sums[array]
        part, whole = self._exchange_buffers()
        for portion in self._portions:
            length = portion.length
            pieces = [[p for p in of_rank if p.array in summed] for of_rank in portion.pieces]
            if not any(pieces):
                continue
            sent = whole[: length * self._ranks]
            for rank, of_rank in enumerate(pieces):
                for piece in of_rank:
                    place, flat = sent[piece.place(rank * length)], flats.get(piece.array)
                    if flat is None:
                        place.zero_()
                    else:
                        torch.mul(flat[piece.elements], weight, out=place)
            transport.reduce_scatter_into(part[:length], sent)
            if mine := pieces[self._rank]:
                foreach_copy_(
                    [self._gradient_piece(piece) for piece in mine],
                    [part[piece.place()] for piece in mine],
                )

    def _gradient_piece(self, piece: Piece) -> torch.Tensor:
        gradient = self.tensors[piece.array].grad
        assert gradient is not None
        begin = self._own[piece.array].begin
        return gradient[piece.begin - begin : piece.end - begin]

    def gather(self, transport: Transport, flats: Mapping[int, torch.Tensor]) -> None:
        """Overwrite what is not this rank's with what the others have. `flats`: all elements of
        arrays like the parameters; those that are not given are left out, on every rank.
        """
        if long := [each for each in self._long_pieces if each[1].array in flats]:
            transport.broadcast_all([(r, flats[p.array][p.elements]) for r, p in long])
        part, whole = self._exchange_buffers()
        for portion in self._gathered:
            pieces = [
                [piece for piece in of_rank if piece.array in flats] for of_rank in portion.pieces
            ]
            own, length = pieces[self._rank], portion.length
            if own:
                foreach_copy_(
                    [part[piece.place()] for piece in own],
                    [flats[piece.array][piece.elements] for piece in own],
                )
            transport.all_gather_into(
                whole[: length * self._ranks].view(torch.uint8), part[:length].view(torch.uint8)
            )
            others = [
                (piece, rank * length)
                for rank, of_rank in enumerate(pieces)
                if rank != self._rank
                for piece in of_rank
            ]
            if others:
                foreach_copy_(
                    [flats[piece.array][piece.elements] for piece, _ in others],
                    [whole[piece.place(offset)] for piece, offset in others],
                )

    def _exchange_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For this rank's elements of a portion, and for all ranks'."""
        if self._buffers is None:
            length = self._longest
            # Zeros: what lies between pieces is summed, too.
            self._buffers = self._like.new_zeros(length), self._like.new_zeros(length * self._ranks)
        return self._buffers

    # ----------------------------------------------------------------------------- state

    def piece_of_state(self, array: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """What belongs to this rank's piece of a parameter, of the parameter's whole state."""
        parameter, elements = self.members[array].parameter, self._own[array].elements
        return {
            name: _flat_like(value, parameter)[elements].clone()
            if _is_array(value, parameter)
            else copy.deepcopy(value)
            for name, value in state.items()
        }

    def describe_state(self, states: Mapping[torch.Tensor, _State]) -> dict[int, _StateNames]:
        """What this rank has for its pieces; numbers themselves, because they are the same for all
        pieces of a parameter.
        """
        return {
            array: {name: _described_state(value) for name, value in states[tensor].items()}
            for array, tensor in self.tensors.items()
            if states.get(tensor)
        }

    def gather_state(
        self,
        transport: Transport,
        states: Mapping[torch.Tensor, _State],
        described: Mapping[int, _StateNames],
    ) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter and its whole state."""
        arrays = dict.fromkeys(
            name
            for array in sorted(described)
            for name, number in described[array].items()
            if number is None
        )
        gathered = {name: self._gather_array(transport, states, described, name) for name in arrays}
        for array, names in sorted(described.items()):
            yield (
                self.members[array].parameter,
                {
                    name: gathered[name][array] if number is None else _number(*number)
                    for name, number in names.items()
                },
            )

    def _gather_array(
        self,
        transport: Transport,
        states: Mapping[torch.Tensor, _State],
        described: Mapping[int, _StateNames],
        name: str,
    ) -> dict[int, torch.Tensor]:
        whole = {
            array: torch.empty_like(self.members[array].parameter, requires_grad=False)
            for array, names in described.items()
            if name in names
        }
        flats = {array: _flat(tensor) for array, tensor in whole.items()}
        for array, flat in flats.items():
            if array in self.tensors:
                flat[self._own[array].elements].copy_(states[self.tensors[array]][name])
        self.gather(transport, flats)
        return whole


def _members(model: DistributedDataParallel, groups: Sequence[_Group]) -> list[_Member]:
    """Of these groups' parameters, those that can be divided: averaged by the model, all elements
    side by side, and stepped element by element.
    """
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    averaged = {id(entry.parameter) for entry in reducer.managed}
    return [
        _Member(f"parameter {number} of group {index}", parameter, index)
        for index, group in enumerate(groups)
        if not group["differentiable"] and not group.get("capturable")
        for number, parameter in enumerate(group["params"])
        if id(parameter) in averaged and _is_divisible(parameter)
    ]


def _counts(groups: Sequence[_Group]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _is_divisible(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and parameter.numel() > 0
        and (
            parameter.is_contiguous()
            or parameter.stride() == torch.empty_like(parameter, device="meta").stride()
        )
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor as they lie in memory."""
    return tensor.data.as_strided((tensor.numel(),), (1,))


def _flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """All elements in the order in which the parameter's lie in memory."""
    if tensor.stride() == parameter.stride() and not tensor.is_neg():
        return _flat(tensor)
    return _flat(torch.empty_like(parameter, requires_grad=False).copy_(tensor))


def _is_array(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _described_state(value: Any) -> tuple[str, float] | None:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return None
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), float(value)
    return "", value


def _number(dtype: str, value: float) -> Any:
    return torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value


def _description(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout} on {tensor.device}"


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())


def _is_given_up(signals: Sequence[Signal]) -> bool:
    """Whether some rank makes no step, because a gradient is not finite: then nobody does."""
    nothing = _digest(_NOTHING.dump())
    return any(
        signal.call is Call.OPTIMIZER_STEP and digest_of(signal) == nothing for signal in signals
    )


def _source(signals: Sequence[Signal]) -> int:
    """The lowest rank that has data."""
    return next(rank for rank, signal in enumerate(signals) if signal.call is not Call.ANSWER)


def _wait_label(model: DistributedDataParallel) -> WaitLabel:
    kind = f"the optimizer step of {type(model.module).__name__}"
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    return WaitLabel(kind, "", group_number(kind), reducer.transport.members).packed()


def _check_same(
    transport: Transport,
    members: Sequence[_Member],
    states: Mapping[torch.Tensor, _State],
) -> None:
    """All ranks divide the same parameters, with the same kind of state."""
    description = describe([(member.name, member.parameter) for member in members], ())
    for name, parameter, _ in members:
        state = states.get(parameter) or {}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            description[name] += f", step {float(state['step']):g}"
        description[name] += f", state {', '.join(state) or 'none'}"
    check_same_model(transport, description)
