"""average="samples": the gradient is that of one process over the global batch, whatever the split.

What the default does is in test_ddp_average.py.
"""

from __future__ import annotations

import functools
import logging
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import paceline
from tests.harness import init_group, run_ranks


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


def join_group():
    init_group(os.environ["BACKEND"])


RTOL = 1e-12
few = settings(max_examples=4, suppress_health_check=list(HealthCheck))


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()


def data(samples):
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, generator=generator, dtype=torch.float64)


def reference(samples):
    plain = net()
    plain(data(samples)).square().mean().backward()
    return [p.grad for p in plain.parameters()]


def assert_exact(model, samples):
    for (name, parameter), expected in zip(
        model.named_parameters(), reference(samples), strict=True
    ):
        worst = ((parameter.grad - expected).abs().max() / expected.abs().max()).item()
        assert worst <= RTOL, f"{name}: relative difference {worst:.1e}"


def run_splits(rank, world, cases):
    """Each case: per rank a list of micro-batch sizes."""
    join_group()
    model = paceline.DistributedDataParallel(net(), average="samples")
    for case in cases:
        model.zero_grad()
        whole = data(sum(map(sum, case)))
        start = sum(map(sum, case[:rank]))
        longest = max(map(len, case))
        parts = []
        for size in case[rank]:
            parts.append(whole[start : start + size])
            start += size
        with model.no_sync():
            for part in parts[:-1]:
                (model(part).square().mean() / longest).backward()
        (model(parts[-1]).square().mean() / longest).backward()
        assert_exact(model, len(whole))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def same_bits(results):
    return all(torch.equal(results[0], other) for other in results[1:])


def splits(samples, world):
    if world == 1:
        yield (samples,)
        return
    for first in range(samples + 1):
        for rest in splits(samples - first, world - 1):
            yield (first, *rest)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_split_of_up_to_twelve_samples(ranks, world):
    largest = 12 if world < 3 else 7
    cases = [
        [[n] for n in split]
        for samples in range(1, largest + 1)
        for split in splits(samples, world)
    ]
    assert same_bits(ranks(world, run_splits, cases, timeout=110))


@few
@given(
    st.lists(
        st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(
            lambda split: 1 <= sum(split) <= 12
        ),
        min_size=30,
        max_size=40,
    )
)
def test_any_split_over_four_ranks(ranks, cases):
    assert same_bits(ranks(4, run_splits, [[[n] for n in split] for split in cases], timeout=110))


@few
@given(st.integers(2, 3).flatmap(lambda world: st.tuples(st.just(world), st.data())))
def test_any_ragged_accumulation(ranks, case):
    world, draw = case
    sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4)
    one = st.lists(sizes, min_size=world, max_size=world).filter(
        lambda ranks: sum(map(sum, ranks)) > 0
    )
    cases = draw.draw(st.lists(one, min_size=20, max_size=25))
    assert same_bits(ranks(world, run_splits, cases, timeout=110))


def ragged_epoch(rank, world, how):
    """Ranks hold 3, 2 and 1 batches; the run equals one process over the global batches, weight for
    weight.
    """
    join_group()
    whole = [[data(5)[:3], data(6)[:2], data(7)[:1]], [data(8)[:4], data(9)[:2]], [data(10)[:1]]]
    plain = net()
    alone = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(3):
        alone.zero_grad()
        batch = torch.cat([batches[step] for batches in whole[:world] if step < len(batches)])
        plain(batch).square().mean().backward()
        alone.step()
    model = paceline.DistributedDataParallel(net(), average="samples")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def train():
        for batch in whole[rank]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    if how == "join":
        with model.join():
            train()
    else:
        train()
        model.no_more_data(optimizer if how == "optimizer" else None)
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-10, atol=0)
    # and the ranks can go on together
    optimizer.zero_grad()
    model(data(4)).square().mean().backward()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("how", ["optimizer", "weights", "join"])
def test_the_ragged_end_of_an_epoch(ranks, how):
    assert same_bits(ranks(3, ragged_epoch, how))


