"""`paceline.Training` on real ranks: one hash for every number of ranks, and a rule that is broken
shows in it.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import ConfigError, MismatchError, StepError
from paceline.data import batch_requests
from paceline.training import (
    balance,
    group_exchange,
    shard_buffers,
    shard_gradients,
    shard_pass,
    tree_sum,
)
from paceline.training.shard_plan import ShardPlan
from tests.harness import init_group, run_ranks
from tests.harness.exact_models import CASES, classify_wide, digest, make, run, train, wide

STEPS = 4  # three make an epoch


def hashes(rank, world, backend, names, steps, options):
    if world > 1:
        init_group(backend)
    return {name: train(name, steps, **options) for name in names}


def one_hash(world, backend, names=tuple(CASES), steps=STEPS, **options):
    """The hashes of all ranks, which must be the same on each."""
    first, *others = run_ranks(world, hashes, backend, names, steps, options, timeout=180)
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def alone():
    return one_hash(1, "gloo")


@pytest.mark.parametrize(
    ("world", "backend"),
    [(2, "paceline"), (4, "paceline"), (3, "gloo")],
)
def test_every_number_of_ranks_gives_the_same_bits(world, backend, alone):
    assert one_hash(world, backend) == alone


def large_gradients(rank, world, backend):
    if world > 1:
        init_group(backend)
    CASES["wide"] = dataclasses.replace(CASES["mlp"], model=wide, step=classify_wide)
    return train("wide", 3)


def test_large_gradients():
    (expected,) = run_ranks(1, large_gradients, "gloo")
    assert run_ranks(2, large_gradients, "paceline") == [expected] * 2
    assert run_ranks(2, large_gradients, "gloo") == [expected] * 2
    assert run_ranks(4, large_gradients, "paceline") == [expected] * 4


def test_a_number_of_shards_that_is_no_power_of_two():
    expected = one_hash(1, "gloo", shards=7)
    assert one_hash(3, "gloo", shards=7) == expected
    assert one_hash(2, "paceline", shards=7) == expected


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_any_other_deal_gives_the_same_bits(backend, alone):
    assert run_ranks(3, with_another_deal, backend, timeout=180) == [alone] * 3


def with_another_deal(rank, world, backend):
    """Odd and even shards apart, and a rank with none."""

    def scattered(self, shards):
        owners = [1 if shard.number % 2 else 2 for shard in shards]
        return [[s for s, o in zip(shards, owners, strict=True) if o == r] for r in range(world)]

    balance.Balance.deal = scattered
    init_group(backend)
    return {name: train(name, STEPS) for name in CASES}


# --- saving and loading -----------------------------------------------------------------------


def first_half(rank, world, backend, path, steps):
    if world > 1:
        init_group(backend)
    metrics = {}
    for name in CASES:
        parts = make(name)
        metrics[name] = run(name, *parts, steps)
        parts[2].save(f"{path}/{name}")
    return metrics


def second_half(rank, world, backend, path, steps, metrics):
    if world > 1:
        init_group(backend)
    found = {}
    for name in CASES:
        parts = make(name)
        parts[2].load(f"{path}/{name}")
        found[name] = digest(*parts[:2], metrics[name] + run(name, *parts, steps))
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3)])
def test_a_run_goes_on_in_mid_epoch_on_another_number_of_ranks(before, after, alone, tmp_path):
    metrics = run_ranks(before, first_half, "gloo", str(tmp_path), 2, timeout=180)[0]
    arguments = ("paceline", str(tmp_path), STEPS, metrics)
    for found in run_ranks(after, second_half, *arguments, timeout=180):
        assert found == alone


def checkpointed(rank, world, backend, path, steps):
    init_group(backend)
    parts = make("transformer", checkpoint=path, save_every=1)
    run("transformer", *parts, steps)
    parts[2].save(f"{path}/same.pt")  # all ranks wait for one another, and for the file before
    return parts[2].step


def test_checkpoints_are_found_by_any_number_of_ranks(tmp_path):
    path = str(tmp_path)
    assert run_ranks(2, checkpointed, "paceline", path, 3) == [3, 3]
    # The body of the third batch was left before its end.
    assert {p.name for p in tmp_path.iterdir()} == {
        "same.pt",
        "step-000000001.pt",
        "step-000000002.pt",
    }
    assert run_ranks(3, checkpointed, "gloo", path, 5) == [5, 5, 5]
    run_ranks(1, alone_until, f"{path}/alone.pt", 5)
    saved, expected = (torch.load(f"{path}/{name}.pt")["state"] for name in ("same", "alone"))
    assert digest_of_state(saved) == digest_of_state(expected)


def alone_until(rank, world, path, steps):
    parts = make("transformer")
    run("transformer", *parts, steps)
    parts[2].save(path)


def digest_of_state(state):
    return digest(nn.Module(), [], [state])


# --- each rule is needed ----------------------------------------------------------------------


def break_rows():
    """Boundaries that follow the number of ranks."""
    world = paceline.world_size()
    ShardPlan.cut = lambda self, samples: ShardPlan._new_plan(
        ShardPlan(self.batch_size, 4 * world), samples
    )


def break_random_numbers():
    """A shard draws from where the shard before has left the generators."""
    shard_pass.seed_generators = lambda seed: None
    paceline.training.global_batch.seed_generators = lambda seed: None


def break_random_numbers_of_python():
    """Only torch's are seeded."""
    shard_pass.seed_generators = lambda seed: torch.manual_seed(seed % 2**63)


