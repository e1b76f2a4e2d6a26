"""DataParallel with worker processes computes what the bare module computes on the whole batch."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import os
import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

import paceline
from paceline import DataParallel
from paceline.core.update import ArrayUpdate
from paceline.dp import Whole
from paceline.errors import ConfigError, GroupError, MismatchError


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def gradients_agree(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            close(a.grad, b.grad)


@pytest.fixture
def wrap():
    """Wrap a module; closed at the end."""
    made: list[DataParallel] = []

    def make(module: nn.Module, workers: int = 2, **options: Any) -> DataParallel:
        made.append(DataParallel(module, workers=workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (cnn, (2, 6, 6))])
def test_outputs_and_gradients_are_those_of_the_whole_batch(wrap, workers, build, shape):
    bare = build()
    model = wrap(copy.deepcopy(bare), workers)
    for batch in (8, 7, 1, 2, 0):
        x = torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out, expected = model(x), bare(y)
        close(out, expected)
        out.pow(2).sum().backward()
        expected.pow(2).sum().backward()  # accumulates over batches
        gradients_agree(model.module, bare)
        close(x.grad, y.grad)


def test_any_batch_size(wrap):
    model = wrap(mlp(), 4)

    @hypothesis.given(batch=st.integers(1, 9), seed=st.integers(0, 99), weighted=st.booleans())
    @hypothesis.settings(max_examples=25)
    def check(batch, seed, weighted):
        bare = mlp()
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, 6, dtype=torch.float64, generator=generator)
        weights = (
            torch.rand(batch, 1, dtype=torch.float64, generator=generator) if weighted else 1.0
        )
        model.module.load_state_dict(bare.state_dict())
        model.zero_grad()
        (model(x) * weights).sum().backward()
        (bare(x) * weights).sum().backward()
        gradients_agree(model.module, bare)

    check()


def test_training_follows_the_optimizer_in_place(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, bare)]
    for step in range(6):
        x = torch.randn(5, 6, dtype=torch.float64)
        for m, optimizer in zip((model, bare), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            m(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
    for a, b in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


class LossInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        return nn.functional.mse_loss(self.net(x), y)


def test_a_loss_per_replica_becomes_the_exact_mean(wrap):
    bare = LossInside()
    model = wrap(copy.deepcopy(bare), 3)
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    loss, expected = model(x, y), bare(x, y)
    assert loss.shape == ()
    close(loss, expected)
    loss.backward()
    expected.backward()
    gradients_agree(model.module, bare)


class GraphLoss(nn.Module):
    """The mean over graphs, each of two nodes; or the sum and the number of graphs."""

    def __init__(self, divides=True):
        super().__init__()
        self.net, self.divides = mlp(), divides

    def forward(self, nodes, targets):
        found = self.net(nodes).view(len(targets), 2, 3).sum(1)
        total = (found - targets).pow(2).sum()
        count = torch.tensor(float(len(targets)), dtype=torch.float64)
        return total / count if self.divides else (total, count)


def test_losses_of_replicas_are_averaged_equally_where_counts_are_not_known(wrap):
    bare = GraphLoss()
    model = wrap(copy.deepcopy(bare))
    nodes, targets = torch.randn(10, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    halves = (bare(nodes[:6], targets[:3]), bare(nodes[6:], targets[3:]))
    with pytest.warns(UserWarning, match=r"3 and 2 rows .* inputs have 5, 10 rows") as caught:
        loss = model(targets=targets, nodes=nodes)
    assert caught[0].filename == __file__
    close(loss, sum(halves) / 2)
    close(model(targets=targets, nodes=nodes), loss)  # and says it once
    total, count = wrap(GraphLoss(divides=False), scalars="sum")(targets=targets, nodes=nodes)
    (total / count).backward()
    close(total / count, bare(nodes, targets))


def test_scalars_can_be_summed_or_stacked(wrap):
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    bare = LossInside()
    parts = [bare(x[:4], y[:4]), bare(x[4:], y[4:])]
    close(wrap(bare, scalars="sum")(x, y), sum(parts))
    close(wrap(bare, scalars="stack")(x, y), torch.stack(parts))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2).double()

    def forward(self, pair, *, scale, sample, table):
        assert isinstance(pair, Point)
        assert isinstance(sample, Sample)
        assert sample.name == "one"
        out = self.net(pair.x + pair.y["y"] + sample.x + table.sum())
        return {"out": out * scale, "kept": (sample.name, [Point(out.argmax(1), None)])}


def test_nested_inputs_and_outputs(wrap):
    bare = Nested()
    model = wrap(copy.deepcopy(bare))

    def inputs():
        generator = torch.Generator().manual_seed(3)
        x, y, z = torch.randn(3, 5, 3, dtype=torch.float64, generator=generator)
        scale = torch.tensor(2.0, dtype=torch.float64)  # of rank 0: for every replica
        table = Whole(torch.arange(7.0))
        return Point(x, collections.OrderedDict(y=y)), {
            "scale": scale,
            "sample": Sample(z, "one"),
            "table": table,
        }

    pair, kwargs = inputs()
    found = model(pair, **kwargs)
    pair, kwargs = inputs()
    expected = bare(pair, **{**kwargs, "table": kwargs["table"].value})
    close(found["out"], expected["out"])
    assert found["kept"][0] == "one"
    assert isinstance(found["kept"][1][0], Point)
    assert torch.equal(found["kept"][1][0].x, expected["kept"][1][0].x)
    found["out"].sum().backward()
    expected["out"].sum().backward()
    gradients_agree(model.module, bare)


class Layer:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.window = torch.tensor(7)
        self.length = 0

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.dtype, self.device = keys.dtype, keys.device
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.length += keys.shape[1]
        return self.keys


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []


@dataclasses.dataclass
class DecoderOutput(collections.OrderedDict):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Cache | None = None
    hidden: Any = None


class Decoder(nn.Module):
    """Outputs as decoders of Hugging Face have them: an object of objects that hold tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4).double()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double()

    def forward(self, tokens, past_key_values=None):
        cache = Cache() if past_key_values is None else past_key_values
        hidden = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if len(cache.layers) == index:
                cache.layers.append(Layer())
            hidden = layer(hidden) + cache.layers[index].update(hidden).mean(1, keepdim=True)
        loss = hidden.pow(2).mean()
        best = hidden.sum(2).max(1)  # of a class that is registered with torch.utils._pytree
        return DecoderOutput(loss, hidden, cache, collections.deque([best], maxlen=2))


