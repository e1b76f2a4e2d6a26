"""one_pass=True with large gradients: they stay where autograd put them, and peers read them from
there. Here every gradient counts as large.
"""

from __future__ import annotations

import os
import select
import signal

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.core.communicator import Communicator
from paceline.ddp import shm_transport
from paceline.ddp.buckets import InPlaceBucket
from tests.harness import init_group, run_ranks
from tests.ranks import test_optim_one_pass as one_pass
from tests.ranks.test_optim_one_pass import OPTIMIZERS, Net, assert_same, bits, loss_of, train


def in_place(rank, world, function, *arguments):
    shm_transport._IN_PLACE_FROM_BYTES = 0
    return function(rank, world, *arguments)


def ranks(world, function, *arguments):
    return run_ranks(world, in_place, function, *arguments, timeout=60)


@pytest.mark.parametrize(
    ("world", "dtype", "max_norm"),
    [
        (2, torch.float32, None),
        (3, torch.float32, 0.05),
        (2, torch.float64, None),
        (3, torch.bfloat16, None),
        (2, torch.float16, 0.05),
    ],
)
def test_the_bits_of_an_average_in_backward(world, dtype, max_norm):
    assert_same(ranks(world, one_pass.train_both_ways, "AdamW", dtype, max_norm))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        one_pass.uneven_samples,
        one_pass.empty_share,
        one_pass.micro_batches,
        one_pass.unused_on_one_rank,
        one_pass.unused_everywhere,
        one_pass.gradients_replaced,
        one_pass.gradients_kept,
    ],
)
def test_holds_as_with_averages(variant, set_to_none):
    assert_same(ranks(2, one_pass.train_variant, variant, set_to_none))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph():
    assert_same(ranks(2, one_pass.train_variant, one_pass.with_a_graph, True))


@pytest.mark.parametrize("way", ["join", "no_more_data"])
def test_a_rank_without_data(way):
    assert_same(ranks(2, one_pass.run_out, way))


@pytest.mark.parametrize(
    "scene",
    [one_pass.loading, one_pass.unfreezing, one_pass.weights_that_change, one_pass.scaled],
)
def test_life_of_an_optimizer(scene):
    ranks(2, scene)


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_without_its_optimizer_a_model_averages_in_backward(where):
    assert_same(ranks(2, one_pass.dropped, where))


class Large(torch.nn.Module):
    """Several windows of a read, and an end that is no whole line."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1031, 1031, bias=False)

    def forward(self, x):
        return self.layer(x)


def large_gradients(rank, world):
    init_group("paceline")
    results = []
    for way in one_pass.WAYS:
        model = paceline.DistributedDataParallel(Large())
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), max_norm=0.1, **way)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(2, 1031, generator=generator)).square().mean().backward()
            optimizer.step()
        assert isinstance(model.reducer.buckets[0], InPlaceBucket)
        results.append(bits(model))
    assert_same(results)
    return results[1]


@pytest.mark.parametrize("world", [2, 3])
def test_large_gradients_stay_where_they_are(world):
    assert_same(run_ranks(world, large_gradients))


def unreadable(rank, world):
    Communicator.reads_directly = False
    results = train_large(rank)
    assert not any(isinstance(bucket, InPlaceBucket) for bucket in results[1].reducer.buckets)
    return results[0]


def train_large(rank):
    init_group("paceline")
    model = paceline.DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, rank, 4)
    return bits(model), model


def test_gradients_are_copied_where_ranks_may_not_read_each_other():
    assert_same(ranks(2, unreadable))


def killed_before_its_gradients_are_read(rank, world):
    """Rank 1 comes to the meeting that begins a step, and ends, with the gradients it brings."""
    init_group("paceline")
    model = paceline.DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, rank, 3)
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    peer = os.pidfd_open(pids[1 - rank])
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()
    begin = optimizer._shared.begin

    def begin_and_die(*arguments, **options):
        verdict = begin(*arguments, **options)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert select.select([peer], [], [], 30)[0], "rank 1 has not ended"
        return verdict

    optimizer._shared.begin = begin_and_die
    before = bits(model)
    with pytest.raises(paceline.PeerLost, match="rank 1"):
        optimizer.step()
    assert_same([before, bits(model)])
    os.close(peer)


def test_a_peer_that_is_gone_is_named():
    survivor, victim = run_ranks(
        2, in_place, killed_before_its_gradients_are_read, check=False, timeout=60
    )
    assert survivor.error is None, survivor.error
    assert victim.exitcode == -signal.SIGKILL
