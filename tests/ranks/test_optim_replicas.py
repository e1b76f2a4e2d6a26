"""Parameters that ranks of a host share look like replicas: whatever a program does to its weights,
it gets the bits that it gets when every rank has its own.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.optim import replica_view, shared_step
from tests.harness import init_group, run_ranks

STEPS = 4


def net(mapped=True):
    """Small, and shared all the same; seen by its pages, or by copies. Layers share pages."""
    shared_step._WORTH_SHARING_BYTES = 0
    replica_view._MAPPED_BYTES = 0 if mapped else 2**40
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 700), torch.nn.Tanh(), torch.nn.Linear(700, 3))


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def assert_same(left, right):
    assert len(left) == len(right)
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, other), number


class Run:
    """A model and its optimizer in training; what a scene does between steps is its own."""

    compares_every = 1  # steps; 0: the replicas are not to be the same
    stays_shared = True

    def __init__(self, rank, world, shared, mapped):
        self.rank, self.world = rank, world
        self.module = net(mapped)
        self.before_wrapping()
        self.model = paceline.DistributedDataParallel(
            self.module, check_replicas_every=self.compares_every
        )
        self.optimizer = self.new_optimizer(shared)

    def new_optimizer(self, shared):
        return paceline.optim.AdamW(self.module.parameters(), lr=0.05, shared=shared)

    def before_wrapping(self):
        pass

    def backward(self, step):
        self.optimizer.zero_grad()
        self.model(batch(self.rank, step)).square().mean().backward()

    def train(self, steps=STEPS, start=0):
        seen = []
        for step in range(start, start + steps):
            self.backward(step)
            self.optimizer.step()
            seen += self.between(step) or []
        return seen

    def between(self, step):
        """What the program does after a step; returns what it has seen."""

    def outcome(self):
        seen = self.train()
        state = copy.deepcopy(self.optimizer.state_dict())["state"]
        return [
            *[parameter.detach().clone() for parameter in self.module.parameters()],
            *[state[key][name] for key in state for name in sorted(state[key])],
            *seen,
        ]


class Scaled(Run):
    """Not the same when done twice, and on some pages only."""

    def between(self, step):
        with torch.no_grad():
            if step % 2:
                self.module[0].weight.mul_(0.5)
                self.module[2].bias.add_(1.0)


class ThroughData(Run):
    def between(self, step):
        if step == 1:
            self.module[0].weight.data[7:9] *= 2.0
            self.module[2].weight.data.clamp_(-0.01, 0.01)


class ThroughNumpy(Run):
    """Views from before the first step see the steps, and write to the weights."""

    def before_wrapping(self):
        self.views = [parameter.detach().numpy() for parameter in self.module.parameters()]

    def between(self, step):
        self.views[0][step] *= 3.0
        return [torch.from_numpy(view.copy()) for view in self.views]


class ReferencesTaken(Run):
    """Later ones, too: by pages they are of the mapping."""

    def before_wrapping(self):
        self.held = []

    def between(self, step):
        if step == 0:
            self.held = [parameter.data for parameter in self.module.parameters()]
        if step == 2:
            self.held[0][3:5] += 1.0
        return [held.clone() for held in self.held]


class TiedByData(Run):
    """Two parameters of one memory: moving one would part them."""

    def before_wrapping(self):
        other = torch.nn.Linear(5, 700)
        other.weight.data = self.module[0].weight.data
        self.module.register_module("3", other)
        other.weight.requires_grad_(False)

    def between(self, step):
        return [self.module.get_submodule("3").weight.detach().clone()]

    def train(self, steps=STEPS, start=0):
        self.module.forward = lambda x: self.module[2](self.module[1](self.module[0](x)))
        return super().train(steps, start)


class AveragedWeights(Run):
    """Swapped in for an evaluation on ranks that take different times for it, and out again."""

    def before_wrapping(self):
        self.average = copy.deepcopy(list(self.module.parameters()))

    def between(self, step):
        with torch.no_grad():
            for mean, parameter in zip(self.average, self.module.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
            self.swap()
            if self.rank == step % self.world:
                dist.barrier()
            evaluated = self.module(torch.ones(2, 5))
            if self.rank != step % self.world:
                dist.barrier()
            self.swap()
        return [evaluated]

    def swap(self):
        for mean, parameter in zip(self.average, self.module.parameters(), strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(kept)


class EvaluatedOnOneRank(AveragedWeights):
    def between(self, step):
        if self.rank == 1:
            with torch.no_grad():
                self.swap()
                self.module(torch.ones(2, 5))
                self.swap()


class Loaded(Run):
    def between(self, step):
        if step == 1:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if step == 2:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(self.saved[1])


class LoadedByAssignment(Run):
    """Other memory for parameters, other parameters for the optimizer's hyperparameters."""

    def between(self, step):
        if step == 1:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone() * 0.5
        if step == 2:
            for state in self.optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5