@pytest.mark.parametrize("batch", [6, 5])
def test_caches_in_outputs_and_inputs(wrap, batch):
    bare = Decoder()
    model = wrap(copy.deepcopy(bare))
    tokens = torch.randint(9, (batch, 3))
    for m in (model, bare):
        first = m(tokens)
        second = m(tokens[:, :1], past_key_values=first.past_key_values)
        (first.loss + second.past_key_values.layers[1].keys.pow(2).sum()).backward()
    gradients_agree(model.module, bare)
    with torch.no_grad():
        found, expected = ((m(tokens)) for m in (model, bare))
        for _ in range(3):
            for one, other in zip(
                found.past_key_values.layers, expected.past_key_values.layers, strict=True
            ):
                close(one.keys, other.keys)
                assert (one.length, one.window.item()) == (other.length, 7)
            assert found.hidden.maxlen == 2
            assert torch.equal(found.hidden[0].indices, expected.hidden[0].indices)
            found, expected = (
                m(tokens[:, :1], past_key_values=out.past_key_values)
                for m, out in ((model, found), (bare, expected))
            )


def test_an_output_that_cannot_be_gathered_is_named(wrap):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.what = None

        def forward(self, x):
            values = {"pid": os.getpid(), "lock": threading.Lock(), None: None}
            return {"x": x, "aside": [values[self.what]]}

    model = wrap(Net())
    model.module.what = "pid"
    with pytest.raises(ConfigError, match=r"outputs\['aside'\]\[0\] is not a tensor, .*different"):
        model(torch.ones(4))
    model.module.what = "lock"
    with pytest.raises(ConfigError, match=r"outputs\['aside'\]\[0\], a lock, cannot be gathered"):
        model(torch.ones(4))
    model.module.what = None
    assert model(torch.ones(4))["aside"] == [None]


