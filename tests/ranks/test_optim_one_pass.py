"""`paceline.optim` with one_pass=True: gradients are summed in the step, and everything is as if
they had been averaged in backward, to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline.optim import shared_step
from tests.harness import init_group, run_ranks

OPTIMIZERS = {
    "SGD": lambda p, **o: paceline.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda p, **o: paceline.optim.Adam(p, amsgrad=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: paceline.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, **o: paceline.optim.Adagrad(p, lr_decay=0.1, **o),
}
WAYS = ({}, {"one_pass": True})


class Net(torch.nn.Module):
    """Two layers, one of which may be left out; small, and shared all the same."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        shared_step._WORTH_SHARING_BYTES = 0
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 9, dtype=dtype)
        self.second = torch.nn.Linear(9, 9, dtype=dtype)
        self.last = torch.nn.Linear(9, 3, dtype=dtype)

    def forward(self, x, skip=False):
        x = self.first(x).tanh()
        return self.last(x if skip else self.second(x).tanh())


def batch(rank, step, samples=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, 5, generator=generator)


def loss_of(model, rank, step, **options):
    dtype = next(model.parameters()).dtype
    return model(batch(rank, step).to(dtype), **options).square().mean()


def train(model, optimizer, rank, steps, start=0, **options):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, rank, step, **options).backward()
        optimizer.step()


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(results):
    first, *others = results
    for other in others:
        assert len(first) == len(other)
        for left, right in zip(first, other, strict=True):
            assert torch.equal(left, right)


def sums_in_step(optimizer):
    return optimizer._one_pass is not None and optimizer._one_pass._deferred.weights is not None


# --- the same bits --------------------------------------------------------------------------------
def train_both_ways(rank, world, name, dtype, max_norm):
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net(dtype), check_replicas_every=1)
        optimizer = OPTIMIZERS[name](model.parameters(), max_norm=max_norm, **way)
        train(model, optimizer, rank, 5)
        states = optimizer.state_dict()["state"].values()
        results.append([*bits(model), *(s["step"] for s in states if "step" in s)])
        assert sums_in_step(optimizer) == bool(way)
    assert_same(results)
    return results[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_an_average_in_backward(name):
    assert_same(run_ranks(2, train_both_ways, name, torch.float32, None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_bits_in_other_types(dtype):
    assert_same(run_ranks(2, train_both_ways, "AdamW", dtype, None))


@pytest.mark.parametrize("world", [2, 3])
def test_clipped_in_the_pass(world):
    assert_same(run_ranks(world, train_both_ways, "AdamW", torch.float32, 0.05))


# --- weights, accumulation, unused parameters -----------------------------------------------------
def uneven_samples(rank, step, model, optimizer):
    with model.count(rank + 1):
        model(batch(rank, step, rank + 1)).square().mean().backward()


def empty_share(rank, step, model, optimizer):
    with model.count(0 if rank == step % 2 else 3):
        model(batch(rank, step, 3)).square().mean().backward()


def micro_batches(rank, step, model, optimizer):
    for part in range(3):
        with model.count(part + rank + 1), contextlib.ExitStack() as stack:
            if part < 2:
                stack.enter_context(model.no_sync())
            model(batch(rank, 10 * step + part, part + rank + 1)).square().mean().backward()


def two_averaged_backwards(rank, step, model, optimizer):
    loss_of(model, rank, step).backward()
    loss_of(model, rank, step + 50).backward()


def several_outstanding(rank, step, model, optimizer):
    losses = [loss_of(model, rank, step), loss_of(model, rank, step + 50)]
    sum(losses).backward()


def unused_on_one_rank(rank, step, model, optimizer):
    loss_of(model, rank, step, skip=rank == step % 2).backward()


def unused_everywhere(rank, step, model, optimizer):
    loss_of(model, rank, step, skip=step % 2 == 1).backward()


def gradients_replaced(rank, step, model, optimizer):
    loss_of(model, rank, step).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


def gradients_kept(rank, step, model, optimizer):
    loss_of(model, rank, step).backward()
    optimizer.kept = [*getattr(optimizer, "kept", []), *(p.grad for p in model.parameters())]


def with_a_graph(rank, step, model, optimizer):
    loss_of(model, rank, step).backward(create_graph=True)


def train_variant(rank, world, variant, set_to_none):
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), **way)
        for step in range(6):
            optimizer.zero_grad(set_to_none)
            variant(rank, step, model, optimizer)
            optimizer.step()
        assert sums_in_step(optimizer) == bool(way)
        results.append(bits(model))
    for left, right in zip(*results, strict=True):
        # Two averages are added up in another order than two gradients.
        assert torch.allclose(left, right, rtol=0, atol=1e-6)
        if variant is not two_averaged_backwards:
            assert torch.equal(left, right)
    return results[1]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        uneven_samples,
        empty_share,
        micro_batches,
        two_averaged_backwards,
        several_outstanding,
        unused_on_one_rank,
        unused_everywhere,
        gradients_replaced,
        gradients_kept,
    ],
)
def test_holds_as_with_averages(variant, set_to_none):
    assert_same(run_ranks(2, train_variant, variant, set_to_none))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph():
    assert_same(run_ranks(2, train_variant, with_a_graph, True))


