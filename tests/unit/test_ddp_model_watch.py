"""What of a module's changes concerns its plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.ddp.model_watch import ModelWatch, PlannedParameter, changes_between


def network():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def planned(net):
    return [PlannedParameter.of(*named) for named in net.named_parameters()]


def watch(net):
    return ModelWatch(net, planned(net), relies_on_hooks=True)


def move_the_last_to_an_empty_table(net):
    """As many entries as before, and all that are left where they were."""
    net[1].bias = net[2].bias
    del net[2].bias


def swap(net):
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(net[0].weight.detach()))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.append(nn.ReLU()),
        lambda net: net.__delitem__(1),
        lambda net: net.__setitem__(1, nn.ReLU()),
        lambda net: setattr(net[2], "bias", nn.Parameter(net[2].bias.detach())),
        lambda net: setattr(net[2], "bias", None),
        lambda net: setattr(net[1], "scale", nn.Parameter(torch.ones(1))),
        lambda net: setattr(net[0], "child", nn.Identity()),
        lambda net: net[2].double(),
        lambda net: setattr(net[2].weight, "data", torch.ones(3, 2)),
        move_the_last_to_an_empty_table,
        swap,
    ],
)
def test_a_change_shows_until_there_is_another_plan(change):
    net = network()
    watched = watch(net)
    assert not watched.has_changed()
    change(net)
    assert watched.has_changed()
    assert watched.has_changed()
    assert not watch(net).has_changed()


def test_other_values_are_no_change():
    net = network()
    watched = watch(net)
    net.load_state_dict(network().state_dict())
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = torch.ones_like(parameter)
    net.train(False).requires_grad_(False)
    assert not watched.has_changed()


def test_changes_are_named_in_the_order_of_the_module():
    net = network()
    net[0].bias.requires_grad_(False)
    before = [entry for entry in planned(net) if entry.parameter.requires_grad]
    frozen = [net[0].bias]
    net[0].weight = nn.Parameter(torch.ones(2, 2))
    net[0].bias.requires_grad_(True)
    net[2].weight.data = net[2].weight.data.double()
    del net[2].bias
    net.append(nn.Linear(1, 1, bias=False))
    trainable = dict(net.named_parameters())
    assert changes_between(before, trainable, net.parameters(), frozen) == [
        "0.weight was replaced",
        "0.bias was unfrozen",
        "2.weight was (1, 2) float32 on cpu and is (1, 2) float64 on cpu",
        "3.weight is new",
        "2.bias was removed",
    ]


def test_what_is_not_trained_is_no_change():
    net = network()
    before = planned(net)
    net[0].weight.requires_grad_(False)
    net.average = network().requires_grad_(False)
    net.first = net[0]
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert changes_between(before, trainable, net.parameters(), ()) == []
