"""`paceline.optim.Sharded`: any torch optimizer, each rank stepping what it owns. The same bits as
that optimizer on every rank.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.optim import Sharded, shared_step
from paceline.optim.sharded import balanced_owners
from tests.harness import init_group, run_ranks

CLASSES = {
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
}


class Counting(torch.optim.Optimizer):
    """State that is no tensor, and tensors that are replaced in each step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["last"] = parameter.grad.clone() / state["calls"]
                with torch.no_grad():
                    parameter.add_(state["last"], alpha=-group["lr"])


CLASSES["Counting"] = (Counting, {"lr": 0.1})


def net(bias=True):
    shared_step._WORTH_SHARING_BYTES = 0
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 40, bias=bias), torch.nn.Tanh(), torch.nn.Linear(40, 3, bias=bias)
    )


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, rank, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def assert_same_states(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert list(state) == list(other["state"][key])
        for name, value in state.items():
            found = other["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, found), (key, name)
            else:
                assert value == found


def assert_same_weights(one, other):
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def plain_and_sharded(name, **options):
    """The same model twice, with the class's own optimizer and with Sharded."""
    kind, settings = CLASSES[name]
    for sharded in (False, True):
        # Muon takes matrices only.
        model = paceline.DistributedDataParallel(net(bias=name != "Muon"), check_replicas_every=1)
        if sharded:
            yield model, Sharded(kind, model.parameters(), **settings, **options)
        else:
            yield model, kind(model.parameters(), **settings)


def train_all_classes(rank, world):
    init_group("paceline")
    for name in CLASSES:
        models, states = [], []
        for model, optimizer in plain_and_sharded(name):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for step in range(4):
                train(model, optimizer, rank, 1, step)
                scheduler.step()
            models.append(model)
            if rank == 0 or not isinstance(optimizer, Sharded):
                states.append(optimizer.state_dict())  # on one rank alone
        assert optimizer._shared is not None
        owned = sum(parameter in optimizer.state for parameter in model.parameters())
        assert owned < len(list(model.parameters()))
        assert_same_weights(*models)
        if rank == 0:
            assert_same_states(*states)
        dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits_as_the_optimizer_itself(world):
    run_ranks(world, train_all_classes)


def checkpoints(rank, world):
    """Of the class load into Sharded and the other way round; copies and pickles go on."""
    init_group("paceline")
    for name in ("AdamW", "Counting"):
        kind, settings = CLASSES[name]
        (plain_model, plain), (model, sharded) = plain_and_sharded(name)
        train(plain_model, plain, rank, 2)
        train(model, sharded, rank, 1)  # shares something before
        model.load_state_dict(plain_model.state_dict())
        sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert_same_states(plain.state_dict(), sharded.state_dict())
        train(plain_model, plain, rank, 2, start=2)
        train(model, sharded, rank, 2, start=2)
        assert_same_weights(plain_model, model)
        assert_same_states(plain.state_dict(), sharded.state_dict())
        back = kind(plain_model.parameters(), **settings)
        back.load_state_dict(pickle.loads(pickle.dumps(sharded.state_dict())))
        train(plain_model, back, rank, 2, start=4)
        train(model, sharded, rank, 2, start=4)
        assert_same_weights(plain_model, model)
        twin = pickle.loads(pickle.dumps(sharded))
        assert_same_states(back.state_dict(), twin.state_dict())
        assert_same_states(back.state_dict(), copy.deepcopy(sharded).state_dict())
        train(plain_model, back, rank, 2, start=6)
        train(model, sharded, rank, 2, start=6)
        assert_same_weights(plain_model, model)


def groups_added_and_plans(rank, world):
    init_group("paceline")
    calls = []

    def plan(parameters, ranks):
        calls.append((len(parameters), ranks))
        return [ranks - 1] * len(parameters)

    models = []
    for sharded in (False, True):
        model = paceline.DistributedDataParallel(net())
        first, *others = model.parameters()
        others[-1].requires_grad_(False)
        if sharded:
            optimizer = Sharded(torch.optim.AdamW, [first], lr=0.01, plan=plan)
        else:
            optimizer = torch.optim.AdamW([first], lr=0.01)
        optimizer.add_param_group({"params": others, "lr": 0.1})
        train(model, optimizer, rank, 3)
        others[-1].requires_grad_(True)
        train(model, optimizer, rank, 2, start=3)
        with torch.no_grad():
            first.mul_(0.5)
        train(model, optimizer, rank, 2, start=5)
        models.append(model)
    assert_same_weights(*models)
    assert optimizer._shared is not None
    assert calls == [(4, world)]
    assert (first in optimizer.state) == (rank == world - 1)
    assert len(optimizer.state_dict()["state"]) == 4
    with pytest.raises(paceline.ConfigError, match="plan of Sharded"):
        train(model, Sharded(torch.optim.SGD, model.parameters(), plan=lambda *_: [7]), rank, 1)


def ranks_without_data(rank, world):
    """Others step what the absent rank owns, and it goes on from there."""
    init_group("paceline")
    for name in ("AdamW", "Counting"):
        models, states = [], []
        for model, optimizer in plain_and_sharded(name):
            train(model, optimizer, rank, 5 if rank == 0 else 2)
            model.no_more_data(optimizer)
            train(model, optimizer, rank, 2, start=10)
            models.append(model)
            states.append(optimizer.state_dict())
        assert optimizer._shared is not None
        assert_same_weights(*models)
        assert_same_states(*states)


def local_steps(rank, world):
    init_group("paceline")
    models, states = [], []
    for model, optimizer in plain_and_sharded("AdamW"):
        train(model, optimizer, rank, 2)
        with model.no_sync():
            train(model, optimizer, rank, 2, start=2)
        models.append(model.module)
        states.append(optimizer.state_dict())
    assert optimizer._shared is None
    assert_same_weights(*models)
    assert_same_states(*states)


def scaled_with_closure(rank, world):
    init_group("paceline")
    models = []
    for model, optimizer in plain_and_sharded("SGD"):
        seen = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(batch(rank, 9)).square().mean()
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), torch.Tensor)
        assert len(seen) == 4
        models.append(model)
    assert_same_weights(*models)


@pytest.mark.parametrize(
    "scene",
    [checkpoints, groups_added_and_plans, ranks_without_data, local_steps, scaled_with_closure],
)
def test_life_of_a_sharded_optimizer(scene):
    run_ranks(2, scene)


def test_in_one_process_it_is_that_optimizer():
    module, twin = net(), net()
    plain = torch.optim.RMSprop(module.parameters())
    sharded = Sharded(torch.optim.RMSprop, twin.parameters())
    for one, optimizer in ((module, plain), (twin, sharded)):
        train(one, optimizer, 0, 3)
    assert_same_weights(module, twin)
    assert_same_states(plain.state_dict(), sharded.state_dict())
    sharded.state = torch.optim.RMSprop(twin.parameters()).state
    assert not sharded.inner.state


def test_what_cannot_be_sharded_is_refused():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(paceline.ConfigError, match="LBFGS"):
        Sharded(torch.optim.LBFGS, parameters)
    with pytest.raises(TypeError, match="class of an optimizer"):
        Sharded(torch.optim.SGD(parameters), parameters)


def test_owners_have_about_as_many_bytes():
    sizes = [100, 1, 50, 50, 3]
    parameters = [torch.empty(size) for size in sizes]
    assert balanced_owners(parameters, 2) == [0, 1, 1, 1, 0]
    assert balanced_owners([], 3) == []
