"""`one_pass=True` under `paceline.Training`: the sum over the tree and the update are one pass over
memory, with the bits of a single process that does one after the other.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import ConfigError, PeerLost, StepError
from paceline.training import shared_exchange
from paceline.training.deferred_nodes import DeferredNodes
from tests.harness import RankDied, run_ranks
from tests.harness.exact_models import digest
from tests.ranks.test_training_shared_step import (
    OPTIMIZERS,
    backward,
    groups,
    is_shared,
    network,
    train,
    training_of,
)


def optimizer_of(model, name="AdamW", **options):
    return OPTIMIZERS[name](groups(model), one_pass=True, **options)


class Counted:
    """How often sums were left to the step, and taken before it."""

    def __init__(self):
        self.left = self.taken = 0
        leave, average = DeferredNodes.leave, shared_exchange.SharedExchange.average_nodes

        def counted_leave(deferred, *arguments):
            self.left += 1
            return leave(deferred, *arguments)

        def counted_average(exchange, *arguments):
            self.taken += 1
            return average(exchange, *arguments)

        DeferredNodes.leave = counted_leave
        shared_exchange.SharedExchange.average_nodes = counted_average


# --- the same bits --------------------------------------------------------------------------------


def trained(rank, world, name, options, mapped=True):
    """Six steps: the first one finds that parameters can be shared. Every rank has a part in each:
    with `steal` another rank may have been faster.
    """
    model = network(world, mapped)
    optimizer = optimizer_of(model, name, **options)
    counted = Counted()
    training = training_of(model, optimizer, steal=False)
    train(model, optimizer, training, 2)
    assert (counted.left, counted.taken) == ((5, 1) if world > 1 else (0, 0))
    return digest(model, [], [*training.metrics.items(), *sorted(optimizer.state_dict().items())])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Sharded"}))
def test_every_number_of_ranks_gives_the_same_bits(name):
    (expected,) = run_ranks(1, trained, name, {})
    assert run_ranks(2, trained, name, {}) == [expected] * 2
    assert run_ranks(3, trained, name, {}, False) == [expected] * 3


def test_the_norm_is_that_of_the_whole_gradient():
    (expected,) = run_ranks(1, trained, "AdamW", {"max_norm": 0.1})
    assert run_ranks(3, trained, "AdamW", {"max_norm": 0.1}) == [expected] * 3


def adds_in_another_order(rank, world):
    class OneAfterTheOther(shared_exchange.TreeOrder):
        def __init__(self, held, rank):
            super().__init__(held, rank)
            self.adds[1:] = type(self.adds)("I", [1] * (len(held) - 1))

    shared_exchange.TreeOrder = OneAfterTheOther
    return trained(rank, world, "SGD", {})


def test_another_order_of_the_sum_shows_in_the_hash():
    (expected,) = run_ranks(1, trained, "SGD", {})
    assert expected not in run_ranks(3, adds_in_another_order)


class TwoHeads(nn.Module):
    """Half of the shards have no use for one of the heads; some batches for neither."""

    def __init__(self, body):
        super().__init__()
        self.body, self.heads = body, nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        hidden = self.body(x)
        return self.heads[int(x[0, 0] > 0)](hidden) if x.sum() > -5 else hidden


def with_unused_parameters(rank, world):
    model = TwoHeads(network(world))
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, training_of(model, optimizer), 3)
    return digest(model, optimizer, [])


def test_parameters_that_some_shards_do_not_use():
    (expected,) = run_ranks(1, with_unused_parameters)
    assert run_ranks(2, with_unused_parameters) == [expected] * 2


def freezes(rank, world):
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer, steal=False)
    counted = Counted()
    for _ in training.epochs(3):
        model[0].weight.requires_grad_(training.epoch != 1)
        for batch in training.batches():
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert world == 1 or counted.left > 3
    return digest(model, optimizer, [])


def test_parameters_that_are_frozen_for_an_epoch():
    (expected,) = run_ranks(1, freezes)
    assert run_ranks(2, freezes) == [expected] * 2


# --- gradients that are not zeroed at once --------------------------------------------------------


def zeroes_first(rank, world, folder):
    """Saves and digests see gradients of the step before."""
    os.environ["PACELINE_DIGESTS"] = lines = f"{folder}/digests-{world}"
    model = network(world)
    optimizer = optimizer_of(model)
    options = {"checkpoint": f"{folder}/saved-{world}", "save_every": 2}
    training = training_of(model, optimizer, **options)
    for _ in training.epochs(2):
        for batch in training.batches():
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
    if rank == 0:
        with open(lines) as file:
            return file.read()
    return None


def test_what_is_saved_and_compared_has_means_for_gradients(tmp_path):
    (expected,) = run_ranks(1, zeroes_first, str(tmp_path))
    first, _ = run_ranks(2, zeroes_first, str(tmp_path))
    assert first == expected
    assert "gradients.0.weight" in expected


def accumulates(rank, world):
    """A step for every two batches; the model's zero_grad does not tell the optimizer."""
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer)
    for _ in training.epochs(4):
        for batch in training.batches():
            backward(model, batch)
            if training.step % 2 == 0:
                optimizer.step()
                model.zero_grad()
    return digest(model, optimizer, [])


