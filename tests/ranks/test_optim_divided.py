"""`paceline.optim` with shared=True where ranks share no memory: each has the state of its part of
the parameters, steps it, and gets the others' parts. The same bits as every rank stepping for
itself.
"""

from __future__ import annotations

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.optim import divided_step, shared_step
from tests.harness import RankDied, init_group, run_ranks
from tests.harness.hosts import enter, simulated_hosts

OPTIMIZERS = {
    "SGD": lambda p, **o: paceline.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda p, **o: paceline.optim.Adam(p, amsgrad=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: paceline.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, **o: paceline.optim.Adagrad(p, lr_decay=0.1, **o),
}


def net(width=37):
    """Small, and divided all the same, in several portions; the longest piece is broadcast."""
    shared_step._WORTH_SHARING_BYTES = 0
    divided_step._BUFFER_BYTES = 256
    divided_step._LONG_PIECE_BYTES = 300
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )


def batch(rank, step, samples=4):
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, rank, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def wrapped(module=None, **options):
    return paceline.DistributedDataParallel(net() if module is None else module, **options)


def bits(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert sorted(one["state"]) == sorted(other["state"])
    for key, values in one["state"].items():
        assert list(other["state"][key]) == list(values)
        for name, value in values.items():
            assert other["state"][key][name].dtype == value.dtype
            assert torch.equal(other["state"][key][name], value), name


def state_elements(optimizer):
    """How many numbers of state this rank keeps, beside the count of steps."""
    return sum(
        value.numel()
        for states in (optimizer.state, optimizer._divided._part.state)
        for state in states.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


# --- the same bits --------------------------------------------------------------------------------
def train_both_ways(rank, world, name, backend="gloo"):
    init_group(backend)
    results = []
    for shared in (False, True):
        model = wrapped(check_replicas_every=1)
        optimizer = OPTIMIZERS[name](model.parameters(), shared=shared)
        train(model, optimizer, rank, 5)
        results.append((bits(model.parameters()), optimizer.state_dict()))
    whole = sum(
        value.numel()
        for state in results[0][1]["state"].values()
        for value in state.values()
        if value.dim()
    )
    assert abs(state_elements(optimizer) * world / whole - 1) < 0.5
    (plain, plain_state), (together, state) = results
    assert_same(plain, together)
    assert_same_state(plain_state, state)
    return together


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_every_rank_for_itself(name):
    results = run_ranks(2, train_both_ways, name)
    assert_same(results[0], results[1])


def test_three_ranks():
    results = run_ranks(3, train_both_ways, "AdamW")
    for result in results[1:]:
        assert_same(results[0], result)


# --- clipping -------------------------------------------------------------------------------------
def clipped(rank, world, way):
    """As `clip_grad_norm_`, with a parameter that every rank steps for itself."""
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        alone = torch.nn.Parameter(torch.ones(4))
        parameters = [*model.parameters(), alone]
        own = {"shared": True, "max_norm": 0.05} if shared else {"shared": False}
        optimizer = OPTIMIZERS["AdamW"](parameters, **own)

        def steps(count, start=0, *, model=model, alone=alone, optimizer=optimizer, own=own):
            for step in range(start, start + count):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                alone.grad = torch.ones(4) / 100
                if "max_norm" not in own:
                    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
                optimizer.step()

        if way == "join":
            with model.join():
                steps(4 if rank == 0 else 2)
        elif way == "scaled":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
            steps(4)
        else:
            steps(4)
        assert optimizer.is_divided == shared
        results.append(bits(model.parameters()))
    for plain, together in zip(*results, strict=True):
        assert torch.allclose(plain, together, rtol=0, atol=1e-6)
    unclipped = wrapped()
    train(unclipped, OPTIMIZERS["AdamW"](unclipped.parameters(), shared=False), rank, 4)
    assert not torch.allclose(next(unclipped.parameters()), results[1][0], rtol=0, atol=1e-4)
    return results[1]


@pytest.mark.parametrize("way", ["plain", "scaled", "join"])
def test_gradients_are_clipped_together(way):
    results = run_ranks(3 if way == "plain" else 2, clipped, way)
    for result in results[1:]:
        assert_same(results[0], result)


def norms_that_differ(rank, world):
    init_group("gloo")
    model = wrapped()
    alone = torch.nn.Parameter(torch.ones(4))
    optimizer = OPTIMIZERS["AdamW"]([*model.parameters(), alone], shared=True, max_norm=0.1)
    before = bits(model.parameters())
    model(batch(rank, 0)).square().mean().backward()
    alone.grad = torch.full((4,), 1.0 + rank)
    with pytest.raises(paceline.MismatchError, match="optimizer of their own"):
        optimizer.step()
    assert_same(before, bits(model.parameters()))


def test_norms_that_differ_are_refused_before_anything_is_changed():
    run_ranks(2, norms_that_differ)


# --- several hosts --------------------------------------------------------------------------------
@pytest.mark.netns
def test_several_hosts():
    def on_host(rank, world, hosts):
        enter(hosts[(0, 0, 1)[rank]])
        return train_both_ways(rank, world, "AdamW", "paceline")

    with simulated_hosts(2) as hosts:
        results = run_ranks(3, on_host, hosts, timeout=90)
    for result in results[1:]:
        assert_same(results[0], result)


def odd_layouts(rank, world):
    """Several types and layouts, parameters shorter than a line, without elements, and so many
    ranks that some have no piece of most.
    """
    init_group("gloo")

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.narrow = torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
            self.wide = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
            self.gaps = torch.nn.Parameter(torch.ones(8, 2)[:, 0])
            self.unused = torch.nn.Parameter(torch.ones(5))

        def forward(self, x):
            y = self.conv(x).sum() * self.scale + self.gaps.sum()
            return y + self.narrow.float().square().mean() + self.wide.float().square().mean()

    results = []
    for shared in (False, True):
        net()
        torch.manual_seed(0)
        model = wrapped(Odd(), find_unused_parameters=True)
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=shared)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 2 * 5 * 2).view(2, 2, 5, 5)).backward()
            optimizer.step()
        results.append((bits(model.parameters()), optimizer.state_dict()))
    assert_same(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])
    weight = model.module.conv.weight
    at = [id(parameter) for parameter in model.parameters()].index(id(weight))
    assert results[1][1]["state"][at]["exp_avg"].stride() == weight.stride()


