"""The exchange of an elastic job: with the ranks of the current generation, or alone for a while.

Whatever ranks gather, each adds a note for what they decide together between two batches: the
newest generation it knows of, what a signal has asked it for, and how old the last checkpoint is.
All who complete a pass have the same notes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.training.gradient_sums import Gradients
from paceline.training.group_exchange import Exchange, Facts, Message
from paceline.training.parameter_set import Forms
from paceline.training.shard_plan import BatchPlan
from paceline.training.tree_sum import Node

__all__ = ["ElasticExchange", "Note"]

_NOTE = "note"


class Note(NamedTuple):
    """What a rank adds to its messages."""

    generation: int
    is_asked_to_save: bool
    is_asked_to_stop: bool
    unsaved_s: float


class ElasticExchange:
    """An `Exchange` whose ranks change. `heard` has the notes of the last gather, by rank."""

    def __init__(self, exchange: Exchange, note: Callable[[], Note]) -> None:
        self._note = note
        self.heard: list[Note] = []
        self.use(exchange)

    def use(self, exchange: Exchange) -> None:
        """Exchange with other ranks from now on."""
        self._current = exchange
        self.rank, self.size, self.sharing = exchange.rank, exchange.size, exchange.sharing
        self.adds_in_passing = exchange.adds_in_passing

    def gather(self, facts: Facts, tensors: Sequence[torch.Tensor] = ()) -> list[Message]:
        messages = self._current.gather({**facts, _NOTE: self._note()}, tensors)
        self.heard = [Note(*facts[_NOTE]) for facts, _ in messages]
        return messages

    def average_nodes(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        return self._current.average_nodes(own, nodes, forms, plan)
