"""With equal counts our class and torch's give the same weights, bit for bit, after whole training
runs on Gloo.

Two ranks: x + y has one result. Three ranks: the order of additions depends on the layout of the
buckets, so this also shows that the layout is torch's, before and after buckets are re-planned.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from tests.harness import init_group, run_ranks

STEPS = 6


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 20)
        self.head.weight = self.embedding.weight  # shared

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def mlp(width, depth):
    layers = [m for _ in range(depth) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


def convolutional():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
    )


def floats(*shape):
    return lambda generator: torch.randn(shape, generator=generator)


def words(generator):
    return torch.randint(0, 20, (3, 7), generator=generator)


MODELS = {
    "mlp": (lambda: mlp(64, 4), floats(5, 64)),
    "deep": (lambda: mlp(8, 30), floats(3, 8)),
    "large": (lambda: mlp(600, 3), floats(4, 600)),  # several buckets
    "cnn": (convolutional, floats(4, 3, 9, 9)),
    "transformer": (Transformer, words),
    "lstm": (Recurrent, floats(3, 5, 8)),
}
OPTIMIZERS = {
    "mlp": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "deep": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "large": lambda p: torch.optim.SGD(p, lr=0.1),
    "cnn": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "transformer": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "lstm": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def train(cls, rank, name, **options):
    build, batch = MODELS[name]
    torch.manual_seed(rank)  # other weights on every rank: the constructor must make them equal
    model = cls(build(), **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    generator = torch.Generator().manual_seed(100 + rank)
    curve = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        loss = model(batch(generator)).float().square().mean()
        loss.backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve), [t.clone() for t in model.state_dict().values()]


def compare(rank, world, options):
    init_group("gloo")
    different = []
    for name in MODELS:
        curve, state = train(torch.nn.parallel.DistributedDataParallel, rank, name, **options)
        ours_curve, ours = train(paceline.DistributedDataParallel, rank, name, **options)
        if not torch.equal(curve, ours_curve):
            different.append(f"{name}: loss curve")
        if not all(torch.equal(a, b) for a, b in zip(state, ours, strict=True)):
            different.append(f"{name}: weights or buffers")
    return different


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (3, {}),
        (3, {"bucket_cap_mb": 1}),
        (2, {"find_unused_parameters": True}),
        (2, {"gradient_as_bucket_view": True, "static_graph": True}),
    ],
    ids=["two ranks", "three ranks", "three ranks, 1 MiB", "find unused", "views, static"],
)
def test_six_models_train_to_the_same_bits_as_with_torch(world, options):
    assert run_ranks(world, compare, options, timeout=110) == [[]] * world


def accumulate(rank, world):
    init_group("gloo")
    states = []
    for cls in (torch.nn.parallel.DistributedDataParallel, paceline.DistributedDataParallel):
        torch.manual_seed(0)
        model = cls(mlp(16, 3))
        generator = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                for _ in range(3):
                    (model(torch.randn(4, 16, generator=generator)).square().mean() / 4).backward()
            (model(torch.randn(4, 16, generator=generator)).square().mean() / 4).backward()
            found.extend(p.grad.clone() for p in model.parameters())
        states.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_accumulated_gradients_have_torchs_bits(world):
    run_ranks(world, accumulate)
