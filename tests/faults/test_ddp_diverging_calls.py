"""Ranks that wait for each other in different calls are told so, all of them, and by name."""

from __future__ import annotations

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import paceline
from tests.harness import init_group, run_ranks


def all_reduce_asynchronously():
    dist.all_reduce(torch.ones(1), async_op=True).wait()


CALLS = {
    "all_reduce of 1 float32, SUM": lambda other: dist.all_reduce(torch.ones(1)),
    "all_reduce of 1 float32": lambda other: all_reduce_asynchronously(),
    "barrier": lambda other: dist.barrier(),
    "all_gather of": lambda other: dist.all_gather_object([None] * 3, "x"),
    "forward or backward of a DistributedDataParallel model with the parameters 0.weight": (
        lambda other: other.backward()
    ),
}


def join(rank, host_of):
    """A group of ranks that believe to be on these hosts."""
    from paceline.backend import create

    create.host_identity = lambda: f"host{host_of[rank]}"
    init_group("paceline", timeout=timedelta(seconds=60))


ONE_HOST = [0, 0, 0]
PLACEMENTS = [ONE_HOST, [0, 0, 1], [0, 1, 1], [0, 1, 2]]


def diverge(rank, world, host_of, call, late_s, backward_ranks):
    join(rank, host_of)
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 1))
    other = paceline.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 1)))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    loss, other_loss = model(torch.ones(2, 3)).sum(), other(torch.ones(2, 3)).sum()
    if rank in backward_ranks:
        make_call = loss.backward
    else:
        time.sleep(late_s)
        make_call = functools.partial(CALLS[call], other_loss)
    with pytest.raises(paceline.MismatchError) as caught:
        make_call()
    if host_of == ONE_HOST:
        with pytest.raises(paceline.MismatchError):
            dist.barrier()  # what was begun cannot be undone
    else:
        dist.barrier()  # nothing was begun
    return str(caught.value), caught.value.values


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("host_of", PLACEMENTS, ids=str)
def test_backward_here_another_call_there(host_of, call):
    for message, values in run_ranks(3, diverge, host_of, call, 0.0, [0, 2]):
        assert values[0].startswith("forward or backward of a DistributedDataParallel model with")
        assert values[0].endswith("weight, bias")
        assert values[1].startswith(call)
        assert values[2] == values[0]
        assert all(f"rank {rank}: {value}" in message for rank, value in values.items())
        assert "same calls in the same order" in message


def step_twins(rank, world, host_of, width):
    """Models that differ in nothing but their values; some ranks step one, some the other."""
    join(rank, host_of)
    twins = [paceline.DistributedDataParallel(torch.nn.Linear(width, 1)) for _ in range(3)]
    for _ in range(2):
        for model in twins:
            model(torch.ones(2, width)).sum().backward()
    losses = [model(torch.ones(2, width)).sum() for model in twins]
    with pytest.raises(paceline.MismatchError) as caught:
        losses[rank].backward()
    return caught.value.values


@pytest.mark.parametrize("width", [3, 100_000], ids=["short", "long"])
@pytest.mark.parametrize("host_of", PLACEMENTS, ids=str)
def test_models_that_are_alike_are_told_apart(host_of, width):
    for values in run_ranks(3, step_twins, host_of, width):
        first, second, third = (values[rank] for rank in range(3))
        assert first.endswith("with the parameters weight, bias")
        assert second == f"{first}, number 2 of those that were wrapped"
        assert third == f"{first}, number 3 of those that were wrapped"


def test_ranks_that_come_later_are_told_too():
    for _, values in run_ranks(2, diverge, ONE_HOST, "barrier", 2.0, [0]):
        assert values[1].startswith("barrier")


def overlap(rank, world):
    """A call in the background and a slow rank: nobody waits in the wrong place."""
    init_group("paceline", timeout=timedelta(seconds=60))
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    loss, total = model(torch.ones(2, 3)).sum(), torch.ones(1)
    if rank == 0:
        loss.backward()
        work = dist.all_reduce(total, async_op=True)
    else:
        work = dist.all_reduce(total, async_op=True)
        time.sleep(1.6)
        loss.backward()
    work.wait()
    assert total == world


@pytest.mark.one_host("steps are calls of the group")
def test_a_call_in_the_background_is_no_divergence():
    run_ranks(2, overlap)
