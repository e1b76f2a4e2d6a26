"""`paceline.Training` in a single process: the loop, its errors, and what plain torch code may do
around it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pathlib
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import ConfigError, MismatchError, PacelineError, StepError
from paceline.cli import main
from paceline.training import input_alignment, shard_buffers, shard_price
from paceline.training.audit import AuditPlan
from paceline.training.shard_plan import ShardPlan, deal
from paceline.training.shard_price import fixed_part, price_of
from tests.harness import exact_models

SAMPLES, BATCH = 22, 8


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), *layers, nn.Linear(5, 3))


def make(model=None, optimizer=None, loader=None, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    loader = paceline.DataLoader(data(), BATCH, shuffle=True) if loader is None else loader
    return model, optimizer, paceline.Training(model, optimizer, loader, shards=4, **options)


def backward(model, batch, loss=F.mse_loss):
    for x, y in batch.shards():
        value = loss(model(x), y)
        value.backward()
        batch.log(loss=value)


def step(model, batch, optimizer):
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return exact_models.digest(model, [], [])


def test_the_example_of_the_documentation_runs(capsys):
    page = pathlib.Path(__file__).parents[2] / "docs" / "exactness.md"
    example = re.search(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    exec(compile(example[1], str(page), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.splitlines()[-1].startswith("14 ")


# --- what comes out ---------------------------------------------------------------------------


def test_the_gradient_and_the_metrics_are_those_of_the_global_batch():
    model, optimizer, training = make()
    reference = copy.deepcopy(model)
    x, y = data().tensors
    for batch in training.batches():
        indices = training.loader.batch_sampler.global_batch(0, batch.number)
        reference.zero_grad()
        loss = F.mse_loss(reference(x[indices]), y[indices])
        loss.backward()
        backward(model, batch)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert batch.metrics["loss"] == pytest.approx(loss.item())
        assert batch.samples == len(indices)
        optimizer.zero_grad()


def test_the_last_metrics_are_part_of_the_state():
    model, optimizer, training = make()
    for batch in training.batches():
        for x, y in batch.shards():
            loss = F.mse_loss(model(x), y)
            loss.backward()
            batch.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    assert training.metrics == batch.metrics
    assert training.metrics["loss"] > 0
    _, _, later = make()
    assert later.metrics == {}
    later.load_state_dict(training.state_dict())
    assert later.metrics == training.metrics


def test_steps_epochs_and_batches_are_counted():
    model, optimizer, training = make()
    seen = []
    for epoch in training.epochs(2):
        for batch in training.batches():
            assert training.step == batch.step
            step(model, batch, optimizer)
            assert training.step == batch.step + 1
            seen.append((epoch, training.epoch, batch.epoch, batch.number, batch.step))
    assert seen == [(n // 3, n // 3, n // 3, n % 3, n) for n in range(6)]
    assert list(training.epochs(2)) == []


def test_batches_need_no_epochs():
    model, optimizer, training = make()
    epochs = []
    while training.step < 7:
        for batch in training.batches():
            step(model, batch, optimizer)
            epochs.append(batch.epoch)
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_loop_that_is_left_goes_on_where_it_was_or_with_the_next_epoch():
    model, optimizer, training = make()
    for batch in training.batches():
        step(model, batch, optimizer)
        break
    assert [batch.number for batch in training.batches()] == [1, 2]
    _, _, training = make()
    first = []
    for _ in training.epochs(3):
        for batch in training.batches():
            first.append((batch.epoch, batch.number))
            break
    assert first == [(0, 0), (1, 0), (2, 0)]


def test_a_batch_may_be_skipped():
    model, optimizer, training = make()
    for batch in training.batches():
        if batch.number != 1:
            step(model, batch, optimizer)
    assert training.step == 3


def test_gradients_accumulate_over_global_batches():
    model, optimizer, training = make()
    total = None
    for batch in training.batches():
        before = None if total is None else total.clone()
        backward(model, batch)
        gradient = model[0].weight.grad
        if before is not None:
            assert not torch.equal(gradient, before)
        total = gradient
    alone = [torch.zeros_like(total)]
    model, optimizer, training = make()
    for batch in training.batches():
        backward(model, batch)
        alone.append(model[0].weight.grad)
        optimizer.zero_grad()
    assert torch.equal(total, alone[1] + alone[2] + alone[3])


def test_frozen_and_unused_parameters_have_no_gradient():
    model = network(nn.Linear(5, 5))
    model[1].requires_grad_(False)
    model.extra = nn.Parameter(torch.ones(3))
    model, optimizer, training = make(nn.ModuleDict({"net": model}))
    for batch in training.batches():
        for x, y in batch.shards():
            net = model["net"]
            F.mse_loss(net[2](net[1](net[0](x))), y).backward()
        assert model["net"].extra.grad is None
        assert model["net"][1].weight.grad is None
        optimizer.step()


def test_complex_and_half_precision_parameters():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.wave = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
            self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.large = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.wave).abs() + self.small.float() + self.large

    model, optimizer, training = make(Mixed())
    reference = copy.deepcopy(model)
    x, y = data().tensors
    indices = training.loader.batch_sampler.global_batch(0, 0)
    F.mse_loss(reference(x[indices]), y[indices].double()).backward()
    _, _, training = make(model, optimizer)
    for batch in training.batches():
        backward(model, batch, lambda out, y: F.mse_loss(out, y.double()))
        break
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_begin_at_multiples_of_64_bytes_and_have_the_parameters_layout():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(12, 3))
    model = model.to(memory_format=torch.channels_last)
    loader = paceline.DataLoader(TensorDataset(torch.randn(9, 2, 2, 2), torch.randn(9, 3)), 9)
    model, _, training = make(model, loader=loader)
    for batch in training.batches():
        backward(model, batch)
        for parameter in model.parameters():
            assert parameter.grad.data_ptr() % 64 == 0
            assert parameter.grad.stride() == parameter.stride()


# --- buffers ----------------------------------------------------------------------------------


class Statistics(nn.Module):
    """Buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer(
            "constant", torch.tensor([*(n / 7 for n in range(40)), math.nan, -0.0])
        )
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("first", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.mean += x.mean(0)
        self.first.fill_(int(x[0, 0] * 1e6))
        self.replaced = self.replaced + x.mean(0)
        return self.linear(x)


def test_float_buffers_become_the_mean_and_integers_those_of_shard_0():
    model, _, training = make(Statistics())
    tensor, expected = model.replaced, torch.zeros(6)
    constant = model.constant.clone()
    for batch in training.batches():
        indices = training.loader.batch_sampler.global_batch(0, batch.number)
        x = data().tensors[0][indices]
        expected += x.mean(0)
        backward(model, batch)
        torch.testing.assert_close(model.mean, expected)
        torch.testing.assert_close(model.replaced, expected)
        assert model.replaced is tensor
        assert int(model.first) == int(x[0, 0] * 1e6)
    assert torch.equal(model.constant.view(torch.int32), constant.view(torch.int32))
    assert set(training.state_dict()["buffers"]) == {"replaced"}


def test_a_constant_would_drift_if_it_were_averaged(monkeypatch):
    loader = paceline.DataLoader(data(), 10)  # shards of 3 and 2 samples
    model, _, training = make(Statistics(), loader=loader)
    constant = model.constant.clone()
    monkeypatch.setattr(shard_buffers._Group, "differing", lambda group, *_: group._numbers)
    for batch in training.batches():
        backward(model, batch)
    assert not torch.equal(model.constant.view(torch.int32), constant.view(torch.int32))


# --- random numbers, threads, memory ----------------------------------------------------------


def test_generators_and_threads_are_put_back():
    model, optimizer, training = make(network(nn.Dropout(0.5)), threads=2)
    paceline.data.seeding.seed_all(7)
    expected = random.random(), np.random.rand(), torch.rand(1)
    paceline.data.seeding.seed_all(7)
    for batch in training.batches():
        assert torch.get_num_threads() == 2
        step(model, batch, optimizer)
    assert torch.get_num_threads() == 1
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_code_around_the_shards_draws_the_same_in_every_run():
    def draws(warm_up):
        model, optimizer, training = make()
        torch.rand(warm_up)
        found = []
        for batch in training.batches():
            found.append(torch.rand(1).item())
            step(model, batch, optimizer)
            found.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return found

    assert draws(1) == draws(2)
    assert len(set(draws(1))) == 6


class LongSum(nn.Module):
    """A sum that torch cuts into as many parts as there are threads."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(400_000, generator=generator))

    def forward(self, x):
        return self.weight.sum() * x


def long_sum_digest(threads):
    model, _, training = make(LongSum())
    torch.set_num_threads(threads)
    metrics = []
    for batch in training.batches():
        backward(model, batch, lambda output, y: output.sum())
        metrics.append(batch.metrics)
    return exact_models.digest(model, [], metrics)


def test_the_number_of_threads_outside_has_no_influence(monkeypatch):
    expected = long_sum_digest(1)
    assert long_sum_digest(6) == expected
    # The rule is needed.
    monkeypatch.setattr(paceline.Training, "_training_environment", contextlib.nullcontext)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert long_sum_digest(6) != expected


class Dots(nn.Module):
    """Depends on an address, as kernels do that begin at the next cache line: on some processors
    torch.dot sums in another order then.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1001, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        head = x.data_ptr() % 64 // x.element_size()
        return x[:, :head] @ self.weight[:head] + x[:, head:] @ self.weight[head:]


def collate_at(offset):
    def collate(samples):
        flat = torch.empty(offset + len(samples) * 1008)
        rows = flat[offset:].view(len(samples), 1008)[:, :1001]
        return rows.copy_(torch.stack([x for (x,) in samples]))

    return collate


def dots_digest(offset):
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(8, 1001, generator=generator))
    loader = paceline.DataLoader(dataset, 8, collate_fn=collate_at(offset))
    model, optimizer, training = make(Dots(), loader=loader)
    metrics = []
    for batch in training.batches():
        for x in batch.shards():
            loss = model(x).square().mean()
            loss.backward()
            batch.log(loss=loss)
        optimizer.step()
        metrics.append(batch.metrics)
    return exact_models.digest(model, optimizer, metrics)