def groups_frozen_and_foreign(rank, world):
    """A parameter that the model does not have, one frozen at first, a group that comes later,
    schedules.
    """
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        first, second, *others = model.parameters()
        foreign = torch.nn.Parameter(torch.ones(4))
        optimizer = paceline.optim.AdamW(
            [{"params": [first, foreign]}, {"params": others, "lr": 0.1, "betas": (0.5, 0.9)}],
            shared=shared,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        others[0].requires_grad_(False)
        for step in range(6):
            optimizer.zero_grad()
            foreign.grad = torch.ones(4)
            if step == 2:
                others[0].requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": [second], "lr": torch.tensor(0.05)})
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append((bits([*model.parameters(), foreign]), optimizer.state_dict()))
    assert_same(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])
    assert set(map(id, [first, second, *others])) == optimizer._divided._member_ids


def loading(rank, world):
    """A checkpoint loaded in mid-run; torch's own class goes on from it, and ours from torch's."""
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        optimizer = OPTIMIZERS["Adam"](model.parameters(), shared=shared)
        train(model, optimizer, rank, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, rank, 2, start=2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, rank, 3, start=2)
        results.append(bits(model.parameters()))
    assert_same(*results)
    stock = torch.optim.Adam(model.parameters(), amsgrad=True, weight_decay=0.1)
    stock.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(stock.state_dict())
    assert_same_state(optimizer.state_dict(), stock.state_dict())
    train(model, optimizer, rank, 1, start=9)
    assert optimizer._divided is not None
    assert copy.deepcopy(optimizer).state_dict()["state"][0]["step"] == 6


