"""`paceline.optim` on ranks of one host: one copy of parameters and state, the step split over the
ranks. The same bits as every rank stepping for itself, whatever the program does to its weights.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.optim import replica_view, shared_step
from tests.harness import RankDied, init_group, run_ranks

OPTIMIZERS = {
    "SGD": lambda p, **o: paceline.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda p, **o: paceline.optim.Adam(p, amsgrad=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: paceline.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, **o: paceline.optim.Adagrad(p, lr_decay=0.1, **o),
}


def net(width=9, mapped=True):
    """Small, and shared all the same; seen by its pages, or by copies."""
    shared_step._WORTH_SHARING_BYTES = 0
    replica_view._MAPPED_BYTES = 0 if mapped else 2**40
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


def wrapped(mapped=True, **options):
    return paceline.DistributedDataParallel(net(mapped=mapped), **options)


def bits(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def assert_one_memory(rank, optimizer, parameters):
    """What is written to the shared memory, all ranks see. Spoils the weights."""
    for parameter in parameters:
        dist.barrier()
        if rank == 0:
            optimizer._shared.shared_tensor(parameter).view(-1)[0] = 1234.5
        dist.barrier()
        assert parameter.data.view(-1)[0] == 1234.5


# --- the same bits --------------------------------------------------------------------------------
def train_both_ways(rank, world, name, mapped=True, shared=None):
    init_group("paceline")
    results = []
    for sharing in (False, shared):
        model = wrapped(mapped, check_replicas_every=1)
        optimizer = OPTIMIZERS[name](model.parameters(), shared=sharing)
        train(model, optimizer, rank, 5)
        results.append((bits(model.parameters()), copy.deepcopy(optimizer.state_dict())))
        assert (optimizer._shared is not None) == (sharing is not False)
        if sharing is not False and mapped:
            assert_one_memory(rank, optimizer, model.parameters())
    (plain, plain_state), (together, state) = results
    assert_same(plain, together)
    assert state["param_groups"] == plain_state["param_groups"]
    for key, values in plain_state["state"].items():
        assert list(state["state"][key]) == list(values)
        for name_, value in values.items():
            assert torch.equal(state["state"][key][name_], value), name_
    return together


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_every_rank_for_itself(name, mapped):
    results = run_ranks(2, train_both_ways, name, mapped)
    assert_same(results[0], results[1])


def test_sharing_can_be_demanded():
    run_ranks(2, train_both_ways, "AdamW", True, True)


def test_more_ranks_than_lines_of_a_parameter():
    results = run_ranks(4, train_both_ways, "AdamW")
    for result in results[1:]:
        assert_same(results[0], result)


def long_training(rank, world):
    """Against a single process given the averages: other ranks' parts, other numbers of ranks."""
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    alone = copy.deepcopy(model.module)
    reference = OPTIMIZERS["AdamW"](alone.parameters())
    for step in range(60):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
            mine.grad = other.grad.clone()
        optimizer.step()
        reference.step()
    assert_same(bits(model.parameters()), bits(alone.parameters()))


@pytest.mark.parametrize("world", [2, 3])
def test_given_the_same_average_the_number_of_ranks_does_not_show(world):
    run_ranks(world, long_training)


# --- how it comes about, and what happens to it ---------------------------------------------------
def optimizer_before_wrapping(rank, world):
    init_group("paceline")
    module = net()
    optimizer = OPTIMIZERS["AdamW"](module.parameters(), shared=True)
    model = paceline.DistributedDataParallel(module)
    train(model, optimizer, rank, 3)
    assert_one_memory(rank, optimizer, model.parameters())


