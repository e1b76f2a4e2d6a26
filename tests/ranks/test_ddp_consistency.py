"""Ranks with different models are told at once, on every rank, by name. Each case is one that
torch lets through or reports by index on one rank only."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch

import paceline
from tests.harness import init_group, run_ranks


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


class Net(torch.nn.Module):
    def __init__(self, names=("a", "b"), head=4, dtype=None):
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(3, 3))
        self.head = torch.nn.Linear(3, head)
        self.register_buffer("scale", torch.ones(2))
        self.to(dtype)

    def forward(self, x):
        return self.head(self.b(self.a(x)))


def shape(rank):
    return Net(head=4 + rank)


def count(rank):
    return Net(names=("a", "b", "c")[: 2 + rank])


def order(rank):
    return Net(names=("a", "b") if rank == 0 else ("b", "a"))


def dtype(rank):
    return Net(dtype=[torch.float32, torch.float64][rank])


def frozen(rank):
    net = Net()
    net.a.weight.requires_grad_(rank == 0)
    return net


def strides(rank):
    net = Net()
    if rank:
        net.a.weight = torch.nn.Parameter(net.a.weight.detach().t().contiguous().t())
    return net


def buffer(rank):
    net = Net()
    net.scale = torch.ones(2 + rank)
    return net


def nothing_trains(rank):
    return Net().requires_grad_(rank == 0)


CASES = {
    nothing_trains: "head.weight: rank 0 (4, 3) float32, "
    "rank 1 (4, 3) float32, requires_grad=False",
    shape: "head.weight: rank 0 (4, 3) float32, rank 1 (5, 3) float32",
    count: "c.weight: rank 0 missing, rank 1 (3, 3) float32",
    order: "registered in another order, first at position 2: rank 0 a.weight, rank 1 b.weight",
    dtype: "a.weight: rank 0 (3, 3) float32, rank 1 (3, 3) float64",
    frozen: "a.weight: rank 0 (3, 3) float32, rank 1 (3, 3) float32, requires_grad=False",
    strides: "a.weight: rank 0 (3, 3) float32, rank 1 (3, 3) float32, strides (1, 3)",
    buffer: "buffer scale: rank 0 (2,) float32, rank 1 (3,) float32",
}


def construct(rank, world, build):
    init_group(os.environ["BACKEND"])
    net = build(rank)
    started = time.monotonic()
    with pytest.raises(paceline.MismatchError) as caught:
        paceline.DistributedDataParallel(net)
    assert set(caught.value.values) == set(range(world))
    # the group is still good
    paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("build", CASES, ids=lambda f: f.__name__)
def test_a_different_model_is_named_on_every_rank(ranks, build):
    for rank, (message, seconds) in enumerate(ranks(2, construct, build)):
        assert CASES[build] in message
        assert f"this is rank {rank}" in message
        assert seconds < 5


ARGUMENTS = {
    "average": ("samples", "ranks"),
    "find_unused_parameters": (False, True),
    "forward_sync_buffers": (True, False),
    "bucket_cap_mb": (0.5, 25),
    "init_sync": (True, False),
    "check_replicas_every": (3, None),
    "skip_all_reduce_unused_params": (False, True),
}


def differing_arguments(rank, world):
    init_group(os.environ["BACKEND"])
    for name, values in ARGUMENTS.items():
        with pytest.raises(paceline.MismatchError, match=f"argument {name}: rank 0 .*, rank 1 "):
            paceline.DistributedDataParallel(torch.nn.Linear(2, 2), **{name: values[rank]})


def test_different_arguments_are_named(ranks):
    ranks(2, differing_arguments)


def drift(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(Net(), check_replicas_every=3)
    for step in range(5):
        model(torch.ones(1, 3)).sum().backward()
        if step == 3 and rank == 1:
            with torch.no_grad():
                model.module.b.weight[1, 1] += 1e-6
    with pytest.raises(paceline.MismatchError) as caught:
        model(torch.ones(1, 3)).sum().backward()
    return str(caught.value)


def test_replicas_that_drift_apart_are_named(ranks):
    for message in ranks(2, drift):
        assert "the replicas drifted apart: b.weight differ between rank 0 and rank 1" in message


def swap(net):
    net.a.weight.data, net.b.weight.data = net.b.weight.data, net.a.weight.data


def cancel(net):
    bits = net.a.weight.data.view(torch.int32)
    bits[0, 0] += 1000
    bits[0, 1] -= 1000


DRIFTS = {
    "rows exchanged": lambda net: net.a.weight.copy_(net.a.weight.flip(0)),
    "transposed": lambda net: net.a.weight.copy_(net.a.weight.t().clone()),
    "two parameters exchanged": swap,
    "changes that cancel": cancel,
    "signs": lambda net: net.a.weight[0, :2].neg_(),
    "replaced": lambda net: setattr(net.a, "weight", torch.nn.Parameter(torch.zeros(3, 3))),
    "removed": lambda net: delattr(net, "a"),
}


def drifts(rank, world):
    init_group(os.environ["BACKEND"])
    unseen = []
    for name, change in DRIFTS.items():
        net = Net()
        model = paceline.DistributedDataParallel(net)
        model.compare_replicas()
        with torch.no_grad():
            if rank == 1:
                change(net)
        try:
            model.compare_replicas()
            unseen.append(name)
        except paceline.MismatchError as error:
            if "a.weight" not in str(error):
                unseen.append(f"{name}: {error}")
    return unseen


def test_whatever_makes_replicas_differ_is_seen(ranks):
    assert ranks(2, drifts) == [[], []]


def no_false_alarm(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 3), check_replicas_every=1)
    for step in range(5):
        model.zero_grad()
        model(torch.full((1, 3), float(rank + step))).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.1)


def test_equal_replicas_raise_no_alarm(ranks):
    ranks(3, no_false_alarm)
