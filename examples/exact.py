"""Trains a small convolutional network on scikit-learn's digits, to the same bytes at any number of
ranks.

    python examples/exact.py                                       # one process
    paceline run -n 2 examples/exact.py                            # two ranks: the same hash
    paceline run -n 3 examples/exact.py --checkpoint build/exact   # stop it at any moment ...
    python examples/exact.py --checkpoint build/exact              # ... and go on alone: the same
"""

from __future__ import annotations

import argparse
import hashlib

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def digits() -> TensorDataset:
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).div_(16).reshape(-1, 1, 8, 8)
    return TensorDataset(x, torch.tensor(labels))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 4 * 4, 10),
    )


def sha256(model: nn.Module) -> str:
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--checkpoint", help="directory of checkpoints, one every 10 steps")
    options = parser.parse_args()

    paceline.init_process_group()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = paceline.DataLoader(digits(), batch_size=128, shuffle=True)
    training = paceline.Training(
        model,
        optimizer,
        loader,
        shards=options.shards,
        checkpoint=options.checkpoint,
        save_every=10 if options.checkpoint else None,
    )
    for epoch in training.epochs(options.epochs):
        for batch in training.batches():
            for x, y in batch.shards():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                batch.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        if paceline.is_main():
            print(f"epoch {epoch}: loss of the last batch {training.metrics['loss']!r}")
    if paceline.is_main():
        print(f"{paceline.world_size()} ranks, {training.step} steps, SHA-256 {sha256(model)}")
    paceline.destroy_process_group()


if __name__ == "__main__":
    main()
