"""Whatever makes the reducer anew, a feature that was on before is on afterwards.

The table of all rebuilds and all features runs in one job per backend; each cell is a test of its
own. A cell that fails on one rank fails the table at that cell's barrier, not silently.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

import paceline
from tests.harness import init_group, run_ranks

STEPS = 3
# A gradient that float16 cannot hold: the built-in hook that compresses rounds it to 1.
FINE = 1.0 + 2.0**-12
calls: list[str] = []


class Net(torch.nn.Module):
    """Three layers; the first is frozen until a rebuild of that kind unfreezes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(3, 3, bias=False)
        self.middle = torch.nn.Linear(3, 3, bias=False)
        self.last = torch.nn.Linear(3, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        calls.append(f"forward in {self.last.weight.dtype}")
        return self.last(self.middle(self.frozen(x)))


def sevens(state, bucket):
    """A user's communication hook: no average, so that it is seen in every gradient."""
    calls.append("hook")
    future = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 7.0))
    return future


def average(state, bucket):
    """The registered hook of the rebuild of that name: what there is without one."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.group.WORLD.allreduce([tensor]).get_future().then(lambda done: done.value()[0])


def buffer_hook(state, buffers):
    calls.append(f"buffers {sorted(buffers)}")
    return []


# -------------------------------------------------------------------------------- rebuilds


def unfreeze(model):
    model.module.frozen.weight.requires_grad_(True)
    return model


def register_hook(model):
    model.register_comm_hook(None, average)
    return model


def update_process_group(model):
    model._update_process_group(dist.new_group(list(range(dist.get_world_size()))))
    return model


def unpickle(model):
    return pickle.loads(pickle.dumps(model))


REBUILDS = {
    "unfrozen": unfreeze,
    "hook registered": register_hook,
    "process group replaced": update_process_group,
    "unpickled": unpickle,
}

# -------------------------------------------------------------------------------- features


def train(model, steps=STEPS, rank_factor=True):
    """Steps whose gradients differ between ranks; yields after each backward."""
    factor = float(dist.get_rank() + 1) if rank_factor else 1.0
    for step in range(steps):
        calls.clear()
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.full((2, 3), factor)).float().sum().backward()
        yield step


def own_gradient(net, factor):
    """What the last layer's gradient is for inputs of `factor`, without any parallelism."""
    with torch.no_grad():
        return 2.0 * net.middle(net.frozen(torch.full((1, 3), factor)))


def averaged(model):
    return (own_gradient(model.module, 1.0) + own_gradient(model.module, 2.0)) / 2


class MixedPrecision:
    """Forward in bfloat16, averages and weights in float32."""

    def create(self):
        from torch.nn.parallel.distributed import _MixedPrecision

        precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return paceline.DistributedDataParallel(Net(), mixed_precision=precision)

    def check(self, model):
        weight = model.module.last.weight
        before = weight.detach().clone()
        for _ in train(model):
            assert calls[0] == "forward in torch.bfloat16"
            assert weight.dtype == torch.float32
            assert weight.grad.dtype == torch.float32
            assert torch.equal(weight, before)
            assert {bucket.dtype for bucket in model.reducer.buckets} == {torch.float32}


class UserHook:
    """The hook replaces the average in every step."""

    def create(self):
        model = paceline.DistributedDataParallel(Net())
        model.register_comm_hook(None, sevens)
        return model

    def check(self, model):
        for _ in train(model, steps=5):
            assert "hook" in calls
            for parameter in model.parameters():
                if parameter.requires_grad:
                    assert bool((parameter.grad == 7.0).all())
        assert "sevens" in model._get_ddp_logging_data()["comm_hook"]
        with pytest.raises(RuntimeError, match="once"):
            model.register_comm_hook(None, sevens)


class BuiltInAllReduce:
    def create(self):
        model = paceline.DistributedDataParallel(Net())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return model

    def check(self, model):
        assert "ALLREDUCE" in model._get_ddp_logging_data()["comm_hook"]
        for _ in train(model):
            assert torch.allclose(model.module.last.weight.grad, averaged(model))
        with pytest.raises(RuntimeError, match="once"):
            model.register_comm_hook(None, sevens)


class BuiltInFp16:
    def create(self):
        model = paceline.DistributedDataParallel(Net())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return model

    def check(self, model):
        assert "FP16_COMPRESS" in model._get_ddp_logging_data()["comm_hook"]
        net = model.module
        with torch.no_grad():
            for layer in (net.frozen, net.middle):
                layer.weight.copy_(torch.eye(3))
        for _ in range(STEPS):
            model.zero_grad()
            model(torch.full((1, 3), FINE)).sum().backward()
            assert bool((net.last.weight.grad == 1.0).all())


class DriftCheckOffUnderHook:
    """Local SGD keeps replicas apart on purpose: nobody compares them."""

    def create(self):
        model = paceline.DistributedDataParallel(Net())
        assert model.compares_replicas_every > 0
        model.register_comm_hook(None, sevens)
        return model

    def check(self, model):
        with torch.no_grad():
            model.module.last.weight.add_(dist.get_rank())
        for _ in train(model):
            assert model.compares_replicas_every == 0
        model.compare_replicas()


