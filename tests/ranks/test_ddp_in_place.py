"""Large gradients are summed where they are, in the ranks' own memory. Here every gradient counts
as large.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.ddp import shm_transport
from paceline.ddp.buckets import InPlaceBucket
from tests.faults import test_ddp_atomic_step as failing
from tests.harness import init_group, run_ranks
from tests.ranks import test_ddp_exact as exact
from tests.ranks import test_ddp_models as models


def in_place(rank, world, function, *arguments):
    shm_transport._IN_PLACE_FROM_BYTES = 0
    return function(rank, world, *arguments)


def ranks(world, function, *arguments):
    return run_ranks(
        world, in_place, function, *arguments, env={"BACKEND": "paceline"}, timeout=110
    )


def buckets_of_a_large_model(rank, world):
    init_group("paceline")
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Linear(8, 1024 * 128, bias=False), torch.nn.Identity()
    )
    model = paceline.DistributedDataParallel(net)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
    large = net[1].weight
    expected = torch.autograd.grad(
        sum(net(torch.full((2, 8), 1.0 + r)).square().mean() for r in range(world)) / world, large
    )
    assert torch.allclose(large.grad, *expected, rtol=1e-5)
    return [
        (type(one), [model.reducer.managed[i].name for i in one.members])
        for one in model.reducer.buckets
    ]


@pytest.mark.one_host("nothing is summed in place")
def test_only_large_gradients_are_summed_in_place_and_after_the_others():
    for found in run_ranks(2, buckets_of_a_large_model):
        assert [kind is InPlaceBucket for kind, _ in found] == [False, True]
        assert found[-1][1] == ["1.weight"]


@pytest.mark.parametrize("world", [2, 3])
def test_every_split_is_exact(world):
    cases = [[[n] for n in split] for split in exact.splits(5, world)] + [
        [[1, 2], [3]] + [[2]] * (world - 2)
    ]
    assert exact.same_bits(ranks(world, exact.run_splits, cases))


def test_the_ragged_end_of_an_epoch():
    assert exact.same_bits(ranks(3, exact.ragged_epoch, "optimizer"))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (exact.empty_rank, ()),
        (exact.several_forwards, ()),
        (models.checkpointing, ()),
        (models.kinds_of_parameters, ()),
        (models.unused, ({},)),
        (models.frozen, ()),
        (models.user_hooks, ()),
        (models.kept_gradients, ()),
        (models.low_precision, ()),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_works_in_buckets_works_in_place(function, arguments):
    ranks(2, function, *arguments)


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "loader"])
def test_a_failing_rank_takes_part_to_the_end(where):
    failing.check_all_know(ranks(2, failing.train_until_failure, where, 1, {}, 2), 1)


def one_memory_for_two_gradients(rank, world):
    """Autograd may give two parameters gradients that are the same memory: it must not be averaged
    twice.
    """
    init_group("paceline")

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            shapes = {"wide": (2, 8), "square": (4, 4), "apart": (16,)}
            self.weights = torch.nn.ParameterDict(
                {name: torch.zeros(shape) for name, shape in shapes.items()}
            )

        def forward(self, x):
            shared = self.weights["wide"].view(16) + self.weights["square"].view(16)
            return shared * x + self.weights["apart"] * x

    x = torch.randn(16, generator=torch.Generator().manual_seed(rank))
    plain = Sum()
    plain(x).sum().backward()
    assert plain.weights["wide"].grad.data_ptr() == plain.weights["square"].grad.data_ptr()
    model = paceline.DistributedDataParallel(Sum())
    for _ in range(2):
        model.zero_grad()
        with model.count(1):
            model(x).sum().backward()
        for parameter in model.parameters():
            # Of three equal gradients, one of which is apart: averaged twice, they would differ in
            # the last bits.
            assert torch.equal(parameter.grad.flatten(), model.weights["apart"].grad)


def test_gradients_that_share_memory_are_averaged_once():
    ranks(3, one_memory_for_two_gradients)
