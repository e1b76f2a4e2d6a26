"""What the optimizers of this package have in common: a step that the core makes.

    step            run the closure, look at what a GradScaler says, then group by group:
      same as last time?   the group's table still describes its parameters and their state
      if not, sort         each parameter: one for the core, or one for torch's own code
    norm            of all gradients, where they are clipped
    update          one native call for each group

Torch's own code takes what the core does not: other devices, sparse gradients, complex numbers,
subclasses of tensors, memory with gaps, `differentiable`, `capturable`, and everything where the
core is not built.
"""

from __future__ import annotations

import enum
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.graph import increment_version

from paceline._interpreter import find_caller
from paceline._torch_internals import tell_scaler_of_inf
from paceline.core.abi import Update, native_status
from paceline.core.update import Option
from paceline.ddp.deferred_sum import DeferredSum
from paceline.errors import ConfigError, GroupError, MismatchError, NativeError
from paceline.optim.averaging_ranks import AveragingRanks, StepSums, registrations
from paceline.optim.divided_step import DividedStep, find_model_to_divide, why_not_summed
from paceline.optim.gradient_norm import (
    check_max_norm,
    clip_factor,
    squares_of,
    squares_of_tables,
    total_of,
)
from paceline.optim.interrupted_step import InterruptedStep, UpdatedArray, record_parts
from paceline.optim.model_ranks import find_ranks
from paceline.optim.one_pass import say_what_grad_holds
from paceline.optim.parameter_table import (
    GradientArrays,
    ParameterTable,
    TableEntry,
    gradient_like,
    is_plain,
    is_shareable,
)
from paceline.optim.shared_step import (
    SharedParameter,
    SharedStep,
    Verdict,
    is_worth_sharing,
    refuse_shared_twice,
    refuse_to_share,
    why_not_shared,
)
from paceline.optim.step_exchange import StepExchange

__all__ = ["NativeOptimizer", "new_step_counter", "write_common_numbers"]

_logger = logging.getLogger("paceline")


class _Sharing(enum.Enum):
    """Whether ranks of a host keep parameters and state once."""

    WHERE_POSSIBLE = None
    REQUIRED = True
    OFF = False


# Where the division of the state is found: in the state, like what it stands for. Whatever loads,
# clears or puts back an optimizer's state does so with the division.
_DIVIDED: Any = "divided among ranks"

_Tables = list[tuple[ParameterTable, GradientArrays]]


class _Place(enum.Enum):
    """Where the parameters of a table are, and what their gradients are."""

    OWN = "own"  # this process's
    SHARED = "shared"  # in shared memory; gradients are averages
    SUMMED = "summed"  # in shared memory; gradients are summed in the step


class _GroupStep(NamedTuple):
    """One group's part of a step: what the core updates, and what torch does."""

    group: dict[str, Any]
    tables: _Tables  # one, or none
    others: list[torch.Tensor]


