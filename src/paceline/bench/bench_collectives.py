"""`paceline bench collectives`: all-reduce through torch.distributed, this backend against Gloo and
Open MPI.

All contestants take turns inside one run, size by size and round by round, so that a busy moment of
the machine hits them alike. Results are checked while measured. Columns:

    core       the same call made on the native core directly, without torch.distributed's Python front (as Open MPI is
               called here, through mpi4py with buffers)
    limit      what the same ranks reach when each reads and writes as many bytes of its own, at the same time
    in place   buckets that already lie in shared memory, reduced where they lie (what DistributedDataParallel does)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.bench.charts import pyplot
from paceline.bench.simulated_hosts import enter, simulated_hosts
from paceline.errors import ConfigError, PacelineError

__all__ = ["add_arguments", "run"]

_SIZES = [4 << (2 * step) for step in range(14)]  # 4 B to 256 MB
_PACELINE, _CORE, _GLOO, _MPI, _IN_PLACE, _LIMIT = (
    "paceline",
    "core",
    "gloo",
    "mpi",
    "in place",
    "limit",
)
_FLOAT32, _SUM = 10, 0


@dataclasses.dataclass
class _Figures:
    """Seconds of each repetition, on the slowest rank's clock."""

    seconds: list[float] = dataclasses.field(default_factory=list)

    def percentile(self, share: float) -> float:
        """The time below which `share` of the repetitions stay."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def best(self) -> float:
        return min(self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="numbers of ranks to measure (default 2)"
    )
    parser.add_argument(
        "--max-bytes", type=int, default=256 << 20, help="largest message (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns per contestant and size (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="length of a turn, about (%(default)s)"
    )
    parser.add_argument(
        "--hosts",
        metavar="HxR",
        help="simulate H hosts of R ranks with network namespaces (needs root), e.g. 2x2",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="with --hosts: the rate of each host's link, e.g. 1gbit"
    )
    parser.add_argument(
        "--no-mpi", action="store_true", help="leave Open MPI out even if it is there"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE", help="draw time over size (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    plt = pyplot() if options.plot else None
    sizes = [size for size in _SIZES if size <= options.max_bytes]
    report = []
    hosts, per_host = _placement(options.hosts)
    for ranks in [hosts * per_host] if hosts else options.ranks:
        figures = _measure(ranks, sizes, options, hosts)
        _print(ranks, figures, hosts, options.link)
        report += [
            {
                "ranks": ranks,
                "bytes": size,
                "contestant": name,
                "min_s": f.best,
                "p50_s": f.percentile(0.5),
                "p99_s": f.percentile(0.99),
            }
            for size, row in figures.items()
            for name, f in row.items()
        ]
    if options.json:
        pathlib.Path(options.json).write_text(
            json.dumps({"machine": _machine(), "all_reduce": report}, indent=1)
        )
    if plt is not None:
        _plot(report, options.plot, plt)
    return 0


def _placement(text: str | None) -> tuple[int, int]:
    """(hosts, ranks per host) of "2x2"; zeros if all ranks are on this host."""
    if text is None:
        return 0, 0
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdigit() and ranks.isdigit() and int(hosts) > 1 and int(ranks) > 0):
        raise ConfigError(
            f"--hosts {text}: give hosts x ranks per host, at least two hosts, for example 2x2"
        )
    return int(hosts), int(ranks)


# --- measuring -------------------------------------------------------------------------------------
def _measure(
    ranks: int, sizes: list[int], options: argparse.Namespace, hosts: int = 0
) -> dict[int, dict[str, _Figures]]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))
        places = stack.enter_context(simulated_hosts(hosts, options.link)) if hosts else []
        mpi = not hosts and stack.enter_context(_mpi(ranks, directory, options))
        job = (ranks, sizes, options.rounds, options.seconds, directory, mpi, places)
        processes = [context.Process(target=_rank, args=(rank, *job)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [
            f"rank {i}: exit code {p.exitcode}" for i, p in enumerate(processes) if p.exitcode
        ]
        if failed:
            raise PacelineError(f"the benchmark failed: {'; '.join(failed)}")
        found = json.loads(pathlib.Path(directory, "figures").read_text())
    return {
        int(size): {name: _Figures(times) for name, times in row.items()}
        for size, row in found.items()
    }


def _rank(
    rank: int,
    ranks: int,
    sizes: list[int],
    rounds: int,
    seconds: float,
    directory: str,
    mpi: bool,
    places: list[int],
) -> None:
    if places:
        enter(places[rank * len(places) // ranks])
    import torch
    import torch.distributed as dist

    import paceline  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "paceline", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=ranks
    )
    gloo = dist.new_group(backend="gloo")
    found = {}
    for size in sizes:
        contestants = _contestants(size, gloo, rank, directory if mpi else None)
        found[size] = _take_turns(contestants, size, rounds, seconds)
    if rank == 0:
        seconds_of = {
            size: {name: figures.seconds for name, figures in row.items()}
            for size, row in found.items()
        }
        pathlib.Path(directory, "figures").write_text(json.dumps(seconds_of))
    if mpi:
        _tell_mpi(directory, rank, "end")
    dist.barrier()
    dist.destroy_process_group()


_Turn = Callable[[int], list[float]]  # runs a number of repetitions, returns the seconds of each


def _contestants(size: int, gloo: Any, rank: int, mpi_directory: str | None) -> dict[str, _Turn]:
    import torch
    import torch.distributed as dist

    data = torch.zeros(size // 4)
    ranks = dist.get_world_size()
    wanted = float(sum(range(1, ranks + 1)))

    def through_torch(group: Any) -> Callable[[], Any]:
        return lambda: dist.all_reduce(data, group=group)

    def all_reduce(group: Any, way: Callable[[Any], Callable[[], Any]] = through_torch) -> _Turn:
        call = way(group)

        def turn(repetitions: int) -> list[float]:
            times = []
            for _ in range(repetitions):
                data.fill_(rank + 1)
                dist.barrier()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                if data[0].item() != wanted or data[-1].item() != wanted:
                    raise PacelineError(f"wrong sum: {data[0].item()} instead of {wanted}")
            if not torch.all(data == wanted):
                raise PacelineError("wrong sum somewhere in the middle")
            return times

        return turn

    def core(_: Any) -> Callable[[], None]:
        comm = world.engine.comm
        return lambda: comm.allreduce(data.data_ptr(), data.numel(), _FLOAT32, _SUM)

    world: Any = dist.group.WORLD
    turns = {_PACELINE: all_reduce(dist.group.WORLD), _GLOO: all_reduce(gloo)}
    turns[_LIMIT] = _limit_turn(data)
    if hasattr(world.engine, "comm"):  # all ranks on one host
        turns[_CORE] = all_reduce(None, core)
        turns[_IN_PLACE] = _in_place_turn(size, rank, wanted)
    if mpi_directory is not None:
        turns[_MPI] = _mpi_turn(size, rank, mpi_directory)
    return turns


def _in_place_turn(size: int, rank: int, wanted: float) -> _Turn:
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    arena = group.engine.open_arena(size, 1)
    arena.define(0, 0, size // 4, 10, 0)
    data = torch.frombuffer(arena.buffer, dtype=torch.float32)

    def turn(repetitions: int) -> list[float]:
        times = []
        for _ in range(repetitions):
            data.fill_(rank + 1)
            dist.barrier()
            start = time.perf_counter()
            arena.ready(0)
            arena.finish(0)
            times.append(time.perf_counter() - start)
        if not torch.all(data == wanted):
            raise PacelineError("wrong sum in place")
        return times

    return turn


def _limit_turn(data: Any) -> _Turn:
    import torch.distributed as dist

    def turn(repetitions: int) -> list[float]:
        times = []
        for _ in range(repetitions):
            dist.barrier()
            start = time.perf_counter()
            data.mul_(1.0)
            times.append(time.perf_counter() - start)
        return times

    return turn


def _take_turns(
    contestants: dict[str, _Turn], size: int, rounds: int, seconds: float
) -> dict[str, _Figures]:
    """Round by round, everyone in turn. The slowest rank's time counts."""
    import torch
    import torch.distributed as dist

    found = {name: _Figures() for name in contestants}
    for name, turn in contestants.items():
        first = torch.tensor([max(turn(2))])
        dist.all_reduce(first, dist.ReduceOp.MAX)
        found[name].seconds = [first.item()]
    repetitions = {name: max(3, min(300, int(seconds / f.best))) for name, f in found.items()}
    for name in contestants:
        found[name].seconds = []
    for _ in range(rounds):
        for name, turn in contestants.items():
            times = torch.tensor(turn(repetitions[name]))
            dist.all_reduce(times, dist.ReduceOp.MAX)
            found[name].seconds += times.tolist()
    return found