def test_gradients_of_several_batches_add_up():
    (expected,) = run_ranks(1, accumulates)
    assert run_ranks(2, accumulates) == [expected] * 2


def steps_around(rank, world):
    """Two steps with the same gradients, one after the loop, and another training."""
    model = network(world)
    optimizer = optimizer_of(model)
    for _ in range(2):
        training = training_of(model, optimizer)
        for _ in training.epochs(2):
            for batch in training.batches():
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
                optimizer.step()
            assert is_shared(optimizer) == (world > 1)
            optimizer.step()
            assert not is_shared(optimizer)
    return digest(model, optimizer, [])


def test_steps_around_the_loop():
    (expected,) = run_ranks(1, steps_around)
    assert run_ranks(2, steps_around) == [expected] * 2


# --- what looks at gradients, or changes them -----------------------------------------------------


def looks_at_means(rank, world):
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer)
    norms = []
    for batch in training.batches():
        backward(model, batch)
        norms.append(training.averaged_gradients()["0.weight"].norm().item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer, norms)


def test_means_can_be_asked_for_and_changed():
    (expected,) = run_ranks(1, looks_at_means)
    assert run_ranks(2, looks_at_means) == [expected] * 2


def changes_gradients(rank, world, change):
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer, steal=False)
    for batch in training.batches():
        backward(model, batch)
        if batch.step < 1:
            optimizer.step()
            optimizer.zero_grad()
            continue
        change(model)
        with pytest.raises(ConfigError, match=r"0\.weight\.grad was changed .* max_norm="):
            optimizer.step()
        return


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def replace(model):
    model[0].weight.grad = model[0].weight.grad * 2


@pytest.mark.parametrize("change", [clip, replace])
def test_a_gradient_that_was_changed_is_refused(change):
    run_ranks(2, changes_gradients, change)


def asks_for_state(rank, world):
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer, steal=False)
    for batch in training.batches():
        backward(model, batch)
        optimizer.step()
        if batch.step == 1:
            with pytest.raises(StepError, match=r"call optimizer\.zero_grad\(\)"):
                training.state_dict()
        optimizer.zero_grad()
        training.state_dict()


def test_state_between_step_and_zero_grad_is_refused():
    run_ranks(2, asks_for_state)


def scaled(rank, world, is_told):
    model = network(world)
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    training = training_of(
        model, optimizer, state={"scaler": scaler} if is_told else {}, steal=False
    )
    counted = Counted()
    scales = []
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            factor = float("inf") if batch.step == 2 and number == 0 else 1.0
            scaler.scale(F.mse_loss(model(x), y) * factor).backward()
        if counted.left and not is_told:
            with pytest.raises(ConfigError, match=r"Training\(state="):
                scaler.step(optimizer)
            return None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert counted.left == 0
    return digest(model, optimizer, scales)


def test_with_a_scaler_sums_are_taken_before_the_step():
    (expected,) = run_ranks(1, scaled, True)
    assert run_ranks(2, scaled, True) == [expected] * 2
    assert run_ranks(2, scaled, False) == [None] * 2


# --- lost ranks -----------------------------------------------------------------------------------


def killed_in_a_step(rank, world):
    model = network(world)
    optimizer = optimizer_of(model)
    training = training_of(model, optimizer, steal=False)
    train(model, optimizer, training, 1, until=2)
    for batch in training.batches():
        backward(model, batch)
        if rank == 1:
            # Its nodes cannot be read any more.
            optimizer._shared.begin = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1"):
            optimizer.step()
        assert optimizer.interrupted_step.is_before
        return


def test_a_rank_that_is_killed_before_its_nodes_were_read_is_named():
    survivor, lost = run_ranks(2, killed_in_a_step, check=False)
    assert survivor.error is None
    assert isinstance(lost.error, RankDied)
