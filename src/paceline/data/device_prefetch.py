"""Batches moved to an accelerator one step ahead, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from paceline.errors import ConfigError

__all__ = ["resolve_device", "is_accelerator", "prefetch_to_device"]


def resolve_device(device: torch.device | str | int | None) -> torch.device | None:
    """The torch device that `device` names.

    "auto" is this rank's current accelerator, or the CPU without one; None stays None.

    Raises:
        ConfigError: torch knows no such device.
    """
    if device is None:
        return None
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f'device={device!r} is no device: {error}. Use "auto", None or a torch device'
        ) from error


def is_accelerator(device: torch.device | None) -> bool:
    """Whether copies to this device run on streams of the machine's accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and accelerator is not None and device.type == accelerator.type


def prefetch_to_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`. On an accelerator, the copy of the next batch has been started
    when a batch is yielded.
    """
    if not is_accelerator(device):
        return (_moved(batch, device, non_blocking=False) for batch in batches)
    return _prefetched(batches, device)


def _prefetched(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    copy_stream = torch.Stream(device)
    pending: _PendingCopy | None = None
    for batch in batches:
        # 1. Start the copy of this batch on the copy stream.
        with copy_stream:
            copy = _moved(batch, device, non_blocking=True)
            copied = copy_stream.record_event()
        # 2. Yield the batch before. Its host tensors are kept until the copy is ordered before
        # their reuse.
        if pending is not None:
            yield pending.ready_on(device)
        pending = _PendingCopy(batch, copy, copied)
    if pending is not None:
        yield pending.ready_on(device)


class _PendingCopy(NamedTuple):
    """A batch that is being copied: the host's tensors, the device's, and the end of the copy."""

    source: Any
    copy: Any
    copied: torch.Event

    def ready_on(self, device: torch.device) -> Any:
        """The copy, safe to use on the device's current stream."""
        compute_stream = torch.accelerator.current_stream(device)
        compute_stream.wait_event(self.copied)
        for tensor in _tensors(self.copy):
            # Its memory came from the copy stream's pool, which must not reuse it too early.
            tensor.record_stream(compute_stream)
        return self.copy


def _moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if isinstance(batch, Mapping):
        return {
            name: _moved(part, device, non_blocking=non_blocking) for name, part in batch.items()
        }
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, device, non_blocking=non_blocking) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(part, device, non_blocking=non_blocking) for part in batch)
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    # Batches of other libraries have a `to` as torch's tensors do; what has none stays where it is.
    return batch.to(device) if hasattr(batch, "to") else batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)