# --- Open MPI: its ranks sleep on a pipe of their own until it is their turn -------------------------
@contextlib.contextmanager
def _mpi(ranks: int, directory: str, options: argparse.Namespace) -> Iterator[bool]:
    if options.no_mpi or shutil.which("mpirun") is None or not _has_mpi4py():
        yield False
        return
    for rank in range(ranks):
        os.mkfifo(f"{directory}/to-{rank}")
        os.mkfifo(f"{directory}/from-{rank}")
    command = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command += ["-n", str(ranks), sys.executable, "-m", "paceline.bench.mpi_rank", directory]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield True
        process.wait(30)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _has_mpi4py() -> bool:
    import importlib.util

    return importlib.util.find_spec("mpi4py") is not None


def _tell_mpi(directory: str, rank: int, line: str) -> None:
    with open(f"{directory}/to-{rank}", "w") as pipe:
        pipe.write(f"{line}\n")


def _mpi_turn(size: int, rank: int, directory: str) -> _Turn:
    def turn(repetitions: int) -> list[float]:
        _tell_mpi(directory, rank, f"{size} {repetitions}")
        with open(f"{directory}/from-{rank}") as pipe:
            times: list[float] = json.loads(pipe.readline())
        return times

    return turn


# --- telling -----------------------------------------------------------------------------------------
def _machine() -> dict[str, Any]:
    import platform

    import torch

    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print(
    ranks: int, figures: dict[int, dict[str, _Figures]], hosts: int = 0, link: str | None = None
) -> None:
    from rich.console import Console
    from rich.table import Table

    has_mpi = any(_MPI in row for row in figures.values())
    cores = len(os.sched_getaffinity(0))
    where = (
        f"{ranks} ranks on {cores} cores"
        + (f", as {hosts} hosts" if hosts else "")
        + (f" on links of {link}" if link else "")
    )
    table = Table(title=f"all_reduce, float32, {where}", title_justify="left")
    columns = [
        "bytes",
        "min",
        "p50",
        "p99",
        "GB/s",
        "x Gloo",
        *(["x MPI"] if has_mpi else []),
        "of limit",
    ]
    columns += [] if hosts else ["core", *(["x MPI"] if has_mpi else []), "in place", "of limit"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for size, row in figures.items():
        ours, limit = row[_PACELINE], row[_LIMIT].best
        cells = [f"{size:,}", *map(_time, (ours.best, ours.percentile(0.5), ours.percentile(0.99)))]
        cells += [f"{size / ours.best / 1e9:.2f}", f"{row[_GLOO].best / ours.best:.1f}"]
        cells += [f"{row[_MPI].best / ours.best:.2f}"] if has_mpi else []
        cells.append(f"{limit / ours.best:.0%}")
        if not hosts:
            core, in_place = row[_CORE].best, row[_IN_PLACE].best
            cells += [_time(core), *([f"{row[_MPI].best / core:.2f}"] if has_mpi else [])]
            cells += [f"{size / in_place / 1e9:.2f} GB/s", f"{limit / in_place:.0%}"]
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _plot(report: list[dict[str, Any]], file: str, plt: Any) -> None:
    for ranks in sorted({entry["ranks"] for entry in report}):
        for name in (_PACELINE, _CORE, _GLOO, _MPI, _IN_PLACE):
            rows = [e for e in report if e["ranks"] == ranks and e["contestant"] == name]
            if rows:
                label = f"{name}, {ranks} ranks"
                plt.plot(
                    [e["bytes"] for e in rows],
                    [e["min_s"] * 1e6 for e in rows],
                    marker="o",
                    label=label,
                )
    plt.xscale("log", base=2)
    plt.yscale("log")
    plt.xlabel("bytes")
    plt.ylabel("microseconds")
    plt.legend()
    plt.savefig(file)
