"""Optimizers of `paceline.optim` under `paceline.Training`: on ranks of one host parameters and
state are there once, and the step is split over the ranks. The bits are those of one process.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import MismatchError, PeerLost
from paceline.optim import replica_view, shared_step
from tests.harness import RankDied, init_group, run_ranks
from tests.harness.exact_models import digest

SAMPLES, BATCH, SHARDS = 45, 16, 4  # three batches make an epoch, the last one is not full

OPTIMIZERS = {
    "SGD": lambda p, **o: paceline.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "Adam": lambda p, **o: paceline.optim.Adam(p, amsgrad=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: paceline.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, **o: paceline.optim.Adagrad(p, lr_decay=0.1, **o),
    "Sharded": lambda p: paceline.optim.Sharded(torch.optim.RMSprop, p, lr=0.01),
}


def network(world, mapped=True):
    """Small, and shared all the same; seen by its pages, or by copies."""
    if world > 1:
        init_group("paceline")
    shared_step._WORTH_SHARING_BYTES = 0
    replica_view._MAPPED_BYTES = 0 if mapped else 2**40
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37), nn.Tanh(), nn.Linear(37, 3))


def groups(model):
    return [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.003}]


def training_of(model, optimizer, **options):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES, width, generator=generator) for width in (6, 3))
    loader = paceline.DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    return paceline.Training(model, optimizer, loader, shards=SHARDS, seed=1, **options)


def backward(model, batch):
    for x, y in batch.shards():
        loss = F.mse_loss(model(x), y)
        loss.backward()
        batch.log(loss=loss)


def train(model, optimizer, training, epochs, until=None):
    for _ in training.epochs(epochs):
        for batch in training.batches():
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            if training.step == until:
                return


def is_shared(optimizer):
    return optimizer._shared is not None and not optimizer._shared.is_released


# --- the same bits --------------------------------------------------------------------------------


def trained(rank, world, name, mapped, options):
    model = network(world, mapped)
    optimizer = OPTIMIZERS[name](groups(model), **options)
    train(model, optimizer, training_of(model, optimizer), 2)
    assert is_shared(optimizer) == (world > 1)
    # `Sharded` lists what a rank owns before what the others have.
    return digest(model, [], sorted(optimizer.state_dict()["state"].items()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_number_of_ranks_gives_the_same_bits(name):
    (expected,) = run_ranks(1, trained, name, True, {})
    assert run_ranks(2, trained, name, True, {}) == [expected] * 2
    assert run_ranks(3, trained, name, False, {}) == [expected] * 3


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"one_pass": True}, {"shared": True}])
def test_options_of_the_step_change_no_bits(options):
    (expected,) = run_ranks(1, trained, "AdamW", True, options)
    assert run_ranks(3, trained, "AdamW", True, options) == [expected] * 3


def breaks_the_split(rank, world):
    def second_half_only(self, present):
        return 1, 2

    shared_step.SharedStep.part = second_half_only
    return trained(rank, world, "AdamW", True, {})


def test_a_part_of_the_step_that_nobody_makes_shows_in_the_hash():
    (expected,) = run_ranks(1, trained, "AdamW", True, {})
    assert expected not in run_ranks(2, breaks_the_split)


def with_one_memory(rank, world):
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    training = training_of(model, optimizer)
    for batch in training.batches():
        backward(model, batch)
        # The loop has ended: gradients are final, whoever makes which part of the step.
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        optimizer.zero_grad()
    for parameter in model.parameters():
        dist.barrier()
        if rank == 0:
            optimizer._shared.shared_tensor(parameter).view(-1)[0] = 1234.5
        dist.barrier()
        assert parameter.data.view(-1)[0] == 1234.5
    return digest(nn.Module(), [], gradients)


def test_parameters_are_there_once_and_gradients_stay_final():
    first, second = run_ranks(2, with_one_memory)
    assert first == second


# --- saving and loading ---------------------------------------------------------------------------


def first_half(rank, world, path):
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    training = training_of(model, optimizer)
    train(model, optimizer, training, 2, until=2)
    training.save(path)


def second_half(rank, world, path):
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    training = training_of(model, optimizer)
    # Once more in the middle: what is loaded replaces what is shared.
    for _ in range(2):
        training.load(path)
        train(model, optimizer, training, 2)
    assert is_shared(optimizer) == (world > 1)
    return digest(model, [], sorted(optimizer.state_dict()["state"].items()))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_on_another_number_of_ranks(before, after, tmp_path):
    (expected,) = run_ranks(1, trained, "AdamW", True, {})
    run_ranks(before, first_half, str(tmp_path / "half"))
    assert run_ranks(after, second_half, str(tmp_path / "half")) == [expected] * after


# --- steps around the loop ------------------------------------------------------------------------


def steps_outside(rank, world):
    """Whether parameters are shared after each loop and after the step that follows it; the bits
    of the training; and then a step of one rank alone.
    """
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    training = training_of(model, optimizer)
    was_shared = []
    for _ in training.epochs(2):
        for batch in training.batches():
            backward(model, batch)
            optimizer.step()
        was_shared.append(is_shared(optimizer))
        optimizer.step()
        was_shared.append(is_shared(optimizer))
        optimizer.zero_grad()
    bits = digest(model, optimizer, [])
    if rank == 0:
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()  # nobody else comes
    return was_shared, bits


def test_a_step_after_the_loop_is_each_ranks_own_and_the_next_epoch_shares_again():
    ((_, expected),) = run_ranks(1, steps_outside)
    assert run_ranks(2, steps_outside) == [([True, False, True, False], expected)] * 2


def two_trainings(rank, world):
    """One after the other, with the same optimizer."""
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    for _ in range(2):
        training = training_of(model, optimizer)
        train(model, optimizer, training, 1)
        assert is_shared(optimizer) == (world > 1)
    return digest(model, optimizer, [])


def test_another_training_goes_on_with_the_same_optimizer():
    (expected,) = run_ranks(1, two_trainings)
    assert run_ranks(2, two_trainings) == [expected] * 2


def two_optimizers(rank, world):
    """Each has some of the parameters, and a pass of its own."""
    model = network(world)
    optimizers = {
        "body": OPTIMIZERS["AdamW"](model[:2].parameters()),
        "head": OPTIMIZERS["SGD"](model[3].parameters()),
    }
    training = training_of(model, optimizers)
    for batch in training.batches():
        for optimizer in optimizers.values():
            for x, y in batch.shards():
                F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.step()  # twice: gradients are the same on all ranks
            model.zero_grad()
    assert all(is_shared(each) == (world > 1) for each in optimizers.values())
    return digest(model, optimizers, [])


def test_two_optimizers_share_what_each_has():
    (expected,) = run_ranks(1, two_optimizers)
    assert run_ranks(2, two_optimizers) == [expected] * 2


def scaled(rank, world):
    """A GradScaler, and a shard whose loss is infinite."""
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    training = training_of(model, optimizer, state={"scaler": scaler})
    scales = []
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            factor = float("inf") if batch.step == 1 and number == 0 else 1.0
            scaler.scale(F.mse_loss(model(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return digest(model, optimizer, scales)


def test_a_step_that_a_scaler_skips():
    (expected,) = run_ranks(1, scaled)
    assert run_ranks(2, scaled) == [expected] * 2


# --- what programs write --------------------------------------------------------------------------


def writes_weights(rank, world, ranks_that_write):
    model = network(world)
    optimizer = OPTIMIZERS["SGD"](groups(model))
    training = training_of(model, optimizer)
    for batch in training.batches():
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        if rank in ranks_that_write:
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
    return digest(model, optimizer, [])


def test_weights_that_every_rank_writes():
    (expected,) = run_ranks(1, writes_weights, [0])
    assert run_ranks(2, writes_weights, [0, 1]) == [expected] * 2


def writes_alone(rank, world):
    with pytest.raises(MismatchError, match=r"has changed 0\.weight to other values on some ranks"):
        writes_weights(rank, world, [1])


def test_weights_that_one_rank_writes_are_named():
    run_ranks(2, writes_alone)


# --- lost ranks -----------------------------------------------------------------------------------


def killed_in_a_step(rank, world):
    model = network(world)
    optimizer = OPTIMIZERS["AdamW"](groups(model))
    training = training_of(model, optimizer)
    train(model, optimizer, training, 1, until=2)
    for batch in training.batches():
        backward(model, batch)
        if rank == 1:
            optimizer._shared.end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1"):
            optimizer.step()
        assert optimizer.interrupted_step.is_after  # it had made its part
        return


def test_a_rank_that_is_killed_in_a_step_is_named_with_what_was_made_of_it():
    survivor, lost = run_ranks(2, killed_in_a_step, check=False)
    assert survivor.error is None
    assert isinstance(lost.error, RankDied)
