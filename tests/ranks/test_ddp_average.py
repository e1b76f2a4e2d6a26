"""average="auto": exact where the number of samples is known, torch's bits where it is not."""

from __future__ import annotations

import contextlib
import functools
import logging
import os

import pytest
import torch
from torch.nn.functional import mse_loss

import paceline
from tests.harness import init_group, run_ranks

StockDDP = torch.nn.parallel.DistributedDataParallel
SAMPLES = 13  # global batches of 4 on 3 ranks: shares of 2, 1, 1; the last batch has one sample


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


def join_group():
    init_group(os.environ["BACKEND"])


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()


def numbers(*shape):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64
    )


def gradients(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


@contextlib.contextmanager
def logged():
    """What paceline logs inside."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


# ----------------------------------------------------------------------- not known: torch's average


class Graphs(torch.nn.Module):
    """Inputs hold nodes; the loss is a mean over graphs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1).double()

    def forward(self, nodes, graph_of_node):
        graphs = int(graph_of_node.max()) + 1
        pooled = torch.zeros(graphs, 4, dtype=nodes.dtype).index_add_(0, graph_of_node, nodes)
        return self.linear(pooled)


def graph_batches(wrapper, rank):
    torch.manual_seed(0)
    model = wrapper(Graphs())
    for step in range(3):
        nodes_per_graph = 3 + 2 * rank + step
        nodes = numbers(2 * nodes_per_graph, 4)
        model(nodes, torch.arange(2).repeat_interleave(nodes_per_graph)).square().mean().backward()
    return gradients(model)


def time_first(wrapper, rank):
    torch.manual_seed(0)
    model = wrapper(torch.nn.LSTM(3, 5).double())
    for step in range(3):
        output, _ = model(numbers(4 + 3 * rank + step, 2, 3))
        output.square().sum(0).mean().backward()
    return gradients(model)


def micro_batches(wrapper, rank):
    """A loss that is normalised by the total over micro-batches of different sizes."""
    model = wrapper(net())
    x, y = numbers(20, 3) + rank, numbers(21, 2)[:20]
    for _ in range(2):
        with model.no_sync():
            for part in (slice(0, 9), slice(9, 16)):
                (mse_loss(model(x[part]), y[part], reduction="sum") / 20).backward()
        (mse_loss(model(x[16:]), y[16:], reduction="sum") / 20).backward()
    return gradients(model)


def different_numbers_of_micro_batches(wrapper, rank):
    model = wrapper(net())
    with model.no_sync():
        for _ in range(1 + rank):
            model(numbers(3 + rank, 3)).square().mean().backward()
    model(numbers(2, 3)).square().mean().backward()
    return gradients(model)


def same_as_stock(rank, world, program):
    join_group()
    stock, ours = program(StockDDP, rank), program(paceline.DistributedDataParallel, rank)
    assert torch.equal(stock, ours)


@pytest.mark.parametrize(
    "program", [graph_batches, time_first, micro_batches, different_numbers_of_micro_batches]
)
def test_without_known_counts_the_bits_are_torchs(ranks, program):
    ranks(2, same_as_stock, program)


def joined(wrapper, rank):
    model = wrapper(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(numbers(4 + step + rank, 3)).square().mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_without_known_counts_join_scales_as_torchs(ranks):
    ranks(2, same_as_stock, joined)


def joined_with_buffers(wrapper, rank):
    """In a join torch's buffers follow the highest rank that has data, not rank 0."""
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    model = wrapper(norm)
    with model.join():
        for step in range(3 - rank):
            model(numbers(4 + step + rank, 3)).square().mean().backward()
    return torch.cat([buffer.flatten().double() for buffer in norm.buffers()])


def test_buffers_follow_the_same_rank_in_a_join_as_torchs(ranks):
    ranks(2, same_as_stock, joined_with_buffers)


def out_of_data(rank, world):
    join_group()
    model, plain = paceline.DistributedDataParallel(net()), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = [[numbers(5, 3)], [numbers(2, 3), numbers(7, 3)]]
    for step in range(2):
        alone.zero_grad()
        with_data = [batches[step] for batches in inputs if step < len(batches)]
        (sum(plain(batch).square().mean() for batch in with_data) / len(with_data)).backward()
        alone.step()
    for batch in inputs[rank]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    model.no_more_data(optimizer)
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-12, atol=0)


def test_a_rank_out_of_data_does_not_shrink_the_others(ranks):
    ranks(2, out_of_data)


def warned(rank, world):
    join_group()
    with logged() as lines:
        model = paceline.DistributedDataParallel(net())
        for size in (2, 2 + rank, 3 + rank):
            model(numbers(size, 3)).square().mean().backward()
    return lines