def test_lambdas_local_classes_and_objects_with_a_declared_split(wrap):
    class Bag:
        def __init__(self, items):
            self.items = items

        def __len__(self):
            return len(self.items)

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.function = lambda x: x * 3
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, bag, transform):
            return torch.stack([transform(self.function(item)) * self.weight for item in bag.items])

    def cut(bag, ranges):
        return [Bag(bag.items[start:stop]) for start, stop in ranges]

    model = wrap(Local(), 2, split={Bag: cut})
    items = [torch.tensor(float(i), dtype=torch.float64) for i in range(5)]
    out = model(Bag(items), lambda x: x + 1)
    assert out.tolist() == [1, 4, 7, 10, 13]
    pids = model.worker_pids
    younger = lambda x: x + 2  # noqa: E731 - made after the workers: they are started anew
    assert model(Bag(items), younger).tolist() == [2, 5, 8, 11, 14]
    assert model.worker_pids != pids


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()

    def forward(self, x):
        return self.net(x)


def test_buffers_of_the_first_replica_persist_and_eval_sees_them(wrap):
    bare = Buffered()
    model = wrap(copy.deepcopy(bare))
    for _ in range(3):
        x = torch.randn(6, 4, dtype=torch.float64)
        model(x)
        bare(x[:3])
    close(model.module.net[1].running_mean, bare.net[1].running_mean)
    assert model.module.net[1].num_batches_tracked == 3
    x = torch.randn(6, 4, dtype=torch.float64)
    close(model.eval()(x), bare.eval()(x))
    with torch.no_grad():
        close(model(x), bare(x))
    with torch.inference_mode():
        close(model(x), bare(x))