class NativeOptimizer(torch.optim.Optimizer):
    """Stands before one of torch's optimizers among the base classes and replaces its step."""

    # Torch's class, whose code steps what the core cannot.
    stock: ClassVar[type[torch.optim.Optimizer]]
    # New state is written by the first step, not read.
    starts_from_gradient: ClassVar[bool] = False
    # New state is zeros, or written before it is read.
    starts_empty: ClassVar[bool] = True
    # For GradScaler: the step divides gradients by the scale, and does nothing if one is not
    # finite.
    _step_supports_amp_scaling = True

    # By the group's number.
    _tables: dict[tuple[int, _Place], ParameterTable]
    _sharing: _Sharing
    _wants_one_pass: bool
    _max_norm: float | None
    _shared: SharedStep | None
    _one_pass: StepSums | None
    _exchange: StepExchange | None
    _interrupted: InterruptedStep | None
    # Where the state is divided: gradients that backward leaves to the step, and whose.
    _deferred: DeferredSum | None
    _summed_by: DividedStep | None
    _release: weakref.finalize[..., NativeOptimizer] | None
    _keeps_apart_from: AveragingRanks | None  # sharing with these was tried, and given up
    _seen_models: int  # how many had been registered when there was none of ours
    _seen_undivided: int  # as above

    def __new__(cls, *_arguments: Any, **_options: Any) -> NativeOptimizer:
        # Here, because copies and unpickled optimizers have no other beginning in common.
        self = super().__new__(cls)
        self._tables, self._sharing = {}, _Sharing.WHERE_POSSIBLE
        self._wants_one_pass, self._max_norm = False, None
        self._one_pass, self._exchange = None, None
        self._deferred, self._summed_by = None, None
        self._shared, self._release, self._seen_models = None, None, 0
        self._seen_undivided = 0
        self._keeps_apart_from = None
        self._interrupted = None
        return self

    def __init__(
        self,
        *arguments: Any,
        shared: bool | None = None,
        one_pass: bool = False,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        """Arguments are those of torch's class.

        shared: with `paceline.DistributedDataParallel` on ranks of one host, keep parameters and
            state once per host, and split the step over the ranks. To the program each rank has a
            replica of its own all the same. None: where it can be and pays. True: an error where it
            cannot be; and where ranks share no memory (several hosts, other backends,
            accelerators), each keeps the state of its part of the parameters only, steps it, and
            gets the other parts from the others. False: each rank steps for itself.
        one_pass: share, and sum gradients over ranks in the step instead of averaging them in
            backward: less memory is moved, and less is sent where ranks share none. Until the step
            `.grad` is then this rank's own gradient; `model.averaged_gradients()` gives the
            average.
        max_norm: clip gradients in the step, as `torch.nn.utils.clip_grad_norm_` does before it:
            to this norm of all gradients of this optimizer together. `.grad` stays as it is.
        """
        self._max_norm = check_max_norm(max_norm)
        super().__init__(*arguments, **options)
        if not (shared is None or isinstance(shared, bool)):
            raise TypeError(f"shared is True, False or None (where it pays), got {shared!r}")
        if one_pass and shared is False:
            raise ConfigError(
                "one_pass=True sums gradients in memory that ranks share, and shared=False asks "
                "for none: leave one of them out"
            )
        self._wants_one_pass = one_pass
        self._sharing = _Sharing.REQUIRED if one_pass else _Sharing(shared)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stock" in vars(cls):
            signature = inspect.signature(cls.stock)
            own = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in (("shared", None), ("one_pass", False), ("max_norm", None))
            ]
            cls.__signature__ = signature.replace(  # type: ignore[attr-defined]  # for inspect
                parameters=[*signature.parameters.values(), *own]
            )

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The arrays of a parameter's state, in the core's order."""
        raise NotImplementedError

    def new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, as torch's class makes it."""
        raise NotImplementedError

    def write_numbers(self, numbers: Update, group: dict[str, Any]) -> None:
        """Write a group's hyperparameters for the core."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure` computes the loss and its gradients anew, and is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        attributes = vars(self)
        found_inf, grad_scale = attributes.get("found_inf"), attributes.get("grad_scale")
        scale = 1.0 if grad_scale is None else float(grad_scale)
        has_inf = found_inf is not None and bool(found_inf.item())
        if has_inf and self._one_pass is None:
            # In an average: all ranks have found it.
            if (divided := self._divided) is not None and not divided.is_absent:
                divided.skip()
        elif self._may_divide and self._divide_if_possible():
            self._step_divided(scale)
        elif self._sharing is not _Sharing.OFF and self._share_if_possible():
            self._step_together(scale, has_inf, is_scaled=found_inf is not None)
        elif not has_inf:
            self.step_groups(self.param_groups, scale)
        return loss

    def step_groups(
        self,
        groups: Sequence[dict[str, Any]],
        grad_scale: float,
        clip_by: Callable[[float], float] | None = None,
    ) -> None:
        """Make a step of these groups in this process alone. `clip_by` is given the sum of squares
        of all gradients, and returns what they are multiplied by; None: what `max_norm` asks for.
        """
        steps = [
            self._tabulate((index, _Place.OWN), group, group["params"], grad_scale)
            for index, group in enumerate(groups)
        ]
        clip = 1.0
        if clip_by is not None:
            clip = clip_by(total_of(_squares_alone(steps)))
        elif self._max_norm is not None:
            clip = clip_factor(total_of(_squares_alone(steps)), grad_scale, self._max_norm)
        for step in steps:
            self._run(step, grad_scale, clip)

    def _run(self, step: _GroupStep, grad_scale: float, clip: float) -> None:
        if step.others:
            self._step_with_torch(step.group, step.others, grad_scale, clip)
        for table, gradients in step.tables:
            table.update.numbers.clip = clip
            table.run(gradients)
            increment_version(table.parameters)

    def _tabulate(
        self,
        key: tuple[int, _Place],
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        grad_scale: float,
    ) -> _GroupStep:
        """The table of a group's parameters that have gradients, ready to run with these, and the
        parameters that the core cannot step.
        """
        if not _core_may_step(group):
            return _GroupStep(group, [], parameters)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if not all(gradient is not None for gradient in gradients):
            parameters = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in parameters]
        names = self.state_names(group)
        table = self._tables.get(key)
        found = None if table is None else table.matches(parameters, gradients, self.state, names)
        others: list[torch.Tensor] = []
        if table is None or found is None:
            is_shared = key[1] is not _Place.OWN
            table, gradients, others = self._sort(group, parameters, names, is_shared)
            self._tables[key] = table
            found = GradientArrays(gradients)
        self.write_numbers(table.update.numbers, group)
        table.update.numbers.grad_scale, table.update.numbers.clip = grad_scale, 1.0
        return _GroupStep(group, [(table, found)], others)

    def _sort(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        names: tuple[str, ...],
        is_shared: bool,
    ) -> tuple[ParameterTable, list[torch.Tensor], list[torch.Tensor]]:
        """Which parameters the core steps, with gradients laid out as it needs them, and which
        torch does. Makes the state of the former.
        """
        entries, gradients, others = [], [], []
        for parameter in parameters:
            entry = self._entry(group, parameter, names) if is_plain(parameter) else None
            if entry is None:
                others.append(parameter)
                continue
            entries.append(entry)
            gradients.append(gradient_like(parameter))
        shared = self._shared if is_shared else None
        if shared is None:
            return ParameterTable(entries, names), gradients, others
        if others and self._sharing is _Sharing.REQUIRED:
            refuse_to_share(others)
        table = ParameterTable(entries, names, shared.shared_addresses(), leaves_out=bool(others))
        return table, gradients, others

    def _entry(
        self, group: dict[str, Any], parameter: torch.Tensor, names: tuple[str, ...]
    ) -> TableEntry | None:
        """This parameter and its state as the core sees them; None if it cannot."""
        if not names:
            return TableEntry(parameter, {}, (), None, False)
        state = self.state[parameter]
        is_new = any(state.get(name) is None for name in names)
        if not state or (is_new and self.starts_from_gradient):
            state.update(self._made_state(parameter, group))
        arrays = tuple(state[name] for name in names)
        entry = TableEntry(
            parameter, state, arrays, state.get("step"), is_new and self.starts_from_gradient
        )
        return entry if entry.is_uniform() else None

    def _made_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        shared = self._shared
        if shared is None or not shared.has_room(parameter, self.state_names(group)):
            return self.new_state(parameter, group)
        # Not in this rank's memory first.
        like = torch.empty_like(parameter, device="meta") if self.starts_empty else parameter
        state = self.new_state(like, group)
        shared.adopt_state(parameter, state)
        return state

    # ----------------------------------------------------------------------------- ranks of a host

    def _share_if_possible(self) -> bool:
        """Whether parameters and state are in shared memory, from now on at the latest."""
        shared = self._shared
        if shared is not None and (shared.is_released or shared.is_cut_off):
            self._separate("another optimizer shares them, or gradients are averaged elsewhere")
            if shared.is_of_past_loop:
                self._seen_models = -1
        if self._shared is not None:
            return True
        if self._seen_models == registrations():
            return False
        parameters = [p for group in self.param_groups for p in group["params"]]
        ranks = find_ranks(parameters)
        if ranks is not None and not ranks.are_ready:
            return False
        if (
            ranks is None
            or ranks is self._keeps_apart_from
            or not self._may_share(ranks, parameters)
            or not self._try_to_share(ranks)
        ):
            self._seen_models = registrations()
            return False
        return True

    def _try_to_share(self, ranks: AveragingRanks) -> bool:
        try:
            self._share(ranks)
        except (MismatchError, NativeError) as error:
            # Raised on all ranks: their optimizers are not alike, or there is too little memory.
            if self._sharing is _Sharing.REQUIRED:
                raise
            _logger.info("each rank keeps optimizer state of its own: %s", error)
            return False
        return True

    def _may_share(self, ranks: AveragingRanks, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these ranks can share these parameters, and gain by it: on all of them the
        same.
        """
        if not is_worth_sharing(parameters):
            return False
        asked_for = "one_pass=True" if self._wants_one_pass else "shared=True"
        reason = why_not_shared(ranks, asked_for)
        if self._sharing is _Sharing.REQUIRED:
            if reason is not None:
                raise ConfigError(reason)
            refuse_shared_twice(parameters)
            return True
        return reason is None and ranks.covers(parameters)

    def _share(self, ranks: AveragingRanks) -> SharedStep:
        names = ranks.names
        chosen = [
            SharedParameter(names[id(parameter)], parameter, self.state_names(group))
            for group in self.param_groups
            for parameter in group["params"]
            if id(parameter) in names and is_shareable(parameter) and _core_may_step(group)
        ]
        counter = new_step_counter(self.param_groups[0])
        self._tables.clear()
        shared = SharedStep(ranks, chosen, self.state, counter.dtype, replaced=self._shared)
        if self._release is not None:
            self._release.detach()
        self._shared = shared
        if self._wants_one_pass or self._max_norm is not None:
            self._exchange = StepExchange(shared.comm, [each.parameter for each in chosen])
        # Whoever changes the parameters when this optimizer is gone does so on every rank.
        self._release = weakref.finalize(self, shared.release)
        self._release.atexit = False
        return shared

    def _separate(self, reason: str) -> None:
        """Each rank has parameters and state of its own again."""
        assert self._release is not None
        if self._one_pass is not None and self._one_pass.are_left:
            raise ConfigError(
                f"one_pass=True cannot sum gradients in shared memory any more: {reason}. Make a "
                "new optimizer"
            )
        _logger.info("each rank keeps parameters and optimizer state of its own now: %s", reason)
        self._release()
        self._shared, self._release, self._exchange, self._one_pass = None, None, None, None
        self._seen_models = registrations()
        self._tables.clear()

    def _step_together(self, grad_scale: float, has_inf: bool, *, is_scaled: bool) -> None:
        shared = self._shared
        assert shared is not None
        alone = self._steps_alone(shared, grad_scale)
        if shared.is_absent:
            for step in alone:
                self._run(step, grad_scale, 1.0)
            return
        present = shared.present
        tables = self._tables_together(shared, grad_scale)
        while (verdict := self._begin_together(shared, present, tables)) is Verdict.SHARE_AGAIN:
            shared = self._share(shared.ranks)
            tables = self._tables_together(shared, grad_scale)
        if verdict is Verdict.FAILED:
            shared.raise_failure()
            return
        if verdict is Verdict.SEPARATE:
            self._forget_step([each for step in alone for each in step.tables])
            self._keeps_apart_from = shared.ranks
            self._separate("the program changes them, or their gradients, rank by rank")
            self.step_groups(self.param_groups, grad_scale)
            return
        try:
            if is_scaled and self._one_pass is not None and self._is_inf_anywhere(shared, has_inf):
                self._forget_step(tables)
            else:
                clip = self._clip_together(shared, present, tables, alone, grad_scale)
                for step in alone:
                    self._run(step, grad_scale, clip)
                for table, gradients in tables:
                    table.update.numbers.clip = clip
                    table.run(gradients)
            shared.end(present)
        except GroupError as error:
            self._record_interruption(shared, present, tables, error)
            raise
        for table, _ in tables:
            increment_version(table.parameters)
        if self._wants_one_pass:
            self._sum_from_now_on(shared)

    def _steps_alone(self, shared: SharedStep, grad_scale: float) -> list[_GroupStep]:
        """What each rank steps for itself."""
        return [
            self._tabulate((index, _Place.OWN), group, alone, grad_scale)
            for index, group in enumerate(self.param_groups)
            if (alone := [p for p in group["params"] if p not in shared])
        ]

    def _tables_together(self, shared: SharedStep, grad_scale: float) -> _Tables:
        """What ranks step together."""
        tables = self._tabulate_shared(shared, grad_scale)
        if not all(table.has_all_addresses for table, _ in tables):
            # The program has replaced something.
            for table, _ in tables:
                table.forget_new_state()
            shared.take_back(self.state)
            self._tables.clear()
            tables = self._tabulate_shared(shared, grad_scale)
        return tables

    def _tabulate_shared(self, shared: SharedStep, grad_scale: float) -> _Tables:
        """With gradients that are the same on all ranks, or summed in the step."""
        summed = self._one_pass
        if summed is not None:
            summed.place()
        tables = []
        for index, group in enumerate(self.param_groups):
            members = [p for p in group["params"] if p in shared]
            places = {_Place.SHARED: members}
            if summed is not None:
                places = {
                    _Place.SHARED: [p for p in members if p not in summed],
                    _Place.SUMMED: [p for p in members if p in summed],
                }
            for place, parameters in places.items():
                if parameters:
                    tables += self._tabulate((index, place), group, parameters, grad_scale).tables
        return tables

    def _begin_together(
        self, shared: SharedStep, present: Sequence[int], tables: _Tables
    ) -> Verdict:
        """Wait for the ranks that make the step; unless they do, it has left no trace here."""
        verdict = None
        try:
            content = b"".join(table.content() for table, _ in tables)
            if self._one_pass is not None:
                content += self._one_pass.prepare(present, tables)
            for table, _ in tables:
                table.update.make_part(*shared.part(present), shared.journal.address)
            verdict = shared.begin(
                present,
                content,
                intact=all(table.has_all_addresses for table, _ in tables),
                separate=self._wants_to_separate(shared, [table for table, _ in tables]),
            )
            return verdict
        except GroupError as error:
            self._record_interruption(shared, present, tables, error)
            raise
        finally:
            if verdict is not Verdict.GO:
                self._forget_step(tables)

    @property
    def interrupted_step(self) -> InterruptedStep | None:
        """What was made of the step in which a rank was lost; None if no step was interrupted."""
        return self._interrupted

    def _record_interruption(
        self, shared: SharedStep, present: Sequence[int], tables: _Tables, error: GroupError
    ) -> None:
        settled = shared.settle(present, [table.update for table, _ in tables])
        record = record_parts(
            [
                [UpdatedArray(shared.name_of(p), p.numel(), p.element_size()) for p in t.parameters]
                for t, _ in tables
            ],
            [settled.progress[rank] for rank in present],
            [part for part, rank in enumerate(present) if rank in settled.unsettled],
        )
        shared.adopt_settled(is_complete=record.is_after)
        self._interrupted = record
        record.explain(error)

    def _forget_step(self, tables: _Tables) -> None:
        """No step is made with these tables."""
        for table, _ in tables:
            table.forget_new_state()
        self._tables.clear()

    def _is_inf_anywhere(self, shared: SharedStep, has_inf: bool) -> bool:
        """Whether some rank's gradient is not finite. The GradScalers of all ranks then hear of it,
        so that all go on with the same scale.
        """
        assert self._exchange is not None
        where = self._exchange.is_true_anywhere(has_inf, shared.present, shared.number)
        if where and not has_inf:
            self._tell_scaler(f"rank {', '.join(map(str, where))}")
        return bool(where)

    def _tell_scaler(self, where: str) -> None:
        """Gradients are not finite elsewhere: let the GradScaler of this rank know."""
        if not tell_scaler_of_inf(self, find_caller("step")):
            _logger.warning(
                "%s: gradients of %s are not finite, so no rank makes this step, but the "
                "GradScaler of this rank could not be told. Scales will differ from now on.",
                type(self).__name__,
                where,
            )

    def _clip_together(
        self,
        shared: SharedStep,
        present: Sequence[int],
        tables: _Tables,
        alone: Sequence[_GroupStep],
        grad_scale: float,
    ) -> float:
        if self._max_norm is None:
            return 1.0
        assert self._exchange is not None
        try:
            squares = self._exchange.sum_squares(
                tables, _squares_alone(alone), present, shared.number
            )
        except MismatchError:
            self._forget_step(tables)
            shared.end(present)
            raise
        return clip_factor(squares, grad_scale, self._max_norm)

    def _sum_from_now_on(self, shared: SharedStep) -> None:
        """Once all ranks share, backward leaves sums to the step; likewise when others are shared
        than before.
        """
        if self._one_pass is not None and self._one_pass.goes_with is shared:
            return
        sums = shared.ranks.leave_sums(shared, self)
        if sums is not None and self._one_pass is None:
            whose = "training" if shared.ranks.have_loops else "model"
            say_what_grad_holds(shared.comm.rank, type(self).__name__, whose)
        self._one_pass = sums or self._one_pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        if self._one_pass is not None:
            self._one_pass.forget_gradients()
        if self._deferred is not None:
            self._deferred.forget()

    def _wants_to_separate(self, shared: SharedStep, tables: Sequence[ParameterTable]) -> bool:
        if self._sharing is _Sharing.REQUIRED:
            shared.refuse_local_gradients()
            return False
        return (
            shared.is_disturbed
            or shared.has_local_gradients
            or any(table.leaves_out for table in tables)
        )

    def state_dict(self) -> dict[str, Any]:
        """Torch's format, complete on every rank. If the state is divided among ranks, all of them
        call this together.
        """
        if self._shared is not None:
            self._shared.prepare_reading()
        if not self.is_divided:
            return super().state_dict()
        divided = self.state
        self.state = self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = divided

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {**super().__getstate__(), "_max_norm": self._max_norm}
        return {**state, "state": self._whole_state()} if self.is_divided else state

    # ----------------------------------------------------------------------------- several hosts

    @property
    def _may_divide(self) -> bool:
        return self._sharing is _Sharing.REQUIRED

    def _divide_if_possible(self) -> bool:
        """Whether the state is divided among ranks that share no memory, from now on at the
        latest.
        """
        if (divided := self._divided) is not None:
            if divided.covers(self.param_groups):
                return True
            self.state = self._whole_state()
        elif self._seen_undivided == registrations():
            return False
        parameters = [p for group in self.param_groups for p in group["params"]]
        pays = self._wants_one_pass or is_worth_sharing(parameters)
        model = find_model_to_divide(parameters) if pays else None
        if model is None:
            self._seen_undivided = registrations()
            return False
        # A rank without data is not here, and dividing needs all of them: later.
        if model.reducer.history.absent:
            return False
        if self._wants_one_pass and (why_not := why_not_summed(model)) is not None:
            raise ConfigError(why_not)
        divided = DividedStep(
            model,
            self.param_groups,
            self.defaults.keys(),
            self._part_optimizer(),
            self.state,
            self._max_norm,
        )
        self.state[_DIVIDED] = {_DIVIDED: divided}
        self._tables.clear()
        return True

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a part of the state only: then all of them call `state_dict()`."""
        return _DIVIDED in self.state

    @property
    def _divided(self) -> DividedStep | None:
        entry = self.state.get(_DIVIDED)
        return None if entry is None else entry[_DIVIDED]

    def _whole_state(self) -> defaultdict[Any, Any]:
        """As if it had never been divided; all ranks ask for it together."""
        divided = self._divided
        assert divided is not None
        whole = defaultdict(dict, {key: self.state[key] for key in self.state if key != _DIVIDED})
        whole.update(divided.whole_state())
        return whole

    def _part_optimizer(self) -> NativeOptimizer:
        """Another optimizer of the same kind, with no parameters and no state yet."""
        part = type(self).__new__(type(self))
        own = vars(part).copy()
        vars(part).update(vars(self))
        vars(part).update(own, param_groups=[], state=defaultdict(dict))
        return part

    def _step_divided(self, grad_scale: float) -> None:
        divided = self._divided
        assert divided is not None
        steps = [
            self._tabulate((index, _Place.OWN), group, alone, grad_scale)
            for index, group in enumerate(self.param_groups)
            if (alone := [p for p in group["params"] if p not in divided])
        ]
        clip = 1.0
        # A rank without data hears of the others' step by their signals, and answers.
        if not divided.is_absent:
            self._refuse_local_gradients(divided)
            squares = 0.0 if self._max_norm is None else total_of(_squares_alone(steps))
            factor = divided.step(grad_scale, squares, self._deferred)
            if factor is None:
                self._tell_scaler("another rank")
                self._forget_step([each for step in steps for each in step.tables])
                return
            clip = factor
        for step in steps:
            self._run(step, grad_scale, clip)
        if self._wants_one_pass and self._summed_by is not divided:
            self._sum_divided_from_now_on(divided)

    def _refuse_local_gradients(self, divided: DividedStep) -> None:
        if self._deferred is not None and divided.model.reducer.window.open:
            raise ConfigError(
                "one_pass=True: the last backward was inside no_sync(), so what it left cannot be "
                "summed. Run the last backward before a step outside of no_sync()"
            )

    def _sum_divided_from_now_on(self, divided: DividedStep) -> None:
        """Backward leaves sums to the divided step; likewise when others are divided."""
        reducer = divided.model.reducer
        # All ranks have to be here, and backward must be over.
        if reducer.history.absent or reducer.in_backward:
            return
        is_first = self._deferred is None
        self._deferred = DeferredSum(divided.parameters, self, in_shared_memory=False)
        self._summed_by = divided
        divided.model.defer_sums(self._deferred)
        if is_first:
            rank = divided.model.process_group.rank()
            say_what_grad_holds(rank, type(self).__name__, "model")

    # ----------------------------------------------------------------------------- torch's own code

    def _step_with_torch(
        self, group: dict[str, Any], parameters: list[torch.Tensor], grad_scale: float, clip: float
    ) -> None:
        """Step some parameters of a group with torch's own code."""
        if grad_scale != 1.0 or clip != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale).mul_(clip)
        # Another optimizer with the same state: hooks, and the scale, have been seen to.
        stand_in: Any = self.stock.__new__(self.stock)
        vars(stand_in).update(vars(self))
        vars(stand_in).update(
            param_groups=[{**group, "params": parameters}], grad_scale=None, found_inf=None
        )
        with torch.set_grad_enabled(group["differentiable"]):
            inspect.unwrap(self.stock.step)(stand_in)


def _squares_alone(steps: Sequence[_GroupStep]) -> list[float]:
    return [
        *(square for step in steps for square in squares_of_tables(step.tables)),
        *(square for step in steps for square in squares_of(step.others)),
    ]


def write_common_numbers(numbers: Update, group: dict[str, Any]) -> None:
    """What all rules have."""
    numbers.lr = float(group["lr"])
    numbers.weight_decay = float(group["weight_decay"])
    numbers.options = Option.MAXIMIZE if group["maximize"] else 0


def new_step_counter(group: dict[str, Any]) -> torch.Tensor:
    """The number of steps made, as torch's classes keep it."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


def _core_may_step(group: dict[str, Any]) -> bool:
    return not (
        group["differentiable"]
        or group.get("capturable")
        or torch.compiler.is_compiling()
        or not native_status().available
    )
