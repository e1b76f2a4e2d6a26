"""Batches that are copied to a device ahead of time: the right ones, and no ordering hazards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.devices.machine import Machine

SUBJECT = "DataLoader"
ROWS, BATCH = 24, 4


def batches(implementation: str, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    data = TensorDataset(torch.arange(ROWS), torch.arange(ROWS) * 2.0)
    if implementation == "paceline":
        import paceline

        yield from paceline.DataLoader(data, BATCH, device=device, rank=0, world_size=1)
        return
    for batch in DataLoader(data, BATCH, pin_memory=True):
        yield tuple(part.to(device, non_blocking=True) for part in batch)


def test_batches_ahead(machine, implementation):
    machine.on_devices(consume, implementation)


@pytest.mark.parametrize("kind", ["waits", "record_stream"])
def test_without_its_ordering_loading_has_hazards(sim_machine, implementation, kind):
    if implementation == "stock":
        pytest.skip("torch's loader leaves the copies to the caller, who has one stream here")
    assert sim_machine.on_devices(hazards_without, implementation, kind)


def hazards_without(machine: Machine, implementation: str, kind: str) -> list[str]:
    from tests import sim

    with sim.left_out(kind):
        consume(machine, implementation)
    return machine.hazards()


def consume(machine: Machine, implementation: str) -> None:
    device = machine.device(machine.count - 1)
    seen: list[int] = []
    for indices, values in batches(implementation, device):
        assert indices.device == values.device == torch.device(device)
        assert torch.equal(values, indices * 2.0)
        seen += indices.tolist()
        values.zero_()  # the memory is the consumer's own now
    assert sorted(seen) == list(range(ROWS))
    machine.assert_worked({machine.count - 1})
