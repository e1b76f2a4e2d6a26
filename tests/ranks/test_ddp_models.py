"""What stock DDP's users rely on: all of it at once on two ranks, each against a plain model over
the global batch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import paceline
from tests.harness import init_group, run_ranks


@pytest.fixture(params=["gloo", "paceline"])
def ranks(request):
    """`run_ranks` on sockets and on shared memory."""
    return functools.partial(run_ranks, env={"BACKEND": request.param})


def join_group():
    init_group(os.environ["BACKEND"])


def linear(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class Checkpointed(torch.nn.Module):
    """Re-entrant checkpointing runs a nested backward; the first layer is used inside it and
    outside.
    """

    def __init__(self, reentrant, shared=True):
        super().__init__()
        self.first, self.second = linear(4, 4), linear(4, 4)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        if self.shared:
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.first(x)


class Branches(torch.nn.Module):
    """Which layers are used depends on the rank and the step."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = linear(4, 4), linear(4, 4), linear(4, 4)
        self.calls = 0

    def forward(self, x, which):
        self.calls += 1
        return self.a(x) if which == "a" else self.b(x)


@dataclasses.dataclass
class Output:
    scores: dict
    note: str


class Structured(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(4, 4)

    def forward(self, x):
        return Output({"scores": [self.layer(x)]}, "text")


def batches(rank, world, shape=(3, 4), steps=4):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        whole = torch.randn(world, *shape, generator=generator)
        yield whole[rank], whole.flatten(0, 1)


def same_as_plain(rank, world, build, loss=None, shape=(3, 4), wrap=None, rtol=1e-5):
    """Train wrapped on this rank's part and plain on the whole: same gradients in every step."""
    loss = loss or (lambda model, x: model(x).square().mean())
    torch.manual_seed(0)
    net = build()
    plain = copy.deepcopy(net)
    model = (wrap or paceline.DistributedDataParallel)(net)
    for part, whole in batches(rank, world, shape):
        model.zero_grad()
        plain.zero_grad()
        loss(model, part).backward()
        loss(plain, whole).backward()
        for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None, name
            else:
                assert torch.allclose(
                    mine.grad.to_dense(), theirs.grad.to_dense(), rtol=rtol, atol=1e-6
                ), name
        with torch.no_grad():
            for one in (*net.parameters(), *plain.parameters()):
                if one.grad is not None:
                    one.add_(one.grad.to_dense(), alpha=-0.1)
    return model


def checkpointing(rank, world):
    join_group()
    for reentrant in (True, False):
        for shared in (True, False):
            # a re-entrant checkpoint needs an input that requires a gradient
            same_as_plain(
                rank,
                world,
                lambda r=reentrant, s=shared: Checkpointed(r, s),
                lambda model, x: model(x.requires_grad_()).square().mean(),
            )


def test_checkpointing_both_ways_with_shared_layers(ranks):
    ranks(2, checkpointing)


class Counting(torch.nn.Module):
    """Has a buffer, so that forward begins with an exchange between the ranks."""

    def __init__(self):
        super().__init__()
        self.layers = linear(4, 4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def checkpointing_from_outside(rank, world):
    """The wrapped model as a whole is checkpointed: its forward runs again in the middle of
    backward.
    """
    join_group()
    for reentrant in (True, False):
        for build in (lambda: linear(4, 4, 4), Counting):
            for early_stop in (True, False):
                with set_checkpoint_early_stop(early_stop):
                    same_as_plain(
                        rank,
                        world,
                        build,
                        lambda model, x, r=reentrant: (
                            checkpoint(model, x.requires_grad_(), use_reentrant=r).square().mean()
                        ),
                    )


def test_checkpointing_of_the_wrapped_model(ranks):
    ranks(2, checkpointing_from_outside)


class Passing(dist.ProcessGroup):
    """A group of the user's own, unknown to torch: hands every call on to another, and is strict
    about arguments.
    """

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self.calls = 0

    def allreduce(self, tensors, opts):
        self.calls += 1
        return self._inner.allreduce(tensors, opts)

    def broadcast(self, tensors, opts):
        return self._inner.broadcast(tensors, opts)

    def getBackendName(self):  # noqa: N802 - torch's
        return "passing"


class WithSparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(5, 4, sparse=True), linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.layer(self.table((x.abs() * 10).long() % 5) + x[..., None])


def in_a_group_of_the_users_own(rank, world):
    join_group()
    group = Passing(dist.group.WORLD)
    wrap = functools.partial(paceline.DistributedDataParallel, process_group=group)
    model = same_as_plain(rank, world, WithSparse, wrap=wrap)
    assert group.calls > 0
    assert model._get_ddp_logging_data()["backend_name"] == "passing"


def test_a_process_group_written_in_python(ranks):
    ranks(2, in_a_group_of_the_users_own)


def several_uses(rank, world):
    join_group()
    same_as_plain(rank, world, lambda: linear(4, 4), lambda m, x: (m(x) + m(m(x))).square().mean())
    same_as_plain(
        rank, world, lambda: linear(4, 4), lambda m, x: m(x).square().mean() + m(2 * x).abs().mean()
    )

    def regularised(
        model, x
    ):  # parameters used outside forward, before and after its outputs are reached
        module = getattr(model, "module", model)
        return model(x).square().mean() + sum(p.square().sum() for p in module.parameters())

    same_as_plain(rank, world, lambda: linear(4, 4, 4), regularised)


def test_forward_several_times_and_parameters_used_outside_it(ranks):
    ranks(2, several_uses)


def outputs(rank, world):
    join_group()

    def loss(model, x):
        out = model(x)
        assert out.note == "text"
        return out.scores["scores"][0].square().mean()

    same_as_plain(rank, world, Structured, loss)


def test_nested_outputs(ranks):
    ranks(2, outputs)


def kinds_of_parameters(rank, world):
    join_group()
    same_as_plain(
        rank, world, lambda: linear(4, 4).double(), lambda m, x: m(x.double()).square().mean()
    )
    same_as_plain(
        rank,
        world,
        lambda: linear(4, 4).to(torch.complex64),
        lambda m, x: m(x.to(torch.complex64)).abs().mean(),
    )
    same_as_plain(
        rank,
        world,
        lambda: torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        shape=(2, 3, 6, 6),
    )
    mixed = lambda: torch.nn.ModuleDict({"a": linear(4, 4), "b": linear(4, 4).double()})  # noqa: E731

    def both(model, x):
        module = getattr(model, "module", model)
        return module["b"](module["a"](x).double()).square().mean()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = mixed()

        def forward(self, x):
            return both(self.parts, x)

    same_as_plain(rank, world, Both, lambda m, x: m(x))


def test_dtypes_complex_channels_last_and_mixed(ranks):
    ranks(2, kinds_of_parameters)


def sparse(rank, world):
    join_group()
    for cls in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        same_as_plain(
            rank,
            world,
            lambda cls=cls: torch.nn.Sequential(cls(10, 4, sparse=True), torch.nn.Linear(4, 2)),
            lambda m, x: m((x.abs() * 3).long().clamp(0, 9)).square().mean(),
            shape=(3, 5),
        )
    model = paceline.DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([rank, 2])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    assert gradient.to_dense()[:4, 0].tolist() == [0.5, 0.5, 1.0, 0.0]


def test_sparse_gradients(ranks):
    ranks(2, sparse)


def unused(rank, world, options):
    """Another layer per rank and step; one that nobody ever uses. No flag, no hang, the right
    gradients.
    """
    join_group()
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Branches(), **options)
    plain = copy.deepcopy(model.module)
    for step, (part, _) in enumerate(batches(rank, world)):
        which = ["a", "b"][(rank + step) % 2] if step % 3 else "a"
        model.zero_grad()
        plain.zero_grad()
        model(part, which).square().mean().backward()
        for r in range(world):
            other = ["a", "b"][(r + step) % 2] if step % 3 else "a"
            whole = list(batches(r, world))[step][0]
            (plain(whole, other).square().mean() / world).backward()
        for (name, mine), theirs in zip(
            model.module.named_parameters(), plain.parameters(), strict=True
        ):
            if theirs.grad is None:
                assert mine.grad is None, name
            else:
                assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), name
    # a gradient that is there stays as it is when nobody uses the parameter
    for p in model.module.never.parameters():
        p.grad = torch.full_like(p, 3.0)
    model(part, "a").square().mean().backward()
    assert all(bool((p.grad == 3.0).all()) for p in model.module.never.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
def test_unused_parameters_need_no_flag(ranks, options):
    ranks(2, unused, options)


def frozen(rank, world):
    join_group()
    net = torch.nn.Sequential(linear(4, 4), linear(4, 4))
    net[0].requires_grad_(False)
    model = paceline.DistributedDataParallel(net)
    model(torch.randn(2, 4)).sum().backward()
    assert net[0][0].weight.grad is None
    net[0].requires_grad_(True)  # unfrozen later
    net[1].requires_grad_(False)
    model.zero_grad()
    for part, whole in batches(rank, world):
        model.zero_grad()
        twin = copy.deepcopy(net)
        model(part).square().mean().backward()
        twin(whole).square().mean().backward()
        assert torch.allclose(net[0][0].weight.grad, twin[0][0].weight.grad, atol=1e-6)
        assert net[1][0].weight.grad is None


def test_parameters_frozen_and_unfrozen_after_construction(ranks):
    ranks(2, frozen)


def user_hooks(rank, world):
    """A hook of the caller's sees this rank's own gradient and may change it."""
    join_group()
    net = torch.nn.Linear(1, 1, bias=False)
    model = paceline.DistributedDataParallel(net)
    seen = []
    net.weight.register_hook(lambda g: (seen.append(g.item()), g * 10)[1])
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        assert net.weight.grad.item() == 15.0
    assert seen == [rank + 1.0] * 2
    again = model(torch.full((1, 1), rank + 1.0)).sum()
    again.backward(retain_graph=True)
    model.zero_grad()
    again.backward()
    assert net.weight.grad.item() == 15.0
    # autograd.grad does not touch parameters and needs no peer
    if rank == 0:
        x = torch.ones(1, 1, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert gradient.shape == (1, 1)
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    assert net.weight.grad.item() == 10.0


def test_user_hooks_retained_graphs_and_autograd_grad(ranks):
    ranks(2, user_hooks)


def kept_gradients(rank, world):
    """Code that collects gradients over several backwards without cloning them."""
    join_group()
    model = paceline.DistributedDataParallel(linear(4, 4))
    collected = []
    for part, _ in batches(rank, world):
        model.zero_grad()
        model(part).square().mean().backward()
        collected.append([(p.grad, p.grad.clone()) for p in model.parameters()])
    assert all(torch.equal(kept, copied) for step in collected for kept, copied in step)


def test_gradients_a_caller_keeps_are_not_overwritten(ranks):
    ranks(2, kept_gradients)


def amp(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(linear(4, 8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.module[0].weight.clone()
    for step, (part, _) in enumerate(batches(rank, world)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(part).float().square().mean()
        if step == 1 and rank == 0:
            loss = loss * float("inf")  # an overflow on one rank is one on all
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(before, model.module[0].weight)
    return model.module[0].weight.detach(), scaler.get_scale()


def test_autocast_and_grad_scaler(ranks):
    (a, scale_a), (b, scale_b) = ranks(2, amp)
    assert torch.equal(a, b)
    assert bool(torch.isfinite(a).all())
    assert scale_a == scale_b == 2.0


def batchnorm(rank, world):
    """Buffers follow rank 0; two forwards before one backward work."""
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = paceline.DistributedDataParallel(net)
    for part, _ in batches(rank, world):
        (model(part) + model(part + 1)).square().mean().backward()
    model.eval()
    with torch.no_grad():
        model(part)
    return net[1].running_mean.clone()


def test_buffers_follow_rank_zero(ranks):
    a, b = ranks(2, batchnorm)
    assert torch.equal(a, b)


def sync_batchnorm(rank, world):
    """The statistics of the global batch, with other numbers of samples per rank."""
    join_group()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 1), torch.nn.BatchNorm1d(4), torch.nn.Linear(5, 2)
    ).double()
    plain = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(
        paceline.SyncBatchNorm.convert_sync_batchnorm(net), average="samples"
    )
    generator = torch.Generator().manual_seed(1)
    for sizes in ([3, 2], [1, 4], [5, 0]):
        whole = torch.randn(5, 3, 5, generator=generator, dtype=torch.float64)
        part = whole.split(sizes)[rank]
        model.zero_grad()
        plain.zero_grad()
        output = model(part)
        (output.square().mean() if len(part) else output.sum()).backward()
        plain(whole).square().mean().backward()
        for (name, mine), theirs in zip(
            model.module.named_parameters(), plain.parameters(), strict=True
        ):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12), name
        for mine, theirs in zip(model.module.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(mine.double(), theirs.double(), rtol=1e-12)
    model.eval()
    plain.eval()
    assert torch.allclose(model(whole), plain(whole))


def test_sync_batchnorm_on_cpu_is_exact(ranks):
    ranks(2, sync_batchnorm)


def torch_sync_batchnorm(rank, world):
    join_group()
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(
        torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    )
    with pytest.raises(paceline.ConfigError, match=r"paceline\.SyncBatchNorm"):
        paceline.DistributedDataParallel(net)


def test_torchs_sync_batchnorm_on_cpu_is_refused_with_the_cure(ranks):
    ranks(2, torch_sync_batchnorm)


def replicated(rank, world):
    join_group()
    same_as_plain(rank, world, lambda: linear(4, 4), wrap=paceline.replicate)
    net = linear(4, 4)
    paceline.replicate(net)
    replica = paceline.replica_of(net)
    with replica.no_sync():
        net(torch.full((1, 4), float(rank))).sum().backward()
    mine = net[0].weight.grad.clone()
    net(torch.zeros(1, 4)).sum().backward()
    return mine, net[0].weight.grad


def test_replicate_in_place(ranks):
    (a, average_a), (b, average_b) = ranks(2, replicated)
    assert not torch.equal(a, b)
    assert torch.equal(average_a, average_b)


def low_precision(rank, world):
    from torch.nn.parallel.distributed import _MixedPrecision

    join_group()
    settings = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
    )
    net = linear(4, 8, 2)
    twin = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net, mixed_precision=settings)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            mine.copy_(theirs)
    for part, whole in batches(rank, world):
        model.zero_grad()
        twin.zero_grad()
        output = model(part)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        twin(whole).square().mean().backward()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert mine.dtype == mine.grad.dtype == torch.float32
            assert torch.allclose(mine.grad, theirs.grad, rtol=0.1, atol=0.02)
        with torch.no_grad():
            for one in (*net.parameters(), *twin.parameters()):
                one.add_(one.grad, alpha=-0.1)
    with torch.no_grad():
        model(part)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    return net[0].weight.detach()


def test_mixed_precision_argument(ranks):
    a, b = ranks(2, low_precision)
    assert torch.equal(a, b)


def delayed(rank, world):
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model = paceline.DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("1.weight", net[1].weight)],
        param_to_hook_all_reduce=net[0].weight,
    )
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return net[0].weight.grad.clone(), net[1].weight.grad.clone()


