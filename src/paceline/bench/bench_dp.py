"""`paceline bench dp`: training steps under DataParallel beside the bare module, torch's class, our
DDP and the ideal.

The ideal is two (or `--workers`) independent processes of one thread, each training on its share of
the batch, never meeting. Each way of training has its own processes, which sleep while another is
measured; ways take turns, round after round, and a way's time is the mean step of its best round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.bench.models import cases

__all__ = ["add_arguments", "run"]

_MODELS = ("mlp-64", "mlp-100-layers", "cnn-batchnorm", "mlp-17m", "transformer", "lstm")
_ALONE = ("bare", "torch", "paceline")  # ways that are one process to the user
_TOGETHER = ("ideal", "ddp")  # ways that are a process per share
_SECONDS_PER_ROUND = 0.4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="replicas (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds over all ways of training (default: 6)"
    )
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"comma-separated, of: {', '.join(_MODELS)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here")


def run(options: argparse.Namespace) -> int:
    names = options.models.split(",")
    unknown = [name for name in names if name not in _MODELS]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(_MODELS)}")
    found = {}
    for name in names:
        found[name] = _measure(name, options.workers, options.rounds)
        _print_row(name, found[name], is_first=name == names[0])
    print(
        "\nto the ideal: its time over ours. Bars: 0.70 where a step takes less than 10 ms, else 0.85"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


def _measure(name: str, workers: int, rounds: int) -> dict[str, float]:
    """Microseconds a step, by way; memory in bytes."""
    best: dict[str, float] = dict.fromkeys((*_ALONE, *_TOGETHER), float("inf"))
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory,
        contextlib.ExitStack() as stack,
    ):
        ways = {
            way: [
                stack.enter_context(_stage(name, way, workers, rank, directory))
                for rank in range(workers if way in _TOGETHER else 1)
            ]
            for way in best
        }
        steps = {way: _steps_for(stages) for way, stages in ways.items()}
        for _ in range(rounds):
            for way, stages in ways.items():
                best[way] = min(best[way], _round(stages, steps[way]))
        memory = ways["paceline"][0].ask("memory", 0)
    return {**best, "memory growth": memory}


@dataclasses.dataclass
class _Stage:
    """A process that trains when asked to."""

    pipe: Any

    def start(self, what: str, steps: int) -> None:
        self.pipe.send((what, steps))

    def end(self) -> float:
        answer: float = self.pipe.recv()
        return answer

    def ask(self, what: str, steps: int) -> float:
        self.start(what, steps)
        return self.end()


def _round(stages: list[_Stage], steps: int) -> float:
    for stage in stages:
        stage.start("train", steps)
    return max(stage.end() for stage in stages)


def _steps_for(stages: list[_Stage]) -> int:
    return max(
        3, min(400, int(_SECONDS_PER_ROUND * 1e6 / min(_round(stages, 3), _round(stages, 3))))
    )


@contextlib.contextmanager
def _stage(name: str, way: str, workers: int, rank: int, directory: str) -> Iterator[_Stage]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_perform, args=(theirs, name, way, workers, rank, directory))
    process.start()
    theirs.close()
    try:
        yield _Stage(ours)
    finally:
        with contextlib.suppress(OSError):
            ours.send(("end", 0))
        process.join(20)
        process.kill()
        process.join()


# ---------------------------------------------------------------------------------------------- in the processes


def _perform(pipe: Any, name: str, way: str, workers: int, rank: int, directory: str) -> None:
    import torch

    case = cases()[name]
    torch.manual_seed(0)
    module = case.build()
    share = case.batch()
    whole = torch.cat([case.batch() for _ in range(workers)])
    model, batch = (
        _wrapped(module, way, workers, rank, directory),
        share if way in _TOGETHER else whole,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    for what, steps in iter(pipe.recv, ("end", 0)):
        pipe.send(_memory_growth(model) if what == "memory" else _train(step, steps))
    if way == "ddp":
        torch.distributed.destroy_process_group()
    if way == "paceline":
        model.close()


def _wrapped(module: Any, way: str, workers: int, rank: int, directory: str) -> Any:
    import torch

    import paceline

    if way in _TOGETHER:
        torch.set_num_threads(1)
    if way == "ddp":
        torch.distributed.init_process_group(
            "paceline", init_method=f"file://{directory}/ddp", rank=rank, world_size=workers
        )
        return paceline.DistributedDataParallel(module)
    if way == "torch":
        return torch.nn.DataParallel(module)
    if way == "paceline":
        return paceline.DataParallel(module, workers=workers)
    return module


def _train(step: Callable[[], None], steps: int) -> float:
    """Microseconds a step."""
    step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps * 1e6


def _memory_growth(model: Any) -> float:
    """Parameters' memory that one worker adds, as a part of the parameters: its share of pages
    mapped shared.
    """
    nbytes: int = sum(parameter.nbytes for parameter in model.module.parameters())
    return (
        sum(_parameter_pss(pid, model) for pid in (os.getpid(), *model.worker_pids)) / nbytes - 1.0
    )


def _parameter_pss(pid: int, model: Any) -> int:
    """Bytes of physical memory the mappings that hold the parameters cost this process."""
    addresses = [parameter.data_ptr() for parameter in model.module.parameters()]
    total, inside = 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(each, 16) for each in first.split("-"))
                inside = any(start <= address < end for address in addresses)
            elif inside and first == "Pss:":
                total += int(line.split()[1]) * 1024
    return total


# ---------------------------------------------------------------------------------------------- the report


def _print_row(name: str, times: dict[str, float], is_first: bool) -> None:
    if is_first:
        print(
            f"{'ms a step':16}{'ideal':>9}{'bare':>9}{'torch DP':>9}{'our DDP':>9}{'paceline':>9}"
            f"{'to the ideal':>14}{'to bare':>9}{'to our DDP':>12}{'more memory':>13}"
        )
    ours = times["paceline"]
    row = [times[way] / 1e3 for way in ("ideal", "bare", "torch", "ddp", "paceline")]
    print(
        f"{name:16}"
        + "".join(f"{value:9.2f}" for value in row)
        + f"{times['ideal'] / ours:14.2f}{times['bare'] / ours:9.2f}{times['ddp'] / ours:12.2f}"
        + f"{times['memory growth']:13.1%}",
        flush=True,
    )
