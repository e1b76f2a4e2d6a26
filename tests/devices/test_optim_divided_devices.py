"""`paceline.optim` with shared=True on accelerators: the state is divided among the ranks."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.optim import divided_step, shared_step

WORLD = 2


def train(machine, rank, devices, make, shared):
    shared_step._WORTH_SHARING_BYTES = 0
    divided_step._DEVICE_BUFFER_BYTES = 256
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 33), torch.nn.Linear(33, 3)]
    placed = [layer.to(device) for layer, device in zip(layers, devices, strict=True)]

    class Stages(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(placed)

        def forward(self, x):
            for layer, device in zip(self.layers, devices, strict=True):
                x = layer(x.to(device))
            return x

    model = paceline.DistributedDataParallel(Stages())
    optimizer = make(model.parameters(), shared=shared)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    values = [parameter.detach().cpu() for parameter in model.parameters()]
    values += [state[key]["exp_avg_sq"].cpu() for key in sorted(state)]
    if shared:
        assert state[0]["exp_avg"].device == next(model.parameters()).device
        kept = optimizer._divided._part.state.values()
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert sum(each["exp_avg"].numel() for each in kept) < 0.7 * numbers
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    torch.accelerator.synchronize()
    return values


def adam(parameters, **options):
    return paceline.optim.AdamW(parameters, lr=0.01, **options)


def on_rank(machine, rank, world, per_rank):
    devices = [machine.device(rank * per_rank + min(i, per_rank - 1)) for i in range(2)]
    torch.accelerator.set_device_index(rank * per_rank)
    plain, divided = (train(machine, rank, devices, adam, shared) for shared in (False, True))
    for one, other in zip(plain, divided, strict=True):
        assert torch.equal(one, other)
    return divided


@pytest.mark.parametrize("per_rank", [1, 2])
def test_the_same_bits_as_every_rank_for_itself(machine, needs, per_rank):
    needs(WORLD * per_rank)
    first, second = machine.on_ranks(WORLD, on_rank, per_rank)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
