"""`paceline bench sampler`: time to the first index, memory and throughput, next to torch's
DistributedSampler.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import PacelineError

__all__ = ["add_arguments", "run"]

_TAKEN = 2_000_000  # indices timed after the first, or the whole share if that is shorter
_STOCK, _DROP_IN, _GLOBAL = (
    "torch DistributedSampler",
    "paceline DistributedSampler",
    "paceline GlobalBatchSampler",
)


@dataclasses.dataclass(frozen=True)
class _Figures:
    first_s: float
    memory_mb: float
    per_second: float

    def best(self, other: _Figures) -> _Figures:
        return _Figures(
            min(self.first_s, other.first_s),
            min(self.memory_mb, other.memory_mb),
            max(self.per_second, other.per_second),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples", type=int, default=100_000_000, help="length of the dataset (%(default)s)"
    )
    parser.add_argument("--world-size", type=int, default=8, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=1024, help="global batch size (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="the best of so many, taken in turn (%(default)s)"
    )
    parser.add_argument(
        "--only-global",
        action="store_true",
        help="leave out what holds the whole order: for 10**12 samples, say",
    )


def run(options: argparse.Namespace) -> int:
    kinds = [_GLOBAL] if options.only_global else [_STOCK, _DROP_IN, _GLOBAL]
    found: dict[str, _Figures] = {}
    for _ in range(options.rounds):
        for kind in kinds:
            figures = _in_fresh_process(kind, options)
            found[kind] = figures.best(found[kind]) if kind in found else figures
    _print(found, options)
    return 0


def _in_fresh_process(kind: str, options: argparse.Namespace) -> _Figures:
    """Measured alone: memory that one sampler leaves to the allocator would hide what the next one
    takes.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    place = (options.samples, options.world_size, options.batch_size)
    process = context.Process(target=_measure, args=(theirs, kind, *place))
    process.start()
    theirs.close()
    try:
        figures: _Figures = ours.recv()
    except EOFError:
        process.join()
        raise PacelineError(
            f"measuring {kind} over {options.samples:,} samples ended with exit code {process.exitcode} and no result; "
            "out of memory? Try fewer --samples, or --only-global"
        ) from None
    process.join()
    return figures


def _measure(pipe: Connection, kind: str, samples: int, world_size: int, batch_size: int) -> None:
    make = _maker(kind, samples, world_size, batch_size)
    next(
        _maker(kind, world_size, world_size, world_size)()
    )  # what is loaded on first use, with next to no data
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_mb("VmRSS")
    start = time.perf_counter()
    indices = make()
    next(indices)
    first = time.perf_counter() - start
    start = time.perf_counter()
    taken = sum(1 for _ in itertools.islice(indices, _TAKEN))
    seconds = time.perf_counter() - start
    pipe.send(_Figures(first, max(0.0, _status_mb("VmHWM") - before), taken / seconds))


def _maker(
    kind: str, samples: int, world_size: int, batch_size: int
) -> Callable[[], Iterator[int]]:
    import torch.utils.data

    from paceline.data import DistributedSampler, GlobalBatchSampler

    dataset: Any = range(samples)
    rank = world_size // 2
    if kind == _GLOBAL:
        return lambda: itertools.chain.from_iterable(
            GlobalBatchSampler(dataset, batch_size, rank=rank, world_size=world_size)
        )
    sampler = torch.utils.data.DistributedSampler if kind == _STOCK else DistributedSampler
    return lambda: iter(sampler(dataset, world_size, rank))


def _status_mb(name: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise PacelineError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def _print(found: dict[str, _Figures], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{options.samples:,} samples, shuffled, one of {options.world_size} ranks; best of {options.rounds}"
    table = Table(title=title, title_justify="left")
    table.add_column("sampler", no_wrap=True)
    for column in ("first index", "extra memory", "indices/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, figures in found.items():
        memory = f"{figures.memory_mb:,.1f} MB"
        table.add_row(
            kind,
            f"{figures.first_s * 1e3:,.2f} ms",
            memory,
            f"{figures.per_second / 1e6:.2f} million",
        )
    console = Console()
    console.print(table)
    if _STOCK in found:
        stock, ours = found[_STOCK], found[_GLOBAL]
        console.print(
            f"GlobalBatchSampler next to torch's: first index {stock.first_s / ours.first_s:,.0f} times sooner, "
            f"{stock.memory_mb / max(ours.memory_mb, 0.1):,.0f} times less memory"
        )
