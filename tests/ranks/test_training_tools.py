"""What plain torch code does around `paceline.Training`: the same bits on one rank and on two.

Every program here is a way in which people train; it returns what it has made of the weights, and
what its decisions were.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import StepError
from tests.harness import init_group, run_ranks
from tests.harness.exact_models import digest

SAMPLES, BATCH, SHARDS = 45, 16, 4


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), *layers, nn.Linear(5, 3))


def training_of(model, optimizer, **options):
    loader = paceline.DataLoader(data(), BATCH, shuffle=True)
    return paceline.Training(model, optimizer, loader, shards=SHARDS, seed=1, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model, batch):
    for x, y in batch.shards():
        loss = F.mse_loss(model(x), y)
        loss.backward()
        batch.log(loss=loss)


def scaling_and_autocast():
    """GradScaler, clipping of unscaled gradients, a shard whose loss is infinite."""
    model = network(nn.BatchNorm1d(5))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    training = training_of(model, optimizer, state={"scaler": scaler})
    scales = []
    for _ in training.epochs(2):
        for batch in training.batches():
            for x, y in batch.shards():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.mse_loss(model(x).float(), y)
                # One sample, so in one shard, wherever that is.
                is_poisoned = batch.step == 2 and bool((x == data().tensors[0][7]).all(1).any())
                scaler.scale(loss * float("inf") if is_poisoned else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return digest(model, optimizer, scales)


def accumulation():
    """A step after every second global batch."""
    model = network(nn.Dropout(0.2))
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    for _ in training.epochs(2):
        for batch in training.batches():
            backward(model, batch)
            if training.step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return digest(model, optimizer, [])


def average_of_the_weights():
    """An exponential average, evaluated with and trained on, and a scheduler."""
    model = network(nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    training = training_of(model, optimizer, state={"s": scheduler, "average": average})
    for _ in training.epochs(2):
        for batch in training.batches():
            backward(model, batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    return digest(model, optimizer, [average.state_dict()])


def evaluation_and_early_stopping():
    """Decisions from an evaluation and from the metrics of a batch."""
    model = network(nn.BatchNorm1d(5), nn.Dropout(0.1))
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    found, stop = [], False
    for _ in training.epochs(20):
        model.train()
        for batch in training.batches():
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            if batch.metrics["loss"] < 0.8:
                stop = True
                break
        model.eval()
        evaluation = paceline.Evaluation(data(), 7)
        with torch.no_grad():
            for x, y in evaluation:
                evaluation.add(loss=(model(x) - y).square().mean(1))
        found.append(evaluation.result().mean("loss"))
        if stop:
            break
    assert 0 < training.step < 60
    return digest(model, optimizer, [training.step, len(found)])


def several_optimizers():
    """Two, for one model, of which one steps every other time."""
    model = network()
    optimizers = {"first": sgd(model[0]), "last": torch.optim.Adam(model[1].parameters())}
    training = training_of(model, optimizers)
    for _ in training.epochs(2):
        for batch in training.batches():
            backward(model, batch)
            optimizers["first"].step()
            if training.step % 2:
                optimizers["last"].step()
            model.zero_grad()
    return digest(model, optimizers, [])


def frozen_unused_and_unfrozen():
    """A layer that thaws after an epoch, a parameter that no shard uses, one that some do."""
    model = network(nn.Linear(5, 5))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.register_parameter("rare", nn.Parameter(torch.ones(3)))
    model[1].requires_grad_(False)
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    for epoch in training.epochs(2):
        model[1].requires_grad_(epoch == 1)
        for batch in training.batches():
            for x, y in batch.shards():
                output = model(x)
                output = output * model.rare if x[0, 0] > 0 else output
                F.mse_loss(output, y).backward()
            assert model.unused.grad is None
            optimizer.step()
            optimizer.zero_grad()
    return digest(model, optimizer, [])


class Waves(nn.Module):
    """Complex, double and half-precision parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.large = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x, y):
        output = (x.to(torch.complex64) @ self.wave).abs() + self.small.float() + self.large
        return {"loss": F.mse_loss(output, y.double()), "output": output}


def complex_numbers_and_a_model_that_returns_its_loss():
    model = Waves()
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    metrics = []
    for batch in training.batches():
        for x, y in batch.shards():
            found = model(x, y)
            found["loss"].backward()
            batch.log(loss=found["loss"].item(), size=found["output"].detach())
        optimizer.step()
        optimizer.zero_grad()
        metrics.append(batch.metrics)
    return digest(model, optimizer, metrics)


def inputs_changed_in_place():
    """Two passes, of which the first spoils its inputs."""
    model = network()
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    for batch in training.batches():
        for factor in (2.0, 3.0):
            for x, y in batch.shards():
                x.mul_(factor)
                F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, optimizer, [])


PROGRAMS = [
    scaling_and_autocast,
    accumulation,
    average_of_the_weights,
    evaluation_and_early_stopping,
    several_optimizers,
    frozen_unused_and_unfrozen,
    complex_numbers_and_a_model_that_returns_its_loss,
    inputs_changed_in_place,
]


def run_all(rank, world, backend):
    if world > 1:
        init_group(backend)
    return {program.__name__: program() for program in PROGRAMS}


def test_one_and_two_ranks_end_with_the_same_bits():
    (expected,) = run_ranks(1, run_all, "gloo", timeout=120)
    for backend in ("paceline", "gloo"):
        for found in run_ranks(2, run_all, backend, timeout=120):
            assert found == expected
    assert len(set(expected.values())) == len(PROGRAMS)


# --- mistakes ---------------------------------------------------------------------------------


def leaves_the_loop_early(rank, world):
    init_group("paceline")
    model = network()
    optimizer = sgd(model)
    for batch in training_of(model, optimizer, steal=False).batches():
        for x, y in batch.shards():
            F.mse_loss(model(x), y).backward()
            break
        optimizer.step()


def steps_in_the_loop(rank, world):
    init_group("paceline")
    model = network()
    optimizer = sgd(model)
    for batch in training_of(model, optimizer, steal=False).batches():
        for x, y in batch.shards():
            F.mse_loss(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(leaves_the_loop_early, "was left early"), (steps_in_the_loop, "do it after the loop")],
)
def test_a_mistake_is_named_on_every_rank(mistake, message):
    for outcome in run_ranks(2, mistake, check=False):
        assert isinstance(outcome.error, StepError)
        assert message in str(outcome.error)


def begins_a_failed_step_again(rank, world):
    """One rank forgets a backward; the step counts on no rank, and all begin it again."""
    init_group("paceline")
    model = network()
    optimizer = sgd(model)
    # Otherwise rank 0 may be given all shards of the step that rank 1 makes a mistake in.
    training = training_of(model, optimizer, steal=False)
    failures = 0
    while True:
        try:
            for batch in training.batches():
                for x, y in batch.shards():
                    loss = F.mse_loss(model(x), y)
                    if rank == 0 or batch.step != 1 or failures == 2:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return failures, training.step, training.digest()
        except StepError:
            failures += 1


def test_a_step_that_failed_begins_again_on_all_ranks():
    first, second = run_ranks(2, begins_a_failed_step_again)
    assert first == second
    assert first[0] == 2
    (alone,) = run_ranks(1, trains_without_failure)
    assert first[1:] == alone


def trains_without_failure(rank, world):
    model = network()
    optimizer = sgd(model)
    training = training_of(model, optimizer)
    for batch in training.batches():
        for x, y in batch.shards():
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.step, training.digest()
