"""Chooses the engines of the default group: shared memory for CPU tensors, the vendor's library for
an accelerator.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from paceline.core import NativeStatus
from paceline.errors import ConfigError

__all__ = ["Choice", "choose_backend", "accelerator_backend"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend string for torch.distributed, and what to say about it."""

    backend: str
    note: str = ""


def choose_backend(
    requested: str | None,
    environ: Mapping[str, str],
    native: NativeStatus,
    accelerator: tuple[str, str] | None,
) -> Choice:
    """The caller's wish, else PACELINE_BACKEND, else the fastest that works here.

    `accelerator` is a device type and its backend, such as ("cuda", "nccl").
    """
    if requested is not None:
        return Choice(requested)
    if wish := environ.get("PACELINE_BACKEND"):
        if wish == "paceline" and not native.available:
            raise ConfigError(
                f"PACELINE_BACKEND=paceline, but {native.reason}; unset it to use gloo, or see `paceline doctor`"
            )
        return Choice(_join(wish, accelerator), "chosen by PACELINE_BACKEND")
    if native.available:
        return Choice(_join("paceline", accelerator))
    return Choice(_join("gloo", accelerator), f"slower than shared memory: {native.reason}")


def _join(cpu: str, accelerator: tuple[str, str] | None) -> str:
    if ":" in cpu or accelerator is None:
        return cpu
    return f"cpu:{cpu},{accelerator[0]}:{accelerator[1]}"


def accelerator_backend() -> tuple[str, str] | None:
    """This machine's accelerator and the backend torch knows for it, or None without one."""
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    backend = os.environ.get(
        "PACELINE_DEVICE_BACKEND"
    ) or dist.Backend.default_device_backend_map.get(device.type)
    return (device.type, backend) if backend else None