def weights_that_change(rank, world):
    """Two averaged backwards whose gradients add up, of other weights."""
    init_group("paceline")
    model = paceline.DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, rank, 2)
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    with model.count(rank + 1), pytest.raises(paceline.ConfigError, match="no_sync"):
        loss_of(model, rank, 3).backward()
    optimizer.zero_grad(set_to_none=False)
    with model.count(rank + 1):
        loss_of(model, rank, 4).backward()
    optimizer.step()
    return bits(model)


def test_sums_of_different_weights_are_refused():
    assert_same(run_ranks(2, weights_that_change))


# --- looking at the average -----------------------------------------------------------------------
def look_at_averages(rank, world, dtype):
    init_group("paceline")
    found = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net(dtype))
        optimizer = paceline.optim.SGD(model.parameters(), lr=0.0, **way)
        train(model, optimizer, rank, 2)
        averages = []
        for step, counts in enumerate([(1, 1), (3, 1)]):
            optimizer.zero_grad()
            with model.count(counts[rank]):
                loss_of(model, rank, step).backward()
            averages += model.averaged_gradients().items()
            own = [parameter.grad.clone() for parameter in model.parameters()]
        names, tensors = zip(*averages, strict=True)
        assert names[:6] == tuple(name for name, _ in model.module.named_parameters())
        found.append(tensors)
        others = [None] * world
        dist.all_gather_object(others, own)
        assert torch.equal(others[0][0], others[1][0]) == (not way)
    assert_same(found)
    return found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averaged_gradients(dtype):
    assert_same(run_ranks(2, look_at_averages, dtype))


# --- ranks without data, failures, other optimizers -----------------------------------------------
def run_out(rank, world, way):
    init_group("paceline")
    results = []
    for options in WAYS:
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), shared=True, max_norm=0.1, **options)
        steps = 5 if rank == 0 else 2
        if way == "join":
            with model.join():
                train(model, optimizer, rank, steps)
        else:
            train(model, optimizer, rank, steps)
            model.no_more_data(optimizer)
        assert optimizer.state_dict()["state"][0]["step"].item() == 5
        train(model, optimizer, rank, 3, start=10)
        results.append(bits(model))
    assert_same(results)
    return results[1]


@pytest.mark.parametrize("way", ["join", "no_more_data"])
def test_a_rank_without_data(way):
    assert_same(run_ranks(2, run_out, way))


