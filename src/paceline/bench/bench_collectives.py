"""`paceline bench collectives`: all-reduce through torch.distributed, this backend against Gloo and
Open MPI; between hosts other collectives too.

All contestants take turns inside one run, size by size and round by round, so that a busy moment of
the machine hits them alike. Results are checked while measured. Columns:

    core       the same call made on the native core directly, without torch.distributed's Python
               front (as Open MPI is called here, through mpi4py with buffers)
    limit      what the same ranks reach when each reads and writes as many bytes of its own, at the
               same time
    in place   buckets that already lie in shared memory, reduced where they lie (what
               DistributedDataParallel does)
    bfloat16   between hosts: a group with `wire_dtype=torch.bfloat16`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.bench.bench_tools import join_group, print_table, pyplot
from paceline.bench.simulated_hosts import (
    add_host_arguments,
    enter,
    hosts_of_options,
    simulated_hosts,
)
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["add_arguments", "run"]

# From 4 B to 256 MB.
_SIZES = [4 << (2 * step) for step in range(14)]
_PACELINE, _CORE, _GLOO, _MPI = "paceline", "core", "gloo", "mpi"
_IN_PLACE, _LIMIT, _ROUNDED = "in place", "limit", "bfloat16"
_ALL_REDUCE, _BARRIER = "all_reduce", "barrier"
_CALLS = (
    _ALL_REDUCE,
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
    "send_recv",
    _BARRIER,
)
# The native core's codes.
_FLOAT32, _SUM = 10, 0

# Runs a number of repetitions, returns the seconds of each.
_Turn = Callable[[int], list[float]]


@dataclasses.dataclass
class _Timings:
    """Seconds of each repetition, on the slowest rank's clock."""

    seconds: list[float] = dataclasses.field(default_factory=list)

    def percentile(self, fraction: float) -> float:
        """The time below which this fraction of the repetitions stay."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    @property
    def best(self) -> float:
        """The fastest repetition."""
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
    add_host_arguments(parser)
    parser.add_argument(
        "--calls",
        nargs="+",
        choices=_CALLS,
        default=[_ALL_REDUCE],
        help="with --hosts: what to measure (default all_reduce)",
    )
    parser.add_argument(
        "--no-mpi", action="store_true", help="leave Open MPI out even if it is there"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw time over size (needs matplotlib)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    plt = pyplot() if options.plot else None
    sizes = [size for size in _SIZES if size <= options.max_bytes]
    report = []
    hosts, per_host = hosts_of_options(options)
    if not hosts and options.calls != [_ALL_REDUCE]:
        raise ConfigError("other --calls are measured between simulated hosts: add --hosts 2x2")
    for call, ranks in (
        [(call, hosts * per_host) for call in options.calls]
        if hosts
        else [(_ALL_REDUCE, ranks) for ranks in options.ranks]
    ):
        timings = _measure(call, ranks, sizes if call != _BARRIER else sizes[:1], options, hosts)
        _print(call, ranks, timings, hosts, options)
        report += [
            {
                "call": call,
                "ranks": ranks,
                "bytes": size,
                "contestant": name,
                "min_s": timing.best,
                "p50_s": timing.percentile(0.5),
                "p99_s": timing.percentile(0.99),
            }
            for size, row in timings.items()
            for name, timing in row.items()
        ]
    if plt is not None:
        _plot(report, options.plot, plt)
    return {"times": report}


# --- measuring -------------------------------------------------------------------------------


def _measure(
    call: str, ranks: int, sizes: list[int], options: argparse.Namespace, hosts: int = 0
) -> dict[int, dict[str, _Timings]]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))
        host_pids = (
            stack.enter_context(simulated_hosts(hosts, options.link, options.delay))
            if hosts
            else []
        )
        mpi = not hosts and stack.enter_context(_mpi_ranks(ranks, directory, options))
        arguments = (call, ranks, sizes, options.rounds, options.seconds, directory, mpi, host_pids)
        processes = [
            context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [
            f"rank {rank} exited with status {process.exitcode}"
            for rank, process in enumerate(processes)
            if process.exitcode
        ]
        if failed:
            raise PacelineError(f"the benchmark failed: {'; '.join(failed)}")
        seconds = json.loads(pathlib.Path(directory, "seconds").read_text())
    return {
        int(size): {name: _Timings(times) for name, times in row.items()}
        for size, row in seconds.items()
    }


def _run_rank(
    rank: int,
    call: str,
    ranks: int,
    sizes: list[int],
    rounds: int,
    seconds: float,
    directory: str,
    mpi: bool,
    host_pids: list[int],
) -> None:
    if host_pids:
        enter(host_pids[rank * len(host_pids) // ranks])
    import torch.distributed as dist

    join_group("paceline", directory, rank, ranks)
    gloo = dist.new_group(backend="gloo")
    rounded = _rounded_group() if host_pids else None
    timings = {}
    for size in sizes:
        if call == _ALL_REDUCE:
            contestants = _contestants(size, gloo, rounded, rank, directory if mpi else None)
        else:
            contestants = _others(call, size, gloo)
        timings[size] = _take_turns(contestants, rounds, seconds)
    if rank == 0:
        times = {
            size: {name: timing.seconds for name, timing in row.items()}
            for size, row in timings.items()
        }
        pathlib.Path(directory, "seconds").write_text(json.dumps(times))
    if mpi:
        _send_to_mpi(directory, rank, "end")
    dist.barrier()
    dist.destroy_process_group()


def _rounded_group() -> dist.ProcessGroup | None:
    import torch
    import torch.distributed as dist

    import paceline

    options = paceline.GroupOptions(wire_dtype=torch.bfloat16)
    group: dist.ProcessGroup | None = dist.new_group(pg_options=options)
    return group


def _contestants(
    size: int,
    gloo: dist.ProcessGroup,
    rounded: dist.ProcessGroup | None,
    rank: int,
    mpi_directory: str | None,
) -> dict[str, _Turn]:
    import torch
    import torch.distributed as dist

    data = torch.zeros(size // 4)
    expected = float(sum(range(1, dist.get_world_size() + 1)))
    world: Any = dist.group.WORLD

    def through_torch(group: dist.ProcessGroup | None) -> Callable[[], object]:
        return lambda: dist.all_reduce(data, group=group)

    def through_core() -> Callable[[], object]:
        comm = world.engine.comm
        return lambda: comm.allreduce(data.data_ptr(), data.numel(), _FLOAT32, _SUM)

    def all_reduce(call: Callable[[], object]) -> _Turn:
        def turn(repetitions: int) -> list[float]:
            times = []
            for _ in range(repetitions):
                data.fill_(rank + 1)
                # So that nobody's time contains the peers' preparations.
                dist.barrier()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                if data[0].item() != expected or data[-1].item() != expected:
                    raise PacelineError(f"wrong sum: expected {expected}, found {data[0].item()}")
            if not torch.all(data == expected):
                raise PacelineError("wrong sum somewhere in the middle")
            return times

        return turn

    turns = {
        _PACELINE: all_reduce(through_torch(world)),
        _GLOO: all_reduce(through_torch(gloo)),
        _LIMIT: _limit_turn(data),
    }
    if rounded is not None:
        turns[_ROUNDED] = all_reduce(through_torch(rounded))
    all_on_one_host = hasattr(world.engine, "comm")
    if all_on_one_host:
        turns[_CORE] = all_reduce(through_core())
        turns[_IN_PLACE] = _in_place_turn(size, rank, expected)
    if mpi_directory is not None:
        turns[_MPI] = _mpi_turn(size, rank, mpi_directory)
    return turns


def _others(call: str, size: int, gloo: dist.ProcessGroup) -> dict[str, _Turn]:
    """Another collective than all_reduce on `size` bytes: what every rank has of the whole in the
    end, or had in the beginning.
    """
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    count = max(size // 4 // world, 1)
    whole, part = torch.zeros(count * world), torch.zeros(count)
    is_root, partner = rank == 0, (rank + world // 2) % world
    parts = list(whole.split(count))
    received = torch.zeros(count * world)
    # Named so since torch 2.13, which warns of the names before.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def send_and_receive(group: dist.ProcessGroup) -> None:
        """There and back: each rank of the first half with one of the second."""
        if rank < world // 2:
            dist.send(whole, partner, group=group)
            dist.recv(received, partner, group=group)
        elif partner < world // 2:
            dist.recv(received, partner, group=group)
            dist.send(whole, partner, group=group)

    # What is in the whole before, what of it or of the part is looked at, and what is there then.
    total = float(sum(range(1, world + 1)))
    calls: dict[str, tuple[Callable[[dist.ProcessGroup], object], torch.Tensor, float]] = {
        "broadcast": (lambda group: dist.broadcast(whole, 0, group=group), whole, 1.0),
        "all_gather": (
            lambda group: all_gather(whole, part, group=group),
            whole[-count:],
            float(world),
        ),
        "reduce_scatter": (
            lambda group: reduce_scatter(part, whole, group=group),
            part,
            total,
        ),
        "all_to_all": (
            lambda group: dist.all_to_all_single(received, whole, group=group),
            received,
            float(world),
        ),
        "reduce": (
            lambda group: dist.reduce(whole, 0, group=group),
            whole,
            # What the others have in the end is left open.
            total if is_root else math.nan,
        ),
        "gather": (
            lambda group: dist.gather(part, parts if is_root else None, 0, group=group),
            whole,
            float(world if is_root else rank + 1),
        ),
        "scatter": (
            lambda group: dist.scatter(part, parts if is_root else None, 0, group=group),
            part,
            1.0,
        ),
        "send_recv": (send_and_receive, received, partner + 1.0),
        _BARRIER: (dist.barrier, part, float(rank + 1)),
    }
    run, seen, expected = calls[call]

    def turn_on(group: dist.ProcessGroup) -> _Turn:
        def turn(repetitions: int) -> list[float]:
            times = []
            for _ in range(repetitions):
                whole.fill_(rank + 1)
                part.fill_(rank + 1)
                dist.barrier()
                start = time.perf_counter()
                run(group)
                times.append(time.perf_counter() - start)
                if seen[-1].item() != expected and not math.isnan(expected):
                    raise PacelineError(
                        f"wrong result of {call}: expected {expected}, found {seen[-1].item()}"
                    )
            return times

        return turn

    world_group: Any = dist.group.WORLD
    return {_PACELINE: turn_on(world_group), _GLOO: turn_on(gloo)}


def _in_place_turn(size: int, rank: int, expected: float) -> _Turn:
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    arena = group.engine.open_arena(size, 1)
    arena.define(0, 0, size // 4, _FLOAT32, _SUM)
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
        if not torch.all(data == expected):
            raise PacelineError("wrong sum in place")
        return times

    return turn


def _limit_turn(data: torch.Tensor) -> _Turn:
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


def _take_turns(contestants: dict[str, _Turn], rounds: int, seconds: float) -> dict[str, _Timings]:
    """Time all contestants in turn, round by round. The slowest rank's time counts."""
    import torch
    import torch.distributed as dist

    # A trial decides how many repetitions make a turn of about `seconds`; it warms up as well.
    repetitions = {}
    for name, turn in contestants.items():
        trial = torch.tensor([max(turn(2))])
        dist.all_reduce(trial, dist.ReduceOp.MAX)
        repetitions[name] = max(3, min(300, int(seconds / trial.item())))
    timings = {name: _Timings() for name in contestants}
    for _ in range(rounds):
        for name, turn in contestants.items():
            times = torch.tensor(turn(repetitions[name]))
            dist.all_reduce(times, dist.ReduceOp.MAX)
            timings[name].seconds += times.tolist()
    return timings


