"""Chooses the engines of the default group: shared memory for CPU tensors, the vendor's library for
an accelerator.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping

from paceline.core import NativeStatus
from paceline.errors import ConfigError

__all__ = ["BackendChoice", "choose_backend", "accelerator_backend", "known_backends"]


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """A backend string for torch.distributed, and a note on it for the user."""

    backend: str
    note: str = ""


def choose_backend(
    requested: str | None,
    environ: Mapping[str, str],
    native: NativeStatus,
    accelerator: tuple[str, str] | None,
    known: Collection[str],
) -> BackendChoice:
    """What the caller requested, else PACELINE_BACKEND, else the fastest that works here.

    `accelerator` is a device type and its backend, such as ("cuda", "nccl"); `known` has the names
    of all backends.
    """
    if requested is not None:
        return BackendChoice(requested)
    if name := environ.get("PACELINE_BACKEND"):
        _check_backend(name, known)
        if name == "paceline" and not native.available:
            raise ConfigError(
                f"PACELINE_BACKEND=paceline, but {native.reason}; unset it to use gloo, or see "
                "`paceline doctor`"
            )
        return BackendChoice(_join(name, accelerator), "chosen by PACELINE_BACKEND")
    if native.available:
        return BackendChoice(_join("paceline", accelerator))
    return BackendChoice(_join("gloo", accelerator), f"slower than shared memory: {native.reason}")


def _check_backend(text: str, known: Collection[str]) -> None:
    """One name, or a name for each kind of device: `cpu:gloo,cuda:nccl`."""
    for part in text.split(","):
        device, _, name = part.rpartition(":")
        if name.lower() not in known or (bool(device) != (":" in text)):
            raise ConfigError(
                f"PACELINE_BACKEND should be one of {', '.join(sorted(known))}, or one for each "
                f"kind of device, such as cpu:gloo,cuda:nccl, but is {text!r}"
            )


def known_backends() -> Collection[str]:
    """The backends torch knows, ours and those of extensions included."""
    import torch.distributed as dist

    return {name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED}


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
