"""Batches moved to an accelerator one step ahead, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.errors import ConfigError

__all__ = ["find_device", "is_accelerator", "on_device"]


def find_device(device: torch.device | str | int | None) -> torch.device | None:
    """The device meant: "auto" is this rank's current accelerator, or the CPU without one."""
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
            f'device={device!r} is none: {error}. Use "auto", None or a torch device'
        ) from error


def is_accelerator(device: torch.device | None) -> bool:
    """Whether copies to this device run on streams of the machine's accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and accelerator is not None and device.type == accelerator.type


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`. On an accelerator, the next one is already under way when one
    is handed out.
    """
    if not is_accelerator(device):
        return (_moved(batch, device, non_blocking=False) for batch in batches)
    return _ahead(batches, device)


def _ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    copies = torch.Stream(device)
    waiting: tuple[Any, Any, torch.Event] | None = None
    for batch in batches:
        # 1. start the copy of this batch on the stream for copies
        with copies:
            moved = _moved(batch, device, non_blocking=True)
            done = copies.record_event()
        # 2. hand out the one before; the host's tensors are kept until its copy is ordered before
        # their reuse
        if waiting is not None:
            yield _received(waiting, device)
        waiting = (batch, moved, done)
    if waiting is not None:
        yield _received(waiting, device)


def _received(waiting: tuple[Any, Any, torch.Event], device: torch.device) -> Any:
    """A batch whose copy is under way, safe to use on the stream that computes."""
    _, moved, done = waiting
    computing = torch.accelerator.current_stream(device)
    computing.wait_event(done)
    for tensor in _tensors(moved):
        tensor.record_stream(computing)  # its memory came from the other stream's pool
    return moved


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
    # Batches of other libraries follow torch's manner of moving; what has no `to` stays where it
    # is.
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