# --- Open MPI: its ranks sleep on a pipe of their own until it is their turn ------------------


@contextlib.contextmanager
def _mpi_ranks(ranks: int, directory: str, options: argparse.Namespace) -> Iterator[bool]:
    if options.no_mpi or shutil.which("mpirun") is None or not _has_mpi4py():
        yield False
        return
    # Pipes rather than MPI's own waiting, which spins and would take the cores from the others.
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


def _send_to_mpi(directory: str, rank: int, line: str) -> None:
    with open(f"{directory}/to-{rank}", "w") as pipe:
        pipe.write(f"{line}\n")


def _mpi_turn(size: int, rank: int, directory: str) -> _Turn:
    def turn(repetitions: int) -> list[float]:
        _send_to_mpi(directory, rank, f"{size} {repetitions}")
        with open(f"{directory}/from-{rank}") as pipe:
            times: list[float] = json.loads(pipe.readline())
        return times

    return turn


# --- the report ------------------------------------------------------------------------------


def _print(
    call: str,
    ranks: int,
    timings: dict[int, dict[str, _Timings]],
    hosts: int,
    options: argparse.Namespace,
) -> None:
    has_mpi = any(_MPI in row for row in timings.values())
    title = f"{call}, float32, {ranks} ranks on {len(os.sched_getaffinity(0))} cores"
    title += f", as {hosts} hosts" if hosts else ""
    title += f" on links of {options.link}" if options.link else ""
    title += f", {options.delay} one way" if options.delay else ""
    against_mpi = ["x MPI"] if has_mpi else []
    columns = ["bytes", "min", "p50", "p99", "GB/s", "x Gloo", *against_mpi, "of limit"]
    if not hosts:
        columns += ["core", *against_mpi, "in place", "of limit"]
    else:
        # Medians: what a link does is not a matter of luck, and its first bytes are.
        columns = ["bytes", "p50", "Gloo", "x Gloo"]
        columns += ["bfloat16", "x Gloo"] if call == _ALL_REDUCE else []
    make_row = _hosts_row if hosts else functools.partial(_table_row, has_mpi=has_mpi)
    rows = [make_row(size, row) for size, row in timings.items()]
    print_table(title, columns, rows)