def groups_frozen_and_foreign(rank, world):
    """A parameter that the model does not have, one frozen at first, groups of other settings."""
    init_group("paceline")
    results = []
    for shared in (False, None):
        model = wrapped()
        first, *others = model.parameters()
        foreign = torch.nn.Parameter(torch.ones(4))
        foreign.grad = torch.ones(4)
        optimizer = paceline.optim.AdamW(
            [{"params": [first, foreign]}, {"params": others, "lr": 0.1, "betas": (0.5, 0.9)}],
            shared=shared,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        others[0].requires_grad_(False)
        for step in range(4):
            optimizer.zero_grad()
            foreign.grad = torch.ones(4)
            if step == 2:
                others[0].requires_grad_(True)
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append(bits([*model.parameters(), foreign]))
    assert_same(*results)


def loading(rank, world):
    """A checkpoint loaded in mid-run, on every rank."""
    init_group("paceline")
    results = []
    for shared in (False, None):
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
    assert_one_memory(rank, optimizer, model.parameters())


def replacing(rank, world):
    """One rank replaces a parameter's memory; all share again, from the first rank's numbers."""
    init_group("paceline")
    model = wrapped(check_replicas_every=1)
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    parameter = next(model.parameters())
    if rank == 1:
        parameter.data = parameter.data.clone()
    train(model, optimizer, rank, 2, start=2)
    assert_one_memory(rank, optimizer, model.parameters())


def momentum_later(rank, world):
    """Momentum is switched on while parameters are shared already; dampening shows a first one."""
    init_group("paceline")
    results = []
    for shared in (False, None):
        model = wrapped()
        optimizer = paceline.optim.SGD(model.parameters(), lr=0.1, dampening=0.5, shared=shared)
        train(model, optimizer, rank, 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(model, optimizer, rank, 3, start=2)
        results.append(bits(model.parameters()))
    assert_same(*results)


def dropping(rank, world):
    """Without its optimizer a parameter is a rank's own again."""
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    before = bits(model.parameters())
    with pytest.raises(paceline.ConfigError, match="another optimizer that shares"):
        train(model, OPTIMIZERS["SGD"](model.parameters(), shared=True), rank, 1)
    dist.barrier()
    del optimizer
    gc.collect()
    dist.barrier()
    assert_same(bits(model.parameters()), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    dist.barrier()
    assert all((parameter == rank).all() for parameter in model.parameters())


def in_one_process(rank, world):
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    assert torch.isfinite(next(model.parameters())).all()


def small_model(rank, world):
    """A rank alone is sooner done."""
    init_group("paceline")
    model = wrapped()
    shared_step._WORTH_SHARING_BYTES = 1024 * 1024
    train(model, OPTIMIZERS["AdamW"](model.parameters(), shared=True), rank, 2)
    dist.barrier()
    with torch.no_grad():
        next(model.parameters()).fill_(float(rank))
    dist.barrier()
    assert (next(model.parameters()) == rank).all()


@pytest.mark.parametrize(
    "scene",
    [
        small_model,
        optimizer_before_wrapping,
        groups_frozen_and_foreign,
        loading,
        replacing,
        momentum_later,
        dropping,
    ],
)
def test_life_of_a_shared_optimizer(scene):
    run_ranks(2, scene)


def test_one_rank_has_nobody_to_share_with():
    run_ranks(1, in_one_process)


def without_memory(rank, world):
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    model(batch(rank, 0)).square().mean().backward()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    os.posix_fallocate = refuse
    with pytest.raises(paceline.NativeError, match=r"shared memory|shared-memory"):
        optimizer.step()


def test_too_little_memory_is_an_error_on_all_ranks():
    run_ranks(2, without_memory)


# --- ranks without data ---------------------------------------------------------------------------
def run_out(rank, world, way):
    """Rank 1 has fewer batches; afterwards all train on together."""
    init_group("paceline")
    results = []
    for shared in (False, None):
        model = wrapped()
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=shared)
        steps = 5 if rank == 0 else 2
        if way == "join":
            with model.join():
                train(model, optimizer, rank, steps)
        else:
            train(model, optimizer, rank, steps)
            model.no_more_data(optimizer)
        if way == "join" and shared is False:
            # The rank that left early has missed steps of its own optimizer: what it is to have is
            # what the other has.
            states = [optimizer.state_dict()]
            dist.broadcast_object_list(states, 0)
            optimizer.load_state_dict(states[0])
        assert optimizer.state_dict()["state"][0]["step"].item() == 5
        train(model, optimizer, rank, 3, start=10)
        results.append(bits(model.parameters()))
    assert_same(*results)
    return results[1]


@pytest.mark.parametrize("way", ["join", "no_more_data"])
def test_a_rank_without_data_is_not_waited_for(way):
    results = run_ranks(2, run_out, way)
    assert_same(results[0], results[1])


# --- failures -------------------------------------------------------------------------------------
def fail_before_the_step(rank, world):
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    before = bits(model.parameters())
    dist.barrier()
    start = time.monotonic()

    def guarded_step():
        with model.all_or_none():
            optimizer.zero_grad()
            model(batch(rank, 7)).square().mean().backward()
            if rank == 1:
                raise ValueError("the needle")
            optimizer.step()

    with pytest.raises((paceline.StepError, ValueError), match="the needle"):
        guarded_step()
    assert time.monotonic() - start < 20
    assert_same(bits(model.parameters()), before)
    train(model, optimizer, rank, 2, start=8)
    assert_one_memory(rank, optimizer, model.parameters())


def test_a_step_given_up_between_average_and_optimizer_is_made_by_nobody():
    run_ranks(2, fail_before_the_step, timeout=60)


def different_steps(rank, world, difference):
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    before = bits(model.parameters())
    model(batch(rank, 7)).square().mean().backward()
    if rank == 1 and difference == "gradient":
        next(model.parameters()).grad = None
    elif rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(paceline.MismatchError, match="different optimizer steps"):
        optimizer.step()
    assert_same(bits(model.parameters()), before)
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, rank, 2, start=8)
    return bits(model.parameters())


@pytest.mark.parametrize("difference", ["gradient", "settings"])
def test_ranks_that_would_make_different_steps_make_none(difference):
    results = run_ranks(2, different_steps, difference)
    assert_same(results[0], results[1])


def killed(rank, world):
    init_group("paceline")
    model = wrapped()
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True)
    train(model, optimizer, rank, 2)
    model(batch(rank, 7)).square().mean().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(paceline.PeerLost, match="as before the optimizer's step"):
        optimizer.step()
    assert time.monotonic() - start < 10
    assert optimizer.interrupted_step.is_before


def test_a_rank_killed_before_the_step_is_named():
    survivor, lost = run_ranks(2, killed, check=False)
    assert survivor.error is None
    assert isinstance(lost.error, RankDied)
