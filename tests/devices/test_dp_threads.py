"""DataParallel's thread executor beyond the matrix: losses, errors, dropout, parameters changed in other ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2).double()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and x.device.index == 1:
            raise KeyError("second device")
        return self.net(x).square().mean()


def test_losses_errors_and_replaced_parameters(sim_machine):
    def body(machine):
        import paceline

        torch.manual_seed(0)
        bare = Loss()
        module = copy.deepcopy(bare).to(machine.device(0))
        x = torch.randn(7, 4, dtype=torch.float64)
        with paceline.DataParallel(module, device_ids=[0, 1, 2]) as model:
            for _ in range(2):
                model.zero_grad()
                bare.zero_grad()
                loss, expected = model(x), bare(x)
                torch.testing.assert_close(loss.cpu(), expected, rtol=1e-12, atol=0)
                loss.backward()
                expected.backward()
                torch.testing.assert_close(module.net.weight.grad.cpu(), bare.net.weight.grad, rtol=1e-12, atol=1e-15)
                bare.net.weight = nn.Parameter(torch.full((2, 4), 0.5, dtype=torch.float64))
                module.net.weight.data = torch.full((2, 4), 0.5, dtype=torch.float64).to(machine.device(0))
            module.fails = True
            with pytest.raises(KeyError, match="second device") as caught:
                model(x)
            assert "replica 1" in caught.value.__notes__[0]
            module.fails = False
            loss = model(x)
            with pytest.raises(RuntimeError, match="differentiated twice"):
                loss.backward(create_graph=True)

    sim_machine.on_devices(body)


def test_dropout_differs_between_devices_and_repeats(sim_machine):
    def body(machine):
        import paceline

        module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)).to(machine.device(0))
        with paceline.DataParallel(module, device_ids=[0, 1]) as model, torch.no_grad():
            x = torch.ones(2, 64, 1)
            torch.manual_seed(3)
            first = model(x).cpu()
            torch.manual_seed(3)
            assert torch.equal(first, model(x).cpu())
            assert not torch.equal(first[0], first[1])

    sim_machine.on_devices(body)
