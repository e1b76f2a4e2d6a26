"""A bucket: one flat stretch of memory in which several gradients lie side by side, and the way in
and out of it.

A gradient that autograd made is copied in once; from then on the parameter's `.grad` *is* its place
in the bucket, so that neither the average nor the optimizer copies it again. A large gradient is
not copied at all: it is a bucket of its own and stays where autograd put it.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any

import torch
import torch.distributed as dist

from paceline.ddp.group_calls import all_reduce

# getrefcount of a place in the bucket that nobody else holds: the list of places, and the call's
# argument.
_OWN_REFERENCES = 2
_REFERENCES_IN_LOOP = 4  # and two more inside a loop over (parameter, place) pairs
# Who refers to the memory of a gradient that nobody else uses: its tensor, and the storage object
# that is asked.
_OWN_STORAGE_REFERENCES = 2
# What is asked of every gradient in every step is asked by map(): a loop of bytecode takes three
# times as long.
_gradient_of: Callable[[Any], torch.Tensor | None] = attrgetter("grad")
_dtype_of: Callable[[Any], torch.dtype] = attrgetter("dtype")
_has_graph: Callable[[Any], bool] = attrgetter("requires_grad")
_address_of: Callable[[Any], int] = torch.Tensor.data_ptr
_is_contiguous: Callable[[Any], bool] = torch.Tensor.is_contiguous
_ONLY_NONE = {id(None)}

__all__ = ["Bucket", "DenseBucket", "Fill", "InPlaceBucket", "SparseBucket", "State"]

# fill(flat tensor, element offset, addresses, lengths in bytes, bytes in all): copies pieces of
# memory side by side.
Fill = Callable[[torch.Tensor, int, "array[int]", "array[int]", int], None]


class State(enum.Enum):
    """Where a bucket stands in the current backward."""

    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"
    DONE = "done"


class Bucket:
    """What dense and sparse buckets share: their parameters, and which of them have arrived."""

    def __init__(
        self, index: int, members: Sequence[int], parameters: Sequence[torch.Tensor]
    ) -> None:
        self.index = index
        self.members = tuple(members)
        self.parameters = list(parameters)
        self.size = len(self.members)
        self.positions = range(self.size)
        self.fired: list[
            int
        ] = []  # positions whose gradient arrived in this backward, as they came
        self.state = State.FILLING
        self._before: list[tuple[torch.Tensor | None, int]] | None = (
            None  # None: no parameter had a gradient
        )

    def reset(self) -> None:
        self.fired.clear()
        self.state = State.FILLING

    # Parameters that have no hook tell by their gradients whether backward has reached them.

    def remember_gradients(self) -> None:
        """Before a backward: what arrives from now on is seen by comparison with this."""
        gradients = list(map(_gradient_of, self.parameters))
        self._before = None
        if {*map(id, gradients)} != _ONLY_NONE:
            self._before = [(one, -1 if one is None else one._version) for one in gradients]

    def arrived(self) -> list[int]:
        """Positions whose gradient is new or has changed since then."""
        gradients = map(_gradient_of, self.parameters)
        if self._before is None:
            return [i for i, one in enumerate(gradients) if one is not None]
        pairs = enumerate(zip(gradients, self._before, strict=True))
        return [
            i
            for i, (one, had) in pairs
            if one is not None and (one is not had[0] or one._version != had[1])
        ]

    @property
    def surely_full(self) -> bool:
        """Every gradient has arrived. Only where there was none before: a changed one may change
        again.
        """
        return self._before is None and None.__class__ not in set(
            map(type, map(_gradient_of, self.parameters))
        )

    def prepare(self) -> None:
        """Before a backward: take memory, if that has not happened yet or if a caller still uses
        it.
        """

    def vacate(self) -> None:
        """Leave that memory."""

    def take(self, position: int) -> None:
        """Take one gradient in at once instead of with the others (large ones: while they are in
        the cache).
        """

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        """Bring all gradients in. A position that is not used, or a rank that contributes nothing,
        gives zeros.

        Returns the positions that do have a gradient: autograd may reach a parameter and bring it
        nothing.
        """
        raise NotImplementedError

    def is_finite(self) -> bool:
        """No gradient in here is infinite or NaN."""
        raise NotImplementedError

    def scale(self, factor: float) -> None:
        raise NotImplementedError

    def all_reduce(self, group: dist.ProcessGroup) -> Any:
        raise NotImplementedError

    def received(self) -> None:
        """The result of `all_reduce` is there."""

    def scatter(self, used_anywhere: Collection[int]) -> None:
        """Give the averages to the parameters; one that no rank used keeps what it had."""
        raise NotImplementedError


class DenseBucket(Bucket):
    """Gradients of one dtype and device in one flat tensor."""

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[torch.Tensor],
        allocate: Callable[[int, torch.device], torch.Tensor | None],
        dtype: torch.dtype | None = None,
        fill: Fill | None = None,
    ) -> None:
        super().__init__(index, members, parameters)
        first = parameters[0]
        self.dtype = dtype or first.dtype
        self._converts = (
            dtype is not None
        )  # gradients have another dtype than the bucket: they never lie in it
        self.device = first.device
        self.lengths = [parameter.numel() for parameter in parameters]
        self.offsets = [0, *itertools.accumulate(self.lengths)][:-1]
        self.numel = sum(self.lengths)
        self.nbytes = (
            self.numel * first.element_size() if dtype is None else self.numel * dtype.itemsize
        )
        self._allocate = allocate
        # By address only where every gradient lies in memory as its place does.
        self._fill = (
            fill if not self._converts and all(one.is_contiguous() for one in parameters) else None
        )
        self._lengths_bytes = array("Q", [length * self.dtype.itemsize for length in self.lengths])
        self._flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self._references = 0
        self._placed = False  # every `.grad` lies in the bucket already
        self._kept: dict[
            int, torch.Tensor
        ] = {}  # gradients of parameters this backward did not touch

    @property
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            self.prepare()
        assert self._flat is not None
        return self._flat

    def prepare(self) -> None:
        if self._flat is None or _storage_references(self._flat) > self._references:
            # The second case: a caller holds a slice of last step's gradients. Leave it that
            # memory, take other.
            memory = self._allocate(self.nbytes, self.device)
            if memory is not None:
                self._lay_out(memory)
            del memory  # it would count as a reference
            assert self._flat is not None
            self._references = _storage_references(self._flat)

    def _lay_out(self, memory: torch.Tensor) -> None:
        self._flat = torch.empty(0, dtype=self.dtype, device=self.device).set_(
            memory.untyped_storage(),
            memory.storage_offset() // self.dtype.itemsize,
            (self.numel,),
            (1,),
        )
        self.views = [self._view(position) for position in range(self.size)]

    def take(self, position: int) -> None:
        parameter = self.parameters[position]
        gradient = parameter.grad
        if (
            self._converts
            or gradient is None
            or gradient is self.views[position]
            or gradient.requires_grad
            or gradient.is_sparse
        ):
            return
        view = self._vacant(position)
        if self._fill is not None and gradient.is_contiguous() and gradient.dtype is self.dtype:
            length = self._lengths_bytes[position]
            address, lengths = array("Q", [gradient.data_ptr()]), array("Q", [length])
            self._fill(self.flat, self.offsets[position], address, lengths, length)
        else:
            view.copy_(gradient)
        parameter.grad = view

    def vacate(self) -> None:
        """The memory is about to be laid out anew: whoever has a gradient in it gets a copy."""
        for position, parameter in enumerate(self.parameters if self.views else ()):
            if parameter.grad is self.views[position]:
                parameter.grad = self.views[position].clone()
            self._vacant(position)

    def _vacant(self, position: int) -> torch.Tensor:
        """The place of a gradient that is about to be overwritten. If a caller kept last step's, it
        gets a copy.
        """
        if getrefcount(self.views[position]) > _OWN_REFERENCES:
            kept = self.views[position]
            copy = kept.clone()
            kept.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
            self.views[position] = self._view(position)
        return self.views[position]

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        if self._flat is None:
            self.prepare()
        self._placed = False
        if contribute and len(used) == self.size and (self.place_quickly() or self._place_all()):
            self._placed = True
            return set(used)
        used = {position for position in used if self.parameters[position].grad is not None}
        if len(used) < self.size:
            self._keep(position for position in range(self.size) if position not in used)
        if contribute:
            self._copy_in()
        else:
            self.flat.zero_()
        return used

    def place_quickly(self) -> bool:
        """The usual case in one call: every gradient is there, plain, and moves in for good. False
        changes nothing.
        """
        views = self.views
        if self._fill is None or not views:
            return False
        gradients = list(map(_gradient_of, self.parameters))
        try:
            addresses = array("Q", map(_address_of, gradients))
        except (TypeError, RuntimeError):  # one is missing, or has no memory of its own
            return False
        # Nobody but this list, and the gradients that lie here already, refers to a place.
        placed = sum(map(is_, gradients, views))
        if sum(map(getrefcount, views)) != _OWN_REFERENCES * (self.size + placed):
            return False
        if not all(map(_is_contiguous, gradients)) or {*map(_dtype_of, gradients)} != {self.dtype}:
            return False
        if any(map(_has_graph, gradients)):
            return False
        self._fill(self.flat, 0, addresses, self._lengths_bytes, self.nbytes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view
        self._placed = True
        return True

    def _place_all(self) -> bool:
        """The usual case in one pass: every gradient is there and moves in for good. False if one
        is special.
        """
        if self._converts:
            return False
        targets, sources, homeless = [], [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if (
                gradient is None
                or gradient.requires_grad
                or getrefcount(view) > _REFERENCES_IN_LOOP
            ):
                return False
            targets.append(view)
            sources.append(gradient)
            homeless.append(parameter)
        self._copy(targets, sources)
        for parameter, view in zip(homeless, targets, strict=True):
            parameter.grad = view
        return True

    def _copy_in(self) -> None:
        targets, sources = [], []
        for position, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is self.views[position]:
                continue
            view = self._vacant(position)
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(gradient)
        self._copy(targets, sources)

    @staticmethod
    def _copy(targets: list[torch.Tensor], sources: list[Any]) -> None:
        if not targets:
            return
        if any(source.is_sparse for source in sources):
            sources = [source.to_dense() if source.is_sparse else source for source in sources]
        torch._foreach_copy_(targets, sources)

    def _keep(self, positions: Iterable[int]) -> None:
        """Remember gradients that live in the bucket and belong to parameters this backward did not
        touch.
        """
        for position in positions:
            if self.parameters[position].grad is self.views[position]:
                self._kept[position] = self.views[position].clone()

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.flat).all())

    def scale(self, factor: float) -> None:
        # Multiplying by 1/world, not dividing by world: torch's own choice, kept bit for bit.
        if factor != 1.0:
            self.flat.mul_(factor)

    def wire(self) -> torch.Tensor:
        """The flat tensor as real numbers, for backends that know no complex ones."""
        return torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat

    def all_reduce(self, group: dist.ProcessGroup) -> Any:
        return all_reduce(group, self.wire())

    def replace(self, result: torch.Tensor) -> None:
        """A communication hook answered with another tensor."""
        if result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view_as(self.flat))

    def scatter(self, used_anywhere: Collection[int]) -> None:
        if self._placed and len(used_anywhere) == self.size:
            return
        everything = len(used_anywhere) == self.size
        for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = parameter.grad
            if everything or position in used_anywhere:
                if gradient is view:
                    continue
                if (
                    gradient is not None and gradient.requires_grad
                ):  # create_graph=True: the graph stays
                    gradient.detach().copy_(view)
                elif self._converts:
                    parameter.grad = view.to(parameter.dtype)
                else:
                    parameter.grad = view
            elif position in self._kept:
                view.copy_(self._kept[position])
        self._kept.clear()

    def _view(self, position: int) -> torch.Tensor:
        """A tensor over one parameter's place in the bucket: no view in autograd's sense, so
        `detach_()` works.
        """
        assert self._flat is not None
        parameter = self.parameters[position]
        strides = _strides_of(parameter)
        view = torch.empty(0, dtype=self.dtype, device=self.device)
        return view.set_(
            self._flat.untyped_storage(), self._offset(position), parameter.shape, strides
        )

    def _offset(self, position: int) -> int:
        assert self._flat is not None
        return int(self._flat.storage_offset()) + self.offsets[position]


class InPlaceBucket(DenseBucket):
    """One large gradient, averaged where autograd put it."""

    def __init__(
        self, index: int, member: int, parameter: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(index, [member], [parameter], _no_memory, dtype)
        self._strides, self._is_contiguous = _strides_of(parameter), parameter.is_contiguous()
        self._data: torch.Tensor | None = None

    def prepare(self) -> None:
        """The gradient brings its memory."""

    def take(self, position: int) -> None:
        """It is where it belongs."""

    def place_quickly(self) -> bool:
        return False

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        gradient = self.parameters[0].grad
        used = set(used) if gradient is not None else set()
        if gradient is not None and used and contribute:
            data = gradient if self._stays(gradient) else self._own_copy(gradient)
        else:
            data = self._own_memory().zero_()
        self._data, self._flat = data, data.as_strided((self.numel,), (1,))
        return used

    def _own_memory(self) -> torch.Tensor:
        return torch.empty_strided(
            self.parameters[0].shape, self._strides, dtype=self.dtype, device=self.device
        )

    def _own_copy(self, gradient: torch.Tensor) -> torch.Tensor:
        own = self._own_memory()
        self._copy([own], [gradient.detach()])
        return own

    def _stays(self, gradient: torch.Tensor) -> bool:
        """It lies in memory as on every other rank, and nobody else uses that memory."""
        return (
            not gradient.is_sparse
            and not gradient.requires_grad
            and gradient.dtype is self.dtype
            and (
                gradient.stride() == self._strides
                or (gradient.is_contiguous() and self.parameters[0].is_contiguous())
            )
            and _storage_references(gradient) <= _OWN_STORAGE_REFERENCES
        )

    def scatter(self, used_anywhere: Collection[int]) -> None:
        parameter, result = self.parameters[0], self._data
        self._data = self._flat = None
        gradient = parameter.grad
        if result is None or gradient is result or not used_anywhere:
            return
        if gradient is not None and gradient.requires_grad:  # create_graph=True: the graph stays
            gradient.detach().copy_(result)
        else:
            parameter.grad = result.to(parameter.dtype) if self._converts else result


class SparseBucket(Bucket):
    """The gradient of one embedding with `sparse=True`."""

    def __init__(
        self, index: int, members: Sequence[int], parameters: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(index, members, parameters)
        self.value: torch.Tensor | None = None

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None or not contribute:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                torch.empty(
                    0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device
                ),
                parameter.shape,
                check_invariants=False,
            )
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        self.value = gradient.detach().clone()
        return set(used) if parameter.grad is not None else set()

    def is_finite(self) -> bool:
        assert self.value is not None
        return bool(torch.isfinite(self.value.coalesce().values()).all())

    def scale(self, factor: float) -> None:
        assert self.value is not None
        self.value = self.value * factor

    def all_reduce(self, group: dist.ProcessGroup) -> Any:
        assert self.value is not None
        self._work = _SparseSum(self.value.coalesce(), group)
        return self._work

    def received(self) -> None:
        self.value = self._work.result

    def scatter(self, used_anywhere: Collection[int]) -> None:
        if used_anywhere:
            self.parameters[0].grad = self.value
        self.value = None


class _SparseSum:
    """Sum of sparse tensors over ranks from dense collectives, which every backend has."""

    def __init__(self, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._value, self._group = value, group
        self.result: torch.Tensor = value
        # Only the counts travel while backward goes on; the rest needs them and follows in wait().
        self._counts = torch.zeros(group.size(), dtype=torch.int64, device=value.device)
        self._counts[group.rank()] = value._nnz()
        self._work = all_reduce(group, self._counts)

    def wait(self) -> None:
        self._work.wait()
        longest = int(self._counts.max())
        value, world = self._value, self._counts.numel()
        indices = value.indices().new_zeros(world, longest)
        values = value.values().new_zeros(world, longest, *value.values().shape[1:])
        rank = self._group.rank()
        indices[rank, : value._nnz()] = value.indices()[0]
        values[rank, : value._nnz()] = value.values()
        for work in (all_reduce(self._group, indices), all_reduce(self._group, values)):
            work.wait()
        valid = torch.arange(longest, device=value.device)[None, :] < self._counts[:, None]
        self.result = torch.sparse_coo_tensor(
            indices[valid][None, :], values[valid], value.shape, check_invariants=False
        ).coalesce()


def _storage_references(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _no_memory(nbytes: int, device: torch.device) -> torch.Tensor | None:
    del nbytes, device
    return None


def _strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """How its gradient lies in memory."""
    dense = parameter if _is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    return dense.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlap in memory: a gradient of the same strides fits numel() places."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
