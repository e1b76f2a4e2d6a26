"""The parameters of a wrapped model are not those it was wrapped with: gradients are averaged all
the same, or every rank is told by name what is not alike.
"""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import paceline
from tests.harness import init_group, run_ranks

STEPS = 5


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, 2, env={"BACKEND": request.param}, timeout=110)


def join_group():
    init_group(os.environ["BACKEND"])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def assign(net):
    values = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(values, assign=True)


def reshape(net):
    net[2].weight.data, net[2].bias.data = torch.ones(5, 6), torch.ones(5)


def insert_adapter(net):
    """As LoRA does: what there was is frozen, what is new is a child of it."""
    net[0].requires_grad_(False)
    net[2].adapter = nn.Linear(6, 6)
    net[2].register_forward_hook(lambda layer, _, output: output + layer.adapter(output))


def by_swapping(change):
    def swap(net):
        torch.__future__.set_swap_module_params_on_conversion(True)
        net.zero_grad()
        change(net)
        torch.__future__.set_swap_module_params_on_conversion(False)

    return swap


CHANGES = {
    "nothing": lambda net: None,
    "loaded with assign": assign,
    "head replaced": lambda net: net.__setitem__(2, nn.Linear(6, 6)),
    "layer appended": lambda net: net.append(nn.Linear(6, 6)),
    "layer removed": lambda net: net.__delitem__(2),
    "layer inserted": lambda net: net.insert(1, nn.Linear(6, 6)),
    "parameter deleted": lambda net: setattr(net[0], "bias", None),
    "parameter assigned": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(6, 6))),
    "scalar replaced by an equal one": lambda net: setattr(
        net[2], "bias", nn.Parameter(net[2].bias.detach().clone())
    ),
    "tied": lambda net: setattr(net[2], "weight", net[0].weight),
    "adapter": insert_adapter,
    "double": lambda net: net.double(),
    "bfloat16 and back": lambda net: net.bfloat16().float(),
    "double, by swapping": by_swapping(lambda net: net.double()),
    "float, by swapping": by_swapping(lambda net: net.float()),
    "loaded, by swapping": by_swapping(lambda net: net.load_state_dict(net.state_dict())),
    "other shape": reshape,
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "pruned": lambda net: nn.utils.prune.l1_unstructured(net[0], "weight", 0.3),
    "head unfrozen": lambda net: net[2].requires_grad_(True),
}


class Wrapped(nn.Module):
    """Takes its inputs in whatever dtype it has."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.to(next(self.net.parameters()).dtype))


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def averages(net, world, step):
    """The gradients of all ranks' batches, in one process."""
    loss = sum(net(batch(step, r)).square().mean() for r in range(world)) / world
    return torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])


def check_step(model, world, rank, step):
    """One step of a small optimizer of our own; returns the names of gradients that are wrong."""
    net = model.module
    net.zero_grad()
    model(batch(step, rank)).square().mean().backward()
    expected = averages(net, world, step)
    found = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}
    wrong = [
        name
        for (name, parameter), true in zip(found, expected, strict=True)
        if not (parameter.grad - true).abs().max() <= tolerance[true.dtype] * true.abs().max()
    ]
    with torch.no_grad():
        for _, parameter in found:
            parameter.sub_(parameter.grad, alpha=0.01)
    return wrong


def train_through(change, late, rank, world, **arguments):
    net = Wrapped(network())
    net.net[2].requires_grad_(change != "head unfrozen")
    model = paceline.DistributedDataParallel(net, average="ranks", **arguments)
    wrong = {}
    for step in range(STEPS):
        if step == late:
            torch.manual_seed(100 + rank)  # what is new comes with other values on each rank
            CHANGES[change](net.net)
        if bad := check_step(model, world, rank, step):
            wrong[step] = bad
    model.compare_replicas()
    with torch.no_grad():
        if rank == 1:
            next(p for p in net.parameters() if p.requires_grad).flatten()[0] += 1
    try:
        model.compare_replicas()
    except paceline.MismatchError:
        return wrong
    return wrong | {"drift": "unseen"}


def all_changes(rank, world):
    join_group()
    return {
        (change, late): train_through(change, late, rank, world)
        for change in CHANGES
        for late in (0, 1, 3)  # before the first step, before the plan made from it, after that
    }


