"""Module buffers (running statistics and the like) follow one rank, as torch's class does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

__all__ = ["BROADCAST_BYTES", "BufferHook", "broadcast", "sync_buffers"]

BROADCAST_BYTES = 250 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class BufferHook:
    """A caller's own way of synchronising buffers."""

    hook: Callable[[Any, Mapping[str, torch.Tensor]], Any]
    state: Any
    after_forward: bool


def broadcast(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copy tensors from one rank of the group to all, in large pieces."""
    if tensors:
        _broadcast_coalesced(group, [tensor.detach() for tensor in tensors], BROADCAST_BYTES, source)


def sync_buffers(group: dist.ProcessGroup, buffers: Mapping[str, torch.Tensor], source: int) -> None:
    """Broadcast buffers in place. Their version counters stay: a graph that saved them remains valid."""
    tensors = list(buffers.values())
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        broadcast(group, tensors, source)
