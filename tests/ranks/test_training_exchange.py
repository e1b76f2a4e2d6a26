"""The two exchanges of `paceline.Training`: through shared memory, and on any process group."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import PeerLost
from paceline.training.gradient_sums import add_gradients
from paceline.training.group_exchange import GroupExchange
from paceline.training.parameter_set import ParameterSet
from paceline.training.shard_plan import ShardPlan
from paceline.training.shard_queue import NoClaims
from paceline.training.shared_exchange import SharedExchange
from paceline.training.tree_sum import TreeSum, subtrees
from paceline.training.work_sharing import WorkSharing
from tests.harness import init_group, run_ranks
from tests.harness.exact_models import CASES, make, train

SHARDS = 9


class Shapes(nn.Module):
    """Gradients of two types: none, one number, some, and more than pass through at once."""

    def __init__(self):
        super().__init__()
        sizes = (1, 0, 7, 5 * 1000, 33, 60 * 1000, 3)
        self.numbers = nn.ParameterList([nn.Parameter(torch.empty(n)) for n in sizes])
        self.wide = nn.Parameter(torch.empty(2, 3, 50, 50).to(memory_format=torch.channels_last))
        self.precise = nn.Parameter(torch.empty(1234, dtype=torch.float64))


def gradients_of_shard(parameters, shard):
    """Any bits: infinities, zeros of both signs, NaN of several kinds. Some shards lack some."""
    generator = torch.Generator().manual_seed(shard)
    found = []
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        special = torch.rand(parameter.shape, generator=generator)
        gradient[special < 0.1] = -0.0
        gradient[special > 0.97] = float("inf")
        gradient[special > 0.98] = float("-inf")
        gradient[special > 0.99] = float("nan")
        if gradient.dtype == torch.float32:
            gradient.view(torch.int32)[special > 0.995] = -0x3FFFF0 + shard  # a NaN of its own
        used = (number + shard) % 4 or shard == 0
        found.append(gradient.contiguous(memory_format=layout_of(parameter)) if used else None)
    return found


def layout_of(parameter):
    return torch.channels_last if parameter.dim() == 4 else torch.contiguous_format


def evenly(rank, world):
    return WorkSharing(rank, world, SHARDS, NoClaims(), follows_speed=False)


def averaged(rank, world, kind, owners, has_loose):
    """The averages over shards that are dealt out by `owners`, as bytes. `has_loose`: ranks have
    not added their last shards to the others.
    """
    init_group("paceline")
    sharing = evenly(rank, world)
    exchange = (
        SharedExchange(dist.group.WORLD, SHARDS, sharing)
        if kind is SharedExchange
        else GroupExchange(dist.group.WORLD, sharing)
    )
    parameters = ParameterSet(Shapes())
    forms = parameters.dense_forms("d" * len(parameters.parameters))
    plan = ShardPlan(5 * SHARDS, SHARDS).cut(5 * SHARDS)
    results = []
    for deal in owners:
        shards = [tuple(n for n, owner in enumerate(deal) if owner == r) for r in range(world)]
        loose = [each[-1] if has_loose and each else None for each in shards]
        tree = TreeSum(SHARDS, add_gradients)
        for number in shards[rank]:
            gradients = gradients_of_shard(parameters.parameters, number)
            if number == loose[rank]:
                tree.nodes[0, number] = gradients
            else:
                tree.add_leaf(number, gradients)
        nodes = [subtrees(shards[r], SHARDS, loose[r]) for r in range(world)]
        exchange.gather({"rank": rank})
        means = exchange.average_nodes(tree.nodes, nodes, forms, plan)
        for mean, form in zip(means, forms, strict=True):
            assert mean.stride() == form.strides
            assert mean.numel() == 0 or mean.data_ptr() % 64 == 0
        flat = [mean.as_strided((mean.numel(),), (1,)).view(torch.uint8) for mean in means]
        results.append([bytes(each.numpy()) for each in flat])
    return results


def alone():
    parameters = ParameterSet(Shapes()).parameters
    tree = TreeSum(SHARDS, add_gradients)
    for number in range(SHARDS):
        tree.add_leaf(number, gradients_of_shard(parameters, number))
    means = [total.div_(SHARDS) for total in tree.root]
    flat = [mean.as_strided((mean.numel(),), (1,)).view(torch.uint8) for mean in means]
    return [bytes(each.numpy()) for each in flat]


DEALS = {
    2: [[0] * 4 + [1] * 5, [0, 1] * 4 + [0], [1] * 9],
    3: [[0] * 3 + [1] * 3 + [2] * 3, [2, 0, 0, 1, 2, 2, 0, 1, 1], [0] * 8 + [2]],
}


@pytest.mark.parametrize("world", DEALS)
@pytest.mark.parametrize(
    ("kind", "has_loose"), [(SharedExchange, False), (SharedExchange, True), (GroupExchange, False)]
)
def test_any_deal_of_any_bits_gives_the_average_of_one_process(kind, has_loose, world):
    expected = alone()
    for found in run_ranks(world, averaged, kind, DEALS[world], has_loose):
        for deal, means in zip(DEALS[world], found, strict=True):
            assert [a == b for a, b in zip(means, expected, strict=True)] == [True] * 9, deal


# --- messages ---------------------------------------------------------------------------------


def talk(rank, world):
    """Messages of all sizes, also ones that need more room than there was."""
    init_group("paceline")
    exchange = SharedExchange(dist.group.WORLD, 4, evenly(rank, world))
    for length in (0, 3, 5000, 1, 100_000, 7):
        sent = [torch.full((length,), rank, dtype=torch.bfloat16), torch.ones(0, 3), torch.ones(())]
        received = exchange.gather({"rank": rank, "length": length}, sent if rank else [])
        for other, (facts, tensors) in enumerate(received):
            assert facts == {"rank": other, "length": length}
            assert len(tensors) == (3 if other else 0)
            if other:
                assert tensors[0].dtype == torch.bfloat16
                assert tensors[0].tolist() == [other] * length
                assert tensors[1].shape == (0, 3)
                assert tensors[2].item() == 1
    return True


def test_messages_of_any_size():
    assert run_ranks(3, talk) == [True] * 3


# --- memory -----------------------------------------------------------------------------------

WIDTH = 3200  # a gradient of 41 MB, which malloc gets from the system and returns to it


def peak_of_a_step(rank, world, shards):
    """How many gradients the memory of a step would hold at its peak, that in `.grad` included."""
    init_group("paceline")
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    loader = paceline.DataLoader(TensorDataset(torch.ones(4 * shards, WIDTH)), 2 * shards)
    training = paceline.Training(
        model, torch.optim.SGD(model.parameters()), loader, shards=shards, steal=False
    )
    for batch in training.batches():
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # a peak from here on
        before = memory_bytes("VmRSS")
        for (x,) in batch.shards():
            model(x).sum().backward()
        peak = (memory_bytes("VmHWM") - before) / model.weight.nbytes
        model.zero_grad()
    return peak


def memory_bytes(field):
    (line,) = [
        line
        for line in pathlib.Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    ]
    return int(line.split()[1]) * 1024


def test_two_sums_of_gradients_beside_the_gradients_are_the_most_that_is_held():
    for peak in run_ranks(2, peak_of_a_step, 8):
        assert 2.5 < peak < 3.2
    # One shard each: nothing but the gradient, which the mean is written to.
    for peak in run_ranks(2, peak_of_a_step, 2):
        assert 0.5 < peak < 1.2


# --- optimizers of our own --------------------------------------------------------------------


def with_our_optimizer(rank, world):
    if world > 1:
        init_group("paceline")
    CASES["ours"] = dataclasses.replace(
        CASES["transformer"],
        optimizers=lambda model: paceline.optim.AdamW(model.parameters(), lr=3e-3),
    )
    return train("ours", 4)


def test_optimizers_of_our_own_give_the_same_bits_at_any_number_of_ranks():
    (expected,) = run_ranks(1, with_our_optimizer)
    assert run_ranks(2, with_our_optimizer) == [expected] * 2
    assert run_ranks(3, with_our_optimizer) == [expected] * 3


# --- a rank that is killed ----------------------------------------------------------------------


def lose_a_peer(rank, world, moment):
    init_group("paceline")
    model, optimizer, training = make("mlp")
    assert isinstance(training._exchange, SharedExchange)
    if rank == 1 and moment == "between":
        # It has said what it has, and dies before it has brought it.
        SharedExchange.average_nodes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for batch in training.batches():
        for x, y in batch.shards():
            F.cross_entropy(model(x), y).backward()
            if rank == 1 and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_peer_that_is_killed_is_reported_at_once(moment):
    outcomes = run_ranks(3, lose_a_peer, moment, check=False)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerLost)
        assert outcomes[rank].error.rank == 1
