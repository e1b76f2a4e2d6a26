"""Module buffers (running statistics and the like) follow one rank, as torch's class does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline._torch_internals import (
    flatten_dense,
    foreach_copy_,
    preserve_version,
    unflatten_dense,
)
from paceline.ddp.group_calls import broadcast_from

__all__ = ["BufferHook", "broadcast", "sync_buffers"]

_PIECE_BYTES = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class BufferHook:
    """A caller's own way of synchronising buffers."""

    hook: Callable[[Any, Mapping[str, torch.Tensor]], Any]
    state: Any
    after_forward: bool


def broadcast(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Copy tensors from one rank of the group to all: as bytes, so that one message serves every
    dtype.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for device, members in by_device.items():
        for piece in _pieces(members):
            _broadcast_piece(group, piece, source, device)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in lists of at most _PIECE_BYTES, or of one."""
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if piece and size + nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += nbytes
    if piece:
        yield piece


def _broadcast_piece(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], source: int, device: torch.device
) -> None:
    sections = _sections(tensors)
    with torch.no_grad():
        if len(tensors) == 1 and tensors[0].is_contiguous():  # a large one, as a rule: no copy
            broadcast_from(source, group, tensors[0].view(-1).view(torch.uint8))
            return
        if group.rank() == source:
            flat = torch.cat([flatten_dense(section).view(torch.uint8) for section in sections])
            broadcast_from(source, group, flat)
            return
        sizes = [
            sum(tensor.numel() * tensor.element_size() for tensor in section)
            for section in sections
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        broadcast_from(source, group, flat)
        for section, part in zip(sections, flat.split(sizes), strict=True):
            received = unflatten_dense(part.view(section[0].dtype), section)
            foreach_copy_(section, list(received))


def _sections(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one dtype together, the widest first: then each section begins where its dtype may
    lie.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return sorted(by_dtype.values(), key=lambda section: -section[0].element_size())


def sync_buffers(
    group: dist.ProcessGroup, buffers: Mapping[str, torch.Tensor], source: int
) -> None:
    """Broadcast buffers in place. Their version counters stay: a graph that saved them remains
    valid.
    """
    tensors = list(buffers.values())
    with torch.no_grad(), preserve_version(tuple(tensors)):
        broadcast(group, tensors, source)
