"""What every kind of bucket offers to the reducer and to the transports.

In every step a bucket goes through the same calls:

    prepare()                  before backward: memory to put gradients in
    copy_in(position)          a large gradient arrived: at once, while it is in the cache
    gather(used)               all gradients are brought in
    scale, all_reduce, ...     the transport's part; shared memory is reduced where it lies
    scatter(used_anywhere)     every parameter's `.grad` holds the average

A bucket has no state of its own for the step: how far a step has come is known by `Step`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Bucket", "Fill", "Waitable", "gradient_of"]

# fill(flat tensor, element offset, addresses, lengths in bytes, bytes in all): copies pieces of
# memory side by side.
Fill = Callable[[torch.Tensor, int, "array[int]", "array[int]", int], None]

# What is read of every gradient in every step is read by map(): a loop of bytecode takes three
# times as long.
gradient_of: Callable[[Any], torch.Tensor | None] = attrgetter("grad")
_ONLY_NONE = {id(None)}


class Waitable(Protocol):
    """A collective that is under way."""

    def wait(self, *args: Any) -> Any: ...


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
        self.is_deferred = False  # what is in it is left to an optimizer's step
        # Positions whose gradient arrived, as they came. The parameters' hooks append to this very
        # list, so it is emptied, never replaced.
        self.fired: list[int] = []
        # The gradients before backward, with their versions. None: no parameter had any.
        self._before: list[tuple[torch.Tensor | None, int]] | None = None

    # A parameter without a hook shows by its gradient whether backward has reached it.

    def remember_gradients(self) -> None:
        """Before a backward: what arrives from now on is seen by comparison with this."""
        gradients = list(map(gradient_of, self.parameters))
        self._before = None
        if {*map(id, gradients)} != _ONLY_NONE:
            self._before = [
                (gradient, -1 if gradient is None else gradient._version) for gradient in gradients
            ]

    def arrived(self) -> list[int]:
        """Positions whose gradient is new or has changed since then."""
        gradients = map(gradient_of, self.parameters)
        if self._before is None:
            return [i for i, gradient in enumerate(gradients) if gradient is not None]
        pairs = enumerate(zip(gradients, self._before, strict=True))
        return [
            i
            for i, (gradient, (before, version)) in pairs
            if gradient is not None and (gradient is not before or gradient._version != version)
        ]

    @property
    def surely_full(self) -> bool:
        """Every gradient has arrived. Only where there was none before: a changed one may change
        again.
        """
        return self._before is None and None.__class__ not in set(
            map(type, map(gradient_of, self.parameters))
        )

    def restore_views(self) -> None:
        """Notice what callers have done to the memory of gradients that lie in the bucket."""

    def prepare(self) -> None:
        """Before a backward: get memory, unless there is some that no caller uses."""

    def vacate(self) -> None:
        """Leave that memory."""

    def copy_in(self, position: int) -> None:
        """Copy one gradient in as soon as it arrives (large ones: while they are in the cache)."""

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

    def all_reduce(
        self, group: dist.ProcessGroup, factor: float, wire_dtype: torch.dtype | None
    ) -> Waitable:
        """Start the sum over the ranks of a group, times a factor that is the same on all of them;
        what it returns is waited for. Dense gradients travel between hosts as `wire_dtype`, if
        there is one.
        """
        raise NotImplementedError

    @property
    def trailer(self) -> torch.Tensor | None:
        """Numbers of the transport's own that `all_reduce` sums with the gradients, if it has
        any.
        """
        return None

    def received(self) -> None:
        """The result of `all_reduce` is there."""

    def scatter(self, used_anywhere: Collection[int]) -> None:
        """Give the averages to the parameters; one that no rank used keeps what it had."""
        raise NotImplementedError
