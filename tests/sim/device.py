"""Loads the simulated accelerator into this process, and reads its checker and counters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.sim import cells
from tests.sim.build import library

__all__ = [
    "load",
    "hazards",
    "raise_at_hazard",
    "left_out",
    "op_counts",
    "thread_count",
    "forget_counts",
    "kernel",
    "host_view",
]


def load(devices: int = 4) -> None:
    """Make `devices` simulated devices the accelerator of this process. A second call must ask for
    the same number.
    """
    if hasattr(torch, "sim"):
        if torch.sim.device_count() != devices:
            raise RuntimeError(
                f"this process already has {torch.sim.device_count()} simulated devices, "
                f"not {devices}"
            )
        return
    torch.ops.load_library(library())
    torch.ops.sim.set_device_count(devices)
    torch.utils.rename_privateuse1_backend("sim")
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module("sim", _SimModule(devices))
    cells.register()
    torch.ops.sim.watch_the_host()
    for name in ("numpy", "tolist", "__array__"):
        setattr(torch.Tensor, name, _announced(getattr(torch.Tensor, name)))


def hazards(*, clear: bool = True) -> list[str]:
    """Pairs of accesses that a real device could reorder, as sentences, in the order they were
    found.
    """
    return list(torch.ops.sim.hazards(clear))


def raise_at_hazard(on: bool = True) -> None:
    """Raise where a launch has a hazard, for a traceback that leads to it.

    Hazards of the host's own accesses and of frees are still only listed: torch lets nothing be
    raised there.
    """
    torch.ops.sim.raise_at_hazard(on)


@contextlib.contextmanager
def left_out(kind: str) -> Iterator[None]:
    """Run a program as if all its `waits` (of streams), `record_stream` or `synchronize` (of the
    host) were missing.

    This also reaches calls made inside torch: by autograd, by Futures, by a reducer in C++.
    """
    torch.ops.sim.leave_out(kind, True)
    try:
        yield
    finally:
        torch.ops.sim.leave_out(kind, False)


def op_counts(device: int) -> dict[str, int]:
    """How often each operator ran on a device since `forget_counts`."""
    return dict(torch.ops.sim.op_counts(device))


def thread_count(device: int) -> int:
    """How many host threads launched work on a device since `forget_counts`."""
    return int(torch.ops.sim.thread_count(device))


def forget_counts() -> None:
    torch.ops.sim.forget_counts()


@contextlib.contextmanager
def kernel(name: str, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> Iterator[Any]:
    """A kernel written in Python: one launch on the current stream; yields the CPU views of its
    operands.
    """
    torch.ops.sim.kernel_begin(name, list(reads), list(writes))
    try:
        yield [torch.ops.sim.view_on_cpu(t) for t in (*reads, *writes)]
    finally:
        torch.ops.sim.kernel_end()


def host_view(tensor: Any) -> Any:
    """Device memory as the host sees it. Using it before the host has waited for the device is a
    hazard.
    """
    return torch.ops.sim.view_on_cpu(tensor)


def _announced(method: Any) -> Any:
    """Tensor methods that read memory without an operator, made visible to the host watch."""

    @functools.wraps(method)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.ops.sim.host_reads(tensor.detach())
        return method(tensor, *args, **kwargs)

    return read


class _SimModule:
    """`torch.sim`, the parts of a device module that torch itself looks for."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._initialized = (
            True  # activation checkpointing asks this before it saves the generators
        )

        class device(torch.accelerator.device_index):  # noqa: N801 - torch.cuda spells it so
            def __init__(inner, which: Any) -> None:  # noqa: N805 - `self` is the module
                super().__init__(None if which is None else self._index(which))

        self.device = device
        self.Stream, self.Event = torch.Stream, torch.Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, which: Any) -> None:
        torch.accelerator.set_device_index(self._index(which))

    def current_stream(self, which: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(which))

    def synchronize(self, which: Any = None) -> None:
        torch.accelerator.synchronize(self._index(which))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def default_generator(self, index: int) -> torch.Generator:
        return torch.ops.sim.default_generator(index)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self._devices):
            self.default_generator(index).manual_seed(seed)

    def get_rng_state(self, which: Any = "sim") -> torch.Tensor:
        return self.default_generator(self._index(which)).get_state()

    def set_rng_state(self, state: torch.Tensor, which: Any = "sim") -> None:
        self.default_generator(self._index(which)).set_state(state)

    def _index(self, which: Any) -> int:
        index = which if isinstance(which, int) or which is None else torch.device(which).index
        return self.current_device() if index is None else index
