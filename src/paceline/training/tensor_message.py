"""A few facts and tensors as one array of bytes: what ranks send each other at the end of a pass.

8 bytes   length of the header
header    JSON: the facts, and type and shape of each tensor
tensors   one after the other, each at a multiple of 16 bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["decode", "encode"]

_ALIGNMENT = 16


def encode(facts: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """The message as a tensor of bytes in host memory."""
    forms = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = json.dumps([facts, forms]).encode()
    beginning = bytearray(len(header).to_bytes(8, "little") + header)
    at = _padded(len(beginning))
    message = torch.empty(at + sum(map(_bytes_of, tensors)), dtype=torch.uint8)
    message[: len(beginning)] = torch.frombuffer(beginning, dtype=torch.uint8)
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            message[at : at + flat.numel()] = flat
        at += _bytes_of(tensor)
    return message


def decode(message: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What `encode` was given; the tensors are views of the message."""
    length = int.from_bytes(message[:8].numpy().tobytes(), "little")
    facts, forms = json.loads(message[8 : 8 + length].numpy().tobytes())
    return facts, list(_tensors(message, _padded(8 + length), forms))


def _tensors(
    message: torch.Tensor, at: int, forms: Sequence[tuple[str, list[int]]]
) -> Iterator[torch.Tensor]:
    for name, shape in forms:
        empty = torch.empty(shape, dtype=getattr(torch, name), device="meta")
        length = empty.numel() * empty.element_size()
        yield message[at : at + length].view(empty.dtype).view(shape)
        at += _padded(length)


def _bytes_of(tensor: torch.Tensor) -> int:
    return _padded(tensor.numel() * tensor.element_size())


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
