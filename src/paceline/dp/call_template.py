"""What calls with inputs of the same types and shapes have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline._pytree import is_flat_call
from paceline.dp.channel import MessageLayout
from paceline.dp.protocol import is_plain
from paceline.dp.scatter import SplitInputs

__all__ = ["CallKey", "CallTemplate", "call_key"]

CallKey = tuple[tuple[torch.Size, torch.dtype, bool], ...]


@dataclasses.dataclass(frozen=True)
class CallTemplate:
    """How a call is split and sent, worked out when inputs like these came first.

    `offsets` has for each replica the bytes from the start of each leaf to the replica's share, if
    all leaves are plain tensors. `layouts` are the messages, by replica and whether gradients are
    wanted; they are filled in as they are needed.
    """

    split: SplitInputs
    are_tensors: tuple[bool, ...]
    tensor_indices: list[int]
    object_indices: list[int]
    is_flat_call: bool
    offsets: dict[int, list[int]]
    layouts: dict[tuple[int, bool], MessageLayout] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, split: SplitInputs, are_plain: bool) -> CallTemplate:
        """The template of a call whose leaves are all plain tensors, or not."""
        are_tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in split.leaves)
        offsets = {}
        if are_plain and split.dim == 0:
            for replica, (start, _) in enumerate(split.ranges):
                rows = [start * (factor or 0) for factor in split.factors]
                leaves = zip(rows, split.leaves, strict=True)
                offsets[replica] = [row * leaf[:1].nbytes for row, leaf in leaves]
        return cls(
            split.with_leaves([]),
            are_tensors,
            [index for index, is_tensor in enumerate(are_tensors) if is_tensor],
            [index for index, is_tensor in enumerate(are_tensors) if not is_tensor],
            is_flat_call(split.spec),
            offsets,
        )


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKey | None:
    """What decides how plain tensors are split and sent; None for any other inputs."""
    if kwargs:
        return None
    for arg in args:
        if type(arg) is not torch.Tensor or not is_plain(arg):
            return None
    return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in args)
