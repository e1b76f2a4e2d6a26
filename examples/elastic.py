"""Trains on scikit-learn's digits while ranks come and go, to the bytes of a run without faults.

    python examples/elastic.py                                      # one process, nothing happens
    paceline run --elastic 1:2 examples/elastic.py --kill-at 20     # a rank dies and is replaced

Both print the same accuracy and the same hash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import sklearn.datasets
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

_HELD_OUT = 300


def rows() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on and digits to evaluate."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).div_(16), torch.tensor(labels)
    return TensorDataset(x[_HELD_OUT:], y[_HELD_OUT:]), TensorDataset(x[:_HELD_OUT], y[:_HELD_OUT])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="the last rank kills itself")
    options = parser.parse_args()

    paceline.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    train, held_out = rows()
    loader = paceline.DataLoader(train, batch_size=96, shuffle=True)
    # A replacement runs this script from the top; here it gets the state of the others.
    training = paceline.Training(model, optimizer, loader, shards=4, state={"schedule": schedule})
    evaluation = paceline.Evaluation(held_out, batch_size=100)
    joined_at = training.step

    for epoch in training.epochs(options.epochs):
        model.train()
        for batch in training.batches():
            # Not with its first shard: of a rank that is late the others may take all.
            is_last = paceline.world_size() > 1 and paceline.rank() == paceline.world_size() - 1
            if training.step == options.kill_at and joined_at == 0 and is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            for x, y in batch.shards():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            for x, y in evaluation:
                evaluation.add(right=model(x).argmax(1) == y)
        accuracy = evaluation.result().mean("right")
        if paceline.is_main():
            print(f"epoch {epoch}: {accuracy:.1%} of {_HELD_OUT} digits right")
    if paceline.is_main():
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"{training.step} steps, SHA-256 {hashlib.sha256(weights).hexdigest()}")
    paceline.destroy_process_group()


if __name__ == "__main__":
    main()
