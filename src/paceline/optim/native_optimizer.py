"""What the optimizers of this package have in common: a step that the core makes.

    step            run the closure, look at what a GradScaler says, then group by group:
      same as last time?   the group's table still describes its parameters and their state
      if not, sort         each parameter: one for the core, or one for torch's own code
      update               one native call for all of the former

Torch's own code takes what the core does not: other devices, sparse gradients, complex numbers,
subclasses of tensors, memory with gaps, `differentiable`, `capturable`, and everything where the
core is not built.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from paceline.core.abi import Update, native_status
from paceline.core.update import Option
from paceline.ddp import DistributedDataParallel
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_partners import registrations
from paceline.optim.divided_step import DividedStep, find_model_to_divide
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

__all__ = ["NativeOptimizer", "new_step_counter", "write_common_numbers"]


# Where the division of the state is found: in the state, like what it stands for. Whatever loads,
# clears or puts back an optimizer's state does so with the division.
_DIVIDED: Any = "divided among ranks"


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

    # By the group's number, and whether they are in memory shared by ranks.
    _tables: dict[tuple[int, bool], ParameterTable]
    _wants_sharing: bool
    _shared: SharedStep | None
    _release: weakref.finalize[..., NativeOptimizer] | None
    _seen_models: int  # how many had been registered when there was none of ours
    _seen_undivided: int  # as above

    def __new__(cls, *_arguments: Any, **_options: Any) -> NativeOptimizer:
        # Here, because copies and unpickled optimizers have no other beginning in common.
        self = super().__new__(cls)
        self._tables, self._wants_sharing = {}, False
        self._shared, self._release, self._seen_models = None, None, 0
        self._seen_undivided = 0
        return self

    def __init__(self, *arguments: Any, shared: bool = False, **options: Any) -> None:
        """Arguments are those of torch's class.

        shared: with `paceline.DistributedDataParallel` on ranks of one host, keep parameters and
            state once per host, and split the step over the ranks. Parameters are then the same
            memory on all ranks: to change them outside the optimizer, by anything that is not the
            same when done twice, do it on one rank. Where ranks share no memory (several hosts,
            other backends, accelerators), each keeps the state of its part of the parameters only,
            steps it, and gets the other parts from the others.
        """
        super().__init__(*arguments, **options)
        self._wants_sharing = shared

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stock" in vars(cls):
            signature = inspect.signature(cls.stock)
            own = inspect.Parameter("shared", inspect.Parameter.KEYWORD_ONLY, default=False)
            cls.__signature__ = signature.replace(  # type: ignore[attr-defined]  # for inspect
                parameters=[*signature.parameters.values(), own]
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
        found_inf = attributes.get("found_inf")
        if found_inf is not None and found_inf.item():
            if (divided := self._divided) is not None and not divided.is_absent:
                divided.skip()
            return loss
        grad_scale = attributes.get("grad_scale")
        scale = 1.0 if grad_scale is None else float(grad_scale)
        if self._wants_sharing is True and self._divide_if_possible():
            self._step_divided(scale)
        elif self._wants_sharing and self._share_if_possible():
            self._step_together(scale)
        else:
            self.step_groups(self.param_groups, scale)
        return loss

    def step_groups(self, groups: Sequence[dict[str, Any]], grad_scale: float) -> None:
        """Make a step of these groups in this process alone."""
        for index, group in enumerate(groups):
            self._step_group(index, group, group["params"], grad_scale)

    def _step_group(
        self, index: int, group: dict[str, Any], parameters: list[torch.Tensor], grad_scale: float
    ) -> None:
        if not _core_may_step(group):
            self._step_with_torch(group, parameters, grad_scale)
            return
        table, gradients = self._tabulate((index, False), group, parameters, grad_scale)
        table.run(gradients)
        increment_version(table.parameters)

    def _tabulate(
        self,
        key: tuple[int, bool],
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        grad_scale: float,
    ) -> tuple[ParameterTable, GradientArrays]:
        """The table of a group's parameters that have gradients, ready to run with these.
        Parameters that the core cannot step have been stepped by torch.
        """
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if not all(gradient is not None for gradient in gradients):
            parameters = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in parameters]
        names = self.state_names(group)
        table = self._tables.get(key)
        found = None if table is None else table.matches(parameters, gradients, self.state, names)
        if table is None or found is None:
            table, gradients, others = self._sort(group, parameters, names)
            self._tables[key] = table
            if others and key[1]:
                refuse_to_share(others)
            elif others:
                self._step_with_torch(group, others, grad_scale)
            found = GradientArrays(gradients)
        self.write_numbers(table.update.numbers, group)
        table.update.numbers.grad_scale = grad_scale
        return table, found

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
        model = find_model(parameters) if is_worth_sharing(parameters) else None
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
        # Whoever changes the parameters when this optimizer is gone does so on every rank.
        self._release = weakref.finalize(self, shared.release)
        self._release.atexit = False
        return shared

    def _step_together(self, grad_scale: float) -> None:
        shared = self._shared
        assert shared is not None
        for index, group in enumerate(self.param_groups):
            alone = [p for p in group["params"] if p not in shared]
            if alone:
                self._step_group(index, group, alone, grad_scale)
        if shared.is_absent:
            return
        present = shared.present
        work = self._work_together(shared, grad_scale)
        while (verdict := self._begin_together(shared, present, work)) is Verdict.SHARE_AGAIN:
            shared = self._share(shared.model)
            work = self._work_together(shared, grad_scale)
        if verdict is Verdict.FAILED:
            shared.raise_failure()
            return
        for table, gradients in work:
            numbers = table.update.numbers
            numbers.part, numbers.parts = shared.part(present)
            table.run(gradients)
        shared.end(present)
        for table, _ in work:
            increment_version(table.parameters)

    def _work_together(
        self, shared: SharedStep, grad_scale: float
    ) -> list[tuple[ParameterTable, GradientArrays]]:
        return [
            self._tabulate((index, True), group, members, grad_scale)
            for index, group in enumerate(self.param_groups)
            if (members := [p for p in group["params"] if p in shared])
        ]

    def _begin_together(
        self,
        shared: SharedStep,
        present: Sequence[int],
        work: list[tuple[ParameterTable, GradientArrays]],
    ) -> Verdict:
        """Wait for the ranks that make the step; unless they do, it has left no trace here."""
        tables = [table for table, _ in work]
        verdict = None
        try:
            verdict = shared.begin(
                present,
                b"".join(table.content() for table in tables),
                intact=all(map(shared.holds, tables)),
            )
            return verdict
        finally:
            if verdict is not Verdict.GO:
                for table in tables:
                    table.forget_new_state()
                self._tables.clear()

    def state_dict(self) -> dict[str, Any]:
        """Torch's format, complete on every rank. If the state is divided among ranks, all of them
        call this together.
        """
        if self._shared is not None:
            self._shared.catch_up()
        if not self.is_divided:
            return super().state_dict()
        divided = self.state
        self.state = self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = divided

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "state": self._whole_state()} if self.is_divided else state

    # ----------------------------------------------------------------------------- several hosts

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
        model = find_model_to_divide(parameters) if is_worth_sharing(parameters) else None
        if model is None:
            self._seen_undivided = registrations()
            return False
        # A rank without data is not here, and dividing needs all of them: later.
        if model.reducer.history.absent:
            return False
        divided = DividedStep(
            model, self.param_groups, self.defaults.keys(), self._part_optimizer(), self.state
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
        # A rank without data hears of the others' step by their signals, and answers.
        if not divided.is_absent:
            divided.step(grad_scale)
        for index, group in enumerate(self.param_groups):
            alone = [p for p in group["params"] if p not in divided]
            if alone:
                self._step_group(index, group, alone, grad_scale)

    # ----------------------------------------------------------------------------- torch's own code

    def _step_with_torch(
        self, group: dict[str, Any], parameters: list[torch.Tensor], grad_scale: float
    ) -> None:
        """Step some parameters of a group with torch's own code."""
        if grad_scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale)
        # Another optimizer with the same state: hooks, and the scale, have been seen to.
        stand_in: Any = self.stock.__new__(self.stock)
        vars(stand_in).update(vars(self))
        vars(stand_in).update(
            param_groups=[{**group, "params": parameters}], grad_scale=None, found_inf=None
        )
        with torch.set_grad_enabled(group["differentiable"]):
            inspect.unwrap(self.stock.step)(stand_in)


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