def break_random_numbers_of_samples():
    """A sample draws from where the sample before has left the generators."""
    batch_requests.sample_seeds = lambda *_: None


def break_buffers():
    """A shard starts from the buffers that the shard before has left."""
    shard_buffers.ShardBuffers._put_back = lambda self, currents, changed: None


def break_tree():
    """Sums in the order of ranks."""

    def add_node(self, node, value):
        first = next(iter(self.nodes), node)
        self.nodes[first] = self._add(self.nodes[first], value) if self.nodes else value

    tree_sum.TreeSum.add_node = add_node
    tree_sum.TreeSum.root = property(lambda self: next(iter(self.nodes.values())))
    shard_pass.subtrees = lambda shards, leaves, loose: [(0, shards[0])] if shards else []


def break_clipping():
    """Clips the gradients of each rank before they are exchanged."""
    original = shard_gradients.ShardGradients.kinds

    def kinds(self):
        for gradients in self.nodes.values():
            norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(min(1.0, 0.5 / float(norm)))
        return original(self)

    shard_gradients.ShardGradients.kinds = kinds


def with_rule_broken(rank, world, rule, name):
    CASES["noisy"] = dataclasses.replace(CASES["mlp"], model=Noisy)
    if world > 1:
        init_group("gloo")
    before = train(name, 3)
    rule()
    return before, train(name, 3)


RULES = {
    break_rows: "mlp",
    break_random_numbers: "transformer",
    break_random_numbers_of_python: "noisy",
    break_random_numbers_of_samples: "mlp",
    break_buffers: "cnn",
    break_tree: "mlp",
    break_clipping: "cnn",
}


