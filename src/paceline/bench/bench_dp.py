"""`paceline bench dp`: training steps under DataParallel beside the bare module, torch's class, our
DDP and the ideal.

The ideal is two (or `--workers`) independent processes of one thread, each training on its share of
the batch, without any communication. Each of these methods has its own processes, which sleep while
another is measured; methods take turns, round after round, and a method's time is the mean step of
its median round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.bench.bench_tools import in_turn, medians
from paceline.bench.models import cases

__all__ = ["add_arguments", "run"]

_MODELS = ("mlp-64", "mlp-100-layers", "cnn-batchnorm", "mlp-17m", "transformer", "lstm")
_SINGLE_PROCESS = ("bare", "torch", "paceline")  # one process, as the user sees it
_PROCESS_PER_SHARE = ("ideal", "ddp")
_SECONDS_PER_ROUND = 0.4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="replicas (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds over all methods (default: 6)"
    )
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"comma-separated, of: {', '.join(_MODELS)}"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = options.models.split(",")
    unknown = [name for name in names if name not in _MODELS]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(_MODELS)}")
    results: dict[str, Any] = {}
    for name in names:
        results[name] = _measure(name, options.workers, options.rounds)
        _print_row(name, results[name], is_first=name == names[0])
    print("\nto the ideal: its time over ours. Goals: 0.60 for mlp-64, 0.85 for the others")
    return results


def _measure(name: str, workers: int, rounds: int) -> dict[str, float]:
    """Microseconds per step, by method, and the growth of memory."""
    times: dict[str, list[float]] = {way: [] for way in (*_SINGLE_PROCESS, *_PROCESS_PER_SHARE)}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory,
        contextlib.ExitStack() as stack,
    ):
        methods = {
            method: [
                stack.enter_context(_training_process(name, method, workers, rank, directory))
                for rank in range(workers if method in _PROCESS_PER_SHARE else 1)
            ]
            for method in times
        }
        steps = {method: _steps_for(processes) for method, processes in methods.items()}
        for number in range(rounds):
            for method in in_turn(list(methods), number):
                times[method].append(_round(methods[method], steps[method]))
        memory = methods["paceline"][0].ask("memory", 0)
    return {**medians(times), "memory growth": memory}


@dataclasses.dataclass
class _TrainingProcess:
    """A process that trains when asked to, through a pipe."""

    pipe: Any

    def start(self, what: str, steps: int) -> None:
        self.pipe.send((what, steps))

    def result(self) -> float:
        result: float = self.pipe.recv()
        return result

    def ask(self, what: str, steps: int) -> float:
        self.start(what, steps)
        return self.result()


def _round(processes: list[_TrainingProcess], steps: int) -> float:
    for process in processes:
        process.start("train", steps)
    return max(process.result() for process in processes)


def _steps_for(processes: list[_TrainingProcess]) -> int:
    return max(
        3, min(400, int(_SECONDS_PER_ROUND * 1e6 / min(_round(processes, 3), _round(processes, 3))))
    )


@contextlib.contextmanager
def _training_process(
    name: str, method: str, workers: int, rank: int, directory: str
) -> Iterator[_TrainingProcess]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_train_on_request, args=(theirs, name, method, workers, rank, directory)
    )
    process.start()
    theirs.close()
    try:
        yield _TrainingProcess(ours)
    finally:
        with contextlib.suppress(OSError):
            ours.send(("end", 0))
        process.join(20)
        process.kill()
        process.join()


# ------------------------------------------------------------------------ in the processes


def _train_on_request(
    pipe: Any, name: str, method: str, workers: int, rank: int, directory: str
) -> None:
    import torch

    case = cases()[name]
    torch.manual_seed(0)
    module = case.build()
    share = case.batch()
    whole = torch.cat([case.batch() for _ in range(workers)])
    model, batch = (
        _wrapped(module, method, workers, rank, directory),
        share if method in _PROCESS_PER_SHARE else whole,
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
    if method == "ddp":
        torch.distributed.destroy_process_group()
    if method == "paceline":
        model.close()


def _wrapped(module: Any, method: str, workers: int, rank: int, directory: str) -> Any:
    import torch

    import paceline

    if method in _PROCESS_PER_SHARE:
        torch.set_num_threads(1)
    if method == "ddp":
        torch.distributed.init_process_group(
            "paceline", init_method=f"file://{directory}/ddp", rank=rank, world_size=workers
        )
        return paceline.DistributedDataParallel(module)
    if method == "torch":
        return torch.nn.DataParallel(module)
    if method == "paceline":
        return paceline.DataParallel(module, workers=workers)
    return module


def _train(step: Callable[[], None], steps: int) -> float:
    """Microseconds per step."""
    step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps * 1e6


def _memory_growth(model: Any) -> float:
    """Memory that one worker adds for parameters, relative to the parameters."""
    nbytes: int = sum(parameter.nbytes for parameter in model.module.parameters())
    return (
        sum(_parameter_pss(pid, model) for pid in (os.getpid(), *model.worker_pids)) / nbytes - 1.0
    )


def _parameter_pss(pid: int, model: Any) -> int:
    """Physical memory of the mappings that hold the parameters: this process's share of it."""
    addresses = [parameter.data_ptr() for parameter in model.module.parameters()]
    total, inside = 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(address, 16) for address in first.split("-"))
                inside = any(start <= address < end for address in addresses)
            elif inside and first == "Pss:":
                total += int(line.split()[1]) * 1024
    return total


# -------------------------------------------------------------------------------- the report


def _print_row(name: str, times: dict[str, float], is_first: bool) -> None:
    if is_first:
        print(
            f"{'ms per step':16}{'ideal':>9}{'bare':>9}{'torch DP':>9}{'our DDP':>9}{'paceline':>9}"
            f"{'to the ideal':>14}{'to bare':>9}{'to our DDP':>12}{'more memory':>13}"
        )
    ours = times["paceline"]
    row = [times[method] / 1e3 for method in ("ideal", "bare", "torch", "ddp", "paceline")]
    print(
        f"{name:16}"
        + "".join(f"{value:9.2f}" for value in row)
        + f"{times['ideal'] / ours:14.2f}{times['bare'] / ours:9.2f}{times['ddp'] / ours:12.2f}"
        + f"{times['memory growth']:13.1%}",
        flush=True,
    )
