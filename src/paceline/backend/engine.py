"""`Engine`: what a process group needs to move data, whatever moves it.

An engine takes contiguous CPU tensors. Each collective either runs to its end (`wait=True`, returns
None) or starts and returns a `Ticket`. `timeout_ns` is the time limit of that call; every wait for
a peer that the call makes ends by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch

from paceline.core.dtypes import Op

__all__ = ["SUM", "Engine", "Reduction", "Ticket"]


class Reduction:
    """An operation (`Op`) and, for PREMUL_SUM, its factor.

    A tensor of factors is applied by the process group; an engine only ever sees a number.
    `wire_dtype`: the type in which sums of float32 travel between hosts, if not the group's.
    """

    __slots__ = ("code", "factor", "scalar", "wire_dtype")

    def __init__(
        self,
        code: int,
        factor: float | torch.Tensor = 1.0,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.code = code
        self.wire_dtype = wire_dtype
        self.factor = factor
        self.scalar = 1.0 if isinstance(factor, torch.Tensor) else float(factor)

    @classmethod
    def scaled(cls, factor: float, wire_dtype: torch.dtype | None) -> Reduction:
        """A sum of numbers that are multiplied by a factor."""
        return cls(Op.SUM if factor == 1.0 else Op.PREMUL_SUM, factor, wire_dtype)


SUM = Reduction(Op.SUM)


class Ticket(Protocol):
    """A call in progress."""

    def wait(self, timeout_ns: int = -1) -> bool:
        """Wait for its end; False if `timeout_ns` passed first; raises what went wrong."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    @property
    def source(self) -> int:
        """For a receive: which rank sent it."""


class Engine(Protocol):
    """Collectives on contiguous CPU tensors. Lists have one tensor per rank of the group."""

    rank: int
    size: int

    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None: ...
    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None: ...
    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None: ...
    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, wait: bool, timeout_ns: int
    ) -> Ticket | None: ...
    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None: ...
    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None: ...
    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None: ...
    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None: ...
    def barrier(self, *, wait: bool, timeout_ns: int) -> Ticket | None: ...
    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket: ...
    def recv(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket: ...
    def post_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        """Send a number to a peer outside of the collectives. The group stays usable if the peer
        never receives it.
        """

    def await_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        """Wait for a peer's number, at least `number`; raises `GroupError` if it does not come."""

    def set_timeout(self, timeout: timedelta) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
