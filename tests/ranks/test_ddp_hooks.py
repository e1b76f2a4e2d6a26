"""Communication hooks: torch's own run unchanged, on sockets and on shared memory; Join works with
ZeRO.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist

import paceline
from tests.harness import init_group, run_ranks


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def gradients(rank, register, **options):
    model = paceline.DistributedDataParallel(net(), **options)
    register(model)
    for step in range(3):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def several_hooks(rank, world):
    # Imported in the ranks: these modules warn of torch's own deprecations, and warnings are errors
    # here.
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
    )

    init_group(os.environ["BACKEND"])
    group = dist.group.WORLD
    plain = gradients(rank, lambda model: None)

    def local_sgd(model):
        state = post_localSGD_hook.PostLocalSGDState(group, None, start_localSGD_iter=100)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def power(model):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    exact = {
        "allreduce": lambda m: m.register_comm_hook(group, default_hooks.allreduce_hook),
        "built-in allreduce": lambda m: m._register_builtin_comm_hook(
            dist.BuiltinCommHookType.ALLREDUCE
        ),
        "post-local SGD": local_sgd,
    }
    close = {
        "fp16": lambda m: m.register_comm_hook(group, default_hooks.fp16_compress_hook),
        "bf16": lambda m: m.register_comm_hook(group, default_hooks.bf16_compress_hook),
        "built-in fp16": lambda m: m._register_builtin_comm_hook(
            dist.BuiltinCommHookType.FP16_COMPRESS
        ),
        "PowerSGD": power,
    }
    found = {}
    for name, register in exact.items():
        assert torch.equal(gradients(rank, register), plain), name
    for name, register in close.items():
        found[name] = gradients(rank, register)
        assert torch.allclose(found[name], plain, atol=0.1), name
    return found


def test_torchs_hooks_run_unchanged(ranks):
    one, other = ranks(2, several_hooks, timeout=100)
    assert all(torch.equal(one[name], other[name]) for name in one)


def registration(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net())
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 3)
    with pytest.raises(ValueError, match=r"dist\.GradBucket"):
        model.register_comm_hook(None, wrong_bucket)
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="once"):
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)


def wrong_bucket(state, bucket: int):
    raise AssertionError


def test_registration_is_checked(ranks):
    ranks(2, registration)


def exact_under_a_hook(rank, world):
    """A hook that averages over ranks still gives the exact gradient of a ragged batch."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).double())
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    sizes = [3, 1]
    x = torch.full((sizes[rank], 1), rank + 1.0, dtype=torch.float64)
    with model.count(sizes[rank]):
        model(x).mean().backward()
    assert model.module.weight.grad.item() == pytest.approx((3 * 1 + 1 * 2) / 4, rel=1e-15)


def test_hooks_get_what_makes_their_average_exact(ranks):
    ranks(2, exact_under_a_hook)


def buffer_hook(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(torch.nn.Sequential(net(), torch.nn.BatchNorm1d(4)))
    model._register_buffer_comm_hook(
        model, lambda state, buffers: state._default_broadcast_coalesced()
    )
    model(torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))).sum().backward()
    assert model._get_ddp_logging_data()["comm_hook"] is None
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert model._get_ddp_logging_data()["comm_hook"] == str(dist.BuiltinCommHookType.ALLREDUCE)
    other = paceline.DistributedDataParallel(net())
    other.register_comm_hook(None, wrong_bucket_size)
    assert other._get_ddp_logging_data()["comm_hook"] == "wrong_bucket_size"
    return model.module[1].running_mean


def wrong_bucket_size(state, bucket):
    raise AssertionError


def test_buffer_hooks_may_call_torchs_broadcast_and_hooks_are_named(ranks):
    one, other = ranks(2, buffer_hook)
    assert one.any()
    assert torch.equal(one, other)


def wrong_results(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net())
    assert model._get_ddp_logging_data()["has_error"] == 0

    def annotated(state, bucket) -> int: ...

    with pytest.raises(ValueError, match=r"return annotation should be torch\.futures\.Future"):
        model.register_comm_hook(None, annotated)
    noted = model._get_ddp_logging_data()
    assert noted["has_error"] == 1
    assert "return annotation should be" in noted["error"]

    model.register_comm_hook(None, lambda state, bucket: 1)
    with pytest.raises(
        RuntimeError, match=r"must return a torch\.futures\.Future object, but got int"
    ):
        model(torch.ones(2, 8)).sum().backward()


def test_hooks_that_return_no_future_are_told_so(ranks):
    ranks(2, wrong_results)


def join_with_zero(rank, world):
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(torch.full((2, 8), float(step))).square().mean().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_join_together_with_zero(ranks):
    one, other = ranks(2, join_with_zero)
    assert torch.equal(one, other)


def early_end(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(net())
    with pytest.raises(RuntimeError, match="exhausted"):
        train_throwing(model, 2 + rank)


def train_throwing(model, steps):
    with model.join(throw_on_early_termination=True):
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()


def test_join_can_throw_at_the_first_end(ranks):
    ranks(2, early_end)