class Noisy(nn.Module):
    """Draws from Python's and numpy's generators in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, x):
        return self.linear(x + random.random() + np.random.rand())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_broken_shows_in_the_hash(rule):
    name = RULES[rule]
    alone, together = (
        run_ranks(world, with_rule_broken, rule, name, timeout=120)[0] for world in (1, 2)
    )
    assert alone[0] == together[0]
    assert alone[1] != together[1]


# --- audits -----------------------------------------------------------------------------------


def test_audits_change_nothing_and_find_nothing(alone):
    assert one_hash(3, "gloo", audit_every=1) == alone


def with_a_broken_processor(rank, world):
    """One bit of one gradient of rank 1 is wrong from the fourth step on."""
    init_group("paceline")
    model, optimizer, training = make("mlp", audit_every=1, steal=False)
    for epoch in training.epochs(2):
        for batch in training.batches():
            for x, y in batch.shards():
                F.cross_entropy(model(x), y).backward()
                if rank == 1 and epoch == 1:
                    model[2].weight.grad.view(torch.int32)[0, 0] ^= 1
            optimizer.step()
            optimizer.zero_grad()


def test_an_audit_finds_a_broken_processor():
    for outcome in run_ranks(2, with_a_broken_processor, check=False):
        assert isinstance(outcome.error, MismatchError)
        assert "audit of step 3, pass 0" in str(outcome.error)
        assert "different gradients of 2.weight" in str(outcome.error)
        assert set(outcome.error.values) == {0, 1}


# --- gradient scaling -------------------------------------------------------------------------


def scaled(rank, world, local_only):
    if world > 1:
        init_group("gloo")
    if local_only:
        group_exchange.GroupExchange.average_nodes = lambda self, own, *_: next(iter(own.values()))
    model, optimizer, training = make("mlp", steal=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for batch in training.batches():
        for number, (x, y) in enumerate(batch.shards()):
            loss = F.cross_entropy(model(x), y)
            # In the first shard of all, which is rank 0's.
            poison = batch.step == 1 and number == 0 and rank == 0
            scaler.scale(loss * float("inf") if poison else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), digest(model, optimizer, [])


def test_an_infinity_in_one_shard_skips_the_step_on_every_rank():
    (expected,) = run_ranks(1, scaled, False)
    assert run_ranks(2, scaled, False) == [expected, expected]
    assert expected[0] == 512.0
    first, second = run_ranks(2, scaled, True)
    assert first[0] != second[0]


# --- ranks that disagree ----------------------------------------------------------------------


def test_initial_weights_are_those_of_rank_0():
    assert len(set(run_ranks(2, differently_initialised))) == 1


def differently_initialised(rank, world):
    init_group("paceline")
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    loader = paceline.DataLoader(TensorDataset(torch.ones(9, 4)), 8)
    paceline.Training(model, torch.optim.SGD(model.parameters()), loader)
    return digest(model, [], [])


def forgets_backward(rank, world, backend):
    init_group(backend)
    model, _, training = make("mlp", steal=False)
    for batch in training.batches():
        for x, y in batch.shards():
            loss = F.cross_entropy(model(x), y)
            if batch.step == 0 or rank != 1:
                loss.backward()


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_mistake_on_one_rank_is_raised_on_all(backend):
    for outcome in run_ranks(3, forgets_backward, backend, check=False):
        assert isinstance(outcome.error, StepError)
        assert outcome.error.rank == 1
        assert "step 1, pass 0 counts on no rank, because rank 1 failed" in str(outcome.error)
        assert "loss.backward()" in str(outcome.error)


def different_arguments(rank, world):
    init_group("gloo")
    make("mlp", shards=8 - rank)


def different_learning_rates(rank, world):
    init_group("gloo")
    model = nn.Linear(4, 2)
    loader = paceline.DataLoader(TensorDataset(torch.ones(9, 4)), 8)
    paceline.Training(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank), loader)


@pytest.mark.parametrize("mistake", [different_arguments, different_learning_rates])
def test_arguments_that_differ_are_named(mistake):
    for outcome in run_ranks(2, mistake, check=False):
        assert isinstance(outcome.error, MismatchError)
        assert "rank 1: " in str(outcome.error)


def test_more_ranks_than_shards():
    for outcome in run_ranks(3, lambda rank, world: too_many(), check=False):
        assert isinstance(outcome.error, ConfigError)
        assert "use at most 2 ranks" in str(outcome.error)


def too_many():
    init_group("gloo")
    make("mlp", shards=2)
