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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.graph import increment_version

from paceline._interpreter import find_caller
from paceline._torch_internals import tell_scaler_of_inf
from paceline.core.abi import Update, native_status
from paceline.core.update import Option
from paceline.ddp import DistributedDataParallel
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_partners import registrations
from paceline.errors import MismatchError
from paceline.optim.gradient_norm import (
    check_max_norm,
    clip_factor,
    squares_of,
    squares_of_tables,
)
from paceline.optim.one_pass import OnePass
from paceline.optim.parameter_table import (
    GradientArrays,
    ParameterTable,
    TableEntry,
    gradient_like,
    is_plain,
    is_shareable,
)
from paceline.optim.shared_step import (
    SharedStep,
    Verdict,
    find_model,
    is_worth_sharing,
    refuse_to_share,
)
from paceline.optim.step_exchange import StepExchange

__all__ = ["NativeOptimizer", "new_step_counter", "write_common_numbers"]


_logger = logging.getLogger("paceline")
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
    _wants_sharing: bool
    _wants_one_pass: bool
    _max_norm: float | None
    _shared: SharedStep | None
    _one_pass: OnePass | None
    _exchange: StepExchange | None
    _release: weakref.finalize[..., NativeOptimizer] | None
    _seen_models: int  # how many had been registered when there was none of ours

    def __new__(cls, *_arguments: Any, **_options: Any) -> NativeOptimizer:
        # Here, because copies and unpickled optimizers have no other beginning in common.
        self = super().__new__(cls)
        self._tables, self._wants_sharing = {}, False
        self._wants_one_pass, self._max_norm = False, None
        self._one_pass, self._exchange = None, None
        self._shared, self._release, self._seen_models = None, None, 0
        return self

    def __init__(
        self,
        *arguments: Any,
        shared: bool = False,
        one_pass: bool = False,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        """Arguments are those of torch's class.

        shared: with `paceline.DistributedDataParallel` on ranks of one host, keep parameters and
            state once per host, and split the step over the ranks. Parameters are then the same
            memory on all ranks: to change them outside the optimizer, by anything that is not the
            same when done twice, do it on one rank.
        one_pass: share, and sum gradients over ranks in the step instead of averaging them in
            backward: less memory is moved. Until the step `.grad` is then this rank's own gradient;
            `model.averaged_gradients()` gives the average.
        max_norm: clip gradients in the step, as `torch.nn.utils.clip_grad_norm_` does before it:
            to this norm of all gradients of this optimizer together. `.grad` stays as it is.
        """
        self._max_norm = check_max_norm(max_norm)
        super().__init__(*arguments, **options)
        self._wants_sharing, self._wants_one_pass = shared or one_pass, one_pass

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stock" in vars(cls):
            signature = inspect.signature(cls.stock)
            own = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in (("shared", False), ("one_pass", False), ("max_norm", None))
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
        if self._wants_sharing and self._share_if_possible():
            self._step_together(scale, has_inf, is_scaled=found_inf is not None)
        elif not has_inf:
            self._step_alone(scale)
        return loss

    def _step_alone(self, grad_scale: float) -> None:
        steps = [
            self._tabulate((index, _Place.OWN), group, group["params"], grad_scale)
            for index, group in enumerate(self.param_groups)
        ]
        clip = 1.0
        if self._max_norm is not None:
            clip = clip_factor(_squares_alone(steps), grad_scale, self._max_norm)
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
            table, gradients, others = self._sort(group, parameters, names)
            self._tables[key] = table
            if others and key[1] is not _Place.OWN:
                refuse_to_share(others)
            found = GradientArrays(gradients)
        self.write_numbers(table.update.numbers, group)
        table.update.numbers.grad_scale, table.update.numbers.clip = grad_scale, 1.0
        return _GroupStep(group, [(table, found)], others)

    def _sort(
        self, group: dict[str, Any], parameters: list[torch.Tensor], names: tuple[str, ...]
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
        return ParameterTable(entries, names), gradients, others

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
        if self._shared is not None:
            return True
        if self._seen_models == registrations():
            return False
        parameters = [p for group in self.param_groups for p in group["params"]]
        asked_for = "one_pass=True" if self._wants_one_pass else "shared=True"
        model = find_model(parameters, asked_for) if is_worth_sharing(parameters) else None
        if model is None:
            self._seen_models = registrations()
            return False
        # A rank without data is not here, and sharing needs all of them: later.
        if model.reducer.history.absent:
            return False
        self._share(model)
        return True

    def _share(self, model: DistributedDataParallel) -> SharedStep:
        reducer = model.reducer
        assert isinstance(reducer, Reducer)
        averaged = {id(entry.parameter) for entry in reducer.managed}
        chosen = [
            (f"parameter {number} of group {index}", parameter, self.state_names(group))
            for index, group in enumerate(self.param_groups)
            for number, parameter in enumerate(group["params"])
            if id(parameter) in averaged and is_shareable(parameter) and _core_may_step(group)
        ]
        counter = new_step_counter(self.param_groups[0])
        self._tables.clear()
        if self._release is not None:
            self._release.detach()
        self._shared = shared = SharedStep(
            model, chosen, self.state, counter.dtype, replaced=self._shared
        )
        model.step_partners.add(shared)
        if self._wants_one_pass or self._max_norm is not None:
            self._exchange = StepExchange(model, [parameter for _, parameter, _ in chosen])
        # Whoever changes the parameters when this optimizer is gone does so on every rank.
        self._release = weakref.finalize(self, shared.release)
        self._release.atexit = False
        return shared

    def _step_together(self, grad_scale: float, has_inf: bool, *, is_scaled: bool) -> None:
        shared = self._shared
        assert shared is not None
        if has_inf and self._one_pass is None:
            return  # in an average: all ranks have found it
        alone = self._steps_alone(shared, grad_scale)
        if shared.is_absent:
            for step in alone:
                self._run(step, grad_scale, 1.0)
            return
        present = shared.present
        tables = self._tables_together(shared, grad_scale)
        while (verdict := self._begin_together(shared, present, tables)) is Verdict.SHARE_AGAIN:
            shared = self._share(shared.model)
            tables = self._tables_together(shared, grad_scale)
        if verdict is Verdict.FAILED:
            shared.raise_failure()
            return
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
        """What ranks step together, with gradients that are the same on all of them or summed in
        the step.
        """
        summed = self._one_pass
        if summed is not None:
            summed.place(shared.model)
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
                content += self._one_pass.prepare(shared.model, present, tables)
            for table, _ in tables:
                table.update.numbers.part, table.update.numbers.parts = shared.part(present)
            intact = all(shared.holds(table) for table, _ in tables)
            verdict = shared.begin(present, content, intact=intact)
            return verdict
        finally:
            if verdict is not Verdict.GO:
                self._forget_step(tables)

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
        if where and not has_inf and not tell_scaler_of_inf(self, find_caller("step")):
            _logger.warning(
                "%s: gradients of rank %s are not finite, so no rank makes this step, but the "
                "GradScaler of this rank could not be told. Scales will differ from now on.",
                type(self).__name__,
                ", ".join(map(str, where)),
            )
        return bool(where)

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
        model = shared.model
        # All ranks have to be here, and backward must be over.
        if model.reducer.history.absent or model.reducer.in_backward:
            return
        parameters = [p for group in self.param_groups for p in group["params"] if p in shared]
        deferred = DeferredSum(parameters, self)
        replaces = self._one_pass is not None
        self._one_pass = OnePass(shared, deferred, type(self).__name__, replaces=replaces)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        if self._one_pass is not None:
            self._one_pass.forget_gradients()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_max_norm": self._max_norm}

    def state_dict(self) -> dict[str, Any]:
        if self._shared is not None:
            self._shared.catch_up()
        return super().state_dict()

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


def _squares_alone(steps: Sequence[_GroupStep]) -> float:
    total = sum(squares_of_tables(step.tables) for step in steps)
    return sum((squares_of(step.others) for step in steps), total)


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