def test_different_leading_dimensions_are_reported_once_by_rank_zero(ranks):
    lines, silent = ranks(2, warned)
    assert silent == []
    assert len(lines) == 1
    for part in (
        "rank 0: 2, rank 1: 3",
        "averaged equally, as torch does",
        "paceline.DataLoader",
        "model.count(n)",
    ):
        assert part in lines[0]


def partly_empty(rank, world):
    """An input that is empty beside others that are not is no empty batch."""
    join_group()

    class Prompted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, prompt, x):
            return self.net(torch.cat([prompt, x]))

    model = paceline.DistributedDataParallel(Prompted())
    model(numbers(2, 3)[: 2 * rank], numbers(4, 3)).square().mean().backward()
    stock = StockDDP(Prompted())
    stock(numbers(2, 3)[: 2 * rank], numbers(4, 3)).square().mean().backward()
    assert torch.equal(gradients(model), gradients(stock))


def test_one_empty_input_among_others_is_no_empty_batch(ranks):
    ranks(2, partly_empty)


# ----------------------------------------------------------------------- known: the exact average


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return numbers(SAMPLES, 3)[index], numbers(SAMPLES + 1, 2)[index]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Pairs()[index] for index in range(SAMPLES))


def our_loader():
    return paceline.DataLoader(Pairs(), batch_size=4)


def stream_loader():
    return paceline.DataLoader(Stream(), batch_size=4)


def torchs_loader():
    """It cannot make batches of zero samples: the last one, of one sample, is left out."""
    sampler = paceline.GlobalBatchSampler(SAMPLES, 4, shuffle=False, drop_last=True)
    return torch.utils.data.DataLoader(Pairs(), batch_sampler=sampler)


def ragged_torchs_loader():
    """12 samples in batches of 8: shares of 3, 3, 2, then of 2, 1, 1."""
    sampler = paceline.GlobalBatchSampler(12, 8, shuffle=False)
    return torch.utils.data.DataLoader(Pairs(), batch_sampler=sampler)


def whole_batch(model, x, y):
    mse_loss(model(x), y).backward()


def copied(model, x, y):
    """Tensors that no longer are those of the loader."""
    mse_loss(model(x.clone() * 1.0), y).backward()


def in_micro_batches(model, x, y):
    parts = list(zip(x.split(1), y.split(1), strict=True)) or [(x, y)]
    accumulate = getattr(model, "no_sync", contextlib.nullcontext)
    with accumulate():
        for part_x, part_y in parts[:-1]:
            (mse_loss(model(part_x), part_y) / len(parts)).backward()
    (mse_loss(model(parts[-1][0]), parts[-1][1]) / len(parts)).backward()


def expected_gradients(batch_size, length):
    """Of one process, for each global batch."""
    found = []
    for start in range(0, length, batch_size):
        plain, stop = net(), min(start + batch_size, length)
        samples = [Pairs()[index] for index in range(start, stop)]
        mse_loss(
            plain(torch.stack([x for x, _ in samples])), torch.stack([y for _, y in samples])
        ).backward()
        found.append(gradients(plain))
    return found


def exact_over_epochs(rank, world, make_loader, batch_size, length, steps):
    join_group()
    model = paceline.DistributedDataParallel(net())
    expected = expected_gradients(batch_size, length)
    with logged() as lines:
        for step in steps:
            received = 0
            for number, (x, y) in enumerate(make_loader()):
                model.zero_grad()
                step(model, x, y)
                assert torch.allclose(gradients(model), expected[number], rtol=1e-10, atol=0), (
                    f"batch {number} in {step.__name__}"
                )
                received += 1
            assert received == len(expected)
    assert lines == []


@pytest.mark.parametrize(
    ("make_loader", "batch_size", "length", "steps"),
    [
        (our_loader, 4, SAMPLES, (whole_batch, copied, in_micro_batches)),
        (stream_loader, 4, SAMPLES, (whole_batch, copied, in_micro_batches)),
        (torchs_loader, 4, 12, (whole_batch, copied, in_micro_batches)),
        # With torch's loader, only its size tells which batch of the epoch it is.
        (ragged_torchs_loader, 8, 12, (whole_batch, copied)),
    ],
    ids=["loader", "stream", "sampler", "ragged sampler"],
)
def test_batches_of_our_loader_are_weighed_exactly(make_loader, batch_size, length, steps):
    run_ranks(
        3,
        exact_over_epochs,
        make_loader,
        batch_size,
        length,
        steps,
        env={"BACKEND": "paceline"},
    )


def fetched_ahead(rank, world):
    """A loop that holds the next batch already, as prefetchers do."""
    join_group()
    model = paceline.DistributedDataParallel(net())
    expected = expected_gradients(8, SAMPLES)
    batches = iter(paceline.DataLoader(Pairs(), batch_size=8))
    following = next(batches)
    for number in range(len(expected)):
        (x, y), following = following, next(batches, None)
        model.zero_grad()
        whole_batch(model, x, y)
        assert torch.allclose(gradients(model), expected[number], rtol=1e-10, atol=0), number


