"""What other libraries call on torch's class and on its reducer, and what it means there."""

from __future__ import annotations

import contextlib
import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock

import paceline
from tests.harness import init_group, run_ranks


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(rank, step, size=3):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@contextlib.contextmanager
def synchronised(model):
    """As Accelerate does it for a forward made inside no_sync()."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def synchronise_a_backward_of_no_sync(rank, world, options):
    init_group(os.environ["BACKEND"])
    # Torch's class on Gloo: a group of ours would only ask for one more kind of comparison.
    stock_group = dist.new_group(backend="gloo")
    stock = Stock(net(), process_group=stock_group, **options)
    ours = paceline.DistributedDataParallel(net(), **options)
    for step in range(4):
        for model in (stock, ours):
            model.zero_grad()
            losses = []
            with model.no_sync():
                for part in range(3):
                    losses.append(model(batch(rank, 3 * step + part)).square().mean())
            losses[0].backward()
            local = gradients(model)
            losses[1].backward()
            with synchronised(model):
                losses[2].backward()
            assert not torch.equal(local[0], model.module[0].weight.grad)
        for expected, got in zip(gradients(stock), gradients(ours), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}]
)
def test_a_backward_can_be_told_to_synchronise(ranks, world, options):
    ranks(world, synchronise_a_backward_of_no_sync, options)


class TrainsInForward(torch.nn.Module):
    """The whole training step is in forward, two backwards included: manual optimisation as
    Lightning does it.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = net(1), net(2)
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.first, self.second)
        ]
        self.wrapper = None  # in a list, so that it is no child
        self.seen = []

    def forward(self, x):
        losses = self.first(x).square().mean(), self.second(x).abs().mean()
        for loss, optimizer in zip(losses, self.optimizers, strict=True):
            if self.wrapper is not None:
                (wrapper,) = self.wrapper
                wrapper.reducer._rebuild_buckets()
                wrapper.reducer.prepare_for_backward(
                    [loss] if wrapper.find_unused_parameters else []
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if self.wrapper is not None:
            (wrapper,) = self.wrapper
            wrapper.require_backward_grad_sync = False
        return losses


def train_in_forward(rank, world, options):
    init_group(os.environ["BACKEND"])
    ours = TrainsInForward()
    alone = copy.deepcopy(ours)  # sees the batches of all ranks at once
    alone.optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone.first, alone.second)
    ]
    model = paceline.DistributedDataParallel(ours, **options)
    ours.wrapper = [model]
    for step in range(5):
        model(batch(rank, step))
        model.require_backward_grad_sync = True
        alone(torch.cat([batch(peer, step) for peer in range(world)]))
        for expected, got in zip(alone.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(got, expected)
        assert (
            model._has_rebuilt_buckets
            == (world > 1 and step > 0 and not model.find_unused_parameters)
            or step == 0
        )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {}, {"bucket_cap_mb": 1e-4}], ids=str
)
def test_a_backward_inside_forward(ranks, world, options):
    ranks(world, train_in_forward, options)


def fail_in_forward(rank, world):
    """A backward that was announced raises on one rank: the others learn of it."""
    init_group(os.environ["BACKEND"])
    module = net()
    model = paceline.DistributedDataParallel(module)

    def step(fail):
        loss = module(batch(rank, 0)).square().mean()
        if fail:
            loss.register_hook(lambda _: 1 / 0)
        model.reducer.prepare_for_backward([])
        loss.backward()

    step(False)
    expected = ZeroDivisionError if rank == 1 else paceline.StepError
    with pytest.raises(expected), model.all_or_none():
        step(rank == 1)
    model.zero_grad()
    step(False)
    return gradients(model)