def fail_after_backward(rank, world):
    init_group("paceline")
    model = paceline.DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, rank, 3)
    before = bits(model)
    dist.barrier()

    def guarded_step(where):
        with model.all_or_none():
            optimizer.zero_grad()
            x = batch(rank, 7)
            if rank == 1 and where == "backward":
                x.requires_grad_(True).register_hook(lambda _: 1 / 0)
            model(x).square().mean().backward()
            if rank == 1 and where == "step":
                raise ValueError("the needle")
            optimizer.step()

    for where in ("step", "backward"):
        with pytest.raises((paceline.StepError, ValueError, ZeroDivisionError)):
            guarded_step(where)
        assert_same([before, bits(model)])
    train(model, optimizer, rank, 2, start=8)
    return bits(model)


def test_a_step_given_up_is_made_by_nobody():
    assert_same(run_ranks(2, fail_after_backward, timeout=60))


def dropped(rank, world, where):
    """Another optimizer takes over: backward averages again, though on some ranks the first one is
    not collected yet.
    """
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), **way)
        train(model, optimizer, rank, 3)
        kept = [optimizer]
        del optimizer
        if rank in where:
            kept.clear()
            gc.collect()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 2)
        kept.clear()
        gc.collect()
        last = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank == 0:
            with model.join():
                train(model, last, rank, 2)
        else:
            with model.join():
                train(model, last, rank, 1)
        train(model, last, rank, 2)
        again = OPTIMIZERS["AdamW"](model.parameters(), **way)
        train(model, again, rank, 3)
        assert sums_in_step(again) == bool(way)
        results.append(bits(model))
    assert_same(results)
    return results[1]


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_without_its_optimizer_a_model_averages_in_backward(where):
    assert_same(run_ranks(2, dropped, where))


def loading(rank, world):
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["Adam"](model.parameters(), **way)
        train(model, optimizer, rank, 3)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, rank, 2, start=3)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, rank, 3, start=2)
        results.append(bits(model))
    assert_same(results)


def unfreezing(rank, world):
    """Groups of other settings, a parameter frozen at first, one the model does not have."""
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net())
        first, *others = model.parameters()
        foreign = torch.nn.Parameter(torch.ones(4))
        groups = [{"params": [first, foreign]}, {"params": others, "lr": 0.1}]
        optimizer = paceline.optim.AdamW(groups, max_norm=0.5, **way)
        others[0].requires_grad_(False)
        for step in range(6):
            optimizer.zero_grad()
            foreign.grad = torch.ones(4)
            if step == 3:
                others[0].requires_grad_(True)
            loss_of(model, rank, step).backward()
            optimizer.step()
        results.append([*bits(model), foreign.detach()])
    assert_same(results)


@pytest.mark.parametrize("scene", [loading, unfreezing])
def test_life_of_an_optimizer(scene):
    run_ranks(2, scene)


def said_once(rank, world):
    init_group("paceline")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("paceline")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    model = paceline.DistributedDataParallel(Net())
    train(model, OPTIMIZERS["AdamW"](model.parameters(), one_pass=True), rank, 4)
    said = [line for line in lines if "each rank's own gradient" in line]
    assert len(said) == (1 if rank == 0 else 0)


def test_what_grad_holds_is_said_once():
    run_ranks(2, said_once)


def through_a_hook(rank, world, backend):
    init_group(backend)
    model = paceline.DistributedDataParallel(Net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    with pytest.raises(paceline.ConfigError, match="one_pass=True"):
        train(model, optimizer, rank, 1)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_gradients_of_communication_hooks_are_refused(backend):
    run_ranks(2, through_a_hook, backend)


# --- GradScaler -----------------------------------------------------------------------------------
def scaled(rank, world):
    """A gradient overflows on one rank: no rank makes the step, and all lower the scale."""
    init_group("paceline")
    results = []
    for way in WAYS:
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["SGD"](model.parameters(), **way)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales = []
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if step in (0, 3) and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append([*bits(model), torch.tensor(scales)])
    assert_same(results)
    return results[1]


def test_a_scaler_hears_of_overflows_on_other_ranks():
    assert_same(run_ranks(2, scaled))
