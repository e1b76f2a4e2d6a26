"""DataParallel's thread executor beyond the matrix: losses, errors, dropout, parameters changed in
other ways.
"""

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
                torch.testing.assert_close(
                    module.net.weight.grad.cpu(), bare.net.weight.grad, rtol=1e-12, atol=1e-15
                )
                bare.net.weight = nn.Parameter(torch.full((2, 4), 0.5, dtype=torch.float64))
                module.net.weight.data = torch.full((2, 4), 0.5, dtype=torch.float64).to(
                    machine.device(0)
                )
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


class Words(nn.Module):
    """An embedding with sparse gradients and a buffer that requires one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True).double()
        self.register_buffer(
            "scale", torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return (self.table(words) * self.scale).sum(1)


def test_sparse_gradients_and_buffers_that_require_one(sim_machine):
    def body(machine):
        import paceline

        torch.manual_seed(0)
        bare, words = Words(), torch.randint(9, (7, 3))
        module = copy.deepcopy(bare).to(machine.device(0))
        module.scale = module.scale.detach().requires_grad_()
        with paceline.DataParallel(module, device_ids=[0, 1, 2]) as model:
            for _ in range(2):
                out = model(words)
                torch.testing.assert_close(out.cpu(), bare(words), rtol=1e-12, atol=0)
                out.square().sum().backward()
                bare(words).square().sum().backward()
                found, expected = module.table.weight.grad, bare.table.weight.grad
                assert found.is_sparse
                torch.testing.assert_close(
                    found.to_dense().cpu(), expected.to_dense(), rtol=1e-12, atol=1e-15
                )
                torch.testing.assert_close(
                    module.scale.grad.cpu(), bare.scale.grad, rtol=1e-12, atol=1e-15
                )
                for each in (bare, module):
                    each.scale.data.mul_(
                        0.5
                    )  # replicas follow, though nothing but the memory tells of it

    sim_machine.on_devices(body)


def test_steps_that_go_past_autograd_reach_all_replicas(sim_machine):
    """`parameter.data.sub_(...)` leaves the parameter's version as it is."""

    def body(machine):
        import paceline

        torch.manual_seed(0)
        bare = nn.Linear(3, 2).double()
        module = copy.deepcopy(bare).to(machine.device(0))
        x = torch.randn(6, 3, dtype=torch.float64)
        with paceline.DataParallel(module, device_ids=[0, 1, 2]) as model:
            for _ in range(3):
                torch.testing.assert_close(model(x).cpu(), bare(x), rtol=1e-12, atol=1e-15)
                kept = model(x)
                for each in (model, bare):
                    each(x).square().sum().backward()
                    for parameter in each.parameters():
                        parameter.data.sub_(0.1 * parameter.grad.data)
                        parameter.grad = None
                model(x)
                kept.sum().backward()  # the copies it was computed with are still its own
                model.zero_grad()

    sim_machine.on_devices(body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_weights_swapped_between_forwards_reach_all_replicas(sim_machine, mode):
    """As averaged weights are, for evaluation: no backward in between, and no version raised."""

    def body(machine):
        import paceline

        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
        module = copy.deepcopy(bare).to(machine.device(0))
        x = torch.randn(6, 3, dtype=torch.float64)
        with paceline.DataParallel(module, device_ids=[0, 1, 2]) as model, mode():
            for _ in range(3):
                torch.testing.assert_close(model(x).cpu(), bare(x), rtol=1e-12, atol=1e-15)
                for each in (module, bare):
                    for tensor in (*each.parameters(), each[1].running_mean):
                        tensor.data.mul_(0.5)

    sim_machine.on_devices(body)


def test_moving_the_wrapped_module_moves_the_work(sim_machine):
    def body(machine):
        import paceline

        x = torch.randn(6, 3)
        module = nn.Linear(3, 2)
        expected = module(x)
        with paceline.DataParallel(module) as model:
            for place, devices in ((machine.device(0), [0, 1, 2, 3]), ("cpu", [])):
                assert model.to(place) is model
                assert model.device_ids == devices
                out = model(x)
                assert out.device == torch.device(place)
                torch.testing.assert_close(out.cpu(), expected)

    sim_machine.on_devices(body)


def test_parameters_without_a_shape_are_refused(sim_machine):
    def body(machine):
        import paceline

        module = nn.LazyLinear(2, device=machine.device(0))
        with paceline.DataParallel(module) as model:
            with pytest.raises(
                ValueError, match=r"uninitialized parameter.*LazyLinear.*dummy forward"
            ):
                model(torch.ones(4, 3))
            module(torch.ones(4, 3).to(machine.device(0)))
            assert model(torch.ones(4, 3)).shape == (4, 2)

    sim_machine.on_devices(body)


class Layer:
    def __init__(self, keys):
        self.keys, self.device, self.window = keys, keys.device, torch.tensor(7)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x, cache=None):
        y = self.linear(x if cache is None else x + cache["layers"][0].keys)
        assert cache is None or cache["layers"][0].keys.device == x.device
        return y, {"layers": [Layer(y * 2)], "best": y.max(1)}


def test_caches_in_outputs_and_inputs(sim_machine):
    def body(machine):
        import paceline

        torch.manual_seed(0)
        bare = Cached()
        module = copy.deepcopy(bare).to(machine.device(0))
        x = torch.randn(5, 3, dtype=torch.float64)
        with paceline.DataParallel(module, device_ids=[0, 1, 2]) as model:
            for each in (model, bare):
                out, cache = each(x)
                again, cache = each(x, cache)
                (out.sum() + cache["layers"][0].keys.square().sum() + again.sum()).backward()
                layer = cache["layers"][0]
                assert layer.device == layer.keys.device == out.device
                assert layer.window.item() == 7
            for one, other in zip(module.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-12, atol=1e-15)
            with torch.no_grad():
                best = model(x)[1]["best"]
            assert torch.equal(best.indices.cpu(), bare(x)[1]["best"].indices)

    sim_machine.on_devices(body)