def test_delayed_parameters(ranks):
    for a, b in zip(*ranks(2, delayed), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_torch_compile(ranks):
    ranks(2, compiled, timeout=110)


def compiled(rank, world):
    join_group()
    same_as_plain(
        rank,
        world,
        lambda: linear(4, 4, 4),
        wrap=lambda net: torch.compile(paceline.DistributedDataParallel(net), backend="aot_eager"),
    )
    same_as_plain(
        rank,
        world,
        lambda: linear(4, 4, 4),
        wrap=lambda net: paceline.DistributedDataParallel(torch.compile(net, backend="aot_eager")),
    )


class Spare(torch.nn.Module):
    """One layer that forward does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = linear(4, 4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def _gradient_before_the_output(rank, world):
    """The loss reaches a parameter directly, before backward comes to an output of forward."""
    join_group()

    def loss(model, x):
        net = getattr(model, "module", model)
        return model(x).square().mean() + net.spare.weight.square().sum()

    same_as_plain(rank, world, Spare, loss=loss)


def test_a_gradient_that_arrives_before_the_output_is_reached(ranks):
    ranks(2, _gradient_before_the_output)


def _gradients_cleared_between(rank, world, set_to_none):
    join_group()

    def loss(model, x):
        output = model(x)
        model.zero_grad(set_to_none=set_to_none)
        return output.square().mean()

    same_as_plain(rank, world, lambda: linear(4, 5, 4), loss=loss)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_between_forward_and_backward(ranks, set_to_none):
    ranks(2, _gradients_cleared_between, set_to_none)


def _two_forwards_then_two_backwards(rank, world):
    join_group()
    torch.manual_seed(0)
    net = linear(4, 5, 4)
    plain = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net)
    for part, whole in batches(rank, world):
        for one, x in ((model, part), (plain, whole)):
            one.zero_grad()
            first, second = one(x).square().mean(), one(x + 1).square().mean()
            first.backward()
            if one is plain:
                kept = [p.grad.clone() for p in plain.parameters()]
            else:
                after_first = [p.grad.clone() for p in net.parameters()]
            second.backward()
        for mine, theirs in zip(after_first, kept, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(
            net.parameters(), plain.parameters(), strict=True
        ):  # and both together
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_second_backward_without_a_forward_of_its_own(ranks):
    ranks(2, _two_forwards_then_two_backwards)


def _bits_of_bucket_sizes(rank, world):
    join_group()
    found = []
    for size in (None, 0.0001, 50):
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(linear(8, 16, 16, 4), bucket_cap_mb=size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part, _ in batches(rank, world, (3, 8)):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sums_in_shared_memory_do_not_depend_on_the_bucket_size():
    run_ranks(3, _bits_of_bucket_sizes, env={"BACKEND": "paceline"})


class Opaque:
    """Not a tensor, a collection or a dataclass: nobody can look into it."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Hiding(torch.nn.Module):
    """Its loss does not come from what forward returns in a form that can be seen."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), how

    def forward(self, x):
        self.kept = self.second(torch.tanh(self.first(x)))
        if self.how == "opaque":
            return Opaque(self.kept)
        return None if self.how == "nothing" else self.first(x)


def _hidden_losses(rank, world, how):
    join_group()
    torch.manual_seed(0)
    net = Hiding(how)
    plain = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net, average="samples")
    for accumulate in (False, True):
        for part, whole in batches(rank, world, (6, 4)):
            for one, x in (
                (model, part[:2] if rank else part),
                (plain, whole[:8]),
            ):  # 6 samples here, 2 there
                one.zero_grad()
                halves = (
                    (x[: len(x) // 2], x[len(x) // 2 :]) if accumulate and one is model else (x,)
                )
                for i, half in enumerate(halves):
                    with model.no_sync() if i < len(halves) - 1 else contextlib.nullcontext():
                        one(half)
                        (one.kept.square().mean() / len(halves)).backward()
            for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["opaque", "nothing", "attribute"])
def test_a_backward_that_does_not_pass_the_outputs_is_averaged_too(ranks, how):
    ranks(2, _hidden_losses, how)


def _seldom_hidden(rank, world):
    """Outputs first, then only an attribute: told once, and right from then on."""
    join_group()
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    torch.manual_seed(0)
    net = Hiding("attribute")
    plain = copy.deepcopy(net)
    model = paceline.DistributedDataParallel(net)
    for step, (part, whole) in enumerate(batches(rank, world, steps=6)):
        for one, x in ((model, part), (plain, whole)):
            one.zero_grad()
            output = one(x)
            (one.kept.square().mean() + (output.square().mean() if step < 2 else 0)).backward()
        if step != 2:  # nobody could know: nothing tells that a backward is under way
            for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert len([message for message in heard if "not computed from forward's" in message]) == 1


def test_a_model_that_hides_its_backward_later_is_told(ranks):
    ranks(2, _seldom_hidden)


def _forwards_alone(rank, world):
    """Forwards without a backward, gradients set by hand in place: no false alarm."""
    join_group()
    model = paceline.DistributedDataParallel(linear(4, 4))
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4))
        model.zero_grad(set_to_none=False)
        model(torch.ones(2, 4))
    assert heard == []


def test_forwards_without_a_backward_raise_no_alarm(ranks):
    ranks(2, _forwards_alone)


def _hooks_left(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(linear(4, 4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    return [parameter._backward_hooks for parameter in model.parameters()]


def test_no_table_of_hooks_is_left_for_autograd_to_look_at(ranks):
    for left in ranks(2, _hooks_left):
        assert left == [None] * 4
