"""Steps of DistributedDataParallel between hosts: how many calls of the group they make, that
nobody waits for opening signals, and that these decide all the same. Hosts are simulated by giving
ranks different host identities: what is between them is Gloo over the loopback device.
"""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from tests.harness import init_group, run_ranks

PLACEMENTS = [[0, 1], [0, 0, 1, 1], [0, 0, 1], [0, 1, 0, 1], [0, 1, 2]]
USUAL = [2, 2, 2, 2]


def join(rank, host_of):
    """A group of ranks that believe to be on these hosts; its engine."""
    from datetime import timedelta

    from paceline.backend import create

    create.host_identity = lambda: f"host{host_of[rank]}"
    init_group("paceline", timeout=timedelta(seconds=60))
    assert type(dist.group.WORLD.engine).__name__ == "MultiHostEngine"
    return dist.group.WORLD.engine


def layers(count, width, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(dtype)


def batches(world, width, dtype=torch.float32):
    return torch.randn(world, 8, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(model, batch, count=None):
    model.zero_grad()
    if count is None:
        model(batch).square().mean().backward()
        return
    with model.count(count):
        loss = model(batch[:count]).square()
    (loss.mean() if count else loss.sum()).backward()


def calls_of(engine, action, *arguments):
    before = engine._sequence
    action(*arguments)
    return engine._sequence - before


def check_average(model, data, rank, counts):
    """One step with these numbers of samples is that of one process with all of them."""
    net = model.module
    whole = torch.cat([batch[:n] for batch, n in zip(data, counts, strict=False)])
    wanted = torch.autograd.grad(net(whole).square().mean(), list(net.parameters()))
    step(model, data[rank], counts[rank])
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# --- a small model: one call --------------------------------------------------------------------


def one_call(rank, world, host_of, wire_dtype):
    engine = join(rank, host_of)
    net = layers(4, 20)
    model = paceline.DistributedDataParallel(net, wire_dtype=wire_dtype)
    batch = batches(world, 20)[rank]
    for _ in range(2):  # the first plan is made anew after a step
        step(model, batch)
    own = torch.autograd.grad(model.module(batch).square().mean(), list(net.parameters()))
    wanted = torch.cat([gradient.flatten() for gradient in own])
    dist.group.WORLD.allreduce_scaled(wanted, 1.0 / world).wait()
    for _ in range(3):
        assert calls_of(engine, step, model, batch) == 1
        assert torch.equal(torch.cat([p.grad.flatten() for p in net.parameters()]), wanted)
    assert len(model.reducer.buckets) == 1
    address = net[0].weight.grad.data_ptr()
    step(model, batch)
    assert net[0].weight.grad.data_ptr() == address  # no step leaves the bucket in use
    dist.destroy_process_group()


@pytest.mark.parametrize("host_of", PLACEMENTS, ids=str)
def test_the_step_of_a_small_model_is_one_call_with_the_bits_of_a_sum(host_of):
    run_ranks(len(host_of), one_call, host_of, None)


def test_a_short_bucket_is_not_rounded():
    run_ranks(2, one_call, [0, 1], torch.bfloat16)


def one_call_for_complex_numbers(rank, world):
    engine = join(rank, [0, 1, 1])
    net = layers(2, 20, torch.complex64)
    model = paceline.DistributedDataParallel(net)
    data = batches(world, 20, torch.complex64)
    wanted = torch.autograd.grad(net(data.flatten(0, 1)).abs().mean(), list(net.parameters()))
    addresses = set()
    for number in range(5):
        model.zero_grad()
        loss = model(data[rank]).abs().mean()
        calls = calls_of(engine, loss.backward)
        assert calls == 1 or number == 0
        for parameter, gradient in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        if number > 1:
            addresses.add(net[0].weight.grad.data_ptr())
    assert len(addresses) == 1  # what was sent is no longer in use
    dist.destroy_process_group()


def test_complex_numbers_travel_with_the_signal_too():
    run_ranks(3, one_call_for_complex_numbers)


def two_calls(rank, world):
    """A bucket that is not offered, or cannot count as it was, is sent by itself."""
    engine = join(rank, [0, 0, 1, 1])
    data = batches(world, 20)
    model = paceline.DistributedDataParallel(layers(4, 20))
    for _ in range(2):
        check_average(model, data, rank, USUAL)
    assert calls_of(engine, check_average, model, data, rank, USUAL) == 1
    for counts in ([1, 2, 3, 4], [0, 5, 3, 8], [2, 2, 2, 0], [2, 2, 0, 0]):
        assert calls_of(engine, check_average, model, data, rank, counts) == 2
        assert calls_of(engine, check_average, model, data, rank, USUAL) == 1
    with model.no_sync():
        assert calls_of(engine, step, model, data[rank], 2) == 0
    assert calls_of(engine, step, model, data[rank], 2) == 1

    long = paceline.DistributedDataParallel(layers(1, 200))
    wide = paceline.DistributedDataParallel(layers(4, 20, torch.float64))
    hooked = paceline.DistributedDataParallel(layers(4, 20))
    hooked.register_comm_hook(None, all_reduce_hook)
    for other, width, dtype in ((long, 200, torch.float32), (wide, 20, torch.float64)):
        mine = batches(world, width, dtype)
        for counts in (USUAL, USUAL, [0, 5, 3, 8]):
            check_average(other, mine, rank, counts)
        assert calls_of(engine, check_average, other, mine, rank, USUAL) == 2
    for counts in (USUAL, USUAL, [0, 5, 3, 8]):
        check_average(hooked, data, rank, counts)
    assert calls_of(engine, check_average, hooked, data, rank, USUAL) == 2

    # Ranks without data bring no bucket: those of the other host, then one of either.
    for absent in ([2, 3], [1, 2]):
        if rank in absent:
            model.no_more_data()
        else:
            counts = [0 if r in absent else 2 for r in range(world)]
            for _ in range(2):
                assert calls_of(engine, check_average, model, data, rank, counts) == 2
            model.no_more_data()
        check_average(model, data, rank, USUAL)
    assert calls_of(engine, check_average, model, data, rank, USUAL) == 1
    dist.destroy_process_group()


def all_reduce_hook(state, bucket):
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


def test_a_bucket_that_counts_otherwise_is_sent_by_itself():
    run_ranks(4, two_calls, timeout=90)


# --- several buckets: nobody waits --------------------------------------------------------------


def late_peers(rank, world, directory, wire_dtype):
    """Backward of one rank comes to its end before any other one begins."""
    engine = join(rank, [0, 0, 1])
    net = layers(4, 100)
    model = paceline.DistributedDataParallel(net, bucket_cap_mb=0.03, wire_dtype=wire_dtype)
    data = batches(world, 100)
    for _ in range(2):
        step(model, data[rank])
    assert len(model.reducer.buckets) > 2
    for early in range(world):
        reached = directory / f"{early} has come to its first layer"
        loss = model(data[rank]).square().mean()
        if rank == early:
            net[0].weight.register_hook(functools.partial(touch, reached))
        else:
            wait_for(reached)
        assert calls_of(engine, loss.backward) == 1 + len(model.reducer.buckets)
    dist.destroy_process_group()


def touch(file, gradient):
    file.touch()


def wait_for(file):
    deadline = time.monotonic() + 40
    while not file.exists():
        assert time.monotonic() < deadline, "backward of the other rank stands still"
        time.sleep(0.01)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=str)
def test_backward_does_not_wait_for_the_opening_signals(tmp_path, wire_dtype):
    run_ranks(3, late_peers, tmp_path, wire_dtype, timeout=90)


# --- what signals decide ------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises in forward, or in backward of its first layer, which comes last."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.where = ""

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("the needle")
        x = self.first(x)
        if self.where == "backward":
            x.register_hook(self.fail)
        return self.third(self.second(x))

    @staticmethod
    def fail(gradient):
        raise ValueError("the needle")


def failing(rank, world, host_of, arguments):
    engine = join(rank, host_of)
    torch.manual_seed(0)
    net = Fails(40)
    model = paceline.DistributedDataParallel(net, **arguments)
    data = batches(world, 40)
    counts = USUAL[:world]
    for _ in range(2):
        check_average(model, data, rank, counts)
    usual = calls_of(engine, check_average, model, data, rank, counts)

    def check_whole():
        """All ranks have made the same calls, and go on as if nothing had been."""
        net.where = ""
        sequences = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sequences, torch.tensor([engine._sequence]))
        assert len({int(sequence) for sequence in sequences}) == 1
        assert calls_of(engine, check_average, model, data, rank, counts) == usual

    for odd in range(world):
        for where in ("forward", "backward"):
            net.where = where if rank == odd else ""
            expected = ValueError if rank == odd else paceline.StepError
            with pytest.raises(expected, match="the needle"), model.all_or_none():
                step(model, data[rank])
            check_whole()
        # One fails before it has sent anything, another one with buckets under way.
        net.where = {odd: "forward", (odd + 1) % world: "backward"}.get(rank, "")
        expected = ValueError if net.where else paceline.StepError
        with pytest.raises(expected, match="the needle"), model.all_or_none():
            step(model, data[rank])
        check_whole()
        with pytest.raises(paceline.MismatchError, match="State it on every rank, or on none"):
            step(model, data[rank], 8 if rank == odd else None)
        check_whole()
        if world > 2:  # likewise, but one has no data: it sends no bucket
            count = 8 if rank == odd else None
            half_stated = functools.partial(step, model, data[rank], count)
            with pytest.raises(paceline.MismatchError, match="State it on every rank, or on none"):
                model.no_more_data() if rank == (odd + 1) % world else half_stated()
            check_whole()
        spoils = net.third.bias.register_hook(lambda gradient: gradient * float("nan"))
        if rank != odd:
            spoils.remove()
        with pytest.raises(paceline.StepError, match="non-finite gradient of third"):
            step(model, data[rank])
        spoils.remove()
        check_whole()
    dist.destroy_process_group()