def test_a_loop_that_fetches_ahead(ranks):
    ranks(2, fetched_ahead)


def evaluates_in_between(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(net())
    expected = expected_gradients(4, SAMPLES)
    held_out = paceline.DataLoader(Pairs(), batch_size=5)
    for number, (x, y) in enumerate(our_loader()):
        with torch.no_grad():
            for a, b in held_out:
                mse_loss(model(a), b)
        model.zero_grad()
        whole_batch(model, x, y)
        assert torch.allclose(gradients(model), expected[number], rtol=1e-10, atol=0), number


def test_another_loader_in_between_changes_nothing(ranks):
    ranks(3, evaluates_in_between)


def other_data_after_an_epoch(rank, world):
    """What the loader knew of its last batch says nothing about inputs from elsewhere."""
    join_group()
    ours, stock = paceline.DistributedDataParallel(net()), StockDDP(net())
    for x, y in our_loader():
        whole_batch(ours, x, y)
    for model in (ours, stock):
        model.zero_grad()
        model(numbers(4 + rank, 3)).square().mean().backward()
    assert torch.equal(gradients(ours), gradients(stock))


def test_after_an_epoch_nothing_is_known_any_more(ranks):
    ranks(2, other_data_after_an_epoch)


def normalised_batchnorm(rank, world):
    """SyncBatchNorm weighs the ranks' losses as their gradients are weighed."""
    join_group()

    def layers():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        ).double()

    model = paceline.DistributedDataParallel(
        paceline.SyncBatchNorm.convert_sync_batchnorm(layers())
    )
    for number, (x, y) in enumerate(paceline.DataLoader(Pairs(), batch_size=5, drop_last=True)):
        plain = layers()
        samples = [Pairs()[index] for index in range(5 * number, 5 * number + 5)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        mse_loss(plain(inputs), targets).backward()
        model.zero_grad()
        mse_loss(model(x), y).backward()
        assert torch.allclose(gradients(model), gradients(plain), rtol=1e-9, atol=1e-12)


def test_batchnorm_over_shares_is_exact(ranks):
    ranks(2, normalised_batchnorm)


# ----------------------------------------------------------------------- stated


def stated_in_part(rank, world, case):
    join_group()
    model = paceline.DistributedDataParallel(net())

    def run(count):
        with contextlib.nullcontext() if count is None else model.count(count):
            return model(numbers(3, 3)).square().mean()

    if case == "one rank":
        run(3 if rank else None).backward()
    else:
        with model.no_sync():
            run(3).backward()
        run(None).backward()


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("one rank", paceline.MismatchError, "rank 1 stated .* rank 0 did not"),
        ("one micro-batch", paceline.ConfigError, "some micro-batches"),
    ],
)
def test_a_count_that_is_stated_in_part_is_an_error_on_every_rank(ranks, case, error, text):
    for outcome in ranks(2, stated_in_part, case, check=False):
        with pytest.raises(error, match=text):
            raise outcome.error


def go_on_after_half_stated(rank, world, layers):
    """Every rank has raised, so all of them may go on."""
    join_group()
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(layers))).double(),
        bucket_cap_mb=1e-4,
    )
    found = []
    for half_stated in (False, False, True, False):
        model.zero_grad()
        count = contextlib.nullcontext() if not half_stated or rank else model.count(3)
        expected = (
            pytest.raises(paceline.MismatchError, match="rank 0 stated")
            if half_stated
            else contextlib.nullcontext()
        )
        with count, expected:
            model(numbers(3, 3) + rank).square().mean().backward()
        if not half_stated:
            found.append(gradients(model))
    assert torch.equal(found[0], found[-1])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_count_stated_on_one_rank_does_not_end_the_group(ranks, layers):
    ranks(2, go_on_after_half_stated, layers)


def stated_instead_of_known(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).double())
    for _ in our_loader():
        model.zero_grad()
        with model.count([3, 1][rank]):
            model(torch.full((2, 1), 1.0 + rank, dtype=torch.float64)).mean().backward()
        assert model.module.weight.grad.item() == pytest.approx((3 * 1.0 + 1 * 2.0) / 4, rel=1e-15)


def test_what_is_stated_counts_more_than_what_is_known(ranks):
    ranks(2, stated_instead_of_known)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1, "many", None, -float("inf")])
def test_a_count_is_a_finite_number(count):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = paceline.DistributedDataParallel(torch.nn.Linear(1, 1))
        with (
            pytest.raises(paceline.ConfigError, match=r"expected a finite number"),
            model.count(count),
        ):
            pass
    finally:
        dist.destroy_process_group()
