"""Six models to train with `paceline.Training`, and the hash of all that comes out of it.

Each has something of its own: plain layers, BatchNorm, dropout, recurrence, sparse gradients, two
optimizers. Data sets do not fill the last global batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import paceline

SAMPLES = 75
BATCH = 32


@dataclasses.dataclass
class Case:
    """How a model is made, and how one of its steps is."""

    model: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    step: Callable[[nn.Module, Any, Any, Any], None]
    optimizers: Callable[[nn.Module], Any]


def classify(model, training, batch, optimizer):
    """Cross entropy, clipped."""
    for x, y in batch.shards():
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        batch.log(loss=loss, correct=(output.argmax(1) == y).double())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def play(model, training, batch, optimizer):
    """A GAN: two passes over each global batch, one for each player."""
    generator, critic = model["generator"], model["critic"]
    for (real,) in batch.shards():
        fake = generator(torch.randn(len(real), 4)).detach()
        loss = critic(fake).mean() - critic(real).mean()
        loss.backward()
        batch.log(critic=loss)
    optimizer["critic"].step()
    model.zero_grad()
    for (real,) in batch.shards():
        loss = -critic(generator(torch.randn(len(real), 4))).mean()
        loss.backward()
        batch.log(generator=loss)
    optimizer["generator"].step()
    model.zero_grad()


def classes(*shape):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 5, (SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(SAMPLES, *shape, generator=generator), y)


def words():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 40, (SAMPLES, 6), generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (SAMPLES,), generator=generator))


class Augmented(Dataset):
    """Draws from all three generators while a sample is made."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.randn(16) + random.random() + np.random.rand()
        return noise + index / SAMPLES, index % 5


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)
        self.register_buffer("scale", torch.full((16,), 0.1), persistent=False)  # constant

    def forward(self, x):
        return self.head(self.encoder(x * self.scale).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(40, 8, sparse=True)
        self.head = nn.Linear(8, 5)
        self.rare = nn.Linear(8, 5)

    def forward(self, x):
        e = self.embedding(x)
        # Some shards use this layer, some do not.
        return self.head(e) + self.rare(e) if x[0, 0] % 2 else self.head(e)


def words_optimizers(model):
    dense = [*model.head.parameters(), *model.rare.parameters()]
    return [
        torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01),
        torch.optim.Adam(dense, lr=0.01),
    ]


def classify_words(model, training, batch, optimizers):
    for x, y in batch.shards():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        batch.log(loss=loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gan():
    return nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 6)),
            "critic": nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1)),
        }
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def wide():
    """Gradients that are too large to be worth copying, one of them not used by every shard."""
    return nn.ModuleDict(
        {"a": nn.Linear(16, 20000), "b": nn.Linear(20000, 16, bias=False), "c": nn.Linear(16, 5)}
    )


def classify_wide(model, training, batch, optimizer):
    for x, y in batch.shards():
        hidden = model["b"](model["a"](x).relu()) if x[0, 0] > -1 else x
        loss = F.cross_entropy(model["c"](hidden), y)
        loss.backward()
        batch.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 5)),
        Augmented,
        classify,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 64, 5),
        ),
        lambda: classes(1, 8, 8),
        classify,
        adamw,
    ),
    "transformer": Case(Transformer, lambda: classes(5, 16), classify, adamw),
    "lstm": Case(Recurrent, lambda: classes(6, 8), classify, adamw),
    "embedding": Case(Words, words, classify_words, words_optimizers),
    "gan": Case(
        gan,
        lambda: TensorDataset(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))),
        play,
        lambda model: {
            name: torch.optim.RMSprop(model[name].parameters(), lr=1e-3)
            for name in ("generator", "critic")
        },
    ),
}


def make(name, *, shards=8, workers=0, **options):
    """A model, its optimizers and its training, ready to start."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizers(model)
    loader = paceline.DataLoader(case.data(), BATCH, shuffle=True, seed=3, num_workers=workers)
    training = paceline.Training(model, optimizer, loader, shards=shards, seed=1, **options)
    return model, optimizer, training


def run(name, model, optimizer, training, steps):
    """Train up to `steps` steps; returns the metrics of each."""
    metrics = []
    for _ in training.epochs(10**6):
        for batch in training.batches():
            CASES[name].step(model, training, batch, optimizer)
            metrics.append(batch.metrics)
            if training.step >= steps:
                return metrics
    raise AssertionError


def digest(model, optimizer, metrics) -> str:
    """The SHA-256 of weights, buffers, optimizer states and metrics."""
    content = hashlib.sha256()
    optimizers = optimizer.values() if isinstance(optimizer, dict) else optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizers = [optimizer]
    states = [model.state_dict(), *(each.state_dict()["state"] for each in optimizers)]
    for path, leaf in _leaves([*states, metrics]):
        content.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            content.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy())
        else:
            content.update(repr(leaf).encode())
    return content.hexdigest()


def _leaves(value, path="") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}.{number}")
    else:
        yield path, value


def train(name, steps, **options) -> str:
    """Train from the start; returns the digest."""
    model, optimizer, training = make(name, **options)
    metrics = run(name, model, optimizer, training, steps)
    return digest(model, optimizer, metrics)