def test_gradients_are_averaged_whatever_becomes_of_the_parameters(ranks):
    for wrong in ranks(all_changes):
        assert {case: names for case, names in wrong.items() if names} == {}


def with_features(rank, world):
    join_group()
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    wrong = {
        "mixed precision": train_through(
            "head replaced", 2, rank, world, mixed_precision=precision
        ),
        "unused parameters": train_through(
            "head replaced", 2, rank, world, find_unused_parameters=True
        ),
        "views": train_through("double", 2, rank, world, gradient_as_bucket_view=True),
        "small buckets": train_through("layer appended", 2, rank, world, bucket_cap_mb=1e-6),
    }
    return {feature: names for feature, names in wrong.items() if names}


def test_features_survive_it(ranks):
    assert ranks(with_features) == [{}, {}]


def on_one_rank(rank, world, change):
    """Only rank 1 changes its model; afterwards rank 0 follows, and both go on."""
    join_group()
    net = Wrapped(network())
    net.net[2].requires_grad_(change != "head unfrozen")
    model = paceline.DistributedDataParallel(net, average="ranks")
    for step in range(2):
        assert not check_step(model, world, rank, step)
    if rank == 1:
        CHANGES[change](net.net)
    with pytest.raises(paceline.MismatchError) as caught:
        check_step(model, world, rank, 2)
    if rank == 0:
        CHANGES[change](net.net)
    for parameter in net.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    assert not check_step(model, world, rank, 3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("head unfrozen", "net.2.weight was unfrozen; net.2.bias was unfrozen"),
        ("head replaced", "net.2.weight was replaced"),
        ("double", "net.0.weight was (6, 6) float32 on cpu and is (6, 6) float64 on cpu"),
        ("layer appended", "net.3.weight is new"),
        ("layer removed", "net.2.weight was removed"),
    ],
)
def test_a_change_on_one_rank_is_named_on_all_and_can_be_mended(ranks, change, named):
    for message in ranks(on_one_rank, change):
        assert "rank 0 is at backward, rank 1 is at a new plan" in message
        assert named in message
        assert "change the model's parameters alike" in message


def differently(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(network())
    model.module.append(nn.Linear(6, 4 + rank))
    with pytest.raises(paceline.MismatchError, match=r"3.weight: rank 0 \(4, 6\).*rank 1 \(5, 6\)"):
        model(batch(0, rank))


def test_changes_that_are_not_alike_are_named_on_all_ranks(ranks):
    ranks(differently)


def without_concern(rank, world):
    """What one rank alone may do to its module: nothing of it is averaged."""
    join_group()
    net = Wrapped(network())
    model = paceline.DistributedDataParallel(net, average="ranks")
    reducer = model.reducer
    for step in range(4):
        if rank == 0 and step == 1:
            net.average = copy.deepcopy(net.net).requires_grad_(False)
        if rank == 1 and step == 2:
            net.net[0].probe = nn.Identity()
            net.net[2].weight.requires_grad_(True)
        if rank == 0 and step == 3:
            net.net[0].weight.data = net.net[0].weight.data.clone()
        assert not check_step(model, world, rank, step)
    assert model.reducer is reducer


def test_what_trains_no_parameter_is_each_rank_s_own_business(ranks):
    ranks(without_concern)


def out_of_data(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(network())
    model(batch(0, rank)).sum().backward()
    if rank == 0:
        model.module.append(nn.Linear(6, 6))
    go_on = model.no_more_data if rank == 1 else functools.partial(model, batch(1, rank))
    with pytest.raises(paceline.ConfigError, match="rank 1 ran out of data, but the model was"):
        go_on()


def test_a_rank_without_data_cannot_follow(ranks):
    ranks(out_of_data)


def one_rank_alone(rank, world):
    init_group("paceline")
    net = Wrapped(network())
    model = paceline.DistributedDataParallel(net)
    for change in (None, "head replaced", "double"):
        if change is not None:
            CHANGES[change](net.net)
        net.zero_grad()
        reference = copy.deepcopy(net)
        model.require_backward_grad_sync = False
        model(batch(0, 0)).sum().backward()
        model.require_backward_grad_sync = True
        model(batch(1, 0)).sum().backward()
        (reference(batch(0, 0)).sum() + reference(batch(1, 0)).sum()).backward()
        for found, true in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(found.grad, true.grad)


def test_one_rank_weighs_what_it_has_now():
    run_ranks(1, one_rank_alone)
