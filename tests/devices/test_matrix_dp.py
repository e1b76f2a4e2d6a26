"""DataParallel with threads on 2 to 4 devices: values of the CPU, no ordering hazards, work and
memory everywhere.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.devices.machine import Machine
from tests.sim.stock_parallel import stock_data_parallel

SUBJECT = "DataParallel"
WIDTH = 64
STEPS = 3
SLACK_BYTES = 16 << 10


class Case:
    """A module and a batch; subclasses change one thing each."""

    rows = 12
    relative_error = 1e-9
    skipped: ClassVar[dict[str, str]] = {}  # implementation: why it cannot be tried

    def module(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )

    def options(self, count: int) -> dict[str, Any]:
        return {}

    def initial(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module().double()

    def batch(self, step: int) -> Tensor:
        return torch.randn(
            self.rows, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    def devices_used(self, count: int) -> int:
        return min(count, self.rows)

    def output_device(self, count: int) -> int:
        return 0

    def train_by_hand(self, count: int) -> tuple[nn.Module, Tensor]:
        """The bare module on the CPU with the whole batch."""
        module = self.initial()
        return module, _train(self, module, "cpu")


class SmallBatch(Case):
    rows = 2


class UnevenBatch(Case):
    rows = 7


class OutputDevice(Case):
    def options(self, count: int) -> dict[str, Any]:
        return {"output_device": count - 1}

    def output_device(self, count: int) -> int:
        return count - 1


class Buffers(Case):
    """Statistics are those of the first replica's share, as torch documents."""

    def module(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )

    def train_by_hand(self, count: int) -> tuple[nn.Module, Tensor]:
        module = self.initial()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(STEPS):
            shares = self.batch(step).chunk(count)
            replicas = [module, *(copy.deepcopy(module) for _ in shares[1:])]
            optimizer.zero_grad()
            output = torch.cat(
                [replica(share) for replica, share in zip(replicas, shares, strict=True)]
            )
            output.square().mean().backward()
            for replica in replicas[1:]:
                for own, other in zip(module.parameters(), replica.parameters(), strict=True):
                    own.grad += other.grad
            optimizer.step()
        return module, output.detach()


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, WIDTH)

    def forward(
        self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float, shift: Tensor
    ) -> dict[str, list[Tensor]]:
        first, rest = pair
        return {"out": [self.layer(first) * scale + shift, self.layer(rest["second"])]}


class NestedArguments(Case):
    def module(self) -> nn.Module:
        return _Nested()

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        found = model((batch, {"second": batch * 2}), scale=3.0, shift=batch[:, :1])
        return torch.cat(found["out"], 1)


class Recurrent(Case):
    def module(self) -> nn.Module:
        return _LastOfLstm()

    def batch(self, step: int) -> Tensor:
        return super().batch(step).unsqueeze(1).expand(-1, 3, -1).contiguous()


class _LastOfLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.lstm(value)[0][:, -1]


class Autocast(Case):
    relative_error = 0.05
    skipped: ClassVar = {
        "stock": "torch's parallel_apply carries neither autocast nor its dtype into its threads"
    }

    def initial(self) -> nn.Module:
        return super().initial().float()

    def batch(self, step: int) -> Tensor:
        return super().batch(step).float()

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
            output = model(batch)
        assert output.dtype == torch.bfloat16
        return output


CASES = {
    "plain": Case(),
    "batch smaller than the devices": SmallBatch(),
    "uneven batch": UnevenBatch(),
    "output_device": OutputDevice(),
    "buffers": Buffers(),
    "nested arguments": NestedArguments(),
    "lstm": Recurrent(),
    "autocast": Autocast(),
}


@contextlib.contextmanager
def class_of(implementation: str) -> Iterator[Any]:
    if implementation == "stock":
        with stock_data_parallel() as stock:
            yield stock
        return
    import paceline

    yield paceline.DataParallel


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_training(machine, needs, implementation, name, count):
    needs(count)
    if implementation in CASES[name].skipped:
        pytest.skip(CASES[name].skipped[implementation])
    machine.on_devices(train_and_check, implementation, name, count)


@pytest.mark.parametrize("start", ["cpu", "pinned", "device"])
def test_inputs_from_anywhere(machine, needs, implementation, start):
    needs(2)
    machine.on_devices(forward_from, implementation, start)


@pytest.mark.parametrize("kind", ["waits", "record_stream"])
def test_without_its_ordering_a_forward_has_hazards(sim_machine, implementation, kind):
    """The zero of the other tests is earned: the checker sees the order this implementation asks
    for.
    """
    assert sim_machine.on_devices(hazards_without, implementation, kind)


def hazards_without(machine: Machine, implementation: str, kind: str) -> list[str]:
    from tests import sim

    with sim.left_out(kind):
        forward_from(machine, implementation, "pinned")
    return machine.hazards()


def _train(case: Case, model: nn.Module, where: str) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = case.forward(model, case.batch(step).to(where))
        output.double().square().mean().backward()
        optimizer.step()
    return output.detach()


def train_and_check(machine: Machine, implementation: str, name: str, count: int) -> None:
    case = CASES[name]
    expected, expected_output = case.train_by_hand(count)
    with class_of(implementation) as data_parallel, contextlib.ExitStack() as stack:
        module = case.initial().to(machine.device(0))
        model = data_parallel(module, device_ids=list(range(count)), **case.options(count))
        if hasattr(model, "close"):
            stack.callback(model.close)
        output = _train(case, model, machine.device(0))
        assert output.device == torch.device(machine.device(case.output_device(count)))
        assert_close(output, expected_output, case.relative_error, "the output")
        del output
        for key, value in module.state_dict().items():
            assert_close(value, expected.state_dict()[key], case.relative_error, key)
        machine.assert_worked(set(range(case.devices_used(count))))
        if (
            machine.simulated
        ):  # CUDA counts no threads, and its libraries take working memory from the same pool
            assert_threads(case.devices_used(count))
            assert_memory_as_planned(module, count)


def assert_close(found: Tensor, expected: Tensor, relative_error: float, what: str) -> None:
    limit = relative_error * max(expected.abs().max().item(), 1e-3)
    error = (found.cpu().double() - expected.double()).abs().max().item()
    assert error <= limit, f"{what}: off by {error:g}, at most {limit:g} allowed"


def assert_threads(used: int) -> None:
    """Forward and backward of a device are launched by other threads than the main one."""
    from tests import sim

    for index in range(used):
        assert sim.thread_count(index) >= 2, f"device {index} was driven by one thread"


def assert_memory_as_planned(module: nn.Module, count: int) -> None:
    """Parameters and gradients on the first device, at most one replica on each of the others."""
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    for index in range(torch.accelerator.device_count()):
        copies = 2 if index == 0 else int(index < count)
        allocated = torch.accelerator.memory_allocated(index)
        limit = copies * parameters + SLACK_BYTES if copies else 0
        assert allocated <= limit, f"device {index}: {allocated} bytes, planned {limit}"


def forward_from(machine: Machine, implementation: str, start: str) -> None:
    case = Case()
    batch = case.batch(0)
    given = {"cpu": batch, "pinned": batch.pin_memory(), "device": batch.to(machine.device(1))}[
        start
    ]
    with class_of(implementation) as data_parallel, contextlib.ExitStack() as stack:
        model = data_parallel(case.initial().to(machine.device(0)), device_ids=[0, 1])
        if hasattr(model, "close"):
            stack.callback(model.close)
        with torch.no_grad():
            assert_close(model(given), case.initial()(batch), case.relative_error, "the output")
