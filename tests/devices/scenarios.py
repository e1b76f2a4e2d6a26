"""What the DistributedDataParallel matrix trains: models, where they live, how they are wrapped and
stepped.

Each scenario can also be trained by hand on the CPU, rank after rank in one process with the
gradients averaged: that is the truth the wrapped model on devices is compared with. Everything is
in float64 unless a scenario is about lower precision, so that the comparison is sharp.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

__all__ = ["SCENARIOS", "Scenario"]

WIDTH = 64  # enough for the parameters to outweigh everything else in the memory plan
BATCH = 4
STEPS = 3


class Scenario:
    """The plain case: one device per rank. Subclasses change one thing each."""

    devices_per_rank = 1
    relative_error = 1e-9
    parameter_copies = 3  # parameters, gradients, buckets
    refused_by: ClassVar[
        dict[str, tuple[type[Exception], str]]
    ] = {}  # implementation: error, words of its message
    skipped: ClassVar[
        dict[tuple[str, str], str]
    ] = {}  # (implementation, device type): why it cannot be tried

    # ---- what is trained

    def module(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )

    def batch(self, rank: int, step: int) -> Tensor:
        return torch.randn(BATCH, 8, generator=self.generator(rank, step), dtype=torch.float64)

    def generator(self, rank: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * step + rank)

    # ---- where, and how it is wrapped

    def place(self, module: nn.Module, devices: Sequence[str]) -> nn.Module:
        return module.to(devices[0])

    def options(self, devices: Sequence[str]) -> dict[str, Any]:
        return {"device_ids": [torch.device(devices[0]).index], "bucket_cap_mb": 0.01}

    def prepare(self, model: Any) -> None:
        """After wrapping."""

    # ---- one step

    def forward(self, model: nn.Module, batch: Tensor, rank: int, step: int) -> Tensor:
        return model(batch)

    def backward(self, model: nn.Module, batch: Tensor, rank: int, step: int) -> None:
        self.forward(model, batch, rank, step).double().square().mean().backward()

    # ---- training, wrapped and by hand

    def initial(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module().double()

    def train(self, wrap: Callable[..., Any], devices: Sequence[str], rank: int) -> Any:
        """The wrapped model after training, with the gradients of the last step still there."""
        model = wrap(self.place(self.initial(), devices), **self.options(devices))
        self.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            self.backward(model, self.batch(rank, step).to(devices[0]), rank, step)
            optimizer.step()
        return model

    def train_by_hand(self, world: int) -> nn.Module:
        """The same on the CPU; buffers continue from rank 0's, as when rank 0 broadcasts them."""
        model = self.initial()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(STEPS):
            replicas = [copy.deepcopy(model) for _ in range(world)]
            for rank, replica in enumerate(replicas):
                replica.zero_grad()
                self.backward(replica, self.batch(rank, step), rank, step)
            for name, parameter in model.named_parameters():
                gradients = [replica.get_parameter(name).grad for replica in replicas]
                parameter.grad = sum(_dense(g, parameter) for g in gradients) / world
            for name, buffer in model.named_buffers():
                buffer.copy_(replicas[0].get_buffer(name))
            optimizer.step()
        return model


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


class NoDeviceIds(Scenario):
    def options(self, devices):
        return {"bucket_cap_mb": 0.01}


class OutputDevice(Scenario):
    def options(self, devices):
        return {**super().options(devices), "output_device": torch.device(devices[0]).index}


class BucketViews(Scenario):
    parameter_copies = 2

    def options(self, devices):
        return {**super().options(devices), "gradient_as_bucket_view": True}


class StaticGraph(Scenario):
    def options(self, devices):
        return {**super().options(devices), "static_graph": True}


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, value: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](value))


class UnusedParameters(Scenario):
    """Each rank takes a branch of its own in each step; one branch is used by nobody."""

    def module(self):
        return _Branches()

    def options(self, devices):
        return {**super().options(devices), "find_unused_parameters": True}

    def forward(self, model, batch, rank, step):
        return model(batch, (rank + step) % 2)


class _OnTwo(nn.Module):
    """Two halves, each on its own device; outputs and gradients cross between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value.to(self.first.weight.device)).tanh()
        return self.second(hidden.to(self.second.weight.device))


class TwoDevices(Scenario):
    devices_per_rank = 2

    def module(self):
        return _OnTwo()

    def place(self, module, devices):
        module.first.to(devices[0])
        module.second.to(devices[1])
        return module

    def options(self, devices):
        return {"bucket_cap_mb": 0.01}


class HostAndDevice(TwoDevices):
    """The first half stays on the host, the second is on the device."""

    devices_per_rank = 1
    refused_by: ClassVar = {"stock": (ValueError, "same type of devices")}

    def place(self, module, devices):
        module.second.to(devices[0])
        return module


class NoSync(Scenario):
    """Two micro-batches; only the second one is followed by an exchange."""

    def backward(self, model, batch, rank, step):
        silent = model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()
        with silent:
            super().backward(model, batch[:2], rank, step)
        super().backward(model, batch[2:], rank, step)


class Buffers(Scenario):
    def module(self):
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
        )


class Checkpointing(Scenario):
    """The middle is recomputed in backward."""

    def module(self):
        return _Checkpointed()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return self.second(checkpoint(self.middle, self.first(value), use_reentrant=False))


class Autocast(Scenario):
    """Forward in bfloat16, parameters and gradients in float32."""

    relative_error = 0.05

    def initial(self):
        return super().initial().float()

    def batch(self, rank, step):
        return super().batch(rank, step).float()

    def forward(self, model, batch, rank, step):
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            output = model(batch)
        assert output.dtype == torch.bfloat16
        return output


class OwnHook(Scenario):
    """A hook that divides, exchanges asynchronously and works on the result in the Future's
    callback.
    """

    def prepare(self, model):
        model.register_comm_hook(dist.group.WORLD, _halves)


def _halves(group, bucket):  # stock takes no annotations but its own classes
    sent = bucket.buffer().div_(2)
    work = dist.all_reduce(sent, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(2).div_(group.size()))


class CompressHook(Scenario):
    relative_error = 0.05

    def prepare(self, model):
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)


class Recurrent(Scenario):
    def module(self):
        return _Recurrent()

    def batch(self, rank, step):
        return torch.randn(BATCH, 5, 8, generator=self.generator(rank, step), dtype=torch.float64)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.lstm(value)[0][:, -1])


class SparseGradients(Scenario):
    skipped: ClassVar = {("stock", "cuda"): "NCCL has no sparse all-reduce"}

    def module(self):
        return nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, 4))

    def batch(self, rank, step):
        return torch.randint(0, 50, (BATCH, 3), generator=self.generator(rank, step))


SCENARIOS: dict[str, Scenario] = {
    "device_ids": Scenario(),
    "no device_ids": NoDeviceIds(),
    "output_device": OutputDevice(),
    "gradients as bucket views": BucketViews(),
    "static graph": StaticGraph(),
    "unused parameters": UnusedParameters(),
    "two devices": TwoDevices(),
    "host and device": HostAndDevice(),
    "no_sync": NoSync(),
    "buffers": Buffers(),
    "checkpointing": Checkpointing(),
    "autocast": Autocast(),
    "own communication hook": OwnHook(),
    "fp16 communication hook": CompressHook(),
    "lstm": Recurrent(),
    "sparse gradients": SparseGradients(),
}