class StateChanged(Run):
    def between(self, step):
        if step == 1:
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
                state["step"].add_(3)
        if step == 2:
            self.optimizer.state.clear()


class Broadcast(Run):
    def between(self, step):
        if step == 1:
            with torch.no_grad():
                if self.rank == 0:
                    self.module[0].weight.add_(1.0)
                dist.broadcast(self.module[0].weight.data, 0)


class MovedToSharedMemory(Run):
    def between(self, step):
        if step == 1:
            self.module.share_memory()


class Copied(Run):
    """Copies are copies, and do not follow."""

    def between(self, step):
        if step == 0:
            self.copy = copy.deepcopy(self.module)
        if step == 2:
            with torch.no_grad():
                self.copy[0].weight.fill_(7.0)
        return [parameter.detach().clone() for parameter in self.copy.parameters()]


class Forked(Run):
    """What a child writes is the child's."""

    def between(self, step):
        pid = os.fork()
        if pid == 0:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.fill_(float("nan"))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


class Perturbed(Run):
    """Sharpness-aware: another gradient at perturbed weights, which are another on each rank."""

    compares_every = 0

    def backward(self, step):
        kept = [parameter.data for parameter in self.module.parameters()]
        with torch.no_grad():
            for parameter in self.module.parameters():
                noise = torch.Generator().manual_seed(self.rank)
                parameter.data = parameter.data + 0.1 * torch.randn(
                    parameter.shape, generator=noise
                )
        super().backward(step)
        for parameter, data in zip(self.module.parameters(), kept, strict=True):
            parameter.data = data


class SecondOptimizer(Run):
    """The same parameters in two, both stepped."""

    stays_shared = None  # that of the optimizer stepped first

    def new_optimizer(self, shared):
        self.other = paceline.optim.SGD(self.module.parameters(), lr=0.1, shared=shared)
        return super().new_optimizer(shared)

    def between(self, step):
        self.other.step()


class Reset(Run):
    """A parameter trained anew."""

    def between(self, step):
        if step == 2:
            torch.manual_seed(5)
            self.module[2].reset_parameters()


class Resized(Run):
    """More classes than before, and state of that size."""

    def between(self, step):
        if step != 1:
            return
        layer = self.module[2]
        for parameter in (layer.weight, layer.bias):
            parameter.data = torch.cat([parameter.data, parameter.data[:1] / 2])
            parameter.grad = None
            del self.optimizer.state[parameter]
        layer.out_features += 1


class WithoutAverage(Run):
    """Local steps, and the mean of the replicas at the end."""

    compares_every = 0
    stays_shared = False

    def backward(self, step):
        if step < 2:
            super().backward(step)
            return
        self.optimizer.zero_grad()
        with self.model.no_sync():
            self.model(batch(self.rank, step)).square().mean().backward()

    def outcome(self):
        self.train()
        with torch.no_grad():
            for parameter in self.module.parameters():
                dist.all_reduce(parameter)
                parameter.div_(self.world)
        return [parameter.detach().clone() for parameter in self.module.parameters()]


class SteppedTwice(Run):
    stays_shared = False

    def between(self, step):
        self.optimizer.step()


class AllWritten(Run):
    """Every step, so that sharing ends."""

    stays_shared = False

    def between(self, step):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.clamp_(-0.02, 0.02)

    def outcome(self):
        self.train(14)
        return [parameter.detach().clone() for parameter in self.module.parameters()]


class Unwritten(Run):
    pass


def train_both_ways(rank, world, kind, mapped):
    outcomes = []
    for shared in (False, None):
        run = kind(rank, world, shared, mapped)
        outcomes.append(run.outcome())
        if shared is None and run.stays_shared is not None:
            assert (run.optimizer._shared is not None) == run.stays_shared, kind
        dist.barrier()
    plain, together = outcomes
    for number, (one, other) in enumerate(zip(plain, together, strict=True)):
        assert torch.equal(one, other), f"{kind.__name__}: {number}"


