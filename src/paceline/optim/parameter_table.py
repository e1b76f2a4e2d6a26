"""The parameters of one group as the core sees them: addresses, numbers of elements, types.

A table is made once and used as long as it still describes what is there. That is looked at before
each step, because a stale address would be a write to memory of somebody else: parameters, their
`.data` and their state may be replaced by the user at any time. Gradients are new in each step, as
a rule, and are not kept.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from paceline.core.dtypes import DTYPE_NAMES
from paceline.core.update import STATE_ARRAYS, ArrayUpdate, KindFlag
from paceline.dp.thread_limit import threads_between_forwards

__all__ = [
    "GradientArrays",
    "ParameterTable",
    "TableEntry",
    "gradient_like",
    "is_plain",
    "is_shareable",
]

_DTYPES = {
    getattr(torch, name): DTYPE_NAMES.index(name)
    for name in ("float16", "bfloat16", "float32", "float64")
}
_STEP_DTYPES = (torch.float32, torch.float64)
_data_ptr, _numel = torch.Tensor.data_ptr, torch.Tensor.numel
_is_contiguous, _is_neg = torch.Tensor.is_contiguous, torch.Tensor.is_neg
_dtype_of, _stride_of = attrgetter("dtype"), torch.Tensor.stride


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether the core can read and write this parameter, and read its gradient."""
    gradient = parameter.grad
    return (
        _is_plain_tensor(parameter)
        and gradient is not None
        and type(gradient) in (torch.nn.Parameter, torch.Tensor)
        and gradient.device == parameter.device
        and gradient.layout is torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.shape == parameter.shape
    )


def _is_plain_tensor(parameter: torch.Tensor) -> bool:
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and parameter.dtype in _DTYPES
        and _is_dense(parameter)
    )


def is_shareable(parameter: torch.Tensor) -> bool:
    """Whether the core can step this parameter, now or once it has a gradient."""
    return _is_plain_tensor(parameter) and parameter.numel() > 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, each place once, in whatever order."""
    return tensor.is_contiguous() or _same_strides(tensor, torch.empty_like(tensor, device="meta"))


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() == other.stride()


def _same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements of the same index are at the same place from the begin of both."""
    return (one.is_contiguous() and other.is_contiguous()) or _same_strides(one, other)


def gradient_like(parameter: torch.Tensor) -> torch.Tensor:
    """A plain parameter's gradient, its elements in the order of the parameter's."""
    gradient = parameter.grad
    assert gradient is not None
    if _same_order(gradient, parameter) and not gradient.is_neg():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient.detach())


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """One parameter and its state."""

    parameter: torch.Tensor
    state: MutableMapping[str, Any]
    arrays: tuple[torch.Tensor, ...]
    step: Any
    is_first_update: bool

    def is_uniform(self) -> bool:
        """Whether the state is laid out as the parameter is. What a checkpoint brought, or the user
        put there, may be anything.
        """
        return all(
            type(array) is torch.Tensor
            and array.device == self.parameter.device
            and array.layout is torch.strided
            and array.dtype == self.parameter.dtype
            and array.shape == self.parameter.shape
            and _same_order(array, self.parameter)
            for array in self.arrays
        ) and (
            self.step is None
            or (
                isinstance(self.step, torch.Tensor)
                and self.step.device.type == "cpu"
                and self.step.dtype in _STEP_DTYPES
                and self.step.numel() == 1
            )
        )

    @property
    def kind(self) -> int:
        """Its type, with flags."""
        wide = self.step is not None and self.step.dtype == torch.float64
        return (
            _DTYPES[self.parameter.dtype]
            | (KindFlag.FIRST_UPDATE if self.is_first_update else 0)
            | (KindFlag.WIDE_STEP if wide else 0)
        )


class GradientArrays:
    """Where the gradients of one step are. Keeps them there: some may be copies made for it."""

    __slots__ = ("_tensors", "addresses")

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._tensors = gradients
        self.addresses = _addresses(gradients)

    def places_in(self, memory: range) -> bytes:
        """Where they are in this piece of memory; -1 for those that are elsewhere."""
        return array(
            "q", [at - memory.start if at in memory else -1 for at in self.addresses]
        ).tobytes()

    def outside(self, memory: range) -> array[int]:
        """Their addresses, 0 for those in this piece of memory."""
        return array("Q", [0 if at in memory else at for at in self.addresses])