SEVERAL = {"bucket_cap_mb": 0.005, "check_finite": True}
ONE = {"check_finite": True}
# The closing signals have a call of their own.
SKIPPING = {
    **SEVERAL,
    "find_unused_parameters": True,
    "skip_all_reduce_unused_params": True,
}


@pytest.mark.parametrize(
    "arguments", [ONE, SEVERAL, SKIPPING], ids=["one bucket", "several", "skipping"]
)
@pytest.mark.parametrize("host_of", [[0, 1], [0, 0, 1]], ids=str)
def test_a_step_that_cannot_count_sends_no_bucket(host_of, arguments):
    run_ranks(len(host_of), failing, host_of, arguments, timeout=120)


def different_calls(rank, world, arguments):
    engine = join(rank, [0, 0, 1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
    model = paceline.DistributedDataParallel(net, **arguments)
    batch = batches(world, 40)[rank]
    for _ in range(2):
        step(model, batch)
    for odd in range(world):
        loss = model(batch).square().mean()
        with pytest.raises(paceline.MismatchError) as raised:
            model(batch) if rank == odd else loss.backward()
        for other in range(world):
            point = "forward" if other == odd else "backward"
            assert f"rank {other} is at {point}" in str(raised.value)
        # A call of another kind, which signals know nothing of.
        loss = model(batch).square().mean()
        with pytest.raises(paceline.MismatchError, match=f"rank {odd}: barrier"):
            dist.barrier() if rank == odd else loss.backward()
        step(model, batch)
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(numbers, torch.tensor([engine._sequence]))
    assert len({int(number) for number in numbers}) == 1
    dist.destroy_process_group()


@pytest.mark.parametrize("arguments", [ONE, SEVERAL], ids=["one bucket", "several"])
def test_forward_here_and_backward_there(arguments):
    run_ranks(3, different_calls, arguments, timeout=90)


# --- beside each other --------------------------------------------------------------------------


class Again(nn.Module):
    """Layers whose backward runs them again, nested."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        for layer in self.net:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


def several_models(rank, world):
    join(rank, [0, 1, 1])
    data = batches(world, 40)
    data.requires_grad_()  # nested backward needs that
    nets = [layers(3, 40), layers(3, 40), Again(layers(3, 40))]
    several = {"bucket_cap_mb": 0.005}
    models = [
        paceline.DistributedDataParallel(net, **arguments)
        for net, arguments in zip(nets, ({}, several, several), strict=True)
    ]
    for _ in range(4):
        wanted = [
            torch.autograd.grad(
                net(data[:, :4].flatten(0, 1)).square().mean(), list(net.parameters())
            )
            for net in (nets[0], nets[1], nets[2].net)
        ]
        for model in models:
            model.zero_grad()
        sum(model(data[rank, :4]).square().mean() for model in models).backward()
        for net, gradients in zip(nets, wanted, strict=True):
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
    dist.destroy_process_group()


def test_models_share_a_group():
    run_ranks(3, several_models)
