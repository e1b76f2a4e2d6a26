"""`paceline bench ddp`: training steps of six models, ours beside torch's class, interleaved in one
run.

Every way of training runs in the same processes in turn, in many short rounds; a way's time is the
mean step of its best round. "barrier" is a step whose ranks exchange no gradients but meet once:
what this machine allows at best.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.bench.charts import pyplot
from paceline.bench.models import Case, cases

__all__ = ["add_arguments", "run"]

_BARS = {  # model -> how many times as fast as torch's class it shall be
    "mlp-64": 2.0,
    "mlp-100-layers": 1.2,
    "cnn-batchnorm": 1.0,
    "mlp-17m": 1.5,
    "transformer": 1.0,
    "lstm": 1.0,
}
_STOCK_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "view, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "view, static, batched": {
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "batched_grad_copy": True,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one thread each (default: 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=25, help="rounds over all ways of training (default: 25)"
    )
    parser.add_argument(
        "--models", default=",".join(_BARS), help=f"comma-separated, of: {', '.join(_BARS)}"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart here (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    names = options.models.split(",")
    unknown = [name for name in names if name not in _BARS]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(_BARS)}")
    plt = pyplot() if options.plot else None

    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        result = os.path.join(directory, "result.json")
        arguments = (options.ranks, names, options.rounds, directory, result)
        start_processes(_rank, args=arguments, nprocs=options.ranks, start_method="spawn")
        with open(result) as file:
            found = json.load(file)
    found["peak_memory"] = _peak_memory(options.ranks)
    _print(found, options.ranks)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    if plt is not None:
        _plot(found, options.plot, plt)
    return 0


# ---------------------------------------------------------------------------------------------- on every rank


def _rank(
    rank: int, world: int, names: list[str], rounds: int, directory: str, result: str
) -> None:
    import torch
    import torch.distributed as dist

    import paceline  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world
    )
    shared = dist.new_group(backend="paceline")
    found: dict[str, Any] = {"models": {}, "world_of_one": _world_of_one_cost()}
    dist.barrier()
    for name in names:
        found["models"][name] = _measure(cases()[name], shared, rounds)
    found["construction"] = _construction(shared, rounds)
    found["digest"] = _digest_cost(shared)
    if rank == 0:
        with open(result, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case, shared: Any, rounds: int) -> dict[str, Any]:
    """Mean step of the best round, per way of training, in microseconds."""
    import torch
    import torch.distributed as dist

    import paceline

    ways: dict[str, Callable[[], Any]] = {"plain": case.build, "barrier": case.build}
    ways["paceline"] = lambda: paceline.DistributedDataParallel(case.build(), process_group=shared)
    for setting, arguments in _STOCK_SETTINGS.items():
        ways[f"torch ({setting})"] = functools.partial(_build_stock, case, arguments)
    trained = {}
    for way, build in ways.items():
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        meet = shared.barrier if way == "barrier" else None
        trained[way] = _stepper(model, optimizer, case.batch(), meet)
        for _ in range(4):
            trained[way]()
    best: dict[str, float] = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, step in trained.items():
            dist.barrier()
            step()
            best[way] = min(best[way], _mean_step(step, case.steps))
    # The slowest rank's time is the time of the step.
    slowest = torch.tensor(list(best.values()))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"microseconds": dict(zip(best, slowest.tolist(), strict=True))}


def _build_stock(case: Case, arguments: dict[str, Any]) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(case.build(), **arguments)


def _stepper(
    model: Any, optimizer: Any, batch: Any, meet: Callable[[], Any] | None
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if meet is not None:
            meet().wait()
        optimizer.step()

    return step


def _mean_step(step: Callable[[], None], steps: int) -> float:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.fmean(times) * 1e6


def _world_of_one_cost() -> float:
    """Step of a wrapped small MLP over that of the same MLP without, in a world of one: the median
    of many pairs.
    """
    import torch
    import torch.distributed as dist

    import paceline

    alone = dist.new_group([0], backend="gloo")
    if dist.get_rank() != 0:
        return 0.0
    case = cases()["mlp-64"]
    plain = case.build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    wrapped = paceline.DistributedDataParallel(plain, process_group=alone)
    # One model, one memory: only the call differs.
    steps = [_stepper(model, optimizer, case.batch(), None) for model in (plain, wrapped)]
    ratios = []
    for number in range(400):
        first, second = steps if number % 2 else reversed(steps)
        times = {id(step): _mean_step(step, 10) for step in (first, second)}
        ratios.append(times[id(steps[1])] / times[id(steps[0])])
    return statistics.median(ratios)


def _construction(shared: Any, rounds: int) -> dict[str, float]:
    """Wrapping a module of 1,000 parameters, in milliseconds."""
    import torch
    import torch.distributed as dist

    import paceline

    stock = torch.nn.parallel.DistributedDataParallel
    best = {"torch": float("inf"), "paceline": float("inf")}
    for _ in range(rounds):
        for way, before in best.items():
            net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(500)])
            dist.barrier()
            started = time.perf_counter()
            wrapped = (
                stock(net)
                if way == "torch"
                else paceline.DistributedDataParallel(net, process_group=shared)
            )
            best[way] = min(before, (time.perf_counter() - started) * 1e3)
            del wrapped
    return best


def _digest_cost(shared: Any) -> dict[str, float]:
    """What looking for drifted replicas adds to a step, as a share of it: one look, spread over the
    steps between.
    """
    import torch
    import torch.distributed as dist

    import paceline

    shares = {}
    for name in ("mlp-64", "mlp-100-layers", "mlp-17m"):
        case = cases()[name]
        model = paceline.DistributedDataParallel(case.build(), process_group=shared)
        step = _stepper(model, torch.optim.SGD(model.parameters(), lr=1e-4), case.batch(), None)
        for _ in range(4):
            step()
        look, training = float("inf"), float("inf")
        for _ in range(5):
            dist.barrier()
            training = min(training, _mean_step(step, case.steps))
            dist.barrier()
            look = min(look, _mean_step(model.compare_replicas, 1))
        shares[name] = look / model.compares_replicas_every / training
    return shares


_MEMORY_WAYS = ("paceline", "torch")


def _peak_memory(ranks: int) -> dict[str, float]:
    """Peak of one rank's memory while it trains the 17 M-parameter model, in MiB, each way in
    processes of its own.
    """
    from torch.multiprocessing.spawn import start_processes

    found = {}
    for way in _MEMORY_WAYS:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
            start_processes(
                _memory_rank, args=(ranks, way, directory), nprocs=ranks, start_method="spawn"
            )
            with open(os.path.join(directory, "peak")) as file:
                found[way] = float(file.read())
    return found


def _memory_rank(rank: int, world: int, way: str, directory: str) -> None:
    import torch
    import torch.distributed as dist

    import paceline

    torch.set_num_threads(1)
    backend = "paceline" if way == "paceline" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world
    )
    case = cases()["mlp-17m"]
    model: Any = case.build()
    if way == "paceline":
        model = paceline.DistributedDataParallel(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = _stepper(model, torch.optim.SGD(model.parameters(), lr=1e-4), case.batch(), None)
    before = _resident_mib()
    peak = _Peak()
    for _ in range(6):
        step()
    highest = torch.tensor([peak.stop() - before])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if rank == 0:
        with open(os.path.join(directory, "peak"), "w") as file:
            file.write(str(float(highest) + before))
    dist.destroy_process_group()


class _Peak:
    """The highest memory a process held: its own pages, and its share of those it shares with other
    ranks.
    """

    def __init__(self) -> None:
        self._highest = _resident_mib()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.002):
            self._highest = max(self._highest, _resident_mib())

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._highest


def _resident_mib() -> float:
    """Proportional set size: a page of two processes counts half in each."""
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell how much memory a process has")


# ---------------------------------------------------------------------------------------------- the report


def _summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, one in found["models"].items():
        times = one["microseconds"]
        stock = {way: value for way, value in times.items() if way.startswith("torch")}
        fastest = min(stock, key=lambda way: stock[way])
        rows.append(
            {
                "model": name,
                "paceline": times["paceline"],
                "torch": stock[fastest],
                "setting": fastest.removeprefix("torch (").removesuffix(")"),
                "faster": stock[fastest] / times["paceline"],
                "bar": _BARS[name],
                "against_barrier": times["paceline"] / times["barrier"],
                "against_plain": times["paceline"] / times["plain"],
            }
        )
    return rows


def _print(found: dict[str, Any], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one training step, {ranks} ranks x 1 thread, best round, slowest rank")
    columns = (
        "model",
        "paceline",
        "torch (best)",
        "its setting",
        "times as fast",
        "bar",
        "/ barrier",
        "/ plain",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "its setting") else "right")
    for row in _summary(found):
        table.add_row(
            row["model"],
            f"{row['paceline'] / 1e3:.3f} ms",
            f"{row['torch'] / 1e3:.3f} ms",
            row["setting"],
            f"{row['faster']:.2f}",
            f"{row['bar']:.1f}",
            f"{row['against_barrier']:.3f}",
            f"{row['against_plain']:.3f}",
        )
    console = Console()
    console.print(table)
    construction = found["construction"]
    console.print(
        f"wrapping 1,000 parameters: paceline {construction['paceline']:.1f} ms, torch {construction['torch']:.1f} ms; "
        f"world of one: {found['world_of_one']:.3f} of a plain step"
    )
    memory = found["peak_memory"]
    console.print(
        f"peak memory of a rank, 17 M parameters: paceline {memory['paceline']:.0f} MiB, torch (view) "
        f"{memory['torch']:.0f} MiB"
    )
    shares = ", ".join(f"{name} {share:.2%}" for name, share in found["digest"].items())
    console.print(f"comparing the replicas, share of all steps: {shares}")


def _plot(found: dict[str, Any], path: str, plt: Any) -> None:
    rows = _summary(found)
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.bar([row["model"] for row in rows], [row["faster"] for row in rows])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast as torch's class")
    figure.autofmt_xdate()
    figure.tight_layout()
    figure.savefig(path)
