"""Gradients of one dtype and device in one flat tensor.

A gradient that autograd made is copied in once; from then on the parameter's `.grad` *is* its view
of the bucket, so that neither the average nor the optimizer copies it again. There are three copy
paths, each for what the one before it refuses: `copy_in_fast` (all gradients are there and plain,
one native call copies them), `_place_all` (all are there, torch copies them), `_copy_in_all` (some
are missing, sparse, of another dtype, or have a graph).

A caller may keep a gradient, or a slice of one, beyond its step. Reference counts show it, and the
bucket moves to other memory or leaves a copy behind. A caller may also give the tensor that is our
view other memory (`p.grad.data = ...`, `p.grad.set_()`, and `module.to_empty()` or
`module.share_memory()`, which do the same). Addresses and strides show that: `restore_views`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist

from paceline._interpreter import reference_count
from paceline._torch_internals import foreach_copy_, storage_users
from paceline.ddp.buckets.base import Bucket, Fill, Waitable, gradient_of
from paceline.ddp.group_calls import all_reduce_scaled

__all__ = ["DenseBucket", "strides_of"]

# The count for a view that nobody else holds: the list of views, and the call's argument.
_OWN_REFERENCES = 2
# And two more inside a loop over (parameter, view) pairs.
_REFERENCES_IN_LOOP = 4
_dtype_of: Callable[[Any], torch.dtype] = attrgetter("dtype")
_has_graph: Callable[[Any], bool] = attrgetter("requires_grad")
_address_of: Callable[[Any], int] = torch.Tensor.data_ptr
_strides_of: Callable[[Any], tuple[int, ...]] = torch.Tensor.stride
_is_contiguous: Callable[[Any], bool] = torch.Tensor.is_contiguous


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
        reallocate: Callable[[int, int, torch.device], torch.Tensor | None] | None = None,
        is_deferred: bool = False,
        trailer: int = 0,
    ) -> None:
        super().__init__(index, members, parameters)
        self.is_deferred = is_deferred
        first = parameters[0]
        self.dtype = dtype or first.dtype
        # Gradients of another dtype than the bucket never lie in it.
        self._converts = dtype is not None
        self.device = first.device
        self.lengths = [parameter.numel() for parameter in parameters]
        self.offsets = [0, *itertools.accumulate(self.lengths)][:-1]
        self.numel = sum(self.lengths)
        self.nbytes = (
            self.numel * first.element_size() if dtype is None else self.numel * dtype.itemsize
        )
        # Numbers of the transport's own behind the gradients, which are summed with them.
        self._trailer_length = trailer
        self._memory_bytes = self.nbytes + trailer * self.dtype.itemsize
        self._allocate, self._reallocate = allocate, reallocate
        # By address only where every gradient lies in memory as its place does.
        self._fill = (
            fill
            if not self._converts and all(parameter.is_contiguous() for parameter in parameters)
            else None
        )
        self._lengths_bytes = array("Q", [length * self.dtype.itemsize for length in self.lengths])
        self._flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        # Where the memory, and each view, was put.
        self._address = 0
        self._view_addresses: list[int] = []
        self._view_strides: list[tuple[int, ...]] = []
        self._references = 0
        self._placed = False  # every `.grad` lies in the bucket already
        # Gradients of parameters this backward did not touch, by position.
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            self.prepare()
        assert self._flat is not None
        return self._flat

    def prepare(self) -> None:
        if self._flat is None or storage_users(self._flat) > self._references:
            # The second case: a caller holds a slice of last step's gradients. Leave it that
            # memory, take other.
            memory = self._allocate(self._memory_bytes, self.device)
            if memory is not None:
                self._lay_out(memory)
            del memory  # it would count as a reference
            assert self._flat is not None
            self._references = storage_users(self._flat)

    def _lay_out(self, memory: torch.Tensor) -> None:
        self._flat = torch.empty(0, dtype=self.dtype, device=self.device).set_(
            memory.untyped_storage(),
            memory.storage_offset() // self.dtype.itemsize,
            (self.numel,),
            (1,),
        )
        self._address = self._flat.data_ptr()
        self.views = [self._view(position) for position in range(self.size)]
        self._view_addresses = [*map(_address_of, self.views)]
        self._view_strides = [*map(_strides_of, self.views)]

    def restore_views(self) -> None:
        """Replace views to which a caller has given other memory: to the bucket those tensors are
        gradients like any other.
        """
        if self._flat is None:
            return
        if self._flat.data_ptr() != self._address:
            # The memory itself was moved or freed: share_memory_(), storage.resize_().
            self._move_back()
        elif [*map(_address_of, self.views)] != self._view_addresses or [
            *map(_strides_of, self.views)
        ] != self._view_strides:
            self._replace_views()

    def _move_back(self) -> None:
        if self._reallocate is None:
            memory = self._allocate(self._memory_bytes, self.device)
        else:
            memory = self._reallocate(self._address, self._memory_bytes, self.device)
        assert memory is not None
        self._lay_out(memory)
        del memory  # it would count as a reference
        assert self._flat is not None
        self._references = storage_users(self._flat)

    def _replace_views(self) -> None:
        for position in self.positions:
            if self._is_in_place(position):
                continue
            # The caller's tensor may lie where another gradient belongs, which is about to be
            # overwritten. Assigning `data`, unlike `set_()`, does not count as a change: nobody
            # takes it for a gradient that has arrived.
            moved = self.views[position]
            moved.data = moved.clone()
            self.views[position] = self._view(position)

    def _is_in_place(self, position: int) -> bool:
        view = self.views[position]
        return (
            view.data_ptr() == self._view_addresses[position]
            and view.stride() == self._view_strides[position]
            and view.numel() == self.lengths[position]
        )

    def copy_in(self, position: int) -> None:
        parameter = self.parameters[position]
        gradient = parameter.grad
        if self._converts or gradient is None or gradient.requires_grad or gradient.is_sparse:
            return
        if not self._is_in_place(position):
            self.restore_views()
        if gradient is self.views[position]:
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
        self.restore_views()
        for position, parameter in enumerate(self.parameters if self.views else ()):
            if parameter.grad is self.views[position]:
                parameter.grad = self.views[position].clone()
            self._vacant(position)

    def _vacant(self, position: int) -> torch.Tensor:
        """The place of a gradient that is about to be overwritten. If a caller kept last step's, it
        gets a copy.
        """
        if reference_count(self.views[position]) > _OWN_REFERENCES:
            kept = self.views[position]
            copy = kept.clone()
            kept.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
            self.views[position] = self._view(position)
        return self.views[position]

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        if self._flat is None:
            self.prepare()
        self._placed = False
        if contribute and len(used) == self.size and (self.copy_in_fast() or self._place_all()):
            self._placed = True
            return set(used)
        self.restore_views()
        used = {position for position in used if self.parameters[position].grad is not None}
        if len(used) < self.size:
            self._keep(position for position in range(self.size) if position not in used)
        if contribute:
            self._copy_in_all()
        else:
            self.flat.zero_()
        return used

    def copy_in_fast(self) -> bool:
        """The usual case in one call: every gradient is there, plain, and moves in for good. False
        changes nothing.
        """
        if self._fill is None or not self.views:
            return False
        self.restore_views()
        views = self.views
        gradients = list(map(gradient_of, self.parameters))
        try:
            addresses = array("Q", map(_address_of, gradients))
        except (TypeError, RuntimeError):  # one is missing, or has no memory of its own
            return False
        # Nobody but this list, and the gradients that lie here already, refers to a place.
        placed = sum(map(is_, gradients, views))
        if sum(map(reference_count, views)) != _OWN_REFERENCES * (self.size + placed):
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
        self.restore_views()
        targets, sources, to_rebind = [], [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if (
                gradient is None
                or gradient.requires_grad
                or reference_count(view) > _REFERENCES_IN_LOOP
            ):
                return False
            targets.append(view)
            sources.append(gradient)
            to_rebind.append(parameter)
        self._copy(targets, sources)
        for parameter, view in zip(to_rebind, targets, strict=True):
            parameter.grad = view
        return True

    def place(self) -> None:
        """Bring in gradients that callers have put elsewhere since they were gathered. One that has
        a graph loses it.
        """
        self.restore_views()
        for position, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None and gradient is not self.views[position]:
                view = self._vacant(position)
                self._copy([view], [gradient.detach()])
                parameter.grad = view

    def _copy_in_all(self) -> None:
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
        foreach_copy_(targets, sources)

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

    def all_reduce(
        self, group: dist.ProcessGroup, factor: float, wire_dtype: torch.dtype | None
    ) -> Waitable:
        return all_reduce_scaled(group, self.sent, factor, wire_dtype)

    @property
    def sent(self) -> torch.Tensor:
        """What `all_reduce` sums."""
        return self._with_trailer if self._trailer_length else self.wire()

    @property
    def trailer(self) -> torch.Tensor | None:
        """The transport's own numbers, if it asked for some."""
        return self._with_trailer[self.numel :] if self._trailer_length else None

    @property
    def _with_trailer(self) -> torch.Tensor:
        flat = self.flat
        return flat.as_strided((self.numel + self._trailer_length,), (1,), flat.storage_offset())

    def replace(self, result: torch.Tensor) -> None:
        """A communication hook returned another tensor."""
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
        strides = strides_of(parameter)
        view = torch.empty(0, dtype=self.dtype, device=self.device)
        return view.set_(
            self._flat.untyped_storage(), self._offset(position), parameter.shape, strides
        )

    def _offset(self, position: int) -> int:
        assert self._flat is not None
        return int(self._flat.storage_offset()) + self.offsets[position]


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
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