def test_where_inputs_lie_in_memory_has_no_influence(monkeypatch):
    expected = dots_digest(0)
    assert dots_digest(1) == expected
    # The rule is needed.
    monkeypatch.setattr("paceline.training.shard_inputs.align_inputs", lambda inputs: inputs)
    assert dots_digest(1) != expected


def test_parameters_are_moved_to_multiples_of_64_bytes():
    array = np.empty(64 + 4 * 30, dtype=np.uint8)
    start = -array.ctypes.data % 64 + 4
    model = network()
    model[0].weight.data = torch.from_numpy(array[start : start + 120].view(np.float32)).view(5, 6)
    model[0].weight.data.fill_(1.0)
    assert model[0].weight.data_ptr() % 64
    input_alignment.align_model(model)
    assert model[0].weight.data_ptr() % 64 == 0
    assert model[0].weight.eq(1).all()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_loader_workers_change_nothing(name):
    assert exact_models.train(name, 5, workers=2) == exact_models.train(name, 5)


# --- torch's tools ----------------------------------------------------------------------------


def scaled_run(poisoned_step):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, optimizer, training = make(model, state={"scaler": scaler})
    scales = []
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            if batch.step == poisoned_step and number == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        before = weights(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (weights(model) == before) is (batch.step == poisoned_step)
        scales.append(scaler.get_scale())
    return scales


def test_gradient_scaling_skips_the_step_of_the_global_batch():
    assert scaled_run(poisoned_step=1) == [1024.0, 512.0, 512.0]
    assert scaled_run(poisoned_step=-1) == [1024.0, 2048.0, 2048.0]


def test_schedulers_averages_and_evaluation_in_between():
    model = network(nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, training = make(
        model, optimizer, state={"scheduler": scheduler, "average": average}
    )
    best = float("inf")
    for _ in training.epochs(2):
        model.train()
        for batch in training.batches():
            step(model, batch, optimizer)
            scheduler.step()
            average.update_parameters(model)
        model.eval()
        evaluation = paceline.Evaluation(data(), 5)
        with torch.no_grad():
            for x, y in evaluation:
                evaluation.add(loss=(model(x) - y).square().mean(1))
        best = min(best, evaluation.result().mean("loss"))
        if batch.metrics["loss"] > 100:
            break
    saved = training.state_dict()["state"]
    assert saved["scheduler"]["last_epoch"] == 6
    assert int(saved["average"]["n_averaged"]) == 6


def test_optimizers_of_our_own():
    def parts():
        model = network()
        return make(model, paceline.optim.AdamW(model.parameters(), lr=0.1))

    def train(model, optimizer, training, until):
        for _ in training.epochs(10):
            for batch in training.batches():
                step(model, batch, optimizer)
                if training.step == until:
                    return
        raise AssertionError

    whole, first, second = parts(), parts(), parts()
    train(*whole, 5)
    train(*first, 2)
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    train(*second, 5)
    assert weights(whole[0]) == weights(second[0])
    model, optimizer, training = parts()
    batches = training.batches()
    for x, y in next(batches).shards():
        F.mse_loss(model(x), y).backward()
        with pytest.raises(StepError, match="inside the loop"):
            optimizer.step()


def test_a_batch_outside_of_its_loop():
    batch = next(make()[2].batches())
    with pytest.raises(StepError, match=r"the loop over training.batches\(\) is over"):
        next(batch.shards())


def test_models_that_return_a_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x, y):
            return {"loss": F.mse_loss(self.inner(x), y)}

    model, optimizer, training = make(WithLoss())
    for batch in training.batches():
        for x, y in batch.shards():
            loss = model(x, y)["loss"]
            loss.backward()
            batch.log(loss=loss.item())
        optimizer.step()
        assert batch.metrics["loss"] > 0


# --- saving and loading -----------------------------------------------------------------------


@pytest.mark.parametrize("name", exact_models.CASES)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(name, tmp_path):
    expected = exact_models.train(name, 7)
    parts = exact_models.make(name)
    metrics = exact_models.run(name, *parts, 4)
    parts[2].save(tmp_path / "training.pt")
    parts = exact_models.make(name)
    for parameter in parts[0].parameters():
        nn.init.zeros_(parameter)
    parts[2].load(tmp_path / "training.pt")
    assert (parts[2].step, parts[2].epoch) == (4, 1)
    metrics += exact_models.run(name, *parts, 7)
    assert exact_models.digest(*parts[:2], metrics) == expected


def test_accumulated_gradients_are_saved():
    def accumulate(parts, until):
        model, optimizer, training = parts
        for _ in training.epochs(10):
            for batch in training.batches():
                backward(model, batch)
                if training.step % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if training.step == until:
                    return
        raise AssertionError

    whole, first, second = make(), make(), make()
    accumulate(whole, 6)
    accumulate(first, 2)
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    accumulate(second, 6)
    assert weights(whole[0]) == weights(second[0])


def test_a_save_after_the_batches_counts_the_epoch_as_over():
    model, optimizer, training = make()
    for _ in training.epochs(1):
        for batch in training.batches():
            step(model, batch, optimizer)
            inside = training.state_dict()["loader"]
        after = training.state_dict()["loader"]
    assert (inside["epoch"], inside["batch"]) == (0, 3)
    assert (after["epoch"], after["batch"]) == (1, 0)
    _, _, training = make()
    training.load_state_dict({**training.state_dict(), "loader": inside})
    assert [(epoch, len(list(training.batches()))) for epoch in training.epochs(2)] == [
        (0, 0),
        (1, 3),
    ]


def test_the_kind_of_optimizer_kernel_is_part_of_the_state():
    def parts(**options):
        model = network()
        return make(model, torch.optim.AdamW(model.parameters(), lr=0.1, **options))

    def train(model, optimizer, training, until):
        for _ in training.epochs(10):
            for batch in training.batches():
                step(model, batch, optimizer)
                if training.step == until:
                    return
        raise AssertionError

    whole, first, second = parts(fused=True), parts(fused=True), parts()
    train(*whole, 5)
    train(*first, 2)
    saved = copy.deepcopy(first[2].state_dict())
    second[2].load_state_dict(copy.deepcopy(saved))
    train(*second, 5)
    assert second[1].param_groups[0]["fused"]
    assert weights(whole[0]) == weights(second[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 5}, "seed was 0 and is now 5"),
        ({"threads": 2}, "threads was 1 and is now 2"),
        ({"state": {"model": nn.Linear(1, 1)}}, "state names was"),
    ],
)
def test_a_state_of_another_way_of_training_is_refused(options, message):
    saved = make()[2].state_dict()
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**options)[2].load_state_dict(saved)