def empty_rank(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(net())
    part = data(4) if rank == 0 else data(4)[:0]
    loss = model(part).square().mean()
    assert bool(loss.isnan()) == (rank == 1)
    loss.backward()
    assert_exact(model, 4)


def test_a_rank_without_samples_contributes_exactly_nothing(ranks):
    ranks(2, empty_rank)


def stated_counts(rank, world):
    """Two samples per rank, but tokens are what counts."""
    join_group()
    tokens = [3, 1][rank]
    model = paceline.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).double())
    with model.count(tokens):
        (model(torch.full((2, 1), 1.0 + rank, dtype=torch.float64)).sum() / 2).backward()
    assert model.module.weight.grad.item() == pytest.approx((3 * 1.0 + 1 * 2.0) / 4, rel=1e-15)


def test_the_caller_may_state_what_counts(ranks):
    ranks(2, stated_counts)


def plain_average(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(
        torch.nn.Linear(1, 1, bias=False).double(), average="ranks"
    )
    x = torch.ones(4, 1) * 3 if rank == 0 else torch.ones(1, 1)
    model(x.double()).mean().backward()
    assert model.module.weight.grad.item() == 2.0


def test_average_over_ranks_is_torchs(ranks):
    ranks(2, plain_average)


def one_line(rank, world):
    join_group()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    model = paceline.DistributedDataParallel(net(), average="samples")
    for size in (2, 2 + rank, 3 + rank):
        model(data(size)).square().mean().backward()
    return lines


def test_the_first_unequal_counts_are_told_once_by_rank_zero(ranks):
    told, silent = ranks(2, one_line)
    assert silent == []
    assert len(told) == 1
    assert "rank 0: 2, rank 1: 3" in told[0]
    assert "model.count(n)" in told[0]


def several_forwards(rank, world):
    """Two forwards, two backwards, of other sizes on every rank: each backward weighs its own
    forward.
    """
    join_group()
    first, second = data(6)[: [4, 2][rank]], data(9)[: [1, 5][rank]]
    expected = []
    for sizes, source in (([4, 2], data(6)), ([1, 5], data(9))):
        plain = net()
        batch = torch.cat([source[:n] for n in sizes])
        plain(batch).square().mean().backward()
        expected.append([p.grad for p in plain.parameters()])
    model = paceline.DistributedDataParallel(net(), average="samples")
    for _ in range(2):
        one, other = model(first).square().mean(), model(second).square().mean()
        for loss, gradients in ((one, expected[0]), (other, expected[1])):
            model.zero_grad()
            loss.backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert torch.allclose(parameter.grad, gradient, rtol=1e-12, atol=1e-16)


def test_each_backward_weighs_its_own_forward(ranks):
    ranks(2, several_forwards)


def unused_at_the_end(rank, world):
    """The others stop using a parameter of which the rank without data still has a gradient."""
    join_group()
    net = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)])
    net.forward = lambda x, which: net[which](x)
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4 if rank else 1):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step)), which=int(step > 0)).square().mean().backward()
        optimizer.step()
    model.no_more_data(optimizer)
    return [one.detach().clone() for one in net.parameters()]


def test_a_rank_without_data_steps_only_what_the_others_step(ranks):
    first, second = ranks(2, unused_at_the_end)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def buffers_at_the_end(rank, world, steps):
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps[rank]):
        optimizer.zero_grad()
        model(
            torch.full((2, 4), float(step + rank), dtype=torch.float64)
        ).square().mean().backward()
        optimizer.step()
    model.no_more_data(optimizer)
    return [one.clone() for one in (*net.parameters(), *net.buffers())]


def test_buffers_too_are_equal_after_the_ragged_end(ranks):
    first, second = ranks(2, buffers_at_the_end, [1, 3])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[-1] == 3  # num_batches_tracked of the rank that trained to the end


def batchnorm_without_data(rank, world, how):
    join_group()
    net = paceline.SyncBatchNorm.convert_sync_batchnorm(
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    )
    model = paceline.DistributedDataParallel(net)

    def run():
        for step in range(3 if rank else 1):
            model(torch.full((2, 4), float(step + rank))).square().mean().backward()

    def run_all():
        if how == "join":
            with model.join():
                run()
        else:
            run()
            model.no_more_data()

    with pytest.raises(paceline.ConfigError, match=r"rank 0 ran out of data, but .* SyncBatchNorm"):
        run_all()


@pytest.mark.parametrize("how", ["join", "no_more_data"])
def test_a_rank_without_data_cannot_answer_a_synchronised_batchnorm(ranks, how):
    ranks(2, batchnorm_without_data, how)
