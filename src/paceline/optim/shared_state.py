"""The state of any torch optimizer in memory that the ranks of a host share, parameter by
parameter.

Whoever steps a parameter has its state as tensors in the shared memory and updates them there;
numbers and whatever else is no tensor are written down beside them after each step. So every rank
can read all state at any time without asking anybody.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from paceline.core.communicator import Communicator
from paceline.core.shared_memory import open_shared_memory, sums_over
from paceline.ddp.consistency import SmallGathers
from paceline.errors import ConfigError

__all__ = ["SharedState"]

_State = MutableMapping[str, Any]
_ALIGN = 64
_LENGTH_BYTES = 8
_LEAST_VALUE_BYTES = 256


@dataclasses.dataclass(frozen=True)
class _Description:
    """What the state of one parameter consists of."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape
    order: tuple[str, ...]  # of all names
    value_bytes: int  # room for what is no tensor

    def takes(self, other: _Description) -> bool:
        return (
            self.tensors == other.tensors
            and self.order == other.order
            and other.value_bytes <= self.value_bytes
        )


def _describe(state: Mapping[str, Any]) -> _Description:
    tensors = [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    for name, tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ConfigError(
                f"the optimizer's state {name!r} is a {tensor.layout} tensor on {tensor.device}; "
                "Sharded takes dense tensors on the CPU. Use the optimizer without Sharded"
            )
    return _Description(
        tuple((k, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in tensors),
        tuple(state),
        max(_LEAST_VALUE_BYTES, 2 * len(_pickled_values(state))),
    )


def _pickled_values(state: Mapping[str, Any]) -> bytes:
    return pickle.dumps({k: v for k, v in state.items() if not isinstance(v, torch.Tensor)})


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class SharedState:
    """The state of some parameters, known by their numbers."""

    def __init__(
        self,
        comm: Communicator,
        gathers: SmallGathers,
        states: Mapping[int, _State],
        former: SharedState | None,
    ) -> None:
        """Made by all ranks together. `states`: what this rank has stepped; it moves in."""
        own = {number: _describe(state) for number, state in states.items()}
        if former is not None and comm.rank == 0:
            own = {**former._descriptions, **own}
        gathered = gathers.all_gather_text(json.dumps({k: _listed(v) for k, v in own.items()}))
        self._descriptions: dict[int, _Description] = {
            int(number): _unlisted(listed)
            for text in gathered  # whoever has stepped a parameter comes after the first rank
            for number, listed in json.loads(text).items()
        }
        self._offsets: dict[int, int] = {}
        at = 0
        for number, description in sorted(self._descriptions.items()):
            self._offsets[number] = at
            at += _up(_LENGTH_BYTES + description.value_bytes)
            at += sum(_up(_nbytes(dtype, shape)) for _, dtype, shape in description.tensors)
        self._memory = open_shared_memory(comm, max(at, mmap.PAGESIZE))
        if former is not None and comm.rank == 0:
            stepped = {int(number) for text in gathered[1:] for number in json.loads(text)}
            for number in former._descriptions.keys() - stepped - states.keys():
                self.write(number, former.read(number))
        for number, state in states.items():
            self.write(number, state)
        sums_over(comm)([0])  # everything is there

    def __contains__(self, number: int) -> bool:
        return number in self._descriptions

    def takes(self, number: int, state: _State) -> bool:
        """Whether there is a place for this state as it is now. If not, all ranks make another
        object.
        """
        known = self._descriptions.get(number)
        return known is not None and known.takes(_describe(state))

    def write(self, number: int, state: _State) -> None:
        """Write down a parameter's state; its tensors are then those in the shared memory."""
        for name, view in self._tensors(number).items():
            if state[name].data_ptr() != view.data_ptr():
                view.copy_(state[name])
                state[name] = view
        values, at = _pickled_values(state), self._offsets[number]
        self._memory[at : at + _LENGTH_BYTES] = len(values).to_bytes(_LENGTH_BYTES, "little")
        self._memory[at + _LENGTH_BYTES : at + _LENGTH_BYTES + len(values)] = values

    def read(self, number: int) -> dict[str, Any]:
        """A parameter's state, its tensors those in the shared memory."""
        at = self._offsets[number]
        length = int.from_bytes(self._memory[at : at + _LENGTH_BYTES], "little")
        if not length:  # nobody has written it yet
            return {}
        values = pickle.loads(self._memory[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length])
        found = {**values, **self._tensors(number)}
        return {name: found[name] for name in self._descriptions[number].order}

    def read_copy(self, number: int) -> dict[str, Any]:
        """The same, in memory of this rank's own."""
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.read(number).items()
        }

    def _tensors(self, number: int) -> dict[str, torch.Tensor]:
        description = self._descriptions[number]
        at = self._offsets[number] + _up(_LENGTH_BYTES + description.value_bytes)
        tensors = {}
        for name, dtype, shape in description.tensors:
            nbytes = _nbytes(dtype, shape)
            if nbytes:
                flat = torch.frombuffer(
                    self._memory,
                    dtype=getattr(torch, dtype),
                    count=_numel(shape),
                    offset=at,
                )
                tensors[name] = flat.view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            at += _up(nbytes)
        return tensors


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return _numel(shape) * torch.empty((), dtype=getattr(torch, dtype)).element_size()


def _listed(description: _Description) -> list[Any]:
    return [description.tensors, description.order, description.value_bytes]


def _unlisted(listed: Sequence[Any]) -> _Description:
    tensors, order, value_bytes = listed
    return _Description(
        tuple((name, dtype, tuple(shape)) for name, dtype, shape in tensors),
        tuple(order),
        value_bytes,
    )
