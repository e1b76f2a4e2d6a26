"""`paceline bench training`: what `paceline.Training` costs, by number of shards.

Three ways to train the same model in the same processes, interleaved in short rounds. The time of
one is that which nine tenths of its steps exceed, on the slowest rank: what else runs on a machine
only makes steps longer.

    bare       this rank's shards one after the other, their gradients kept apart, then a barrier:
               what V small batches cost by themselves
    training   `paceline.Training` with V shards
    ddp        `paceline.DistributedDataParallel` with the whole share of a rank at once

All three step with torch's SGD, or with that of `paceline.optim`, which the ranks of `training` and
`ddp` split among themselves; with `one-pass` they sum gradients in the step, too.

With `--slow-rank` the last rank pauses after each of its shards for as long as the shard took, and
`Training` is compared with and without `steal`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.bench.bench_tools import join_group, print_table, write_json
from paceline.bench.models import Case, cases

if TYPE_CHECKING:
    import torch

__all__ = ["add_arguments", "run"]

_Steps: TypeAlias = dict[str, Callable[[], object]]

_MODELS = ("mlp-64", "mlp-100-layers", "cnn-batchnorm", "mlp-17m", "transformer", "lstm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="one thread each (default: 2)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds over all ways (default: 10)")
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"comma-separated, of: {', '.join(_MODELS)}"
    )
    parser.add_argument(
        "--shards-per-rank", default="1,2,4,8", help="comma-separated (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--optimizer",
        default="torch",
        choices=("torch", "paceline", "one-pass"),
        help="whose SGD makes the steps (default: torch); one-pass: ours with one_pass=True",
    )
    parser.add_argument("--backend", default="paceline", help="of the group (default: paceline)")
    parser.add_argument(
        "--slow-rank",
        action="store_true",
        help="let the last rank compute at half its speed; compare steal=True and steal=False",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = options.models.split(",")
    if unknown := [name for name in names if name not in _MODELS]:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(_MODELS)}")
    per_rank = [int(count) for count in options.shards_per_rank.split(",")]

    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        result = os.path.join(directory, "result.json")
        arguments = (
            options.ranks,
            options.backend,
            names,
            per_rank,
            options.rounds,
            options.slow_rank,
            options.optimizer,
            directory,
            result,
        )
        start_processes(_run_rank, args=arguments, nprocs=options.ranks, start_method="spawn")
        with open(result) as file:
            figures: dict[str, Any] = json.load(file)
    (_print_slow_rank if options.slow_rank else _print)(figures, options.ranks)
    return figures


# --- on every rank ---------------------------------------------------------------------------


def _run_rank(
    rank: int,
    world: int,
    backend: str,
    names: list[str],
    per_rank: list[int],
    rounds: int,
    slow_rank: bool,
    optimizer: str,
    directory: str,
    result: str,
) -> None:
    import torch.distributed as dist

    join_group(backend, directory, rank, world)
    steps = _steps_beside_a_slow_rank if slow_rank else _steps
    figures = {
        name: _measure(cases()[name], steps(cases()[name], per_rank, optimizer), rounds)
        for name in names
    }
    if rank == 0:
        write_json(result, figures)
    dist.barrier()
    dist.destroy_process_group()


def _steps(case: Case, per_rank: list[int], optimizer: str) -> _Steps:
    """Variants "ddp", "bare 4", "training 4"."""
    steps = {"ddp": _ddp_step(case, optimizer)}
    for count in _possible(case, per_rank):
        steps[f"bare {count}"] = _bare_step(case, count, optimizer)
        steps[f"training {count}"] = _training_step(case, count, optimizer)
    return steps


def _steps_beside_a_slow_rank(case: Case, per_rank: list[int], optimizer: str) -> _Steps:
    """Variants "stealing 4", "even 4"."""
    steps = {}
    for count in _possible(case, per_rank):
        steps[f"even {count}"] = _training_step(case, count, optimizer, slow_rank=True, steal=False)
        steps[f"stealing {count}"] = _training_step(case, count, optimizer, slow_rank=True)
    return steps


def _sgd(model: torch.nn.Module, optimizer: str) -> torch.optim.Optimizer:
    import torch

    import paceline

    if optimizer == "torch":
        return torch.optim.SGD(model.parameters(), lr=1e-4)
    return paceline.optim.SGD(model.parameters(), lr=1e-4, one_pass=optimizer == "one-pass")


def _possible(case: Case, per_rank: list[int]) -> list[int]:
    """A shard has at least two samples, which BatchNorm needs."""
    return [count for count in per_rank if len(case.batch()) // count > 1]


def _measure(case: Case, steps: _Steps, rounds: int) -> dict[str, float]:
    """The time of a step in microseconds, by variant."""
    import torch
    import torch.distributed as dist

    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            step()
            times[name] += _step_times_us(step, case.steps)
    slowest = torch.tensor([statistics.quantiles(each, n=10)[0] for each in times.values()])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def _step_times_us(step: Callable[[], object], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e6)
    return times


def _ddp_step(case: Case, optimizer_name: str) -> Callable[[], object]:
    import paceline

    model = paceline.DistributedDataParallel(case.build())
    optimizer = _sgd(model, optimizer_name)
    batch = case.batch()

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bare_step(case: Case, count: int, optimizer_name: str) -> Callable[[], object]:
    import torch.distributed as dist

    model = case.build()
    optimizer = _sgd(model, optimizer_name)
    shards = _shards_of(case.batch(), count)

    def step() -> None:
        for shard in shards:
            optimizer.zero_grad()
            model(shard).square().mean().backward()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _training_step(
    case: Case,
    count: int,
    optimizer_name: str,
    *,
    slow_rank: bool = False,
    steal: bool = True,
) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    import paceline

    torch.manual_seed(0)
    model = case.build()
    optimizer = _sgd(model, optimizer_name)
    batch, world = case.batch(), dist.get_world_size()
    dataset: Any = _Prepared(batch, world * 1000)
    loader = paceline.DataLoader(dataset, len(batch) * world, collate_fn=_first, seed_samples=False)
    training = paceline.Training(
        model, optimizer, loader, shards=count * world, steal=steal, measure_shards=False
    )
    is_slow = slow_rank and dist.get_rank() == world - 1

    def train() -> Iterator[None]:
        for _ in itertools.count():
            for global_batch in training.batches():
                for shard in global_batch.shards():
                    began = time.perf_counter()
                    model(shard).square().mean().backward()
                    if is_slow:
                        time.sleep(time.perf_counter() - began)
                optimizer.step()
                optimizer.zero_grad()
                yield

    return train().__next__


class _Prepared:
    """A dataset that costs nothing: every shard is the same few rows."""

    def __init__(self, batch: torch.Tensor, batches: int) -> None:
        self._batch, self._length = batch, len(batch) * batches
        self._rows: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[Any]:
        count = len(indices)
        if count not in self._rows:
            self._rows[count] = self._batch[:count].clone()
        return [self._rows[count]]


def _first(samples: list[Any]) -> Any:
    return samples[0]


def _shards_of(batch: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [part.clone() for part in batch.tensor_split(count)]


# --- the report ------------------------------------------------------------------------------


def _print(figures: dict[str, dict[str, float]], ranks: int) -> None:
    rows = []
    for name, times in figures.items():
        for count in [int(key.split()[1]) for key in times if key.startswith("bare")]:
            bare, training = times[f"bare {count}"], times[f"training {count}"]
            rows.append(
                (
                    name,
                    str(count * ranks),
                    f"{bare / 1e3:.3f} ms",
                    f"{training / 1e3:.3f} ms",
                    f"{training / bare:.3f}",
                    f"{training / times['ddp']:.3f}",
                )
            )
    print_table(
        f"one training step, {ranks} ranks x 1 thread, fastest tenth, slowest rank",
        ("model", "shards", "bare loop", "training", "/ bare", "/ ddp"),
        rows,
        text_columns=("model",),
    )


def _print_slow_rank(figures: dict[str, dict[str, float]], ranks: int) -> None:
    rows = []
    for name, times in figures.items():
        for count in [int(key.split()[1]) for key in times if key.startswith("even")]:
            even, stealing = times[f"even {count}"], times[f"stealing {count}"]
            rows.append(
                (
                    name,
                    str(count * ranks),
                    f"{even / 1e3:.3f} ms",
                    f"{stealing / 1e3:.3f} ms",
                    f"{even / stealing:.3f}",
                )
            )
    print_table(
        f"one training step, {ranks} ranks x 1 thread, the last at half its speed, best round",
        ("model", "shards", "steal=False", "steal=True", "faster by"),
        rows,
        text_columns=("model",),
    )
