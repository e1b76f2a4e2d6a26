"""Trains a small convolutional network on scikit-learn's digits with every core: one rank per core.

    make train                          # all defaults
    make train ARGS="--epochs 5 --ranks 4"
    paceline run examples/digits.py     # the same, started by the launcher

The gradient is that of the global batch at any number of ranks, ragged last batch included, and
every test image is counted once.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

import sklearn.datasets
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.diagnostics import Progress, write_report

TEST_IMAGES = 360


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 images for training and 360 for testing, 8 x 8 pixels each."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).div_(16).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return TensorDataset(x[TEST_IMAGES:], y[TEST_IMAGES:]), TensorDataset(
        x[:TEST_IMAGES], y[:TEST_IMAGES]
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(options: argparse.Namespace, terminal: str | None = None) -> dict[str, float]:
    """What every rank runs; returns its accuracy and speed."""
    paceline.init_process_group()
    torch.manual_seed(0)
    training, test = digits()
    loader = paceline.DataLoader(
        training, batch_size=options.batch_size, shuffle=True, seed=options.seed
    )
    model = paceline.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    steps = options.epochs * len(loader)
    samples, start = 0, time.perf_counter()
    with Progress(steps, terminal=terminal, enabled=paceline.is_main()) as progress:
        for epoch in range(options.epochs):
            if epoch == 1:  # the first one warms up
                samples, start = 0, time.perf_counter()
            samples += len(training)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                progress.step(loss.item(), len(x) * paceline.world_size(), model.last_sync_seconds)
        share = progress.sync_share
    speed = samples / (time.perf_counter() - start)
    accuracy = evaluate(model.module, test)
    paceline.destroy_process_group()
    return {"accuracy": accuracy, "samples_per_second": speed, "sync_share": share}


def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """Every test image once, on whichever rank; no collective inside the loop."""
    model.eval()
    evaluation = paceline.Evaluation(test, batch_size=60)
    with torch.no_grad():
        for x, y in evaluation:
            evaluation.add(correct=(model(x).argmax(1) == y).double())
    return evaluation.result().mean("correct")


def train_without_paceline(options: argparse.Namespace, threads: int) -> float:
    """The same training in one process with torch's classes only; returns samples per second."""
    torch.set_num_threads(threads)
    training, _ = digits()
    loader = torch.utils.data.DataLoader(training, batch_size=options.batch_size, shuffle=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    samples, start = 0, 0.0
    # The first epoch warms up.
    for epoch in range(3):
        if epoch == 1:
            samples, start = 0, time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            samples += len(x)
    return samples / (time.perf_counter() - start)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="auto", help="number of ranks (default: one per core)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace", type=pathlib.Path, default=pathlib.Path("build/digits"), help="for the timeline"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not measure one process for comparison"
    )
    return parser.parse_args()


def report(result: dict[str, float], ranks: int) -> None:
    print(f"test accuracy   {result['accuracy']:.2%} of {TEST_IMAGES} images, each counted once")
    print(
        f"speed           {result['samples_per_second']:,.0f} samples/s on {ranks} ranks, "
        f"{result['sync_share']:.1%} of the time spent synchronising"
    )


def main() -> None:
    options = arguments()
    # Started by `paceline run`, torchrun or another launcher: be one rank.
    if "RANK" in os.environ or paceline.world_size() > 1:
        result = train(options)
        if paceline.is_main():
            report(result, paceline.world_size())
        return
    terminal = os.ttyname(1) if sys.stdout.isatty() else None
    results = paceline.spawn(
        train, (options, terminal), options.ranks, env={"PACELINE_TRACE": str(options.trace)}
    )
    report(results[0], len(results))
    print(f"timeline        {write_report(options.trace)}: open it in a browser")
    if not options.no_compare:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            (speed,) = paceline.spawn(train_without_paceline, (options, threads), 1)
            times = results[0]["samples_per_second"] / speed
            print(
                f"one process     {speed:,.0f} samples/s with {threads} thread"
                f"{'s' * (threads > 1)}: {len(results)} ranks are {times:.2f} times as fast"
            )


if __name__ == "__main__":
    main()
