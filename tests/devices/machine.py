"""The devices a test runs on: simulated ones, or the machine's own GPUs with
`PACELINE_TEST_DEVICE=cuda`.

`on_devices(fn)` runs a function in fresh processes that have the devices loaded, and fails when the
happens-before checker found something there. On CUDA there is no checker and no operator count:
those checks are left out, the values are still compared.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from tests.harness import init_group, run_ranks

__all__ = ["CHOICE", "Hazards", "Machine", "chosen_device_type"]

CHOICE = "PACELINE_TEST_DEVICE"
TIMEOUT_S = 240.0  # for a loaded machine; a test takes a second or two


def chosen_device_type() -> str:
    return os.environ.get(CHOICE, "sim")


class Hazards(AssertionError):
    """Accesses that a real device could reorder."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """So many devices of one type."""

    type: str
    count: int

    @property
    def simulated(self) -> bool:
        return self.type == "sim"

    def device(self, index: int) -> str:
        return f"{self.type}:{index}"

    def on_devices(
        self, fn: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> Any:
        """`fn(machine, *args)` in one fresh process; fails if it caused hazards."""
        return run_ranks(1, _alone, self, fn, args, timeout=TIMEOUT_S, env=env)[0]

    def on_ranks(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(machine, rank, world, *args)` on `world` ranks that share a process group; fails on
        hazards.
        """
        return run_ranks(world, _in_group, self, fn, args, timeout=TIMEOUT_S)

    # ---- inside the process

    def load(self) -> None:
        if self.simulated:
            from tests import sim

            sim.load(self.count)

    def init_group(self) -> None:
        if not self.simulated:
            init_group("cpu:gloo,cuda:nccl")
            return
        from tests.sim import process_group

        process_group.register()
        init_group(process_group.BACKEND)

    def hazards(self) -> list[str]:
        if not self.simulated:
            return []
        from tests import sim

        return sim.hazards()

    def assert_no_hazards(self) -> None:
        found = self.hazards()
        if found:
            raise Hazards(f"{len(found)} ordering hazards:\n  " + "\n  ".join(found[:20]))

    def assert_worked(self, indices: set[int]) -> None:
        """Operators ran on these devices and on no others."""
        if not self.simulated:
            return
        from tests import sim

        busy = {index for index in range(self.count) if sum(sim.op_counts(index).values())}
        assert busy == indices, (
            f"expected work on devices {sorted(indices)}, found it on {sorted(busy)}"
        )


def _alone(
    rank: int, world: int, machine: Machine, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    machine.load()
    value = fn(machine, *args)
    machine.assert_no_hazards()
    return value


def _in_group(
    rank: int, world: int, machine: Machine, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch
    import torch.distributed as dist

    machine.load()
    torch.accelerator.set_device_index(rank)
    machine.init_group()
    value = fn(machine, rank, world, *args)
    machine.assert_no_hazards()
    dist.barrier()
    dist.destroy_process_group()
    return value
