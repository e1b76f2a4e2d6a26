"""Which sums count where ranks have computed some shards twice, and which shards nobody has; pure.

After a change of ranks a shard may have been computed by two of them, in sums of different extent.
Nodes of the tree contain each other or have nothing in common. So the largest ones count, each once
and from the lowest rank that holds it, and they cover all that was computed by anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from paceline.training.tree_sum import Node

__all__ = ["counted_nodes", "missing_shards"]

_T = TypeVar("_T")


def counted_nodes(held: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Of the nodes that each rank holds, those that count."""
    every = {node for nodes in held for node in nodes}
    given: set[Node] = set()
    counted: list[list[Node]] = []
    for nodes in held:
        own = [node for node in nodes if node not in given and not _is_within(node, every)]
        given.update(own)
        counted.append(own)
    return counted


def _is_within(node: Node, others: set[Node]) -> bool:
    """Whether one of the others contains the node."""
    level, index = node
    highest = max(other_level for other_level, _ in others)
    return any((level + up, index >> up) in others for up in range(1, highest - level + 1))


def missing_shards(computed: Sequence[Iterable[int]], shards: Sequence[_T]) -> list[_T]:
    """The shards that no rank has computed, from the numbers of those that each has."""
    found = {number for numbers in computed for number in numbers}
    return [shard for number, shard in enumerate(shards) if number not in found]
