"""Lets torch's own `nn.DataParallel` run off CUDA, as a reference.

Its three communication functions exist in C++ for CUDA only; here they are made of generic
operators. Everything else - threads, replicas, autograd functions - is torch's code as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

__all__ = ["stock_data_parallel"]


@contextlib.contextmanager
def stock_data_parallel() -> Iterator[type[torch.nn.DataParallel]]:
    """`nn.DataParallel`, with what it lacks on this accelerator filled in; unchanged on CUDA."""
    if torch.accelerator.current_accelerator().type == "cuda":
        yield torch.nn.DataParallel
        return
    functions = {
        "_scatter": _scatter,
        "_gather": _gather,
        "_broadcast_coalesced": _broadcast_coalesced,
    }
    with mock.patch.multiple(torch._C, create=True, **functions):
        yield torch.nn.DataParallel


def _device(index: int) -> torch.device:
    if index == -1:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, index)


def _scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    chunks = (
        tensor.split(list(chunk_sizes), dim)
        if chunk_sizes is not None
        else tensor.chunk(len(devices), dim)
    )
    scattered = []
    for position, (chunk, device) in enumerate(zip(chunks, devices, strict=False)):
        with (streams and streams[position]) or contextlib.nullcontext():
            scattered.append(chunk.contiguous().to(_device(device), non_blocking=True))
    return scattered


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    target = torch.accelerator.current_device_index() if destination is None else destination
    return torch.cat([tensor.to(_device(target)) for tensor in tensors], dim)


def _broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[Tensor]]:
    """The first copy shares the original's memory: BatchNorm's statistics rely on it."""
    return [
        [
            t.view_as(t) if device == t.get_device() else t.to(_device(device), non_blocking=True)
            for t in tensors
        ]
        for device in devices
    ]
