"""`paceline bench optim`: whole training steps - forward, backward, exchange, optimizer - with
torch's optimizers and with ours, interleaved in one run; an optimizer's step alone, in one process;
and the memory of all ranks together.

The time of a round is the mean step of its slowest rank, that of a way its median round. Forward
and backward alone, on ranks that exchange nothing, are one of the ways: no optimizer can be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from paceline.bench.bench_tools import (
    in_turn,
    join_group,
    medians,
    own_memory_mib,
    print_table,
    pyplot,
    slowest_of_ranks,
    write_json,
)
from paceline.bench.models import Case, cases

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["add_arguments", "run"]

_MODELS = ("mlp-64", "transformer", "mlp-17m")
_SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-4},
    "SGD": {"lr": 1e-4, "momentum": 0.9},
}
_ALONE = "forward and backward alone"
# Way -> (whose DistributedDataParallel, whose optimizer, what it is told besides).
_WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    _ALONE: ("nobody", "nobody", {}),
    "torch, default": ("torch", "torch", {}),
    "torch, fused": ("torch", "torch", {"fused": True}),
    "paceline + torch fused": ("paceline", "torch", {"fused": True}),
    "paceline.optim": ("paceline", "paceline", {"shared": False}),
    "paceline.optim, shared": ("paceline", "paceline", {"shared": True}),
    "one pass": ("paceline", "paceline", {"one_pass": True}),
}
_LARGE_MODEL = "mlp-17m"  # larger than caches: its step runs at the speed of memory
_ONE_PASS = "one pass"
_OURS = ("paceline.optim", "paceline.optim, shared", _ONE_PASS)
_MEMORY_WAYS = ("torch, fused", *_OURS)
_MEMORY_RANKS = (1, 2, 4)
_ADAMW_ARRAYS = 3  # parameters and two arrays of state
# Of an optimizer's step in one process: whose, and what it is told.
_STEPS_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "torch, default": ("torch", {}),
    "torch, fused": ("torch", {"fused": True}),
    "paceline.optim": ("paceline", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one thread each (default: 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds over all ways of training (default: 15)"
    )
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"comma-separated, of: {', '.join(_MODELS)}"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart here (needs matplotlib)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = options.models.split(",")
    unknown = [name for name in names if name not in _MODELS]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(_MODELS)}")
    plt = pyplot() if options.plot else None
    figures: dict[str, Any] = _on_ranks(options.ranks, _measure_all, names, options.rounds)
    figures["one_process_us"] = _on_ranks(1, _measure_alone, names, options.rounds)
    if _LARGE_MODEL in names:
        figures["pass_us"] = _on_ranks(options.ranks, _measure_pass, options.rounds)
        figures["memory_mib"] = {
            ranks: {way: _on_ranks(ranks, _memory, way) for way in _MEMORY_WAYS}
            for ranks in _MEMORY_RANKS
        }
        figures["least_memory_mib"] = {ranks: _least_memory_mib(ranks) for ranks in _MEMORY_RANKS}
    _print(figures, options.ranks)
    if plt is not None:
        _plot(figures, options.plot, plt)
    return figures


# --- on every rank ---------------------------------------------------------------------------


def _on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on fresh ranks; what it returns on the first of them."""
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        start_processes(
            _run_rank,
            args=(ranks, directory, function, arguments),
            nprocs=ranks,
            start_method="spawn",
        )
        with open(os.path.join(directory, "result.json")) as file:
            return json.load(file)


