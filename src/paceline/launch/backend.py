"""Chooses the engines of the default group: shared memory for CPU tensors, the vendor's library for an accelerator."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

from paceline.errors import ConfigError

__all__ = ["NativeStatus", "native_status", "Choice", "choose_backend", "accelerator_backend"]


@dataclasses.dataclass(frozen=True)
class NativeStatus:
    """Whether the native core can be used, and if not, why."""

    available: bool
    reason: str


def native_status() -> NativeStatus:
    """Looks for the built core beside the package; a failed build left its reason there."""
    import paceline.shm

    folder = pathlib.Path(paceline.shm.__file__).parent
    if (folder / "libpaceline_core.so").exists():
        return NativeStatus(True, "built")
    try:
        record = json.loads((folder / "native_build.json").read_text())
    except (OSError, ValueError):
        return NativeStatus(False, "the native core was not built")
    return NativeStatus(False, str(record.get("error", "the native core was not built")))


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
    backend = os.environ.get("PACELINE_DEVICE_BACKEND") or dist.Backend.default_device_backend_map.get(device.type)
    return (device.type, backend) if backend else None
