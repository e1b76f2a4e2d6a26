"""`paceline.optim` on ranks of one host, whatever the shapes, types, groups and settings: the same
bits on all ranks and at any number of them given the same summed gradient, and torch's numbers.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import paceline
from paceline.optim import replica_view, shared_step
from tests.harness import init_group, run_ranks

EXAMPLES = 5
STEPS = 4
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
SHAPES = [(), (1,), (7,), (16,), (17, 3), (2, 3, 5, 2), (129,), (1000,), (4099,), (80, 300)]


@dataclasses.dataclass
class Example:
    """A model, an optimizer and gradients, all of which follow from a random generator."""

    name: str
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    options: dict
    groups: list[dict]  # settings of the second group, if there are two
    smallest_mapped: int

    @staticmethod
    def draw(choose: random.Random) -> Example:
        name = choose.choice(["SGD", "Adam", "AdamW", "Adagrad"])
        shapes = choose.choices(SHAPES, k=choose.randint(1, 6))
        types = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        dtypes = choose.choices(types, [6, 3, 1, 1], k=len(shapes))
        options = {"lr": choose.choice([0.01, 0.1]), "maximize": choose.random() < 0.3}
        options["weight_decay"] = choose.choice([0.0, 0.1])
        if name == "SGD":
            options["momentum"] = choose.choice([0.0, 0.9])
            options["nesterov"] = options["momentum"] > 0 and choose.random() < 0.5
        elif name == "Adagrad":
            options["lr_decay"] = choose.choice([0.0, 0.1])
        else:
            options["amsgrad"] = choose.random() < 0.5
        groups = [{"lr": 0.003, "weight_decay": 0.2}] if choose.random() < 0.5 else []
        return Example(name, shapes, dtypes, options, groups, choose.choice([0, 2**16]))

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


class Weighted(torch.nn.Module):
    """The gradient of each parameter is what it is given."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters_ = torch.nn.ParameterList(parameters)

    def forward(self, gradients):
        pairs = zip(self.parameters_, gradients, strict=True)
        return sum((p * g).sum().double() for p, g in pairs)


def train_examples(rank, world, seed, one_pass):
    init_group("paceline")
    shared_step._WORTH_SHARING_BYTES = 0
    choose, results = random.Random(seed), []
    for _ in range(EXAMPLES):
        example = Example.draw(choose)
        replica_view._MAPPED_BYTES = example.smallest_mapped
        model = paceline.DistributedDataParallel(Weighted(example.parameters()))
        optimizer = example.optimizer(
            paceline.optim, model.parameters(), shared=True, one_pass=one_pass
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            model(example.gradients(step, rank, world)).backward()
            optimizer.step()
        assert optimizer._shared is not None
        assert (optimizer._one_pass is not None) == one_pass
        results.append([p.detach().clone() for p in model.parameters()])
        del model, optimizer
    return results


def train_alone(seed):
    """Each example by our classes and by torch's, in one process."""
    choose, results = random.Random(seed), []
    for _ in range(EXAMPLES):
        example = Example.draw(choose)
        trained = []
        for module in (paceline.optim, torch.optim):
            parameters = example.parameters()
            optimizer = example.optimizer(module, parameters)
            for step in range(STEPS):
                for parameter, gradient in zip(
                    parameters, example.gradients(step, 0, 1), strict=True
                ):
                    parameter.grad = gradient
                optimizer.step()
            trained.append([p.detach() for p in parameters])
        results.append((example, *trained))
    return results


@pytest.mark.parametrize("one_pass", [False, True])
def test_the_same_bits_at_any_number_of_ranks(one_pass, request):
    # pytest-randomly prints its seed.
    seed = getattr(request.config.option, "randomly_seed", 1)
    alone = train_alone(seed)
    for example, ours, torchs in alone:
        for left, right in zip(ours, torchs, strict=True):
            if right.dtype in TOLERANCE:
                scale = max(float(right.abs().max()), 1.0)
                error = float((left - right).abs().max())
                assert error <= TOLERANCE[right.dtype] * scale, example
    for world in (2, 3, 4):
        for results in run_ranks(world, train_examples, seed, one_pass):
            for (example, expected, _), found in zip(alone, results, strict=True):
                for left, right in zip(found, expected, strict=True):
                    assert torch.equal(left, right), (world, example)
