"""`paceline.optim` on ranks of one host, whatever the shapes, types, groups and settings: the same
bits on all ranks and at any number of them given the same summed gradient, and torch's numbers.

Hypothesis runs on the first of four ranks, which tells the others each example; an example that
fails becomes as small as it can be. Every example has a group of its own, so that one that breaks
its group does not spoil the next.
"""

from __future__ import annotations

import dataclasses
import datetime
import traceback

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

import paceline
from paceline.optim import replica_view, shared_step
from tests.harness import init_group, run_ranks

EXAMPLES = 8
STEPS = 4
WORLDS = (2, 3, 4)
RANKS = max(WORLDS)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
SHAPES = [(), (1,), (7,), (16,), (17, 3), (2, 3, 5, 2), (129,), (1000,), (4099,), (80, 300)]
# Types that have to be in most examples come first, as do simpler ones.
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and an optimizer; their gradients follow from the shapes."""

    name: str
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    options: dict
    groups: list[dict]  # settings of the second group, if there are two
    smallest_mapped: int

    def parameters(self):
        generator = torch.Generator().manual_seed(len(self.shapes))
        return [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def optimizer(self, module, parameters, **more):
        parameters = list(parameters)
        cut = len(parameters) // 2 if self.groups else 0
        groups = [{"params": parameters[cut:]}]
        if cut:
            groups.append({"params": parameters[:cut], **self.groups[0]})
        return getattr(module, self.name)(groups, **self.options, **more)

    def gradients(self, step, rank, world):
        """This rank's. Their mean over any number of ranks up to four is that of one rank, exactly:
        all are small multiples of twelve.
        """
        of_ranks = []
        for each in range(max(world, 1)):
            generator = torch.Generator().manual_seed(1000 * step + each)
            of_ranks.append(
                [12.0 * torch.randint(-9, 10, s, generator=generator) for s in self.shapes]
            )
        mean = of_ranks[0]
        if world > 1:
            others = [sum(tensors) for tensors in zip(*of_ranks[1:], strict=True)]
            of_ranks[0] = [world * m - o for m, o in zip(mean, others, strict=True)]
        return [(g / 64).to(dtype) for g, dtype in zip(of_ranks[rank], self.dtypes, strict=True)]


@st.composite
def examples(draw):
    name = draw(st.sampled_from(["SGD", "Adam", "AdamW", "Adagrad"]))
    parameters = draw(
        st.lists(
            st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6
        )
    )
    options = {
        "lr": draw(st.sampled_from([0.01, 0.1])),
        "maximize": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
    }
    if name == "SGD":
        options["momentum"] = draw(st.sampled_from([0.0, 0.9]))
        options["nesterov"] = options["momentum"] > 0 and draw(st.booleans())
    elif name == "Adagrad":
        options["lr_decay"] = draw(st.sampled_from([0.0, 0.1]))
    else:
        options["amsgrad"] = draw(st.booleans())
    return Example(
        name,
        [shape for shape, _ in parameters],
        [dtype for _, dtype in parameters],
        options,
        draw(st.sampled_from([[], [{"lr": 0.003, "weight_decay": 0.2}]])),
        draw(st.sampled_from([0, 2**16])),
    )


class Weighted(torch.nn.Module):
    """The gradient of each parameter is what it is given."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters_ = torch.nn.ParameterList(parameters)

    def forward(self, gradients):
        pairs = zip(self.parameters_, gradients, strict=True)
        return sum((p * g).sum().double() for p, g in pairs)


def train(example, group, one_pass):
    """On one rank of a group; the parameters at the end."""
    rank, world = group.rank(), group.size()
    replica_view._MAPPED_BYTES = example.smallest_mapped
    model = paceline.DistributedDataParallel(Weighted(example.parameters()), process_group=group)
    optimizer = example.optimizer(
        paceline.optim, model.parameters(), shared=True, one_pass=one_pass
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(example.gradients(step, rank, world)).backward()
        optimizer.step()
    assert optimizer._shared is not None
    assert (optimizer._one_pass is not None) == one_pass
    return [p.detach().clone() for p in model.parameters()]


def train_alone(example, module):
    """In one process, by the class of this module."""
    parameters = example.parameters()
    optimizer = example.optimizer(module, parameters)
    for step in range(STEPS):
        gradients = example.gradients(step, 0, 1)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [p.detach() for p in parameters]


def train_together(example, one_pass):
    """Called by every rank. By number of ranks: what each has in the end, or the text of the error
    that it raised. Only the first rank gets it.
    """
    found = {}
    for world in WORLDS:
        limit = datetime.timedelta(seconds=20)
        group = dist.new_group(range(world), backend="paceline", timeout=limit)
        result = None
        if dist.get_rank() < world:
            try:
                result = train(example, group, one_pass)
            except Exception:
                result = traceback.format_exc()
            dist.destroy_process_group(group)
        results = [None] * RANKS if dist.get_rank() == 0 else None
        dist.gather_object(result, results)
        found[world] = (results or [])[:world]
    return found


def check(example, one_pass):
    dist.broadcast_object_list([example])
    together = train_together(example, one_pass)  # the others are at it: before anything may fail
    expected = train_alone(example, paceline.optim)
    for left, right in zip(expected, train_alone(example, torch.optim), strict=True):
        if right.dtype in TOLERANCE:
            scale = max(float(right.abs().max()), 1.0)
            assert float((left - right).abs().max()) <= TOLERANCE[right.dtype] * scale
    for world, results in together.items():
        for result in results:
            assert not isinstance(result, str), result
            for left, right in zip(result, expected, strict=True):
                assert torch.equal(left, right), world


def search(rank, world, one_pass, seed):
    init_group("gloo")
    shared_step._WORTH_SHARING_BYTES = 0
    if rank == 0:

        @hypothesis.seed(seed)
        @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
        @hypothesis.given(examples())
        def has_the_same_bits(example):
            check(example, one_pass)

        try:
            has_the_same_bits()
        finally:
            dist.broadcast_object_list([None])
        return
    while True:
        received = [None]
        dist.broadcast_object_list(received)
        if received[0] is None:
            return
        train_together(received[0], one_pass)


@pytest.mark.parametrize("one_pass", [False, True])
def test_the_same_bits_at_any_number_of_ranks(one_pass, request):
    # pytest-randomly prints its seed.
    seed = getattr(request.config.option, "randomly_seed", 1)
    run_ranks(RANKS, search, one_pass, seed, timeout=600)  # shrinking takes up to 300