def train_all(rank, world, kinds, mapped):
    init_group("paceline")
    for kind in kinds:
        train_both_ways(rank, world, kind, mapped)


WRITES = [
    Unwritten,
    Scaled,
    ThroughData,
    ThroughNumpy,
    ReferencesTaken,
    TiedByData,
    AveragedWeights,
    EvaluatedOnOneRank,
    Broadcast,
    Reset,
    AllWritten,
]
REPLACES = [
    Loaded,
    LoadedByAssignment,
    StateChanged,
    MovedToSharedMemory,
    Copied,
    Forked,
    Perturbed,
    SecondOptimizer,
    Resized,
    WithoutAverage,
    SteppedTwice,
]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "copied"])
@pytest.mark.parametrize("kinds", [WRITES, REPLACES], ids=["writes", "replaces"])
def test_same_bits_as_with_replicas(kinds, mapped):
    run_ranks(2, train_all, kinds, mapped)


# --- where it cannot be one step for all ----------------------------------------------------------
def written_differently(rank, world):
    init_group("paceline")
    run = Unwritten(rank, world, None, True)
    run.model = paceline.DistributedDataParallel(run.module, check_replicas_every=0)
    run.train(2)
    before = [parameter.detach().clone() for parameter in run.module.parameters()]
    run.backward(2)
    with torch.no_grad():
        run.module[2].weight.add_(float(rank))
    with pytest.raises(paceline.MismatchError, match=r"changed 2\.weight to other values"):
        run.optimizer.step()
    with torch.no_grad():
        run.module[2].weight.copy_(before[2])
    for one, other in zip(before, run.module.parameters(), strict=True):
        assert torch.equal(one, other)
    run.optimizer.step()
    run.train(2, start=3)
    dist.barrier()


class Clamped(Run):
    compares_every = 0

    def between(self, step):
        with torch.no_grad():
            self.module[0].weight.mul_(0.5)


def written_by_a_rank_without_data(rank, world):
    """It writes after its last step, as the others do after theirs; they train on."""
    init_group("paceline")
    results = []
    for shared, mapped in ((False, True), (None, True), (None, False)):
        run = Clamped(rank, world, shared, mapped)
        with run.model.join():
            run.train(2 if rank else 5)
        results.append([parameter.detach().clone() for parameter in run.module.parameters()])
        if shared is None:
            run.train(2, start=20)
            results[-1] += [parameter.detach().clone() for parameter in run.module.parameters()]
    return results


def steps_of_a_subset(rank, world):
    """As torch's ZeroRedundancyOptimizer has it: another optimizer on each rank."""
    init_group("paceline")
    module = net()
    model = paceline.DistributedDataParallel(module)
    own = list(module.parameters())[rank::world]
    optimizer = paceline.optim.AdamW(own)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
        optimizer.step()
        for index, parameter in enumerate(module.parameters()):
            dist.broadcast(parameter.data, index % world)
    assert optimizer._shared is None


def without_page_tables(rank, world):
    init_group("paceline")
    shared_step.can_find_written_pages = lambda: False
    run = Unwritten(rank, world, None, True)
    run.train(2)
    assert run.optimizer._shared is None
    demanding = Unwritten(rank, world, True, True)
    with pytest.raises(paceline.ConfigError, match="pagemap"):
        demanding.train(1)


def demanded_for_local_gradients(rank, world):
    init_group("paceline")
    run = WithoutAverage(rank, world, True, True)
    run.train(2)
    with pytest.raises(paceline.ConfigError, match="no_sync"):
        run.train(1, start=2)


@pytest.mark.parametrize(
    "scene",
    [
        written_differently,
        steps_of_a_subset,
        without_page_tables,
        demanded_for_local_gradients,
    ],
)
def test_where_ranks_cannot_share(scene):
    run_ranks(2, scene)


def test_old_writes_of_a_rank_without_data_do_not_hide_the_steps_of_others():
    first, second = run_ranks(2, written_by_a_rank_without_data)
    for plain, mapped, copied in (first, second):
        assert_same(plain, mapped[: len(plain)])
        assert_same(mapped, copied)
    assert_same(first[1], second[1])
