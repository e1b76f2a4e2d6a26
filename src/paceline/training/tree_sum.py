"""One fixed binary tree over shard numbers, in which everything that shards contribute is added.

Node (level, index) is the sum of shards index * 2**level up to (index + 1) * 2**level - 1. It is
the sum of its two children; where the right child has no shards, it is the left one, untouched. Who
computed which shard decides only where the children of a node meet, never what is added to what:

    level 3                 01234
                          /       \\
    level 2           0123         4
                     /    \\        |
    level 1        01      23      4
                  /  \\    /  \\     |
    level 0      0    1  2    3    4
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

__all__ = ["HeldNode", "Node", "TreeSum", "additions", "subtrees"]

_T = TypeVar("_T")
Node: TypeAlias = tuple[int, int]  # level, index


class TreeSum(Generic[_T]):
    """Adds values at the leaves, or at nodes that others have summed already, in any order.

    `nodes` holds the sums that wait for their sibling: with the shards of one rank, which are
    contiguous, at most two for each level, and for shards that came in order one.

    Args:
        leaves: how many shards there are, numbered from 0.
        add: the sum of a left and a right value; it may reuse the memory of either.
    """

    def __init__(self, leaves: int, add: Callable[[_T, _T], _T]) -> None:
        self._leaves, self._add = leaves, add
        self._height = (leaves - 1).bit_length()
        self.nodes: dict[Node, _T] = {}

    def add_leaf(self, number: int, value: _T) -> None:
        """Add the value of one shard."""
        self.add_node((0, number), value)

    def add_node(self, node: Node, value: _T) -> None:
        """Add the sum of all shards below a node."""
        level, index = node
        while level < self._height:
            if (index ^ 1) << level < self._leaves:
                sibling = self.nodes.pop((level, index ^ 1), None)
                if sibling is None:
                    break
                # Left plus right, also for the sake of what NaN remembers.
                left, right = (sibling, value) if index % 2 else (value, sibling)
                value = self._add(left, right)
            level, index = level + 1, index // 2
        self.nodes[level, index] = value

    @property
    def root(self) -> _T:
        """The sum of all shards, once all have been added."""
        return self.nodes[self._height, 0]


@functools.lru_cache(maxsize=1024)
def subtrees(numbers: tuple[int, ...], leaves: int, loose: int | None = None) -> tuple[Node, ...]:
    """The nodes that a rank with these shards holds when it has computed them, in order. `loose`:
    the one of them that it has not added to the others.
    """
    tree = TreeSum[int](leaves, lambda left, _: left)
    for number in numbers:
        if number != loose:
            tree.add_leaf(number, 0)
    nodes = [*tree.nodes, *([] if loose is None else [(0, loose)])]
    return tuple(sorted(nodes, key=lambda node: node[1] << node[0]))


class HeldNode(NamedTuple):
    """A node on the way to the root. After it is taken up, `adds` additions follow, each of the two
    sums that were made last.
    """

    owner: int
    node: Node
    adds: int


def additions(nodes: Sequence[Sequence[Node]], leaves: int) -> list[HeldNode]:
    """The way to the root from the nodes that each rank holds."""
    made = 0

    def count(left: int, _right: int) -> int:
        nonlocal made
        made += 1
        return left

    tree = TreeSum[int](leaves, count)
    order: list[HeldNode] = []
    held = [(node, owner) for owner, each in enumerate(nodes) for node in each]
    for node, owner in sorted(held, key=lambda each: each[0][1] << each[0][0]):
        before = made
        tree.add_node(node, 0)
        order.append(HeldNode(owner, node, made - before))
    return order
