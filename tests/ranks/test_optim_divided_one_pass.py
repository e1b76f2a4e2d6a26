"""one_pass=True where ranks share no memory: each gets the sum of its part of the gradients, steps
that part, and all get all parts. With two ranks everything is as if gradients had been averaged in
backward, to the bit.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.optim import divided_step
from tests.harness import init_group, run_ranks
from tests.harness.hosts import enter, simulated_hosts
from tests.ranks import test_optim_one_pass as one_pass
from tests.ranks.test_optim_one_pass import OPTIMIZERS, Net, assert_same, bits, loss_of, train


def sums_in_step(optimizer):
    return optimizer._deferred is not None and optimizer._deferred.weights is not None


def on_gloo(rank, world, function, *arguments):
    one_pass.init_group = lambda _: init_group("gloo")
    one_pass.sums_in_step = sums_in_step
    divided_step._BUFFER_BYTES = 256
    divided_step._LONG_PIECE_BYTES = 100
    return function(rank, world, *arguments)


def ranks(function, *arguments, world=2):
    return run_ranks(world, on_gloo, function, *arguments, timeout=100)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("SGD", torch.float32), ("AdamW", torch.float64), ("Adam", torch.bfloat16)],
)
def test_the_bits_of_an_average_in_backward(name, dtype):
    assert_same(ranks(one_pass.train_both_ways, name, dtype, None))


@pytest.mark.parametrize(
    "variant",
    [
        one_pass.uneven_samples,
        one_pass.empty_share,
        one_pass.micro_batches,
        one_pass.two_averaged_backwards,
        one_pass.unused_on_one_rank,
        one_pass.unused_everywhere,
        one_pass.gradients_replaced,
        one_pass.gradients_kept,
    ],
)
def test_holds_as_with_averages(variant):
    assert_same(ranks(one_pass.train_variant, variant, True))


@pytest.mark.parametrize("way", ["join", "no_more_data"])
def test_a_rank_without_data(way):
    assert_same(ranks(one_pass.run_out, way))


@pytest.mark.parametrize(
    "scene",
    [
        one_pass.loading,
        one_pass.weights_that_change,
        one_pass.scaled,
        one_pass.fail_after_backward,
        one_pass.said_once,
    ],
)
def test_life_of_an_optimizer(scene):
    ranks(scene)


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_without_its_optimizer_a_model_averages_in_backward(where):
    assert_same(ranks(one_pass.dropped, where))


def test_averaged_gradients():
    assert_same(ranks(one_pass.look_at_averages, torch.float32))


def three_ranks(rank, world, backend="gloo"):
    """Sums of three depend on their order: near what is averaged, and the same on all ranks."""
    init_group(backend)
    results = []
    for way in ({"shared": False}, {"one_pass": True}):
        model = paceline.DistributedDataParallel(Net())
        optimizer = OPTIMIZERS["SGD"](model.parameters(), max_norm=0.05, **way)
        train(model, optimizer, rank, 5)
        results.append(bits(model))
    assert optimizer.is_divided
    assert sums_in_step(optimizer)
    for plain, together in zip(*results, strict=True):
        assert torch.allclose(plain, together, rtol=0, atol=1e-6)
    return results[1]


def test_three_ranks_clip_together():
    assert_same(ranks(three_ranks, world=3))


@pytest.mark.netns
def test_several_hosts():
    def on_host(rank, world, hosts):
        enter(hosts[(0, 0, 1)[rank]])
        return three_ranks(rank, world, "paceline")

    with simulated_hosts(2) as hosts:
        assert_same(run_ranks(3, on_host, hosts, timeout=100))


def ends_in_no_sync(rank, world):
    init_group("gloo")
    model = paceline.DistributedDataParallel(Net())
    optimizer = OPTIMIZERS["AdamW"](model.parameters(), one_pass=True)
    train(model, optimizer, rank, 2)
    with model.no_sync():
        loss_of(model, rank, 3).backward()
    with pytest.raises(paceline.ConfigError, match="no_sync"):
        optimizer.step()


def test_a_step_after_no_sync_is_refused():
    ranks(ends_in_no_sync)
