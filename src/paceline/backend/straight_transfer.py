"""`StraightTransfer`: tensors that go over Gloo from ranks to ranks on other hosts, as they lie in
memory, as a part of a call that all ranks are known to make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline._torch_internals import Work
from paceline.backend.multi_host_call import DIRECT_TAG, MultiHostCall

__all__ = ["StraightTransfer"]


class StraightTransfer:
    """What one rank sends and receives. To and from each rank at most once."""

    def __init__(self, call: MultiHostCall) -> None:
        self._call = call
        self._gloo = call.links.all_ranks
        self._incoming: dict[int, list[Work]] = {}
        self._outgoing: list[Work] = []

    def send(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to send them, one after the other."""
        self._outgoing += [self._gloo.send([part], rank, DIRECT_TAG) for part in parts]

    def receive(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to receive them."""
        self._incoming[rank] = [self._gloo.recv([part], rank, DIRECT_TAG) for part in parts]

    def await_next(self, rank: int) -> None:
        """Wait for the next part from a rank."""
        self._incoming[rank].pop(0).wait(self._call.left())

    def finish(self) -> None:
        """Wait until everything has arrived and left."""
        if self._incoming or self._outgoing:
            self._call.wait_for_gloo(self._finish)

    def _finish(self) -> None:
        for works in (*self._incoming.values(), self._outgoing):
            for work in works:
                work.wait(self._call.left())