def _hosts_row(size: int, row: dict[str, _Timings]) -> list[str]:
    medians = {name: timing.percentile(0.5) for name, timing in row.items()}
    ours, gloo = medians[_PACELINE], medians[_GLOO]
    cells = [f"{size:,}", _time(ours), _time(gloo), f"{gloo / ours:.2f}"]
    if rounded := medians.get(_ROUNDED):
        cells += [_time(rounded), f"{gloo / rounded:.2f}"]
    return cells


def _table_row(size: int, row: dict[str, _Timings], has_mpi: bool) -> list[str]:
    ours, limit = row[_PACELINE], row[_LIMIT].best
    cells = [f"{size:,}", *map(_time, (ours.best, ours.percentile(0.5), ours.percentile(0.99)))]
    cells += [f"{size / ours.best / 1e9:.2f}", f"{row[_GLOO].best / ours.best:.1f}"]
    cells += [f"{row[_MPI].best / ours.best:.2f}"] if has_mpi else []
    cells.append(f"{limit / ours.best:.0%}")
    core, in_place = row[_CORE].best, row[_IN_PLACE].best
    cells += [_time(core), *([f"{row[_MPI].best / core:.2f}"] if has_mpi else [])]
    return [*cells, f"{size / in_place / 1e9:.2f} GB/s", f"{limit / in_place:.0%}"]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _plot(report: list[dict[str, Any]], file: str, plt: Any) -> None:
    for ranks in sorted({entry["ranks"] for entry in report}):
        for name in (_PACELINE, _CORE, _GLOO, _MPI, _IN_PLACE):
            entries = [
                entry for entry in report if entry["ranks"] == ranks and entry["contestant"] == name
            ]
            if entries:
                plt.plot(
                    [entry["bytes"] for entry in entries],
                    [entry["min_s"] * 1e6 for entry in entries],
                    marker="o",
                    label=f"{name}, {ranks} ranks",
                )
    plt.xscale("log", base=2)
    plt.yscale("log")
    plt.xlabel("bytes")
    plt.ylabel("microseconds")
    plt.legend()
    plt.savefig(file)
