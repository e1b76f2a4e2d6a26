"""The buffers of a module: replica 0 is the module itself; workers get its values when changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline._torch_internals import BatchNormBase, version_of

__all__ = ["BufferEntry", "ModuleBuffers"]

BufferEntry = tuple[dict[str, torch.Tensor | None], str]  # a module's `_buffers` and a name in it
_SMALL_BUFFER = 4096  # elements; cheaper to send than to think about


class ModuleBuffers:
    """Which buffers changed since they were last sent to the workers.

    `entries` are the buffers that are sent; those that require a gradient are shared, like
    parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = [
            (part, name, buffer)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.requires_grad
        ]
        self.entries: list[BufferEntry] = [(part._buffers, name) for part, name, _ in buffers]
        self._owners = [part for part, _, _ in buffers]
        self._seen = [(buffer, _version(buffer)) for _, _, buffer in buffers]
        self._trained_since_seen = False

    def fit(self) -> bool:
        """Whether all are still there, with the same shapes and types."""
        for (holder, name), (seen, _) in zip(self.entries, self._seen, strict=True):
            now = holder.get(name)
            if now is not seen and (
                now is None or now.shape != seen.shape or now.dtype != seen.dtype
            ):
                return False
        return True

    def changed(self) -> list[int]:
        """Indices of the buffers that changed since the last call."""
        indices = []
        for index, (holder, name) in enumerate(self.entries):
            now = holder[name]
            assert now is not None, "fit() was asked before"
            version = _version(now)
            seen, seen_version = self._seen[index]
            uncounted = self._trained_since_seen and _may_change_uncounted(self._owners[index], now)
            if now is not seen or version != seen_version or version < 0 or uncounted:
                self._seen[index] = (now, version)
                indices.append(index)
        return indices

    def expect_forward(self) -> None:
        """A forward follows."""
        self._trained_since_seen = any(owner.training for owner in self._owners)

    def values(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The buffers with these indices."""
        values = [holder[name] for holder, name in (self.entries[index] for index in indices)]
        return [value for value in values if value is not None]


def _may_change_uncounted(owner: nn.Module, buffer: torch.Tensor) -> bool:
    """Kernels of batch normalisation write running statistics without raising the version."""
    return buffer.is_floating_point() and (
        isinstance(owner, BatchNormBase) or buffer.numel() <= _SMALL_BUFFER
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)
