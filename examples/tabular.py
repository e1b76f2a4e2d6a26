"""Classifies a table with an embedding for every column: scikit-learn's breast cancer data, its
numbers sorted into bins.

    paceline run examples/tabular.py                    # seconds on two ranks
"""

from __future__ import annotations

import argparse

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

BINS = 16


def table() -> tuple[TensorDataset, TensorDataset]:
    """Rows for training and for testing: the bin of each of 30 columns, and the diagnosis."""
    numbers, diagnosis = sklearn.datasets.load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(numbers), torch.tensor(diagnosis)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    edges = torch.quantile(x[order[100:]], torch.linspace(0, 1, BINS + 1)[1:-1].double(), dim=0)
    bins = torch.stack(
        [
            torch.bucketize(column.contiguous(), edge)
            for column, edge in zip(x.T, edges.T, strict=True)
        ],
        dim=1,
    )
    return TensorDataset(bins[order[100:]], y[order[100:]]), TensorDataset(
        bins[order[:100]], y[order[:100]]
    )


class Table(nn.Module):
    """An embedding for each bin of each column, then two layers."""

    def __init__(self, columns: int, width: int = 8) -> None:
        super().__init__()
        self.bins = nn.Embedding(columns * BINS, width, sparse=True)
        self.register_buffer("first", torch.arange(columns) * BINS)
        self.layers = nn.Sequential(
            nn.Linear(columns * width, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.bins(x + self.first).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    paceline.init_process_group()
    torch.manual_seed(0)
    training, test = table()
    loader = paceline.DataLoader(training, batch_size=50, shuffle=True)  # the last one has 19
    model = paceline.DistributedDataParallel(Table(columns=30))
    # Rows of the table that a batch does not use cost nothing: their gradient is sparse.
    optimizers = [
        torch.optim.SparseAdam(model.module.bins.parameters(), lr=0.01),
        paceline.optim.AdamW(model.module.layers.parameters(), lr=0.003),
    ]
    for _ in range(options.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model.module.eval()
    evaluation = paceline.Evaluation(test, batch_size=32)
    with torch.inference_mode():
        for x, y in evaluation:
            evaluation.add(correct=model.module(x).argmax(1) == y)
    accuracy = evaluation.result().mean("correct")
    if paceline.is_main():
        print(f"{accuracy:.1%} of {len(test)} rows right, each counted once")


if __name__ == "__main__":
    main()
