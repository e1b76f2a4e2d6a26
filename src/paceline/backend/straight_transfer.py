"""`StraightTransfer`: tensors that go over Gloo from ranks to ranks on other hosts, as they lie in
memory.

It may begin before all ranks are known to make the call that it belongs to. Its tags are those of
this call and of the length that is sent, so that nothing can be taken for something else.
"""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch

from paceline._torch_internals import Work
from paceline.backend.multi_host_call import MultiHostCall

__all__ = ["StraightTransfer"]


class StraightTransfer:
    """What one rank sends and receives, to and from each rank at most once, within a `with`."""

    def __init__(self, call: MultiHostCall) -> None:
        self._call = call
        self._gloo = call.links.all_ranks
        self._incoming: dict[int, list[Work]] = {}
        self._outgoing: list[Work] = []

    def __enter__(self) -> StraightTransfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is not None:
            self._call.links.leave_behind(self._works())

    def send(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to send them, one after the other."""
        tag = self._tag(parts)
        self._outgoing += [self._gloo.send([part], rank, tag) for part in parts]

    def receive(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to receive them."""
        tag = self._tag(parts)
        self._incoming[rank] = [self._gloo.recv([part], rank, tag) for part in parts]

    def _tag(self, parts: Sequence[torch.Tensor]) -> int:
        return self._call.straight_tag(sum(part.nbytes for part in parts))

    def await_next(self, rank: int) -> None:
        """Wait for the next part from a rank."""
        self._incoming[rank].pop(0).wait(self._call.left())

    def finish(self) -> None:
        """Wait until everything has arrived and left."""
        if self._incoming or self._outgoing:
            self._call.wait_for_gloo(self._finish)

    def _finish(self) -> None:
        for work in self._works():
            work.wait(self._call.left())

    def _works(self) -> list[Work]:
        return [*(work for works in self._incoming.values() for work in works), *self._outgoing]