class DriftCheckOnWhereAsked:
    """Given by the caller, the check stays on, also under a hook."""

    def create(self):
        return paceline.DistributedDataParallel(Net(), check_replicas_every=2)

    def check(self, model):
        assert model.compares_replicas_every == 2
        for _ in train(model, steps=4):
            pass
        with torch.no_grad():
            model.module.last.weight.add_(dist.get_rank())
        with pytest.raises(paceline.MismatchError, match="last"):
            for _ in train(model, steps=2):
                pass


class OptimizerInBackward:
    """torch's _apply_optimizer_in_backward: weights have changed when backward returns."""

    def create(self):
        from torch.distributed.optim import _apply_optimizer_in_backward

        net = Net()
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.125})
        model = paceline.DistributedDataParallel(net)
        for _ in train(model, steps=1):  # the first forward finds the optimizers
            pass
        return model

    def check(self, model):
        net = model.module
        for _ in range(STEPS):
            expected = net.last.weight.detach() - 0.125 * averaged(model)
            for _ in train(model, steps=1):
                assert torch.allclose(net.last.weight, expected, atol=1e-5)
                assert net.last.weight.grad is None


class StaticGraph:
    """Buckets are planned anew after the first step, even if unused parameters are sought."""

    def create(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return paceline.DistributedDataParallel(
                Net(), find_unused_parameters=True, static_graph=True
            )

    def check(self, model):
        assert model.static_graph
        for _ in train(model):
            assert torch.allclose(model.module.last.weight.grad, averaged(model))
        assert model._get_ddp_logging_data()["static_graph"] == 1
        assert model._get_ddp_logging_data()["has_rebuilt_buckets"] == 1


class DelayedParameters:
    """The gradient of `last` waits for that of `middle`, then both are averaged."""

    def create(self):
        net = Net()
        return paceline.DistributedDataParallel(
            net,
            delay_all_reduce_named_params=[("last.weight", net.last.weight)],
            param_to_hook_all_reduce=net.middle.weight,
        )

    def check(self, model):
        for _ in train(model):
            assert torch.allclose(model.module.last.weight.grad, averaged(model))


class BufferHooks:
    def create(self):
        model = paceline.DistributedDataParallel(Net())
        model._register_buffer_comm_hook(None, buffer_hook)
        return model

    def check(self, model):
        for _ in train(model):
            assert calls.count("buffers ['seen']") == 1


FEATURES = {
    "mixed precision": MixedPrecision,
    "user's hook": UserHook,
    "built-in all-reduce": BuiltInAllReduce,
    "built-in fp16": BuiltInFp16,
    "drift check off under a hook": DriftCheckOffUnderHook,
    "drift check where asked": DriftCheckOnWhereAsked,
    "optimizer in backward": OptimizerInBackward,
    "static graph": StaticGraph,
    "delayed parameters": DelayedParameters,
    "buffer hooks": BufferHooks,
}

_ONCE = "a model takes one communication hook, and this feature is one: the second is refused"
_COPIES = "torch pickles the optimizers of a parameter with a copy of that parameter, and steps it"
SENSELESS = {
    ("unpickled", "optimizer in backward"): _COPIES,
    ("hook registered", "user's hook"): _ONCE,
    ("hook registered", "built-in all-reduce"): _ONCE,
    ("hook registered", "built-in fp16"): _ONCE,
    ("hook registered", "drift check off under a hook"): _ONCE,
    ("hook registered", "optimizer in backward"): _ONCE,
}
CELLS = [(rebuild, feature) for rebuild in REBUILDS for feature in FEATURES]


# -------------------------------------------------------------------------------- the table


def run_cell(rebuild, feature):
    case = FEATURES[feature]()
    model = case.create()
    for _ in train(model, steps=2):
        pass
    model = REBUILDS[rebuild](model)
    case.check(model)


class NoStream:
    """Torch's hook for optimizers in backward waits for a stream, and a CPU has none."""

    def wait_stream(self, stream):
        pass


def run_table(rank, world):
    init_group(os.environ["BACKEND"])
    torch.accelerator.current_stream = NoStream
    outcomes = {}
    for cell in CELLS:
        if cell in SENSELESS:
            continue
        try:
            run_cell(*cell)
            outcomes[cell] = ""
        except (Exception, pytest.fail.Exception):
            outcomes[cell] = traceback.format_exc()
        dist.barrier()
    return outcomes


@pytest.fixture(scope="module", params=["gloo", "paceline"])
def table(request):
    """Every rank's outcome of every cell."""
    return run_ranks(2, run_table, timeout=100, env={"BACKEND": request.param})


@pytest.mark.parametrize(("rebuild", "feature"), [cell for cell in CELLS if cell not in SENSELESS])
def test_a_rebuilt_reducer_keeps_every_feature(table, rebuild, feature):
    for rank, outcomes in enumerate(table):
        assert not outcomes[rebuild, feature], f"rank {rank}:\n{outcomes[rebuild, feature]}"


def test_cells_left_out_have_a_reason():
    assert all(cell in CELLS and reason for cell, reason in SENSELESS.items())