def _run_rank(
    rank: int, world: int, directory: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    join_group("gloo", directory, rank, world)
    group = dist.new_group(backend="paceline")
    result = function(group, *arguments)
    if rank == 0:
        write_json(os.path.join(directory, "result.json"), result)
    dist.barrier()
    dist.destroy_process_group()


def _measure_all(group: dist.ProcessGroup, names: list[str], rounds: int) -> dict[str, Any]:
    return {
        "step_us": {
            name: {
                optimizer: _measure(cases()[name], optimizer, group, rounds)
                for optimizer in _SETTINGS
            }
            for name in names
        }
    }


def _measure(case: Case, optimizer: str, group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """The median round by way, in microseconds a step."""
    import torch.distributed as dist

    steps = {way: _make_step(case, optimizer, way, group) for way in _WAYS}
    for step, _ in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        for way in in_turn(list(_WAYS), number):
            step, _ = steps[way]
            dist.barrier()
            step()  # ranks start together; the first step after a barrier is not timed
            started = time.perf_counter()
            for _ in range(case.steps):
                step()
            times[way].append((time.perf_counter() - started) / case.steps * 1e6)
    return medians(slowest_of_ranks(times))


def _make_step(
    case: Case, optimizer: str, way: str, group: dist.ProcessGroup
) -> tuple[Callable[[], None], torch.optim.Optimizer | None]:
    import torch

    import paceline

    wrapper, maker, besides = _WAYS[way]
    torch.manual_seed(0)
    model: torch.nn.Module = case.build()
    if wrapper == "torch":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif wrapper == "paceline":
        model = paceline.DistributedDataParallel(model, process_group=group)
    used = None
    if maker != "nobody":
        used = _new_optimizer(maker, optimizer, model.parameters(), besides)
    batch = case.batch()

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()
        if used is not None:
            used.step()

    return step, used


def _new_optimizer(
    maker: str, name: str, parameters: Iterable[torch.Tensor], besides: dict[str, Any]
) -> torch.optim.Optimizer:
    import torch

    import paceline

    cls = getattr(torch.optim if maker == "torch" else paceline.optim, name)
    optimizer: torch.optim.Optimizer = cls(parameters, **_SETTINGS[name], **besides)
    return optimizer


def _measure_alone(
    group: dist.ProcessGroup, names: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """The step of AdamW in one process with one thread, without forward and backward: the median of
    each way, interleaved, in microseconds.
    """
    import torch

    del group
    found = {}
    for name in names:
        steps = {}
        for way, (maker, besides) in _STEPS_ALONE.items():
            torch.manual_seed(0)
            parameters = list(cases()[name].build().parameters())
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            steps[way] = _new_optimizer(maker, "AdamW", parameters, besides).step
        times: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(2 * rounds):
            for way in in_turn(list(steps), number):
                started = time.perf_counter()
                steps[way]()
                times[way].append((time.perf_counter() - started) * 1e6)
        found[name] = medians(times)
    return found


def _memory(group: dist.ProcessGroup, way: str) -> float:
    """What training adds to the memory of all ranks together, in MiB: a page of several processes
    is divided among them. A small model is trained before: code that is imported and libraries that
    get ready at the first step are not the model's.
    """
    import torch
    import torch.distributed as dist

    def train(model: str) -> object:
        step, optimizer = _make_step(cases()[model], "AdamW", way, group)
        for _ in range(4):
            step()
        dist.barrier()
        return step, optimizer

    train("mlp-64")
    before = own_memory_mib("smaps_rollup", "Pss")
    dist.barrier()
    kept = train(_LARGE_MODEL)
    total = torch.tensor([own_memory_mib("smaps_rollup", "Pss") - before])
    dist.all_reduce(total)
    del kept
    return float(total)


def _least_memory_mib(ranks: int) -> float:
    """Parameters and state of AdamW once, gradients once for each rank."""
    parameters = cases()[_LARGE_MODEL].build().parameters()
    return (_ADAMW_ARRAYS + ranks) * sum(p.nbytes for p in parameters) / 2**20


def _measure_pass(group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """The step of `one_pass=True` alone, and the same bytes streamed: best of both, interleaved, in
    microseconds.
    """
    import torch
    import torch.distributed as dist

    step, optimizer = _make_step(cases()[_LARGE_MODEL], "AdamW", _ONE_PASS, group)
    assert optimizer is not None
    for _ in range(3):
        step()
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    elements = sum(p.numel() for p in parameters) // group.size()
    # A rank's part of parameters and two arrays of state, and of every rank's gradients.
    written = [torch.zeros(elements) for _ in range(3)]
    read = [torch.zeros(elements) for _ in range(group.size())]

    def stream() -> None:
        for tensor in written:
            tensor.add_(1.0)
        for tensor in read:
            tensor.sum()

    ways: dict[str, Callable[[], Any]] = {"pass": optimizer.step, "stream": stream}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run_way in ways.items():
            dist.barrier(group)
            started = time.perf_counter()
            run_way()
            dist.barrier(group)
            best[name] = min(best[name], (time.perf_counter() - started) * 1e6)
    return best


# --- the report ------------------------------------------------------------------------------


def _print(figures: dict[str, Any], ranks: int) -> None:
    columns = {
        f"{name} {optimizer}": times
        for name, measured in figures["step_us"].items()
        for optimizer, times in measured.items()
    }
    print_table(
        f"one training step in ms, {ranks} ranks x 1 thread, median round, slowest rank",
        ("way", *columns),
        [(way, *(f"{times[way] / 1e3:.3f}" for times in columns.values())) for way in _WAYS],
        text_columns=("way",),
    )
    for name, times in figures["one_process_us"].items():
        shown = ", ".join(f"{way} {us / 1e3:.3f} ms" for way, us in times.items())
        print(f"a step of AdamW alone, one process, {name}: {shown}")
    if "pass_us" in figures:
        whole, stream = figures["pass_us"]["pass"], figures["pass_us"]["stream"]
        print(
            f"the step of one pass alone: {whole / 1e3:.3f} ms; the same bytes streamed by {ranks} "
            f"processes: {stream / 1e3:.3f} ms, {stream / whole:.0%}"
        )
    if "memory_mib" in figures:
        _print_memory(figures)


def _print_memory(figures: dict[str, Any]) -> None:
    least = figures["least_memory_mib"]
    print_table(
        f"memory that training {_LARGE_MODEL} with AdamW adds, all ranks together",
        ("ranks", *_MEMORY_WAYS, "parameters and state once, gradients of each rank"),
        [
            (str(ranks), *(f"{mib:.0f} MiB" for mib in [*memory.values(), least[ranks]]))
            for ranks, memory in figures["memory_mib"].items()
        ],
    )


def _plot(figures: dict[str, Any], path: str, plt: Any) -> None:
    """How many times as fast as torch's default, by model and optimizer; and memory by ranks."""
    columns = 2 if "memory_mib" in figures else 1
    figure, panels = plt.subplots(1, columns, figsize=(9 * columns, 4), squeeze=False)
    axes = panels[0][0]
    labels = [
        f"{name}\n{optimizer}"
        for name, measured in figures["step_us"].items()
        for optimizer in measured
    ]
    all_times = [t for measured in figures["step_us"].values() for t in measured.values()]
    width = 0.8 / len(_WAYS)
    for number, way in enumerate(_WAYS):
        ratios = [times["torch, default"] / times[way] for times in all_times]
        places = [index + number * width for index in range(len(labels))]
        axes.bar(places, ratios, width, label=way)
    axes.set_xticks([index + 0.4 for index in range(len(labels))], labels)
    axes.set_ylabel("times as fast as torch's default")
    axes.legend()
    for way in _MEMORY_WAYS if columns > 1 else ():
        memory = figures["memory_mib"]
        panels[0][1].plot(list(memory), [used[way] for used in memory.values()], "o-", label=way)
    if columns > 1:
        least = figures["least_memory_mib"]
        panels[0][1].plot(list(least), list(least.values()), "k--", label="at least")
        panels[0][1].set_xlabel("ranks")
        panels[0][1].set_ylabel("MiB that training adds, all ranks together")
        panels[0][1].legend()
    figure.tight_layout()
    figure.savefig(path)