class Tables(nn.Module):
    """Buffers of all kinds; each row of the output depends on every element of each of them."""

    def __init__(self, size: int = 70) -> None:
        super().__init__()
        ramp = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("table", ramp / ramp.sum())
        self.register_buffer("count", torch.tensor([3]), persistent=False)
        self.register_buffer("wide", torch.linspace(0, 1, 3, dtype=torch.float64).expand(4, 3))
        self.register_buffer("sparse", torch.eye(3, dtype=torch.float64).to_sparse())
        self.register_buffer("nothing", None)
        self.again = nn.Module()
        self.again.register_buffer("table", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(self.table.numel(), dtype=torch.float64).view_as(self.table)
        y = self.linear(x) * (self.table * ramp).sum() + self.count + self.again.table.mean()
        y = torch.sparse.mm(self.sparse, y.t()).t() + self.wide.mean(0)
        return y if self.nothing is None else y * self.nothing.sum()


def _set_both(module: Tables, table: torch.Tensor) -> None:
    module.table = module.again.table = table


CHANGES_TO_BUFFERS = {
    "in place": lambda m: m.table.mul_(2),
    "data": lambda m: m.table.data.mul_(2),
    "data of an integer": lambda m: m.count.data.fill_(7),
    "numpy": lambda m: np.multiply(m.table.numpy(), 2, out=m.table.numpy()),
    "one element": lambda m: m.table.data[-1, -1].mul_(2),
    "two elements swapped": lambda m: m.table.data[:2, 0].copy_(m.table[:2, 0].flip(0).clone()),
    "negative zero": lambda m: m.count.data.zero_(),
    "data replaced": lambda m: setattr(m.table, "data", m.table.data * 2),
    "data transposed": lambda m: setattr(m.table, "data", m.table.data.t()),
    "transposed": lambda m: _set_both(m, m.table.t()),
    "assigned": lambda m: _set_both(m, m.table * 2),
    "one of two assigned": lambda m: setattr(m, "table", m.table * 2),
    "another type": lambda m: setattr(m, "count", torch.tensor([2.5], dtype=torch.float64)),
    "another shape": lambda m: _set_both(m, m.table[:5] * 3),
    "resized": lambda m: m.count.resize_(3).fill_(4),
    "memory replaced": lambda m: m.table.set_((m.table * 2).contiguous()),
    "not contiguous": lambda m: m.wide.data.select(0, 0).mul_(3),
    "sparse": lambda m: m.sparse._values().data.mul_(3),
    "from nothing": lambda m: setattr(m, "nothing", torch.ones(2, dtype=torch.float64)),
    "removed": lambda m: delattr(m, "nothing") or m.register_buffer("nothing", torch.ones(3)),
    "loaded": lambda m: m.load_state_dict({"table": m.table * 2}, strict=False),
    "assigned by loading": lambda m: m.load_state_dict(
        {k: v * 2 for k, v in m.state_dict().items()}, assign=True
    ),
    "to float": lambda m: m.float().double(),
}


@pytest.mark.parametrize("change", CHANGES_TO_BUFFERS)
def test_buffers_that_the_user_changes_in_any_way(wrap, change):
    bare = Tables()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(4, 3, dtype=torch.float64)
    close(model(x), bare(x))
    for _ in range(2):
        for module in (model.module, bare):
            CHANGES_TO_BUFFERS[change](module)
        for m in (model, bare):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        gradients_agree(model.module, bare)
        with torch.inference_mode():
            close(model(x), bare(x))


def test_a_buffer_that_is_asked_for_a_gradient(wrap):
    bare = Tables()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(4, 3, dtype=torch.float64)
    model(x)
    for module in (model.module, bare):
        _set_both(module, module.table.clone().requires_grad_())
        module.count = module.count.double().requires_grad_()
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    close(model.module.table.grad, bare.table.grad)
    close(model.module.count.grad, bare.count.grad)
    model(x)
    for module in (model.module, bare):
        module.count.grad = None
        module.count.requires_grad_(False)
        module.count.data.mul_(2)
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    assert model.module.count.grad is None
    close(model(x), bare(x))


class Counts(nn.Module):
    """Buffers that forward changes in ways of its own, in a worker or in the main process."""

    def __init__(self, main: int) -> None:
        super().__init__()
        self.main = main
        self.register_buffer("seen", torch.zeros(5000))
        self.register_buffer("assigned", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x + self.seen.sum() + self.assigned.sum()
        if os.getpid() != self.main:
            self.seen.data.add_(1)
            self.assigned = self.assigned + 1
        return found


def test_every_forward_begins_with_the_buffers_of_the_first_replica(wrap):
    model = wrap(Counts(os.getpid()), 3)
    x = torch.ones(6)
    for _ in range(3):
        assert model(x).tolist() == [1.0] * 6
    model.module.seen.numpy()[0] = 2.0
    assert model(x).tolist() == [3.0] * 6


def test_a_worker_that_a_small_batch_left_idle_has_missed_nothing(wrap):
    model = wrap(Counts(os.getpid()), 3)
    model(torch.ones(6))
    model.module.seen.data[0] = 2.0
    assert model(torch.ones(2)).tolist() == [3.0] * 2
    assert model(torch.ones(6)).tolist() == [3.0] * 6


CHANGES_TO_PARAMETERS = {
    "data": lambda p: p.data.mul_(2),
    "numpy": lambda p: np.multiply(p.data.numpy(), 2, out=p.data.numpy()),
    "data replaced": lambda p: setattr(p, "data", p.data * 2),
    "data transposed": lambda p: setattr(p, "data", p.data.t()),
    "memory replaced": lambda p: p.data.set_((p.data * 2).contiguous()),
}


@pytest.mark.parametrize("change", CHANGES_TO_PARAMETERS)
def test_parameters_that_the_user_changes_past_autograd(wrap, change):
    torch.manual_seed(1)
    bare = nn.Linear(5, 5).double()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(3):
        for m in (model, bare):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        close(model(x), bare(x))
        gradients_agree(model.module, bare)
        for module in (model.module, bare):
            CHANGES_TO_PARAMETERS[change](module.weight)


def test_dropout_differs_between_replicas_and_repeats_with_the_seed(wrap):
    model = wrap(nn.Dropout(0.5), 3)
    x = torch.ones(3, 64)
    torch.manual_seed(7)
    first, second = model(x), model(x)
    torch.manual_seed(7)
    again = model(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 3
    assert torch.equal(model.eval()(x), x)


def test_autocast_reaches_the_workers(wrap):
    model = wrap(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(4, 4))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.module.weight.grad.dtype == torch.float32


def test_several_forwards_before_one_backward_and_retain_graph(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x, y = torch.randn(2, 4, 6, dtype=torch.float64)
    for m in (model, bare):
        loss = m(x).sum() + m(y).pow(2).sum() * m(x).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    gradients_agree(model.module, bare)
    loss = model(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad_hooks_and_inputs_argument_see_the_whole_batch(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(5, 6, dtype=torch.float64)
    seen = []
    handle = model.module[0].weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    close(seen[0], bare[0].weight.grad)
    close(model.module[0].weight.grad, 2 * bare[0].weight.grad)
    handle.remove()
    close(*(torch.autograd.grad(m(x).sum(), next(m.parameters()))[0] for m in (model, bare)))
    model.zero_grad()
    model(x).sum().backward(inputs=[model.module[2].bias])
    assert model.module[0].weight.grad is None
    close(model.module[2].bias.grad, torch.full((3,), 5.0, dtype=torch.float64))


def test_create_graph_is_refused(wrap):
    model = wrap(mlp())
    out = model(torch.randn(4, 6, dtype=torch.float64)).sum()
    with pytest.raises(RuntimeError, match="differentiated twice"):
        out.backward(create_graph=True)


def test_parameters_replaced_resized_frozen_and_loaded(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(4, 6, dtype=torch.float64)

    def check():
        model.zero_grad()
        bare.zero_grad()
        out, expected = model(x), bare(x)
        close(out, expected)
        out.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        gradients_agree(model.module, bare)

    check()
    pids = model.worker_pids
    for m in (model.module, bare):
        m[0].weight.requires_grad_(False)
    check()
    for m in (model.module, bare):
        m[0].weight.requires_grad_(True)
        m[0].weight = nn.Parameter(torch.full((8, 6), 0.1, dtype=torch.float64))
    check()
    state = {name: torch.randn_like(value) for name, value in bare.state_dict().items()}
    model.load_state_dict(state)
    bare.load_state_dict(state)
    check()
    model.load_state_dict({f"module.{name}": value * 2 for name, value in state.items()})
    bare.load_state_dict({name: value * 2 for name, value in state.items()})
    check()
    model.module.load_state_dict(state, assign=True)
    bare.load_state_dict(state)
    check()
    assert model.worker_pids == pids, "none of this needs new workers"
    for m in (model.module, bare):
        m[2] = nn.Linear(8, 5).double()
        with torch.no_grad():
            m[2].weight.fill_(0.3)
            m[2].bias.fill_(0.1)
    check()
    assert model.worker_pids != pids
    for m in (model.module, bare):
        m.float()
    x = x.float()
    torch.testing.assert_close(model(x), bare(x))


def test_attributes_and_hooks_changed_by_the_user(wrap):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.table = [1]
            self.seen = None

        def forward(self, x):
            self.seen = x
            return x * self.scale * self.table[0]

    model = wrap(Scaled())
    x = torch.ones(4)
    assert model(x).tolist() == [2] * 4
    pids = model.worker_pids
    model.module.scale = 3.0
    assert model(x).tolist() == [3] * 4
    assert model.worker_pids == pids, (
        "a number is told, and what forward itself stores is not a change"
    )
    model.module.table[0] = 2
    assert model(x).tolist() == [6] * 4
    model.module.register_forward_hook(lambda module, args, out: out + 1)
    assert model(x).tolist() == [7] * 4
    model.register_forward_hook(lambda module, args, out: out * 10)
    assert model(x).tolist() == [70] * 4
    assert model.scale == 3.0
    with pytest.raises(AttributeError):
        _ = model.nothing


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4).double()
        self.lstm = nn.LSTM(4, 4, batch_first=True).double()
        self.out = nn.Linear(4, 10).double()
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0])


def test_tied_unused_and_recurrent_parameters(wrap):
    bare = Tied()
    model = wrap(copy.deepcopy(bare))
    x = torch.randint(10, (4, 3))
    model(x).pow(2).sum().backward()
    bare(x).pow(2).sum().backward()
    gradients_agree(model.module, bare)


def test_sparse_gradients(wrap):
    bare = nn.Embedding(10, 4, sparse=True).double()
    model = wrap(copy.deepcopy(bare), 3)
    x = torch.tensor([1, 2, 2, 7])
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    close(model.module.weight.grad.to_dense(), bare.weight.grad.to_dense())


class Scaled(nn.Module):
    """No parameter, but a buffer that requires a gradient, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "scale", torch.linspace(1, 2, 3, dtype=torch.float64, requires_grad=True)
        )
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def test_buffers_that_require_a_gradient(wrap):
    bare = Scaled()
    model = wrap(copy.deepcopy(bare), 3)
    x = torch.randn(7, 3, dtype=torch.float64)
    for _ in range(3):
        for m in (model, bare):
            m(x).square().sum().backward()
        close(model.module.scale.grad, bare.scale.grad)
        for m in (model.module, bare):
            with torch.no_grad():
                m.scale -= 0.1 * m.scale.grad
                m.shift *= 2
    module = model.module
    torch.autograd.gradcheck(lambda scale: model(x), (module.scale,), check_batched_grad=False)


def test_a_module_before_and_after(wrap):
    torch.manual_seed(0)
    before, after = nn.Linear(6, 6).double(), nn.Linear(3, 1).double()
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(5, 6, dtype=torch.float64)
    grads = []
    for m in (model, bare):
        before.zero_grad()
        after(m(before(x))).sum().backward()
        grads.append(before.weight.grad)
    close(*grads)


def test_other_dimensions(wrap):
    bare = nn.Linear(6, 3).double()
    model = wrap(copy.deepcopy(bare), dim=1)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    close(model(x), bare(x))


def test_channels_last_and_integers(wrap):
    model = wrap(nn.Conv2d(3, 4, 1))
    out = model(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert wrap(nn.Identity())(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_split_is_said(wrap):
    model = wrap(nn.Bilinear(2, 2, 2))
    with pytest.raises(ConfigError, match=r"Whole\(tensor\)"):
        model(torch.randn(4, 2), torch.randn(3, 2))

    class Odd(nn.Module):
        def forward(self, x):
            return x.sum(0) if len(x) == 2 else x

    with pytest.raises(MismatchError, match="same type and number of dimensions"):
        wrap(Odd())(torch.randn(3, 2))


def test_more_threads_per_worker(wrap):
    torch.randn(512, 512) @ torch.randn(512, 512)  # the parent has used its OpenMP threads
    bare = nn.Linear(512, 512).double()
    model = wrap(copy.deepcopy(bare), 2, threads=2)
    x = torch.randn(512, 512, dtype=torch.float64)
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, bare.weight.grad, rtol=1e-10, atol=1e-10)


def test_lazy_modules_are_finished_first(wrap):
    model = wrap(nn.LazyLinear(3))
    x = torch.randn(4, 5)
    torch.testing.assert_close(model(x), model(x))
    assert len(model.worker_pids) == 1


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.BatchNorm2d(4, affine=False, momentum=None),
            nn.Flatten(),
        ).double()
        self.out = nn.BatchNorm1d(64).double()
        self.fails_in = None

    def forward(self, x):
        found = self.net(x)
        if self.fails_in == os.getpid():
            raise LookupError("between two layers")
        return self.out(found)


@pytest.mark.parametrize("workers", [2, 3])
def test_batch_normalisation_over_the_whole_batch(wrap, workers):
    torch.manual_seed(5)
    bare = Normalised()
    model = wrap(copy.deepcopy(bare), workers, batch_norm="global")
    for batch in (7, 2, 6):
        x = torch.randn(batch, 2, 6, 6, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        weights = torch.randn(batch, 64, dtype=torch.float64)
        out, expected = model(x), bare(y)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
        (out * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-11)
        for a, b in zip(model.module.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)
        for (name, a), b in zip(model.module.named_buffers(), bare.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13, msg=name)
    x = torch.randn(6, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(model.eval()(x), bare.eval()(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("where", ["worker", "main"])
def test_a_replica_that_fails_between_two_normalisations_does_not_keep_the_others_waiting(
    wrap, where
):
    model = wrap(Normalised(), 3, batch_norm="global")
    x = torch.randn(6, 2, 6, 6, dtype=torch.float64)
    model(x)
    pids = model.worker_pids
    model.module.fails_in = pids[1] if where == "worker" else os.getpid()
    with pytest.raises(LookupError, match="between two layers"):
        model(x)
    model.module.fails_in = None
    model(x).sum().backward()
    assert len(model.worker_pids) == 2
    assert model.worker_pids != pids


def test_whole_inside_structures_reaches_all_replicas_and_has_gradients(wrap):
    class Net(nn.Module):
        def forward(self, x, more):
            return x * more["a"][0].sum() + more["b"]["c"].sum()

    def run(model, mark):
        a, b = torch.arange(1.0, 4.0, requires_grad=True), torch.ones(5, requires_grad=True)
        out = model(torch.arange(4.0), {"a": [mark(a)], "b": mark({"c": mark(b)})})
        out.sum().backward()
        return out, a.grad, b.grad

    expected = run(Net(), lambda given: given)
    for workers in (1, 2, 3):
        for found, right in zip(run(wrap(Net(), workers), Whole), expected, strict=True):
            torch.testing.assert_close(found, right)


def test_what_numpy_and_random_draw_differs_between_replicas_and_repeats(wrap):
    class Noise(nn.Module):
        def forward(self, x):
            return x * 0 + torch.tensor([np.random.rand(), random.random()], dtype=torch.float64)

    model = wrap(Noise(), 3)
    x = torch.zeros(3, 2, dtype=torch.float64)
    torch.manual_seed(7)
    first, second = model(x), model(x)
    torch.manual_seed(7)
    again = model(x)
    assert torch.equal(
        first[1:], again[1:]
    )  # replica 0 is the main process, with the user's own generators
    assert len({value.item() for value in torch.cat([first, second[1:]]).flatten()}) == 10


class Large(nn.Module):
    """Gradients large enough to be added in place, some of which others refer to."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.randn(256, 256, dtype=torch.float64)) for _ in range(3)
        )
        self.kept = []

    def forward(self, x):
        both = self.a + self.b  # one gradient for two parameters
        hidden = x @ self.c
        if hidden.requires_grad:
            self.c.register_hook(self.kept.append)
        return (hidden @ both).tanh()


def test_sums_are_not_written_where_others_look(wrap):
    torch.manual_seed(2)
    bare = Large()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(6, 256, dtype=torch.float64)
    model(x).sum().backward()
    bare(x).sum().backward()
    for name in "abc":
        torch.testing.assert_close(
            getattr(model.module, name).grad, getattr(bare, name).grad, rtol=1e-10, atol=1e-10
        )
    half = Large()
    half.load_state_dict(bare.state_dict())
    (half(x[:3]).sum()).backward()
    torch.testing.assert_close(model.module.kept[0], half.c.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.compile looks, and hides it by itself
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_modules_are_compiled_once(wrap):
    bare = mlp()
    model = wrap(torch.compile(copy.deepcopy(bare), backend="aot_eager"))
    x = torch.randn(6, 6, dtype=torch.float64)
    for _ in range(3):
        bare.zero_grad()
        model.zero_grad()
        out, expected = model(x), bare(x)
        close(out, expected)
        out.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        gradients_agree(model.module, bare)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("is_inner_compiled", [False, True])
def test_compiling_around_it_leaves_its_own_code_alone(wrap, is_inner_compiled):
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    bare = mlp()
    inner = copy.deepcopy(bare)
    model = wrap(torch.compile(inner, backend="eager") if is_inner_compiled else inner)
    x = torch.randn(6, 6, dtype=torch.float64)
    whole = torch.compile(model, backend=backend)
    within = torch.compile(lambda x: model(x.sin()).cos(), backend=backend)
    with contextlib.nullcontext() if is_inner_compiled else pytest.warns(match="compiles nothing"):
        whole(x).pow(2).sum().backward()
    within(x).pow(2).sum().backward()
    bare(x).pow(2).sum().backward()
    bare(x.sin()).cos().pow(2).sum().backward()
    gradients_agree(inner, bare)
    assert len(graphs) == 2, "before and after it"
    with pytest.raises(Exception, match=r"DataParallel\(torch.compile\(module\)\)"):
        torch.compile(lambda x: model(x.sin()), backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compile_as_a_method_compiles_the_module(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    model.compile(backend="eager")
    x = torch.randn(6, 6, dtype=torch.float64)
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    gradients_agree(model.module, bare)
    assert model.module._compiled_call_impl is not None
    torch._dynamo.reset()


def test_workers_have_compile_threads_of_their_own(wrap, monkeypatch):
    """The pool of torch's compiler, as it is inherited: its threads do not exist in a worker."""

    class AsyncCompile:
        pool = staticmethod(functools.lru_cache(1)(lambda: ThreadPoolExecutor(1)))

    compiler = types.ModuleType("async_compile")
    compiler.AsyncCompile = AsyncCompile
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", compiler)
    AsyncCompile.pool().submit(int).result()

    class Net(nn.Module):
        def forward(self, x):
            return x + AsyncCompile.pool().submit(int).result()

    assert wrap(Net(), timeout=20)(torch.ones(4)).tolist() == [1.0] * 4
    AsyncCompile.pool().shutdown()


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_workers_started_under_other_modes_train_all_the_same(wrap, mode):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(6, 6, dtype=torch.float64)
    with mode():
        model(x)
    for m in (model, bare):
        m(x).pow(2).sum().backward()
    gradients_agree(model.module, bare)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

    def forward(self, x):
        hidden = self.first(x)
        return torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(wrap, reentrant):
    torch.manual_seed(3)
    bare = Checkpointed(reentrant).double()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(6, 6, dtype=torch.float64)
    for _ in range(2):
        for m in (model, bare):
            m(x).pow(2).sum().backward()  # the second time into gradients that exist
        gradients_agree(model.module, bare)


class Views(nn.Module):
    """Gradients that are views: of one tensor, of one that a hook keeps, of a single number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(3)
        )
        self.kept = []

    def forward(self, x):
        both = torch.cat([self.a, self.b])
        middle = self.c.t() * 1.0
        if middle.requires_grad:
            middle.register_hook(self.kept.append)
        return (x @ both) @ middle + self.c.sum() + (self.a + self.b.t()).sum()


def test_sums_are_not_written_into_views_that_others_have(wrap):
    torch.manual_seed(4)
    bare = Views()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(6, 8, dtype=torch.float64)
    for m in (model, bare):
        m(x).sum().backward()
    gradients_agree(model.module, bare)
    half = Views()
    half.load_state_dict(bare.state_dict())
    half(x[:3]).sum().backward()
    close(model.module.kept[0], half.kept[0])


def test_gradients_with_a_pending_sign(wrap):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            return torch.complex(x, self.weight.expand_as(x)).conj().imag

    bare = Net()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(4, 3, dtype=torch.float64)
    for m in (model, bare):
        m(x).pow(3).sum().backward()
    gradients_agree(model.module, bare)


def test_a_backward_past_the_outputs_is_refused(wrap):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.aside = nn.Linear(2, 2), None

        def forward(self, x):
            self.aside = self.linear(x).sum()
            return self.linear(x)

    model = wrap(Net())
    model(torch.randn(4, 2))
    with pytest.raises(GroupError, match="none of its outputs"):
        model.module.aside.backward()
    model(torch.randn(4, 2)).sum().backward()
    assert model.module.linear.bias.grad.tolist() == [4.0, 4.0]


def test_inputs_that_are_no_plain_memory(wrap):
    bare = mlp()
    model = wrap(copy.deepcopy(bare))
    x = torch.randn(6, 6, dtype=torch.float64)
    model(x)
    for other in (x.t(), torch.complex(x, x).conj().imag, x[:, :1].expand(6, 6)):
        close(model(other), bare(other))


def test_the_step_of_an_optimizer_runs_on_the_cores_of_all_replicas(wrap, monkeypatch):
    """And has the bits of a step on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wide = nn.Linear(600, 600)
        alone = copy.deepcopy(wide)
        used = []
        monkeypatch.setattr(
            ArrayUpdate,
            "run",
            lambda update, gradients, run=ArrayUpdate.run: (
                used.append(update.numbers.threads),
                run(update, gradients),
            ),
        )
        model = wrap(wide, workers=3)
        optimizer = paceline.optim.AdamW(model.parameters())
        reference = paceline.optim.AdamW(alone.parameters())
        model(torch.randn(6, 600)).square().mean().backward()
        for one, other in zip(alone.parameters(), wide.parameters(), strict=True):
            one.grad = other.grad.clone()
        monkeypatch.setattr(ArrayUpdate, "most_threads", 8)
        optimizer.step()
        model.close()
        reference.step()
        assert used == [3, 1]
        for one, other in zip(alone.parameters(), wide.parameters(), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)
