"""Any torch optimizer, each rank stepping the parameters that it owns.

    begin    all ranks that had data are here
    step     the optimizer's own step, for whole parameters, in the shared memory
    end      everybody sees all parameters, and can read all state

Parameters are shared as those of `paceline.optim.AdamW` and its like are (see `shared_step.py`).
Where they cannot be, every rank steps all of them, and has the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from paceline.errors import ConfigError, GroupError, MismatchError, NativeError
from paceline.optim.averaging_ranks import AveragingRanks, registrations
from paceline.optim.interrupted_step import InterruptedStep, record_whole
from paceline.optim.model_ranks import find_ranks
from paceline.optim.parameter_table import is_shareable
from paceline.optim.shared_state import SharedState
from paceline.optim.shared_step import (
    SharedParameter,
    SharedStep,
    Verdict,
    is_worth_sharing,
    why_not_shared,
)

__all__ = ["OwnershipPlan", "Sharded", "balanced_owners"]

_logger = logging.getLogger("paceline")

# (parameters, number of ranks) -> the owner of each parameter.
OwnershipPlan = Callable[[Sequence[torch.Tensor], int], Sequence[int]]


def balanced_owners(parameters: Sequence[torch.Tensor], ranks: int) -> list[int]:
    """About as many bytes for each rank: the largest first, each to who has least."""
    loads = [0] * ranks
    owners = [0] * len(parameters)
    by_size = sorted(range(len(parameters)), key=lambda index: -parameters[index].nbytes)
    for index in by_size:
        owners[index] = owner = loads.index(min(loads))
        loads[owner] += parameters[index].nbytes
    return owners


class Sharded(torch.optim.Optimizer):
    """Any torch optimizer, each parameter stepped by one of the host's ranks, its state kept once.

    For optimizers that step each parameter by itself, as most do.

    Args:
        optimizer_class: the class of the optimizer.
        params: its parameters or groups of them.
        *arguments: further arguments of the class.
        plan: which rank owns which parameter, the same on every rank.
        **options: further options of the class.

    Raises:
        TypeError: the first argument is not the class of an optimizer.

    Example:
        ```python
        optimizer = paceline.optim.Sharded(torch.optim.RMSprop, model.parameters(), lr=0.01)
        model(x).sum().backward()
        optimizer.step()
        ```
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Any,
        *arguments: Any,
        plan: OwnershipPlan = balanced_owners,
        **options: Any,
    ) -> None:
        """`arguments` and `options` are those of the class.

        plan: which rank owns which parameter, the same on every rank.
        """
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, _Optimizer)):
            raise TypeError(
                "Sharded takes the class of an optimizer and then its arguments, as in "
                f"Sharded(torch.optim.RMSprop, params, lr=0.01); got {optimizer_class!r}"
            )
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS steps all parameters as one vector, and Sharded gives them to different "
                "ranks. Use torch.optim.LBFGS itself"
            )
        inner = self._inner = optimizer_class(params, *arguments, **options)
        self._plan = plan
        self._interrupted: InterruptedStep | None = None
        self._keeps_apart_from: AveragingRanks | None = None  # sharing with these was given up
        self._forget_sharing()
        self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self._is_made = True

    def _forget_sharing(self) -> None:
        self._shared: SharedStep | None = None
        self._shared_state: SharedState | None = None
        self._state_of_step = 0  # how many steps the state of this rank has seen
        # By the parameter's id: who owns it, and under which number its state is shared.
        self._owners: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._release: weakref.finalize[..., Sharded] | None = None
        self._seen_models = -1

    # ------------------------------------------------------------------------ torch's interface

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that makes the steps. Its `state` has what this rank owns."""
        return self._inner

    # Those of the optimizer inside, whoever replaces them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside, with their settings."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_made:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self._inner.state = state
            self._shared_state = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of groups that name none."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_made:
            self._inner.defaults = defaults

    def __repr__(self) -> str:
        return f"Sharded({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        self._collect_state()
        return {"_plan": self._plan, "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_inner" in state:  # unpickled or copied
            self._inner, self._plan = state["_inner"], state["_plan"]
            self._interrupted = None
            self._keeps_apart_from = None
            self._forget_sharing()
            self._is_made = True
            super().__setstate__({})
        else:  # loaded
            self._inner.__setstate__(state)
            self._shared_state = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Complete on every rank, in the format of the class; no rank waits for another."""
        self._catch_up()
        missing = self._missing_state()
        self.state.update(missing)
        try:
            return super().state_dict()
        finally:
            for parameter in missing:
                del self.state[parameter]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure` computes the loss and its gradients anew, and is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._share_if_possible():
            self._step_together()
        else:
            self.inner.step()
        return loss

    # ----------------------------------------------------------------------------- sharing

    def _share_if_possible(self) -> bool:
        shared = self._shared
        if shared is not None and (shared.is_released or shared.is_cut_off):
            self._separate("another optimizer shares them, or gradients are averaged elsewhere")
            if shared.is_of_past_loop:
                self._seen_models = -1
        if self._shared is not None:
            return True
        if self._seen_models == registrations():
            return False
        ranks = find_ranks(self._parameters)
        if ranks is not None and not ranks.are_ready:
            return False
        if ranks is None or not self._may_share(ranks) or not self._try_to_share(ranks):
            self._seen_models = registrations()
            return False
        return True

    def _may_share(self, ranks: AveragingRanks) -> bool:
        parameters = self._parameters
        return (
            is_worth_sharing(parameters)
            and ranks is not self._keeps_apart_from
            and why_not_shared(ranks) is None
            and ranks.covers(parameters)
        )

    def _try_to_share(self, ranks: AveragingRanks) -> bool:
        try:
            self._share(ranks)
        except (MismatchError, NativeError) as error:
            # Raised on all ranks: their optimizers are not alike, or there is too little memory.
            _logger.info("each rank steps all parameters: %s", error)
            return False
        return True

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _share(self, ranks: AveragingRanks) -> SharedStep:
        self._collect_state()
        names, comm = ranks.names, ranks.shared_memory
        assert comm is not None
        chosen = [
            SharedParameter(names[id(parameter)], parameter, ())
            for parameter in self._parameters
            if id(parameter) in names and is_shareable(parameter)
        ]
        owners = self._planned_owners([shared.parameter for shared in chosen], comm.size)
        shared = SharedStep(ranks, chosen, {}, torch.float32, replaced=self._shared)
        if self._release is not None:
            self._release.detach()
        self._forget_sharing()
        self._shared, self._owners = shared, owners
        self._numbers = {id(entry.parameter): number for number, entry in enumerate(chosen)}
        self._release = weakref.finalize(self, shared.release)
        self._release.atexit = False
        return shared

    def _planned_owners(self, parameters: Sequence[torch.Tensor], ranks: int) -> dict[int, int]:
        owners = list(self._plan(parameters, ranks))
        if len(owners) != len(parameters) or not all(owner in range(ranks) for owner in owners):
            raise ConfigError(
                f"the plan of Sharded gives the rank (0 to {ranks - 1}) that owns each of the "
                f"{len(parameters)} parameters; it returned {owners!r}"
            )
        return {id(p): owner for p, owner in zip(parameters, owners, strict=True)}

    def _separate(self, reason: str) -> None:
        """Each rank has all parameters and all state again, and steps all of them."""
        assert self._release is not None
        _logger.info("each rank steps all parameters now: %s", reason)
        self._collect_state()
        self._release()
        self._forget_sharing()
        self._seen_models = registrations()

    # ----------------------------------------------------------------------------- one step

    def _step_together(self) -> None:
        shared = self._shared
        assert shared is not None
        self._step_some([p for p in self._parameters if p not in shared])
        if shared.is_absent:
            return
        present = shared.present
        while (verdict := self._begin(shared, present)) is Verdict.SHARE_AGAIN:
            shared = self._share(shared.ranks)
        if verdict is Verdict.FAILED:
            shared.raise_failure()
        elif verdict is Verdict.SEPARATE:
            self._keeps_apart_from = shared.ranks
            self._separate("the program changes them, or their gradients, rank by rank")
            self._step_some([p for p in self._parameters if p in shared])
        else:
            with self._recorded(shared, present):
                self._step_own(shared, present)

    @property
    def interrupted_step(self) -> InterruptedStep | None:
        """What was made of the step in which a rank was lost; None if no step was interrupted. The
        optimizer's own code cannot be repeated: what the lost rank was stepping is torn.
        """
        return self._interrupted

    @contextlib.contextmanager
    def _recorded(self, shared: SharedStep, present: Sequence[int]) -> Iterator[None]:
        """If the group fails meanwhile, write down what was made of the step."""
        try:
            yield
        except GroupError as error:
            stepped = [p for p in self._parameters if p in shared and p.grad is not None]
            record = self._interrupted = record_whole(
                {shared.name_of(p): p.numel() for p in stepped},
                {shared.name_of(p): self._stepper(p, present) for p in stepped},
                shared.settle(present).progress,
            )
            record.explain(error)
            raise

    def _begin(self, shared: SharedStep, present: Sequence[int]) -> Verdict:
        with torch.no_grad():
            shared.take_back({})
        with self._recorded(shared, present):
            return shared.begin(
                present,
                self._content(),
                intact=all(
                    id(parameter) not in self._owners or shared.is_in_place(parameter)
                    for parameter in self._parameters
                )
                and self._has_all_parameters(shared),
                separate=shared.is_disturbed or shared.has_local_gradients,
            )

    def _has_all_parameters(self, shared: SharedStep) -> bool:
        """Whether none was added that could be shared."""
        averaged = shared.ranks.names
        return not any(
            id(parameter) in averaged and parameter not in shared and is_shareable(parameter)
            for parameter in self._parameters
        )

    def _content(self) -> bytes:
        """What the step is to do: settings, and which parameters have a gradient."""
        settings = [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]
        has_gradient = bytes(parameter.grad is not None for parameter in self._parameters)
        return repr(settings).encode() + has_gradient

    def _step_own(self, shared: SharedStep, present: Sequence[int]) -> None:
        """Step the parameters that fall to this rank, and write down their state."""
        self._catch_up()
        parameters = [p for p in self._parameters if p in shared]
        mine = [p for p in parameters if self._stepper(p, present) == shared.comm.rank]
        self._take_state([p for p in mine if not self._owns(p)])
        shared.journal.note(begun=1, made=0)
        with shared.writing(mine):
            self._step_some(mine)
        stepped = {self._numbers[id(p)]: self.state[p] for p in mine if p in self.state}
        known = self._shared_state
        is_new = any(known is None or not known.takes(i, state) for i, state in stepped.items())
        if not is_new and known is not None:
            for number, state in stepped.items():
                known.write(number, state)
            shared.journal.note(begun=1, made=1)
        if any(shared.end(present, note=int(is_new))):
            self._shared_state = self._new_shared_state(shared, present, stepped)
            shared.journal.note(begun=1, made=1)
        for parameter in parameters:
            if not self._owns(parameter):
                self.state.pop(parameter, None)  # others have it, and have written it down
        self._state_of_step = shared.steps_made
        increment_version([parameter for parameter in parameters if parameter.grad is not None])

    def _owns(self, parameter: torch.Tensor) -> bool:
        shared = self._shared
        return shared is not None and self._owners[id(parameter)] == shared.comm.rank

    def _stepper(self, parameter: torch.Tensor, present: Sequence[int]) -> int:
        """Who steps a parameter: its owner, or who stands in for an owner without data."""
        owner = self._owners[id(parameter)]
        return owner if owner in present else present[owner % len(present)]

    def _step_some(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer's own step, with some of its parameters only."""
        if not parameters:
            return
        with _only(self.param_groups, {id(parameter) for parameter in parameters}):
            self.inner.step()

    # ----------------------------------------------------------------------------- state

    def _new_shared_state(
        self, shared: SharedStep, present: Sequence[int], stepped: dict[int, Any]
    ) -> SharedState:
        if len(present) < shared.comm.size:
            raise ConfigError(
                "the state of this optimizer has changed its shape while some ranks are without "
                "data, and all are needed to make room for it. Let all ranks make the first steps"
            )
        return SharedState(shared.comm, shared.ranks.gathers, stepped, self._shared_state)

    def _take_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have the state of these parameters as it was written down."""
        known = self._shared_state
        for parameter in parameters:
            if known is not None and (number := self._numbers[id(parameter)]) in known:
                self.state[parameter] = known.read(number)

    def _catch_up(self) -> None:
        """If others have made steps without this rank, its state is what they wrote down."""
        shared = self._shared
        if shared is None:
            return
        shared.catch_up()
        if shared.steps_made != self._state_of_step:
            self._take_state([p for p in self._parameters if p in shared and self._owns(p)])
            self._state_of_step = shared.steps_made

    def _missing_state(self) -> dict[torch.Tensor, Any]:
        """Copies of the state that others have."""
        known = self._shared_state
        missing = {}
        for parameter in self._parameters:
            number = self._numbers.get(id(parameter), -1)
            if known is not None and number in known and parameter not in self.state:
                missing[parameter] = known.read_copy(number)
        return {parameter: state for parameter, state in missing.items() if state}

    def _collect_state(self) -> None:
        """Have all state here, in memory of this rank's own."""
        if self._shared_state is None:
            return
        self._catch_up()
        for parameter, state in self.state.items():
            if id(parameter) in self._numbers:
                self.state[parameter] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in state.items()
                }
        self.state.update(self._missing_state())
        self._shared_state = None


_Optimizer = torch.optim.Optimizer


@contextlib.contextmanager
def _only(groups: Sequence[dict[str, Any]], chosen: set[int]) -> Iterator[None]:
    """Let the groups have only these parameters, by their ids, for as long as the block runs."""
    kept = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    try:
        yield
    finally:
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters


def _plain(value: Any) -> Any:
    """A setting as something that looks the same on every rank that has the same."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | complex):
        return value
    return type(value).__name__
