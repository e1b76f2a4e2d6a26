"""DistributedDataParallel on devices: values of the CPU, no ordering hazards, work and memory where
they belong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.devices.machine import Machine
from tests.devices.scenarios import SCENARIOS, Scenario

SUBJECT = "DistributedDataParallel"
WORLD = 2
SLACK_BYTES = 16 << 10  # inputs, activations that live until the next step, bookkeeping


def class_of(implementation: str) -> Any:
    if implementation == "stock":
        return torch.nn.parallel.DistributedDataParallel
    import paceline

    return paceline.DistributedDataParallel


@pytest.mark.parametrize("name", SCENARIOS)
def test_training(machine, needs, implementation, name):
    scenario = SCENARIOS[name]
    needs(WORLD * scenario.devices_per_rank)
    if (implementation, machine.type) in scenario.skipped:
        pytest.skip(scenario.skipped[implementation, machine.type])
    states = machine.on_ranks(WORLD, train_and_check, implementation, name)
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), f"rank 0 and rank 1 differ in {key}"


@pytest.mark.parametrize("name", ["device_ids", "two devices", "own communication hook"])
def test_without_its_waits_training_has_hazards(sim_machine, implementation, name):
    """The zero of the other test is earned: the checker sees the order this implementation asks
    for.
    """
    for found in sim_machine.on_ranks(WORLD, hazards_without_waits, implementation, name):
        assert found


def hazards_without_waits(
    machine: Machine, rank: int, world: int, implementation: str, name: str
) -> list[str]:
    from tests import sim

    count = SCENARIOS[name].devices_per_rank
    devices = [machine.device(index) for index in range(rank * count, (rank + 1) * count)]
    with sim.left_out("waits"):
        model = SCENARIOS[name].train(class_of(implementation), devices, rank)
    torch.accelerator.synchronize()
    del model
    return machine.hazards()


def train_and_check(
    machine: Machine, rank: int, world: int, implementation: str, name: str
) -> dict[str, torch.Tensor]:
    scenario = SCENARIOS[name]
    count = scenario.devices_per_rank
    indices = range(rank * count, (rank + 1) * count)
    devices = [machine.device(index) for index in indices]
    if implementation in scenario.refused_by:
        error, words = scenario.refused_by[implementation]
        with pytest.raises(error, match=words):
            scenario.train(class_of(implementation), devices, rank)
        return {}
    torch.accelerator.set_device_index(indices[0])
    expected = scenario.train_by_hand(world)
    model = scenario.train(class_of(implementation), devices, rank)
    assert_same_state(scenario, model.module, expected, rank)
    machine.assert_worked(set(indices))
    assert_memory_as_planned(machine, scenario, model, indices)
    return {name: parameter.detach().cpu() for name, parameter in model.module.named_parameters()}


def assert_same_state(scenario: Scenario, module: Any, expected: Any, rank: int) -> None:
    found = dict(module.named_parameters())
    if rank == 0:  # the other ranks' buffers are overwritten at their next forward
        found |= dict(module.named_buffers())
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for key, value in found.items():
        limit = scenario.relative_error * max(wanted[key].abs().max().item(), 1e-3)
        error = (value.detach().cpu() - wanted[key].detach()).abs().max().item()
        assert error <= limit, f"{key}: off by {error:g}, at most {limit:g} allowed"


def assert_memory_as_planned(
    machine: Machine, scenario: Scenario, model: Any, indices: range
) -> None:
    """Each device holds its own parameters, their gradients and their buckets, and nothing lies on
    other devices.
    """
    for index in range(torch.accelerator.device_count()):
        allocated = torch.accelerator.memory_allocated(index)
        if index not in indices:
            assert allocated == 0, f"{allocated} bytes on device {index}, which is another rank's"
        elif machine.simulated:  # CUDA's libraries take working memory from the same pool
            own = [
                p for p in model.parameters() if p.device.type != "cpu" and p.device.index == index
            ]
            parameters = sum(p.numel() * p.element_size() for p in own)
            plan = scenario.parameter_copies * parameters
            assert parameters < allocated <= plan + SLACK_BYTES, (
                f"device {index}: {allocated} bytes, planned {plan}"
            )
