"""`paceline bench ddp`: training steps of six models, ours beside torch's class, interleaved in one
run.

All variants - plain, wrapped by ours, wrapped by torch's with different settings - train in the
same processes in turn, in many short rounds. The time of a round is the mean step of its slowest
rank, that of a variant its median round. "barrier" is a step whose ranks exchange no gradients but
pass one barrier: the best this machine allows.

With `--hosts` ranks are on simulated hosts, as in `paceline bench collectives`. "bfloat16" is ours
with `wire_dtype=torch.bfloat16`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.bench.bench_tools import (
    in_turn,
    join_group,
    medians,
    own_memory_mib,
    print_table,
    pyplot,
    ratio_quartiles,
    slowest_of_ranks,
    write_json,
)
from paceline.bench.models import Case, cases
from paceline.bench.simulated_hosts import (
    add_host_arguments,
    enter,
    hosts_of_options,
    simulated_hosts,
)
from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

__all__ = ["add_arguments", "run"]

# Model -> how many times as fast as torch's class a step should be.
_EXPECTED_SPEEDUP = {
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
_ROUNDS, _ROUNDS_BETWEEN_HOSTS = 25, 4
# The model whose gradients fill a link; and how many times as fast its step should be.
_MODEL_BETWEEN_HOSTS = "mlp-17m"
_EXPECTED_BETWEEN_HOSTS = {"paceline": 1.3, "bfloat16": 2.2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one thread each (default: 2)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"rounds over all ways of training (default: {_ROUNDS}, with --hosts "
        f"{_ROUNDS_BETWEEN_HOSTS})",
    )
    parser.add_argument(
        "--models",
        help=f"comma-separated, of: {', '.join(_EXPECTED_SPEEDUP)} (default: all, with --hosts "
        f"{_MODEL_BETWEEN_HOSTS})",
    )
    add_host_arguments(parser)
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart here (needs matplotlib)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    hosts, per_host = hosts_of_options(options)
    if hosts:
        return _run_between_hosts(options, hosts, per_host)
    names = _chosen_models(options.models or ",".join(_EXPECTED_SPEEDUP))
    rounds = options.rounds or _ROUNDS
    plt = pyplot() if options.plot else None

    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        result = os.path.join(directory, "result.json")
        arguments = (options.ranks, names, rounds, directory, result)
        start_processes(_run_rank, args=arguments, nprocs=options.ranks, start_method="spawn")
        with open(result) as file:
            figures: dict[str, Any] = {"rounds": rounds, **json.load(file)}
    figures["peak_memory"] = _peak_memory(options.ranks)
    _print(figures, options.ranks)
    if plt is not None:
        _plot(figures, options.plot, plt)
    return figures


def _run_between_hosts(options: argparse.Namespace, hosts: int, per_host: int) -> dict[str, Any]:
    from torch.multiprocessing.spawn import start_processes

    if options.plot:
        raise ConfigError("--plot is drawn for one host only: leave out --hosts")
    names = _chosen_models(options.models or _MODEL_BETWEEN_HOSTS)
    rounds = options.rounds or _ROUNDS_BETWEEN_HOSTS
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))
        pids = stack.enter_context(simulated_hosts(hosts, options.link, options.delay))
        result = os.path.join(directory, "result.json")
        arguments = (hosts * per_host, names, rounds, pids, directory, result)
        start_processes(
            _run_host_rank, args=arguments, nprocs=hosts * per_host, start_method="spawn"
        )
        with open(result) as file:
            figures = json.load(file)
    _print_between_hosts(figures, options)
    placement = {"hosts": hosts, "ranks_per_host": per_host}
    link = {"link": options.link, "delay": options.delay}
    return {"rounds": rounds, **placement, **link, "milliseconds": figures}


def _chosen_models(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in _EXPECTED_SPEEDUP]
    if unknown:
        raise SystemExit(
            f"unknown model {', '.join(unknown)}; there are {', '.join(_EXPECTED_SPEEDUP)}"
        )
    return names


# --- on every rank ---------------------------------------------------------------------------


def _run_rank(
    rank: int, world: int, names: list[str], rounds: int, directory: str, result: str
) -> None:
    import torch.distributed as dist

    join_group("gloo", directory, rank, world)
    group = dist.new_group(backend="paceline")
    assert group is not None, "every rank is in this group"
    figures: dict[str, Any] = {"models": {}, "world_of_one": _single_process_cost()}
    dist.barrier()
    for name in names:
        figures["models"][name] = _measure(cases()[name], group, rounds)
    figures["construction"] = _construction_ms(group, rounds)
    figures["digest"] = _digest_cost(group)
    if rank == 0:
        write_json(result, figures)
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case, group: dist.ProcessGroup, rounds: int) -> dict[str, dict[str, Any]]:
    """The median round by variant, in microseconds a step; and how many times as long as ours each
    took, as quartiles of all rounds.
    """
    import torch
    import torch.distributed as dist

    import paceline

    variants: dict[str, Callable[[], nn.Module]] = {"plain": case.build, "barrier": case.build}
    variants["paceline"] = lambda: paceline.DistributedDataParallel(
        case.build(), process_group=group
    )
    for setting, arguments in _STOCK_SETTINGS.items():
        variants[f"torch ({setting})"] = functools.partial(_build_stock, case, arguments)
    steps = {}
    for variant, build in variants.items():
        torch.manual_seed(0)
        barrier = group.barrier if variant == "barrier" else None
        steps[variant] = _make_step(build(), case.batch(), barrier)
        for _ in range(4):
            steps[variant]()
    # Interleaved, so that a busy moment of the machine hits all variants alike. The barrier lets
    # ranks start together; the first step after it is not timed.
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in in_turn(list(variants), number):
            dist.barrier()
            steps[variant]()
            times[variant].append(_mean_step_us(steps[variant], case.steps))
    times = slowest_of_ranks(times)
    return {
        "microseconds": medians(times),
        "over_paceline": {
            variant: ratio_quartiles(rounds_us, times["paceline"])
            for variant, rounds_us in times.items()
        },
    }


def _run_host_rank(
    rank: int,
    world: int,
    names: list[str],
    rounds: int,
    host_pids: list[int],
    directory: str,
    result: str,
) -> None:
    enter(host_pids[rank * len(host_pids) // world])
    import torch.distributed as dist

    join_group("gloo", directory, rank, world)
    group = dist.new_group(backend="paceline")
    assert group is not None, "every rank is in this group"
    figures = {name: _median_steps_ms(cases()[name], group, rounds) for name in names}
    if rank == 0:
        write_json(result, figures)
    dist.barrier()
    dist.destroy_process_group()


def _median_steps_ms(case: Case, group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """The median step of the slowest rank, by variant, in milliseconds."""
    import torch
    import torch.distributed as dist

    import paceline

    ours = functools.partial(paceline.DistributedDataParallel, process_group=group)
    variants: dict[str, Callable[[], nn.Module]] = {
        "plain": case.build,
        "paceline": lambda: ours(case.build()),
        "bfloat16": lambda: ours(case.build(), wire_dtype=torch.bfloat16),
        "torch (default)": lambda: _build_stock(case, {}),
        "torch (view)": lambda: _build_stock(case, {"gradient_as_bucket_view": True}),
    }
    steps = {variant: _make_step(build(), case.batch()) for variant, build in variants.items()}
    for step in steps.values():
        for _ in range(2):  # the second is the first with its final buckets
            step()
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, step in steps.items():
            for _ in range(case.steps):
                dist.barrier()
                started = time.perf_counter()
                step()
                seconds[variant].append(time.perf_counter() - started)
    slowest = torch.tensor(list(seconds.values()))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = (slowest.median(dim=1).values * 1e3).tolist()
    return dict(zip(variants, medians, strict=True))


def _build_stock(case: Case, arguments: dict[str, Any]) -> nn.Module:
    import torch

    return torch.nn.parallel.DistributedDataParallel(case.build(), **arguments)


def _make_step(
    model: nn.Module,
    batch: torch.Tensor,
    barrier: Callable[[], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:
    """A function that makes one training step, with an optimizer of its own unless given one."""
    import torch

    used = torch.optim.SGD(model.parameters(), lr=1e-4) if optimizer is None else optimizer

    def step() -> None:
        used.zero_grad()
        model(batch).square().mean().backward()
        if barrier is not None:
            barrier().wait()
        used.step()

    return step


def _mean_step_us(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.fmean(times) * 1e6


def _single_process_cost() -> float:
    """Step of a wrapped small MLP over that of the same MLP without, in a group of one rank: the
    median of many pairs.
    """
    import torch
    import torch.distributed as dist

    import paceline

    single_rank_group = dist.new_group([0], backend="gloo")
    if dist.get_rank() != 0:
        return 0.0
    case = cases()["mlp-64"]
    plain = case.build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    wrapped = paceline.DistributedDataParallel(plain, process_group=single_rank_group)
    # Both train the same parameters with the same optimizer: only the call differs.
    models = {"plain": plain, "wrapped": wrapped}
    steps = {
        name: _make_step(model, case.batch(), optimizer=optimizer) for name, model in models.items()
    }
    ratios = []
    for pair in range(400):
        # Alternately first and second: whatever the first one leaves in the caches helps both.
        order = list(steps) if pair % 2 else list(reversed(steps))
        times = {name: _mean_step_us(steps[name], 10) for name in order}
        ratios.append(times["wrapped"] / times["plain"])
    return statistics.median(ratios)


def _construction_ms(group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """Wrapping a module of 1,000 parameters, in milliseconds."""
    import torch
    import torch.distributed as dist

    import paceline

    stock = torch.nn.parallel.DistributedDataParallel
    best = {"torch": float("inf"), "paceline": float("inf")}
    for _ in range(rounds):
        for variant, before in best.items():
            net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(500)])
            dist.barrier()
            started = time.perf_counter()
            wrapped = (
                stock(net)
                if variant == "torch"
                else paceline.DistributedDataParallel(net, process_group=group)
            )
            best[variant] = min(before, (time.perf_counter() - started) * 1e3)
            del wrapped
    return best


def _digest_cost(group: dist.ProcessGroup) -> dict[str, float]:
    """What comparing the replicas adds to a step, as a fraction of it: one comparison, spread over
    the steps between two.
    """
    import torch.distributed as dist

    import paceline

    costs = {}
    for name in ("mlp-64", "mlp-100-layers", "mlp-17m"):
        case = cases()[name]
        model = paceline.DistributedDataParallel(case.build(), process_group=group)
        step = _make_step(model, case.batch())
        for _ in range(4):
            step()
        comparison, training = float("inf"), float("inf")
        for _ in range(5):
            dist.barrier()
            training = min(training, _mean_step_us(step, case.steps))
            dist.barrier()
            comparison = min(comparison, _mean_step_us(model.compare_replicas, 1))
        costs[name] = comparison / model.compares_replicas_every / training
    return costs


def _peak_memory(ranks: int) -> dict[str, float]:
    """Peak of one rank's memory while it trains the 17 M-parameter model, in MiB, each class in
    processes of its own.
    """
    from torch.multiprocessing.spawn import start_processes

    peaks = {}
    for variant in ("paceline", "torch"):
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
            arguments = (ranks, variant, directory)
            start_processes(_run_memory_rank, args=arguments, nprocs=ranks, start_method="spawn")
            with open(os.path.join(directory, "peak")) as file:
                peaks[variant] = float(file.read())
    return peaks


def _run_memory_rank(rank: int, world: int, variant: str, directory: str) -> None:
    import torch
    import torch.distributed as dist

    import paceline

    join_group("paceline" if variant == "paceline" else "gloo", directory, rank, world)
    case = cases()["mlp-17m"]
    model: nn.Module
    if variant == "paceline":
        model = paceline.DistributedDataParallel(case.build())
    else:
        model = _build_stock(case, {"gradient_as_bucket_view": True})
    step = _make_step(model, case.batch())
    before = _resident_mib()
    peak = _PeakMemory()
    for _ in range(6):
        step()
    highest = torch.tensor([peak.stop() - before])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if rank == 0:
        with open(os.path.join(directory, "peak"), "w") as file:
            file.write(str(float(highest) + before))
    dist.destroy_process_group()


class _PeakMemory:
    """The most memory this process held, sampled by a thread: its own pages, and a part of those
    it shares with other ranks.
    """

    def __init__(self) -> None:
        self._highest = _resident_mib()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(0.002):
            self._highest = max(self._highest, _resident_mib())

    def stop(self) -> float:
        """Stop sampling; returns the peak in MiB."""
        self._stopped.set()
        self._thread.join()
        return self._highest


def _resident_mib() -> float:
    """Proportional set size: a page of two processes counts half in each."""
    return own_memory_mib("smaps_rollup", "Pss")


# --- the report ------------------------------------------------------------------------------


def _summary(figures: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, measured in figures["models"].items():
        times = measured["microseconds"]
        stock = {variant: us for variant, us in times.items() if variant.startswith("torch")}
        fastest = min(stock, key=lambda variant: stock[variant])
        rows.append(
            {
                "model": name,
                "paceline": times["paceline"],
                "torch": stock[fastest],
                "setting": fastest.removeprefix("torch (").removesuffix(")"),
                "faster": stock[fastest] / times["paceline"],
                "range": measured["over_paceline"][fastest],
                "expected": _EXPECTED_SPEEDUP[name],
                "against_barrier": times["paceline"] / times["barrier"],
                "against_plain": times["paceline"] / times["plain"],
            }
        )
    return rows


def _print(figures: dict[str, Any], ranks: int) -> None:
    rows = [
        (
            row["model"],
            f"{row['paceline'] / 1e3:.3f} ms",
            f"{row['torch'] / 1e3:.3f} ms",
            row["setting"],
            f"{row['faster']:.2f}",
            f"{row['range'][0]:.2f}-{row['range'][2]:.2f}",
            f"{row['expected']:.1f}",
            f"{row['against_barrier']:.3f}",
            f"{row['against_plain']:.3f}",
        )
        for row in _summary(figures)
    ]
    columns = (
        "model",
        "paceline",
        "torch (best)",
        "its setting",
        "times as fast",
        "half of rounds",
    )
    print_table(
        f"one training step, {ranks} ranks x 1 thread, median round, slowest rank",
        (*columns, "goal", "/ barrier", "/ plain"),
        rows,
        text_columns=("model", "its setting"),
    )
    construction, memory = figures["construction"], figures["peak_memory"]
    print(
        f"wrapping 1,000 parameters: paceline {construction['paceline']:.1f} ms, "
        f"torch {construction['torch']:.1f} ms; "
        f"single process: {figures['world_of_one']:.3f} of a plain step"
    )
    print(
        f"peak memory of a rank, 17 M parameters: paceline {memory['paceline']:.0f} MiB, "
        f"torch (view) {memory['torch']:.0f} MiB"
    )
    costs = ", ".join(f"{name} {cost:.2%}" for name, cost in figures["digest"].items())
    print(f"comparing the replicas, share of all steps: {costs}")


def _print_between_hosts(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    rows = []
    for name, times in figures.items():
        stock = min(ms for variant, ms in times.items() if variant.startswith("torch"))
        cells = [name, f"{times['plain']:.0f} ms", f"{stock:.0f} ms"]
        for variant, expected in _EXPECTED_BETWEEN_HOSTS.items():
            cells += [f"{times[variant]:.0f} ms", f"{stock / times[variant]:.2f}"]
            cells.append(f"{expected:.1f}" if name == _MODEL_BETWEEN_HOSTS else "")
        rows.append(cells)
    title = f"one training step, {options.hosts} simulated hosts x ranks, 1 thread each"
    title += f", links of {options.link}" if options.link else ""
    title += f", {options.delay} one way" if options.delay else ""
    columns = ["model", "no exchange", "torch on Gloo (best)"]
    for variant in _EXPECTED_BETWEEN_HOSTS:
        columns += [variant, "times as fast", "goal"]
    print_table(f"{title}; medians, slowest rank", columns, rows, text_columns=("model",))


def _plot(figures: dict[str, Any], path: str, plt: Any) -> None:
    rows = _summary(figures)
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.bar([row["model"] for row in rows], [row["faster"] for row in rows])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast as torch's class")
    figure.autofmt_xdate()
    figure.tight_layout()
    figure.savefig(path)
