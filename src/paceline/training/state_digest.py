"""Digests of tensors and of whole states: what two runs compare."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["DIGESTS", "DIGEST_LINE", "append_line", "digest_line", "tensor_digest"]

# The environment variable with the file that the digests of every step are appended to.
DIGESTS = "PACELINE_DIGESTS"

# How a line of digests begins, in a log among other lines.
DIGEST_LINE = "paceline digest "
_LONGEST_TEXT = 24


def tensor_digest(tensor: torch.Tensor | None) -> str:
    """16 hexadecimal digits for the bytes of a tensor; an empty text for None."""
    if tensor is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    parts = [tensor]
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        parts = [tensor.indices(), tensor.values()]
    for part in parts:
        flat = part.detach().cpu().contiguous().view(-1)
        if flat.numel():
            # Not by numpy(), after which a parameter cannot be moved to shared memory any more.
            flat = flat.view(torch.uint8)
            digest.update(ctypes.string_at(flat.data_ptr(), flat.numel()))
    return digest.hexdigest()


def digest_line(step: int, state: Mapping[str, Any]) -> str:
    """One line with a digest for everything in a state, by its path; numbers as they are."""
    digests = {path: _shown(leaf) for path, leaf in _leaves(state, "")}
    return DIGEST_LINE + json.dumps({"step": step, "digests": digests})


def append_line(path: str, line: str) -> None:
    """Append to a file that several processes write to: whole lines, each in one call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}.{number}")
    else:
        yield path, value


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return tensor_digest(leaf)
    text = repr(leaf)
    if len(text) <= _LONGEST_TEXT:
        return text
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
