"""What torch documents of `nn.DataParallel`, on simulated devices: ours gives what torch's own
class gives.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.devices.machine import Machine
from tests.sim.stock_parallel import stock_data_parallel

Pair = collections.namedtuple("Pair", ["sum", "rest"])


class Net(nn.Module):
    """Takes and returns many things; `how` says which."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(3, 5).double(), nn.Linear(5, 2).double()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor | None = None, *, scale: Any = 1.0, more: Any = None) -> Any:
        self.calls.add_(1)
        if x is None:
            return self.second(torch.ones(2, 5, dtype=torch.float64, device=self.calls.device))
        if self.how == "half":
            return self.first(x)
        out = self.second(self.first(x).tanh()) * scale
        if more is not None:
            out = out + more["shift"][0]
        if self.how == "loss":
            return out.square().mean()
        if self.how == "nested":
            return {"a": [out, out * 2], "b": Pair(out.sum(1), {"c": out + 1})}
        return out


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(model: Any) -> Any:
    return model(batch(7))


def even(model: Any) -> Any:
    return model(
        batch(6)
    )  # torch's chunks of 7 are 3, 3, 1, ours 3, 2, 2: losses of shares would differ


def keywords_only(model: Any) -> Any:
    return model(x=batch(6), scale=2.0, more={"shift": [batch(6, 1)[:, :2]]})


def under_no_grad(model: Any) -> Any:
    with torch.no_grad():
        return model(batch(5))


def frozen(model: Any) -> Any:
    model.module.first.weight.requires_grad_(False)
    return model(batch(5))


def twice(model: Any) -> Any:
    return model(batch(4)) + model(batch(4, 1))


def penalty(model: Any) -> Any:
    x = batch(4).requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def in_eval(model: Any) -> Any:
    return model.eval()(batch(4))


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "plain": (plain, {}, "plain"),
    "one device": (plain, {"device_ids": [0]}, "plain"),
    "devices in another order of size": (plain, {"device_ids": [0, 2, 1]}, "plain"),
    "output_device": (plain, {"output_device": 1}, "plain"),
    "nested outputs": (plain, {}, "nested"),
    "a loss of each replica": (even, {}, "loss"),
    "keywords only": (keywords_only, {}, "plain"),
    "no_grad": (under_no_grad, {}, "plain"),
    "frozen parameter": (frozen, {}, "plain"),
    "two forwards, one backward": (twice, {}, "plain"),
    "eval": (in_eval, {}, "plain"),
    "parameters nobody uses": (plain, {}, "half"),
    "gradient penalty on the inputs": (penalty, {}, "plain"),
}


@pytest.mark.parametrize("name", CASES)
def test_as_torchs_own_class(sim_machine, name):
    sim_machine.on_devices(compare, name)


def compare(machine: Machine, name: str) -> None:
    use, options, how = CASES[name]
    import paceline

    with stock_data_parallel() as stock:
        expected = results(machine, stock, use, options, how)
    ours = {**options, "scalars": "stack"}  # torch gathers losses into a vector
    found = results(machine, paceline.DataParallel, use, ours, how)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].device == value.device, key
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-15, msg=key)
        else:
            assert found[key] == value, key


def results(
    machine: Machine,
    data_parallel: Any,
    use: Callable[[Any], Any],
    options: dict[str, Any],
    how: str,
) -> dict[str, Any]:
    """Everything a user can see after a forward and a backward."""
    torch.manual_seed(0)
    module = Net(how).to(machine.device(0))
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's class says that it gathers scalars
        model = data_parallel(module, **{"device_ids": [0, 1, 2], **options})
        if hasattr(model, "close"):
            stack.callback(model.close)
        flat: dict[str, Any] = {}
        output = use(model)
        collect("out", output, flat)
        leaves = [
            value for value in flat.values() if isinstance(value, Tensor) and value.requires_grad
        ]
        if leaves:
            torch.stack(
                [leaf.square().sum().to(leaves[0].device) for leaf in leaves]
            ).sum().backward()
    seen = {
        key: value.detach() if isinstance(value, Tensor) else value for key, value in flat.items()
    }
    seen |= {f"grad of {name}": parameter.grad for name, parameter in module.named_parameters()}
    seen |= {f"state {name}": value for name, value in model.state_dict().items()}
    return seen


def collect(path: str, thing: Any, found: dict[str, Any]) -> None:
    found[f"type of {path}"] = type(thing)
    if isinstance(thing, dict):
        for key, value in thing.items():
            collect(f"{path}.{key}", value, found)
    elif isinstance(thing, list | tuple):
        for index, value in enumerate(thing):
            collect(f"{path}.{index}", value, found)
    else:
        found[path] = thing
