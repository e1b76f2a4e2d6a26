"""What the bits of a computation depend on beside the program: the machine, torch, its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from paceline._linux import processor_name

__all__ = ["Fingerprint", "differences", "take_fingerprint"]

Fingerprint = dict[str, str]

# Variables that choose other kernels.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
)


def take_fingerprint() -> Fingerprint:
    """The fingerprint of this process, by what is compared."""
    fingerprint = {
        "torch": str(torch.__version__),
        "processor": processor_name(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "denormal numbers": "kept" if float(torch.tensor(1e-38) * 1e-4) else "flushed to zero",
        "accelerator": _accelerator(),
    }
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {**fingerprint, **variables}


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What differs, in words: "torch was 2.9.0 and is now 2.10.0"."""
    return [
        f"{name} was {expected.get(name, 'not set')} and is now {found.get(name, 'not set')}"
        for name in [*expected, *(name for name in found if name not in expected)]
        if expected.get(name) != found.get(name)
    ]


def _accelerator() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none"
    name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)
    return str(name())