def checkpoints(rank, world, folder):
    """`paceline.save` and `load`; a load that fails on one rank leaves all as they were."""
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    paceline.save(folder / "x.pt", model=model, optimizer=optimizer, last={"position": 1})
    train(model, optimizer, rank, 2, start=2)
    went_on = bits(model.parameters()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises((paceline.PacelineError, ValueError), match="the needle"):
        paceline.load(folder / "x.pt", model=model, optimizer=optimizer, last=Last(rank == 1))
    assert optimizer.is_divided
    assert_same(bits(model.parameters()), went_on[0])
    assert_same_state(optimizer.state_dict(), went_on[1])
    paceline.load(folder / "x.pt", model=model, optimizer=optimizer)
    assert not optimizer.is_divided
    train(model, optimizer, rank, 2, start=2)
    assert_same(bits(model.parameters()), went_on[0])
    empty = OPTIMIZERS["AdamW"](model.parameters())
    optimizer.load_state_dict(empty.state_dict())
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, rank, 1)
    assert optimizer.state_dict()["state"][0]["step"].item() == 1


class Last:
    """Cannot be put back, so it is loaded last; and on one rank not at all."""

    def __init__(self, fails):
        self._fails = fails

    def load_state_dict(self, state):
        if self._fails:
            raise ValueError("the needle")


def test_checkpoints(tmp_path):
    run_ranks(2, checkpoints, tmp_path)


def replacing(rank, world):
    """The memory of parameters and gradients is the program's to replace."""
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped(check_replicas_every=1)
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=shared)
        for step in range(5):
            train(model, optimizer, rank, 1, start=step)
            for parameter in model.parameters():
                if step == rank:
                    parameter.data = parameter.data.clone()
                if step == 2:
                    parameter.data.clamp_(-0.1, 0.1)
        model(batch(rank, 8)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.t().contiguous().t()
        optimizer.step()
        results.append(bits(model.parameters()))
    assert_same(*results)
    model.double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(paceline.ConfigError, match="Make a new optimizer"):
        optimizer.step()


def closures_and_scales(rank, world):
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=shared)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(batch(rank, 7)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        results.append(bits([*model.parameters(), loss]))
    assert_same(*results)


def two_optimizers(rank, world):
    """One for each half of the parameters, then both for the same."""
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        first, second, *others = model.parameters()
        optimizers = [
            OPTIMIZERS["AdamW"]([first, second], shared=shared),
            OPTIMIZERS["SGD"]([*others, first], shared=shared),
        ]
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append(bits(model.parameters()))
    assert_same(*results)


def sparse_gradient(rank, world):
    init_group("gloo")
    net()
    model = wrapped(torch.nn.Embedding(9, 4, sparse=True))
    optimizer = OPTIMIZERS["SGD"](model.parameters(), shared=True)
    model(torch.tensor([rank])).sum().backward()
    with pytest.raises(paceline.ConfigError, match="cannot be divided"):
        optimizer.step()


def small_model(rank, world):
    """A rank alone is sooner done."""
    init_group("gloo")
    model = wrapped()
    shared_step._WORTH_SHARING_BYTES = 1024 * 1024
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    assert optimizer._divided is None


@pytest.mark.parametrize(
    "scene",
    [
        groups_frozen_and_foreign,
        loading,
        replacing,
        closures_and_scales,
        two_optimizers,
        sparse_gradient,
        small_model,
    ],
)
def test_life_of_a_divided_optimizer(scene):
    run_ranks(2, scene)


def test_types_and_layouts():
    run_ranks(4, odd_layouts)


# --- ranks without data ---------------------------------------------------------------------------
def run_out(rank, world, way):
    """The last rank has fewer batches; gradients are clipped and rates follow a schedule where
    there is data. Afterwards all train on together.
    """
    init_group("gloo")
    results = []
    for shared in (False, True):
        model = wrapped()
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=shared)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

        def steps(count, model=model, optimizer=optimizer, scheduler=scheduler):
            for step in range(count):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()

        count = 5 if rank < world - 1 else 2
        if way == "join":
            with model.join():
                steps(count)
        else:
            steps(count)
            model.no_more_data(optimizer if way == "with optimizer" and shared else None)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        if not shared:
            # The rank that left early has missed steps of its own optimizer: what it is to have is
            # what the others have.
            states = [optimizer.state_dict()]
            dist.broadcast_object_list(states, 0)
            optimizer.load_state_dict(states[0])
        assert optimizer.state_dict()["state"][0]["step"].item() == 5
        train(model, optimizer, rank, 3, start=10)
        results.append(bits(model.parameters()))
    assert_same(*results)
    return results[1]


