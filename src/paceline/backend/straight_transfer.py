"""`StraightTransfer`: tensors that go over Gloo from ranks to ranks on other hosts, as they lie in
memory, as a part of a call that all ranks are known to make.

When a connection is lost, Gloo ends the waits for messages that are to come, but neither for the
one it is just receiving nor for those it is sending. So behind every part goes a mark, and whoever
waits for the part waits for the mark; and whoever has everything from a rank answers, for which
that one waits.
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
        # By rank, in the order in which they end: a mark, then its part.
        self._incoming: dict[int, list[Work]] = {}
        self._outgoing: dict[int, list[Work]] = {}

    def send(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to send them, one after the other."""
        self._outgoing[rank] = [
            self._gloo.send([data], rank, DIRECT_TAG) for part in parts for data in (part, _mark())
        ]

    def receive(self, parts: Sequence[torch.Tensor], rank: int) -> None:
        """Start to receive them."""
        self._incoming[rank] = works = []
        for part in parts:
            data = self._gloo.recv([part], rank, DIRECT_TAG)
            works += [self._gloo.recv([_mark()], rank, DIRECT_TAG), data]

    def await_next(self, rank: int) -> None:
        """Wait for the next part from a rank."""
        works = self._incoming[rank]
        self._await(works[:2])
        del works[:2]

    def finish(self) -> None:
        """Wait until everything has arrived, here and where it was sent to."""
        if self._incoming or self._outgoing:
            self._call.wait_for_gloo(self._finish)

    def _finish(self) -> None:
        # Posted after the parts: messages between two ranks keep their order.
        answers = [self._gloo.recv([_mark()], rank, DIRECT_TAG) for rank in self._outgoing]
        answered = []
        for rank, works in self._incoming.items():
            self._await(works)
            answered.append(self._gloo.send([_mark()], rank, DIRECT_TAG))
        self._await(answers)
        self._await(answered)
        for works in self._outgoing.values():
            self._await(works)

    def _await(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait(self._call.left())


def _mark() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)
