"""Batches moved to an accelerator one step ahead, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paceline._pytree import flatten, tensors_in, unflatten
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
        # Its memory came from the copy stream's pool, which must not reuse it while the compute
        # stream may still read it.
        for tensor in tensors_in(self.copy):
            if tensor.device.type == device.type:
                tensor.record_stream(compute_stream)
        return self.copy


@runtime_checkable
class _SupportsTo(Protocol):
    """Tensors, and batches of other libraries that move themselves as tensors do."""

    def to(self, device: torch.device) -> object: ...


def _moved(batch: object, device: torch.device, *, non_blocking: bool) -> Any:
    spec, leaves = flatten(batch, (_SupportsTo,))
    return unflatten(spec, [_moved_leaf(leaf, device, non_blocking) for leaf in leaves])


def _moved_leaf(leaf: object, device: torch.device, non_blocking: bool) -> Any:
    """A leaf on `device`; what can neither be moved nor looked into stays where it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    if isinstance(leaf, _SupportsTo):
        return leaf.to(device)
    # Containers that cannot be rebuilt as what they are: any mapping will do for a batch.
    if isinstance(leaf, Mapping):
        return _moved(dict(leaf), device, non_blocking=non_blocking)
    if isinstance(leaf, list | tuple):
        return type(leaf)(_moved(part, device, non_blocking=non_blocking) for part in leaf)
    return leaf