def test_another_machine_is_refused_by_name_or_warned_of():
    training = make()[2]
    saved = training.state_dict()
    saved["fingerprint"]["instruction set"] = "NEON"
    with pytest.raises(PacelineError, match="instruction set was NEON and is now"):
        training.load_state_dict(saved)
    with pytest.warns(UserWarning, match="instruction set was NEON and is now"):
        training.load_state_dict(saved, strict=False)
    assert {"torch", "processor", "oneDNN"} <= set(training.fingerprint)


class Versioned:
    """A part of the state that cannot be loaded in another version, after others have been."""

    def state_dict(self):
        return {"version": 1}

    def load_state_dict(self, state):
        if state["version"] != 1:
            raise ValueError("refused")


def trained_with_wide_momentum():
    """Two steps, with momentum in a wider type than its parameters, which torch would round."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, training = make(model, optimizer, state={"versioned": Versioned()})
    for batch in training.batches():
        step(model, batch, optimizer)
        if training.step == 2:
            break
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape).double()
        parameter.grad = torch.ones_like(parameter)
    return optimizer, training


@pytest.mark.parametrize("through_a_file", [True, False])
def test_a_state_that_cannot_be_loaded_changes_nothing(through_a_file, tmp_path):
    optimizer, training = trained_with_wide_momentum()
    saved = copy.deepcopy(training.state_dict())
    saved["step"] += 1
    saved["state"]["versioned"]["version"] = 2
    saved["model"] = {name: value + 1 for name, value in saved["model"].items()}
    paceline.save(tmp_path / "other.pt", training=saved)
    before = training.digest(), training.step, training.epoch
    gradients = [parameter.grad for parameter in training.model.parameters()]
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    load, source = training.load_state_dict, saved
    if through_a_file:
        load, source = training.load, tmp_path / "other.pt"
    with pytest.raises(ValueError, match="refused") as caught:
        load(source)
    assert not any("could not" in note for note in getattr(caught.value, "__notes__", []))
    assert (training.digest(), training.step, training.epoch) == before
    assert optimizer.state_dict()["state"][0]["momentum_buffer"] is momentum
    for parameter, gradient in zip(training.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient


def test_loading_a_file_inside_the_loop_changes_nothing(tmp_path):
    training = make()[2]
    training.save(tmp_path / "training.pt")
    for _ in training.batches():
        with pytest.raises(ConfigError, match="load before the loops") as caught:
            training.load(tmp_path / "training.pt")
        assert caught.value.__notes__[-1].startswith("nothing was loaded")
        break


def test_what_is_no_saved_state_is_refused():
    with pytest.raises(ConfigError, match="not a state"):
        make()[2].load_state_dict({"model": {}})


def test_other_data_is_refused():
    saved = make()[2].state_dict()
    other = paceline.DataLoader(data(), BATCH, shuffle=True, seed=9)
    with pytest.raises(ConfigError, match="seed was 0 and is now 9"):
        make(loader=other)[2].load_state_dict(saved)


# --- audits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "embedding", "gan"])
def test_audits_of_a_single_process_change_nothing(name):
    assert exact_models.train(name, 5, audit_every=2) == exact_models.train(name, 5)


def test_an_audit_finds_code_that_depends_on_who_runs_it():
    model, _, training = make(audit_every=2)
    calls = []

    def run(batch):
        for x, y in batch.shards():
            calls.append(x)
            (F.mse_loss(model(x), y) * len(calls)).backward()

    batches = training.batches()
    run(next(batches))
    assert len(calls) == 4
    with pytest.raises(MismatchError, match=r"audit of step 1, pass 0: .* gradients of 0.weight"):
        run(next(batches))
    assert len(calls) == 9


def test_metrics_of_an_audited_shard_count_once():
    def metrics(**options):
        model, optimizer, training = make(**options)
        found = []
        for batch in training.batches():
            step(model, batch, optimizer)
            found.append(batch.metrics)
        return found

    assert metrics(audit_every=1) == metrics()


@given(st.integers(1, 7), st.integers(1, 12), st.integers(0, 50), st.integers(1, 4))
def test_an_audit_is_by_another_rank(world, shards, number, every):
    deals = deal(ShardPlan(shards, shards).cut(shards).shards, world)
    audit = AuditPlan(every, 0).audit_of(number, deals)
    if (number + 1) % every:
        assert audit is None
    else:
        (owner,) = [rank for rank, own in enumerate(deals) if audit.shard in own]
        assert 0 <= audit.auditor < world
        assert (audit.auditor != owner) is (world > 1)


# --- what the shards cost ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "gan"])
def test_measuring_the_shards_changes_nothing(name, capsys):
    measured = exact_models.train(name, 12)
    capsys.readouterr()
    assert measured == exact_models.train(name, 12, measure_shards=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds_of_a_call", "said"),
    [
        (
            lambda samples: 1.0,
            "paceline: 8 shards on 1 rank take about 8.0 times as long as 1 would: use fewer "
            "shards if you will never have as many ranks as that (another number of shards gives "
            "other bits; measure_shards=False says nothing)\n",
        ),
        (lambda samples: 0.1 * samples, ""),
    ],
)
def test_what_shards_cost_is_said_once_if_it_is_much(monkeypatch, capsys, seconds_of_a_call, said):
    monkeypatch.setattr(
        shard_price._Call, "seconds", lambda call, _: seconds_of_a_call(len(call.args[0]))
    )
    exact_models.train("mlp", 12)
    assert capsys.readouterr().err == said


def test_a_model_that_is_not_called_itself_is_not_measured(capsys):
    exact_models.train("gan", 12)
    assert capsys.readouterr().err == ""


class Counting(nn.Module):
    """Counts the samples it is called with, in its forward and in the script's hooks."""

    def __init__(self):
        super().__init__()
        self.layer, self.sizes, self.seen = nn.Linear(6, 3), [], []
        self.register_forward_hook(lambda model, args, out: self.seen.append(len(args[0])))

    def forward(self, x):
        self.sizes.append((len(x), torch.is_autocast_enabled("cpu")))
        return self.layer(x)


