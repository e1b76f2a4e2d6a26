"""A program may give a gradient other memory, or a parameter other values: later averages are right
all the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os

import pytest
import torch

import paceline
from paceline.ddp import shm_transport
from tests.harness import init_group, run_ranks

STEPS, CHANGED_AFTER = 4, 1  # the plan changes once, after the first step


@pytest.fixture(
    params=[("gloo", 25), ("gloo", 1e-6), ("paceline", 25), ("paceline", 1e-6), ("in place", 25)],
    ids=lambda one: f"{one[0]}-{'one bucket' if one[1] == 25 else 'many buckets'}",
)
def ranks(request):
    transport, cap = request.param
    env = {"TRANSPORT": transport, "BUCKET_CAP_MB": str(cap)}
    return functools.partial(run_ranks, 2, env=env, timeout=110)


def join_group():
    transport = os.environ["TRANSPORT"]
    if transport == "in place":
        shm_transport._IN_PLACE_FROM_BYTES = 0
        transport = "paceline"
    init_group(transport)


class Net(torch.nn.Module):
    """Square weights of one shape, so that gradients can be exchanged and transposed."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 2)

    def forward(self, x):
        seen = self.conv(x).flatten(1)[:, :6]
        return self.last(self.second(torch.tanh(self.first(seen))))


def gradients(net):
    return [parameter.grad for parameter in net.parameters()]


def halve_data(net):
    for gradient in gradients(net):
        gradient.data = gradient.data * 0.5


def exchange_data(net):
    one, other = net.first.weight.grad, net.second.weight.grad
    one.data, other.data = other.data, one.data


def exchange_gradients(net):
    one, other = net.first.weight, net.second.weight
    one.grad, other.grad = other.grad, one.grad


def share_one_memory(net):
    net.second.weight.grad.data = net.first.weight.grad.data


def empty_and_fill(net):
    for parameter in net.parameters():
        parameter.grad.resize_(0).set_(torch.zeros_like(parameter))


def each(change):
    """Apply a change to every gradient."""

    def to_all(net):
        for gradient in gradients(net):
            change(gradient)

    return to_all


def reassign_values(net):
    """What moving averages, flat parameters and swaps of weights do."""
    for parameter in net.parameters():
        parameter.data = parameter.data.clone() * 0.9


def flatten_values(net):
    vector = torch.nn.utils.parameters_to_vector(net.parameters()).detach() * 0.9
    torch.nn.utils.vector_to_parameters(vector, net.parameters())


CHANGES = {
    "nothing": lambda net: None,
    "data halved": halve_data,
    "data of two exchanged": exchange_data,
    "two gradients exchanged": exchange_gradients,
    "two in one memory": share_one_memory,
    "replaced": lambda net: [
        setattr(parameter, "grad", parameter.grad.clone()) for parameter in net.parameters()
    ],
    "set_": each(lambda gradient: gradient.set_(gradient.clone())),
    "slice of a larger one": each(
        lambda gradient: setattr(gradient, "data", torch.stack([gradient] * 2)[1])
    ),
    "transposed in place": lambda net: net.first.weight.grad.t_(),
    "data transposed": lambda net: setattr(
        net.first.weight.grad, "data", net.first.weight.grad.data.t()
    ),
    "emptied and filled": empty_and_fill,
    "to_empty": lambda net: (
        net.to_empty(device="cpu"),
        [torch.nn.init.constant_(parameter, 0.1) for parameter in net.parameters()],
        # What to_empty leaves in the gradients is undefined, in stock too.
        net.zero_grad(),
    ),
    "share_memory": lambda net: net.share_memory(),
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "float, cpu": lambda net: net.float().cpu(),
    "there and back": lambda net: net.double().float(),
    "values reassigned": reassign_values,
    "values as one vector": flatten_values,
    "values loaded": lambda net: net.load_state_dict(net.state_dict()),
    "detached": each(lambda gradient: gradient.detach_()),
}


def batch(step, rank):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank, world, change, to_none, micro_batches):
    """The largest error of a gradient, against one process with the same history."""
    torch.manual_seed(0)
    net = Net()
    model = paceline.DistributedDataParallel(
        net, bucket_cap_mb=float(os.environ["BUCKET_CAP_MB"]), average="ranks"
    )
    error = 0.0
    for step in range(STEPS):
        net.zero_grad(set_to_none=to_none)
        reference = copy.deepcopy(net)
        for micro_batch, r in itertools.product(range(micro_batches), range(world)):
            loss = reference(batch(100 * micro_batch + step, r)).square().mean()
            (loss / world).backward()
        for micro_batch in range(micro_batches):
            model.require_backward_grad_sync = micro_batch == micro_batches - 1
            model(batch(100 * micro_batch + step, rank)).square().mean().backward()
        for found, expected in zip(net.parameters(), reference.parameters(), strict=True):
            difference = (found.grad - expected.grad).abs().max() / expected.grad.abs().max()
            error = max(error, float(difference))
        if step == CHANGED_AFTER:
            change(net)
    return error


def all_changes(rank, world):
    join_group()
    return {
        (name, to_none, micro_batches): train(rank, world, CHANGES[name], to_none, micro_batches)
        for name in CHANGES
        for to_none, micro_batches in ((True, 1), (False, 2))
        if to_none or name != "two in one memory"  # both would gather there, in stock too
    }


def test_gradients_stay_right_whatever_becomes_of_their_memory(ranks):
    for errors in ranks(all_changes):
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


def delayed_parameters(rank, world):
    """They lie in one buffer of their own."""
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.eye_(net[0].weight)
    model = paceline.DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("1.weight", net[1].weight)],
        param_to_hook_all_reduce=net[0].weight,
    )
    for change in (halve_data, CHANGES["replaced"], CHANGES["set_"], CHANGES["nothing"]):
        net.zero_grad(set_to_none=False)
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert net[1].weight.grad.tolist() == [[1.5, 1.5]]
        change(net)


@pytest.mark.parametrize("transport", ["gloo", "paceline"])
def test_so_do_those_whose_average_is_delayed(transport):
    run_ranks(2, delayed_parameters, env={"TRANSPORT": transport})