def test_an_announced_backward_that_raises_fails_the_step_everywhere(ranks):
    first, second = ranks(2, fail_in_forward)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def overlap_with_zero(rank, world, shard_buckets):
    """ZeRO steps its shards inside backward, from the third step on."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer

        init_group("paceline")
        module, alone = net(), net()
        model = paceline.DistributedDataParallel(module, bucket_cap_mb=1e-4)
        zero = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.SGD,
            overlap_with_ddp=True,
            lr=0.1,
            momentum=0.9,
        )
        hook = hook_with_zero_step(allreduce_hook, model, zero, shard_buckets=shard_buckets)
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            if step >= 2:
                optimizer.zero_grad()
                alone(
                    torch.cat([batch(peer, step) for peer in range(world)])
                ).square().mean().backward()
                optimizer.step()
            for expected, got in zip(alone.parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(got, expected)
        assert len(model.reducer.buckets) > 1
    dist.destroy_process_group()


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_the_steps_of_zero_overlap_with_backward(shard_buckets):
    run_ranks(2, overlap_with_zero, shard_buckets)


def look_at_the_reducer(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net())
    assert not model._has_rebuilt_buckets
    assert not model.reducer._rebuild_buckets()
    model.reducer.prepare_for_forward()
    for _ in range(2):
        model(batch(rank, 0)).sum().backward()
        model.reducer._delay_all_reduce()  # nothing is left to do
    assert model._has_rebuilt_buckets == (world > 1)
    assert model.reducer._check_reducer_finalized() is None
    assert "comm_hook" not in model._get_ddp_logging_data()
    if world > 1:
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._set_static_graph()
    assert model.logger._get_ddp_logging_data().strs_map["module_name"] == "Sequential"
    assert model.logger._get_ddp_logging_data().ints_map["world_size"] == world


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_asked_of_the_reducer_and_the_logger(ranks, world):
    ranks(world, look_at_the_reducer)


def join_rpc(rank, world, directory):
    import warnings

    from torch.distributed import rpc

    init_group(os.environ["BACKEND"])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    return rpc


class Mixed(torch.nn.Module):
    """Small, large and sparse parameters; one that need not be used."""

    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(7, 4, sparse=sparse)
        self.small, self.large = torch.nn.Linear(4, 4), torch.nn.Linear(4, 150_000)
        self.spare = torch.nn.Linear(4, 4)

    def forward(self, x, spare=False):
        y = self.small(x) + self.words(torch.arange(len(x)))
        y = self.large(y).sum(1) / 150_000
        return y + self.spare(x).sum(1) if spare else y


def average_in_a_context(rank, world, directory, options, sparse):
    import torch.distributed.autograd as dist_autograd

    rpc = join_rpc(rank, world, directory)
    alone, module = Mixed(sparse=sparse), Mixed(sparse=sparse)
    model = paceline.DistributedDataParallel(module, **options)
    # A gradient of an ordinary backward, perhaps in the memory of a bucket: nobody touches it.
    model(batch(rank, 0)).sum().backward()
    kept = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    for step in range(1, 4):
        with dist_autograd.context() as context:
            with model.no_sync():
                dist_autograd.backward(context, [model(batch(rank, 20 + step)).square().mean()])
            for _ in range(2):  # gradients accumulate in a context, too
                dist_autograd.backward(context, [model(batch(rank, step)).square().mean()])
            found = dist_autograd.get_gradients(context)
            alone.zero_grad()
            for peer in range(world):
                alone(batch(peer, 20 + step)).square().mean().div(world).backward()
                alone(batch(peer, step)).square().mean().mul(2 / world).backward()
            for (name, own), expected in zip(
                module.named_parameters(), alone.parameters(), strict=True
            ):
                if expected.grad is None:
                    assert own not in found
                else:
                    torch.testing.assert_close(found[own].to_dense(), expected.grad.to_dense())
                assert (own.grad is None) == (name not in kept)
                if own.grad is not None:
                    assert torch.equal(own.grad.to_dense(), kept[name].to_dense())
    # An ordinary backward goes on as before.
    model.zero_grad()
    model(batch(rank, 0)).sum().backward()
    for name, own in module.named_parameters():
        if name in kept:
            torch.testing.assert_close(own.grad.to_dense(), kept[name].to_dense())
    loss = model(batch(rank, 1)).sum()
    with dist_autograd.context() as context:
        with pytest.raises(RuntimeError, match=r"outside of the context"):
            dist_autograd.backward(context, [loss])
        loss = model(batch(rank, 1), spare=rank == 0).sum()
        with pytest.raises(RuntimeError, match=r"spare.* used on some ranks only"):
            dist_autograd.backward(context, [loss])
    rpc.shutdown()


@pytest.mark.parametrize(
    ("options", "sparse"), [({}, False), ({"bucket_cap_mb": 1e-4}, False), ({}, True)]
)
def test_gradients_in_a_context_of_distributed_autograd(ranks, tmp_path, options, sparse):
    ranks(2, average_in_a_context, str(tmp_path), options, sparse)


def use_as_torchs_class(rank, world):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net(rank))
    assert isinstance(model, Stock)
    # Names in checkpoints of torch.distributed.checkpoint are those of the module itself.
    state = get_model_state_dict(model)
    assert list(state) == list(model.module.state_dict())
    set_model_state_dict(model, {name: torch.ones_like(value) for name, value in state.items()})
    assert all(parameter.eq(1).all() for parameter in model.parameters())


def test_other_code_takes_it_for_torchs_class(ranks):
    ranks(2, use_as_torchs_class)


def test_nothing_of_torchs_class_is_inherited():
    """But its identity: what would read its own attributes is overridden."""
    harmless = {"train"}  # calls Module.train
    ours = paceline.DistributedDataParallel
    inherited = {
        name
        for name, value in vars(Stock).items()
        if not name.startswith("_") and getattr(ours, name) is value
    }
    assert inherited == harmless