def sizes_in_the_loop(**options):
    """What a model is called with, step by step, beside the script's own calls."""
    torch.manual_seed(0)
    model = Counting()
    training = paceline.Training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        paceline.DataLoader(TensorDataset(torch.randn(64, 6)), 16),
        shards=4,
        **options,
    )
    extra = []
    for _ in training.epochs(2):
        for batch in training.batches():
            model.sizes.clear()
            model.seen.clear()
            for (x,) in batch.shards():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).float().sum()
                loss.backward()
                assert x.grad is None
            assert model.seen == [4] * 4
            extra.append(model.sizes[4:])
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
    return extra, gradients


def test_five_early_steps_run_the_model_with_a_shard_and_with_half_of_one():
    extra, gradients = sizes_in_the_loop()
    assert extra == [[], [], *[[(4, True), (2, True)]] * 5, []]
    plain, expected = sizes_in_the_loop(measure_shards=False)
    assert plain == [[]] * 8
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


class Fussy(nn.Module):
    """Takes batches of one size only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x.view(2, 6))


def test_a_model_that_takes_no_half_batches_is_not_measured(capsys):
    model = Fussy()
    loader = paceline.DataLoader(TensorDataset(torch.randn(64, 6)), BATCH)
    _, _, training = make(model, loader=loader)
    for batch in training.batches():
        for (x,) in batch.shards():
            model(x).sum().backward()
        model.zero_grad()
    assert training.step == 8
    assert capsys.readouterr().err == ""


def test_half_a_shard_tells_what_fewer_shards_would_save():
    # 3 ms, and 1 ms for each of 8 samples.
    assert fixed_part(8, 0.011, 4, 0.007) == pytest.approx(0.003)
    assert price_of(4, 0.011, 0.003) == pytest.approx(4 * 11 / (3 + 4 * 8))
    # Nothing but overhead; a half that takes longer than the whole, as measured times may.
    assert price_of(4, 0.01, fixed_part(8, 0.01, 4, 0.01)) == pytest.approx(4)
    assert price_of(4, 0.01, fixed_part(8, 0.01, 4, 0.012)) == pytest.approx(4)
    # No overhead at all, or less than none.
    assert price_of(4, 0.01, fixed_part(8, 0.01, 4, 0.005)) == 1
    assert price_of(4, 0.01, fixed_part(8, 0.01, 4, 0.004)) == 1


# --- finding differences ----------------------------------------------------------------------


def logged(path, lr, prefix=""):
    model = network(nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, training = make(model, optimizer)
    lines = ["something else"]
    for batch in training.batches():
        backward(model, batch)
        optimizer.param_groups[0]["lr"] = lr if training.step == 2 else 0.1
        optimizer.step()
        lines.append(prefix + training.digest())
        optimizer.zero_grad()
    path.write_text("\n".join(lines))


def test_diff_names_the_first_step_and_tensors_that_differ(tmp_path, capsys):
    logged(tmp_path / "a", 0.1)
    logged(tmp_path / "b", 0.1, prefix="[0] ")
    logged(tmp_path / "c", 0.2)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "no difference in 3 steps, 1 to 3\n"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2 is the first that differs, in 7 of ")
    assert second.startswith("  model.0.weight: ")


def test_diff_of_what_is_no_log(tmp_path, capsys):
    (tmp_path / "a").write_text("paceline digest {")
    (tmp_path / "b").write_text("")
    for name, problem in (("a", "cut off"), ("b", "no lines of digests"), ("c", "cannot be read")):
        assert main(["diff", str(tmp_path / name), str(tmp_path / name)]) == 2
        assert problem in capsys.readouterr().err


# --- mistakes ---------------------------------------------------------------------------------


def in_every_shard(mistake, model=None):
    model, optimizer, training = make(model)
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            mistake(model, optimizer, training, number, x, y)


def test_a_shard_without_backward():
    def mistake(model, optimizer, training, number, x, y):
        if number != 1:
            F.mse_loss(model(x), y).backward()

    with pytest.raises(StepError, match=r"after shard 1: call loss.backward\(\)"):
        in_every_shard(mistake)


@pytest.mark.parametrize("sparse_shard", [1, 2])
def test_a_gradient_that_is_sparse_in_some_shards_only(sparse_shard):
    """Also where the two shards are not added to each other first; a failure of the pass, of which
    all ranks hear.
    """

    def mistake(model, optimizer, training, number, x, y):
        rows = torch.zeros(len(x), dtype=torch.long)
        F.embedding(rows, model.weight, sparse=number == sparse_shard).sum().backward()

    with pytest.raises(StepError, match=r"counts on no rank, .* sparse in some shards and dense"):
        in_every_shard(mistake, nn.Embedding(3, 2))


def test_a_step_inside_the_loop_over_the_shards():
    def mistake(model, optimizer, training, number, x, y):
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    with pytest.raises(StepError, match=r"optimizer.step\(\) was called inside the loop"):
        in_every_shard(mistake)


def leave_early(then):
    model, optimizer, training = make()
    for batch in training.batches():
        for x, y in batch.shards():
            F.mse_loss(model(x), y).backward()
            break
        then(model, optimizer, training, batch)


@pytest.mark.parametrize(
    ("then", "what"),
    [
        (lambda model, optimizer, training, batch: optimizer.step(), "optimizer.step()"),
        (lambda model, optimizer, training, batch: None, "The next batch"),
        (lambda model, optimizer, training, batch: training.state_dict(), "state_dict()"),
        (lambda model, optimizer, training, batch: list(batch.shards()), "batch.shards()"),
    ],
)
def test_a_loop_over_the_shards_that_was_left_early(then, what):
    with pytest.raises(StepError, match=re.escape(what) + ".* was left early"):
        leave_early(then)


def fails_in_a_shard(model, batch):
    for number, (x, y) in enumerate(batch.shards()):
        F.mse_loss(model(x), y).backward()
        if number == 1:
            raise KeyError("of the program's own")


def forgets_a_backward(model, batch):
    for number, (x, y) in enumerate(batch.shards()):
        if number != 1:
            F.mse_loss(model(x), y).backward()


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("mistake", [fails_in_a_shard, forgets_a_backward])
def test_after_an_error_in_a_batch_another_loop_begins_it_again(mistake, carries):
    def train(fails):
        model, optimizer, training = make(network(nn.BatchNorm1d(5)))
        steps = 0
        with contextlib.suppress(KeyError, StepError):
            for batch in training.batches():
                if fails and steps == 1:
                    mistake(model, batch)
                steps += 1
                backward(model, batch)
                if not carries:
                    optimizer.step()
                    optimizer.zero_grad()
        if fails:
            with pytest.raises(StepError, match=r"optimizer.step\(\).*training.batches\(\)"):
                optimizer.step()
            for batch in training.batches():
                assert batch.number == steps
                steps += 1
                backward(model, batch)
                if not carries:
                    optimizer.step()
                    optimizer.zero_grad()
        assert steps == training.step == 3
        optimizer.step()
        return weights(model)

    assert train(fails=True) == train(fails=False)


def test_after_an_error_in_a_batch_a_state_can_be_loaded():
    model, optimizer, training = make()
    before = weights(model)
    state = copy.deepcopy(training.state_dict())
    with contextlib.suppress(KeyError):
        for batch in training.batches():
            step(model, batch, optimizer) if batch.number == 0 else fails_in_a_shard(model, batch)
    training.load_state_dict(state)
    assert training.step == 0
    assert weights(model) == before


def test_metrics_and_logs_in_the_wrong_place():
    model, _, training = make()
    for batch in training.batches():
        with pytest.raises(StepError, match="has ended"):
            batch.metrics  # noqa: B018
        backward(model, batch)
        with pytest.raises(StepError, match=r"batch.log\(loss\) belongs inside"):
            batch.log(loss=1.0)


def test_threads_that_are_changed_amid_a_step():
    def mistake(model, optimizer, training, number, x, y):
        torch.set_num_threads(3)
        F.mse_loss(model(x), y).backward()

    with pytest.raises(StepError, match="is 3 after shard 0"):
        in_every_shard(mistake)


def test_a_parameter_that_is_unfrozen_inside_the_loop():
    def mistake(model, optimizer, training, number, x, y):
        model[0].requires_grad_(True)
        F.mse_loss(model(x), y).backward()

    model = network()
    model[0].requires_grad_(False)
    with pytest.raises(StepError, match="before the loop"):
        in_every_shard(mistake, model)


def test_a_failed_step_leaves_the_gradients_of_before():
    model, _, training = make()
    batches = training.batches()
    backward(model, next(batches))
    before = model[0].weight.grad.clone()
    with pytest.raises(StepError):
        for _ in next(batches).shards():
            pass
    assert torch.equal(model[0].weight.grad, before)


def test_loading_inside_the_loop():
    model, optimizer, training = make()
    saved = training.state_dict()
    for batch in training.batches():
        step(model, batch, optimizer)
        with pytest.raises(ConfigError, match="load before the loops"):
            training.load_state_dict(saved)


def several_models():
    model = network()
    paceline.Training([model], torch.optim.SGD(model.parameters()), paceline.DataLoader(data(), 8))


def lbfgs():
    model = network()
    make(model, optimizer := torch.optim.LBFGS(model.parameters()))
    optimizer.step(lambda: 0.0)


def wrapped():
    make(paceline.DataParallel(network(), workers=1))


def foreign_parameters():
    make(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1))


def stock_loader():
    make(loader=torch.utils.data.DataLoader(data(), 8))


def in_any_order():
    make(loader=paceline.DataLoader(data(), 8, num_workers=1, in_order=False))


def stock_sampler():
    sampler = torch.utils.data.RandomSampler(data())
    make(loader=paceline.DataLoader(data(), 8, sampler=sampler))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: make(network(nn.SyncBatchNorm(5))), "1 is a SyncBatchNorm.*GroupNorm"),
        (lambda: make(nn.LazyLinear(3), torch.optim.SGD([nn.Parameter()])), "run one forward"),
        (lambda: make(loader=paceline.DataLoader(data(), 3)), "cannot be cut into shards=4"),
        (lambda: make(threads=0), "threads must be at least 1"),
        (lambda: make(audit_every=0), "audit_every must be at least 1"),
        (lambda: make(state={"x": 3}), r"state\['x'\] is a int without state_dict"),
        (several_models, "model must be a torch.nn.Module"),
        (lambda: make(optimizer="adam"), "must be a torch.optim.Optimizer"),
        (foreign_parameters, "ModuleDict"),
        (stock_loader, "paceline.DataLoader"),
        (in_any_order, "in_order=False"),
        (stock_sampler, "paceline.GlobalBatchSampler"),
        (wrapped, "give the bare module"),
        (lbfgs, "needs no closure"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_cure(mistake, message):
    with pytest.raises(ConfigError, match=message):
        mistake()


def test_ranks_without_a_group(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = paceline.DataLoader(data(), BATCH, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="init_process_group"):
        make(loader=loader)


def test_a_scaler_is_ready_on_a_rank_that_has_scaled_nothing():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    make(state={"scaler": scaler})
    scaler.update(2.0)  # refused before a scaler has set itself up
    assert scaler.get_scale() == 2.0


# --- what newcomers do ----------------------------------------------------------------------------


def test_a_name_that_some_shards_do_not_log_is_refused():
    model, _, training = make()

    def train_one():
        for batch in training.batches():
            for number, (x, y) in enumerate(batch.shards()):
                F.mse_loss(model(x), y).backward()
                batch.log(**({"loss": 1.0, "late": 2.0} if number else {"loss": 1.0}))
            return

    with pytest.raises(
        StepError, match=r"'late' was not logged for shards \[0\] \(of ranks \[0\]\)"
    ):
        train_one()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_shard_may_log_nothing_for_a_name():
    model, _, training = make()
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            F.mse_loss(model(x), y).backward()
            batch.log(large=torch.full((number,), 3.0))
        assert batch.metrics == {"large": 3.0}
        break


def test_a_step_with_gradients_of_the_bare_loader_is_refused():
    model, optimizer, training = make()
    optimizer.step()  # without gradients it does nothing, as some schedules want it
    for x, y in training.loader:
        F.mse_loss(model(x), y).backward()
        with pytest.raises(StepError, match=r"Loop over training\.batches\(\)"):
            optimizer.step()
        break
    optimizer.zero_grad()
    for batch in training.batches():
        step(model, batch, optimizer)


def test_mistakes_inside_a_batch_say_what_to_write():
    model, _, training = make()
    for batch in training.batches():
        with pytest.raises(StepError, match=r"use batch\.shards\(\)"):
            list(batch)
        backward(model, batch)
        with pytest.raises(KeyError, match=r"'accuracy' was not logged \(loss\).*batch\.log\("):
            batch.metrics["accuracy"]
        assert batch.metrics.get("accuracy") is None
        break