class ParameterTable:
    """Parameters that one native call updates, and the call."""

    def __init__(
        self,
        entries: Sequence[TableEntry],
        names: tuple[str, ...],
        update_addresses: Mapping[int, int] | None = None,
        *,
        leaves_out: bool = False,
    ) -> None:
        """update_addresses: from where parameters and state are seen to where the core updates
            them, if that is elsewhere.
        leaves_out: there are parameters that the core cannot take.
        """
        self.leaves_out = leaves_out
        self.parameters = [entry.parameter for entry in entries]
        self._names = names
        self._states = [entry.state for entry in entries]
        self._columns = [[entry.arrays[i] for entry in entries] for i in range(len(names))]
        steps = [entry.step for entry in entries if entry.step is not None]
        if steps:
            assert len(steps) == len(entries), "some parameters count their steps, some do not"
            self._names = (*names, "step")
            self._columns.append(steps)
        self._tensors = [*self.parameters, *chain.from_iterable(self._columns)]
        self._addresses = _addresses(self._tensors)
        self._counts = array("Q", map(_numel, self.parameters))
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        # None: all are contiguous.
        self._strides = (
            None
            if all(map(_is_contiguous, self.parameters))
            else [parameter.stride() for parameter in self.parameters]
        )
        self._first_updates = [entry for entry in entries if entry.is_first_update]
        updated = self._addresses
        if update_addresses is not None:
            updated = array("Q", [update_addresses.get(at, 0) for at in updated])
        # Whether all of it has an address to be updated at; if not, the table must not be run.
        self.has_all_addresses = 0 not in updated
        self.update = self._new_update(entries, updated, bool(steps))

    def _new_update(
        self, entries: Sequence[TableEntry], addresses: array[int], count_steps: bool
    ) -> ArrayUpdate:
        count = len(entries)
        parameters = addresses[:count]
        none = array("Q", bytes(8 * count))
        arrays = len(self._columns) - count_steps
        states = addresses[count : count * (1 + arrays)] + none * (STATE_ARRAYS - arrays)
        states += addresses[count * (1 + arrays) :] if count_steps else none
        kinds = array("I", [entry.kind for entry in entries])
        nbytes = sum(parameter.nbytes for parameter in self.parameters)
        return ArrayUpdate(parameters, states, array("Q", self._counts), kinds, nbytes)

    def matches(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
        names: tuple[str, ...],
    ) -> GradientArrays | None:
        """Whether this table still describes these parameters and their state, all of them, and
        can take their gradients as they are; if so, these.
        """
        if len(parameters) != len(self.parameters) or names != self._names[: len(names)]:
            return None
        if not all(map(is_, parameters, self.parameters)):
            return None
        if names and not all(map(is_, map(states.get, parameters), self._states)):
            return None
        for name, column in zip(self._names, self._columns, strict=True):
            if not all(map(is_, map(itemgetter(name), self._states), column)):
                return None
        if _addresses(self._tensors) != self._addresses or not self._takes(gradients):
            return None
        return GradientArrays(gradients)

    def _takes(self, gradients: list[torch.Tensor]) -> bool:
        counts = array("Q", map(_numel, self.parameters))
        return (
            counts == self._counts
            and array("Q", map(_numel, gradients)) == counts
            and all(map(is_, map(_dtype_of, gradients), self._dtypes))
            and not any(map(_is_neg, gradients))
            and (
                all(map(_is_contiguous, gradients))
                if self._strides is None
                else list(map(_stride_of, gradients)) == self._strides
            )
        )

    def content(self) -> bytes:
        """What an update of this table does, the same on all ranks that do the same."""
        return self._counts.tobytes() + self.update.content()

    def run(self, gradients: GradientArrays) -> None:
        """Make the step, or this process's part of it."""
        self._choose_threads()
        self.update.run(gradients.addresses)
        if self._first_updates:
            self.update.forget_first_update()
            self._first_updates = []

    def sum_squares(self, gradients: GradientArrays, out: int) -> None:
        """Write the sums of squares of this process's part, block by block, to memory at `out`."""
        self._choose_threads()
        self.update.square_sums(gradients.addresses, out)

    def _choose_threads(self) -> None:
        most = self.update.most_threads
        self.update.numbers.threads = min(threads_between_forwards(), most) if most > 1 else 1

    def forget_new_state(self) -> None:
        """The step will not be made with this table: state that it was to write first is not
        there.
        """
        for entry in self._first_updates:
            for name in self._names:
                entry.state.pop(name, None)


def _addresses(tensors: Iterable[torch.Tensor]) -> array[int]:
    return array("Q", map(_data_ptr, tensors))