@pytest.mark.parametrize("way", ["join", "no_more_data", "with optimizer"])
def test_a_rank_without_data_does_its_part(way):
    results = run_ranks(3, run_out, way)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def save_while_one_is_absent(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 1)
    if rank == 1:
        model.no_more_data()
        return
    train(model, optimizer, rank, 1, start=1)
    assert optimizer.state_dict()["state"][0]["step"].item() == 2
    model.no_more_data()


def load_while_one_is_absent(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 1)
    state = optimizer.state_dict()

    if rank == 0:
        # Steps for itself while somebody is absent: what it loaded is whole.
        optimizer.load_state_dict(state)
        train(model, optimizer, rank, 2, start=1)
        assert optimizer.state_dict()["state"][0]["step"].item() == 3
    model.no_more_data()


def test_saving_and_loading_while_a_rank_has_no_data():
    run_ranks(2, save_while_one_is_absent)
    run_ranks(2, load_while_one_is_absent)


# --- failures -------------------------------------------------------------------------------------
def fail_before_the_step(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    before = bits(model.parameters())

    def guarded_step():
        with model.all_or_none():
            optimizer.zero_grad()
            model(batch(rank, 7)).square().mean().backward()
            if rank == 1:
                raise ValueError("the needle")
            optimizer.step()

    with pytest.raises((paceline.StepError, ValueError), match="the needle"):
        guarded_step()
    assert_same(bits(model.parameters()), before)
    train(model, optimizer, rank, 2, start=8)
    return bits(model.parameters())


def test_a_step_given_up_between_average_and_optimizer_is_made_by_nobody():
    results = run_ranks(2, fail_before_the_step, timeout=60)
    assert_same(results[0], results[1])


def different_steps(rank, world, difference):
    init_group("gloo")
    model = wrapped()
    foreign = torch.nn.Parameter(torch.ones(4))  # which every rank steps for itself
    optimizer = OPTIMIZERS["AdamW"]([*model.parameters(), foreign], shared=True)
    train(model, optimizer, rank, 2)
    foreign.grad = torch.ones(4)
    before = bits([*model.parameters(), foreign])
    model(batch(rank, 7)).square().mean().backward()
    if rank == 1 and difference == "gradient":
        next(model.parameters()).grad = None
    elif rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(paceline.MismatchError, match="different optimizer steps"):
        optimizer.step()
    assert_same(bits([*model.parameters(), foreign]), before)
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, rank, 2, start=8)
    return bits(model.parameters())


@pytest.mark.parametrize("difference", ["gradient", "settings"])
def test_ranks_that_would_make_different_steps_make_none(difference):
    results = run_ranks(2, different_steps, difference)
    assert_same(results[0], results[1])


def save_on_one_rank(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    call = optimizer.state_dict if rank == 0 else lambda: train(model, optimizer, rank, 1, start=2)
    with pytest.raises(paceline.MismatchError, match=r"state_dict\(\).*also if only one of them"):
        call()


def load_on_one_rank(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    state = optimizer.state_dict()
    if rank == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(paceline.MismatchError, match="dividing the state"):
        train(model, optimizer, rank, 1, start=2)


@pytest.mark.parametrize("scene", [save_on_one_rank, load_on_one_rank])
def test_what_only_one_rank_calls_is_an_error_on_all(scene):
    run_ranks(2, scene)


def killed(rank, world):
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    model(batch(rank, 7)).square().mean().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(paceline.PeerLost):
        optimizer.step()
    assert time.monotonic() - start < 20


def test_a_rank_killed_before_the_step_is_named():
    with pytest.raises(RankDied) as caught:
        run_ranks(2, killed)
    assert caught.value.rank == 1


def broken_part(rank, world):
    """One rank fails where the others have begun; leaving the step out would not mend that."""
    init_group("gloo")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)

    def no_memory(*_):
        raise MemoryError("the needle")

    if rank == 1:
        optimizer._divided._part.step_groups = no_memory

    with model.all_or_none(on_error="skip"):
        train(model, optimizer, rank, 1, start=2)


def test_a_rank_that_cannot_make_its_part_ends_the_group():
    outcomes = run_ranks(2, broken_part, check=False)
    errors = [outcome.error for outcome in outcomes]
    assert isinstance(errors[0], paceline.PeerLost), errors
    assert isinstance(errors[1], paceline.errors.GroupError), errors
    assert "the needle" in str(errors[1])
