"""`paceline bench sampler`: time to the first index, memory and throughput, compared with torch's
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

from paceline.bench.bench_tools import own_memory_mib, print_table
from paceline.errors import PacelineError

__all__ = ["add_arguments", "run"]

# Indices timed after the first, or the whole share if that is shorter.
_TIMED_INDICES = 2_000_000
_STOCK = "torch DistributedSampler"
_DROP_IN = "paceline DistributedSampler"
_GLOBAL = "paceline GlobalBatchSampler"


@dataclasses.dataclass(frozen=True)
class _Figures:
    first_s: float
    memory_mb: float
    per_second: float

    def best(self, other: _Figures) -> _Figures:
        """The better of both in each respect."""
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


def run(options: argparse.Namespace) -> dict[str, Any]:
    kinds = [_GLOBAL] if options.only_global else [_STOCK, _DROP_IN, _GLOBAL]
    best: dict[str, _Figures] = {}
    for _ in range(options.rounds):
        for kind in kinds:
            figures = _measure_in_fresh_process(kind, options)
            best[kind] = figures.best(best[kind]) if kind in best else figures
    _print(best, options)
    return {kind: dataclasses.asdict(figures) for kind, figures in best.items()}


def _measure_in_fresh_process(kind: str, options: argparse.Namespace) -> _Figures:
    """Alone, because memory that one sampler leaves to the allocator would hide what the next one
    takes.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, kind, options.samples, options.world_size, options.batch_size)
    process = context.Process(target=_measure, args=arguments)
    process.start()
    sender.close()
    try:
        figures: _Figures = receiver.recv()
    except EOFError:
        process.join()
        raise PacelineError(
            f"measuring {kind} over {options.samples:,} samples exited with status "
            f"{process.exitcode} and no result; out of memory? Try fewer --samples, or "
            "--only-global"
        ) from None
    process.join()
    return figures


def _measure(sender: Connection, kind: str, samples: int, world_size: int, batch_size: int) -> None:
    make_indices = _index_source(kind, samples, world_size, batch_size)
    # What is loaded on first use, with next to no data.
    next(_index_source(kind, world_size, world_size, world_size)())
    # Resets the peak, VmHWM (man 5 proc).
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = own_memory_mib("status", "VmRSS")
    start = time.perf_counter()
    indices = make_indices()
    next(indices)
    first = time.perf_counter() - start
    start = time.perf_counter()
    count = sum(1 for _ in itertools.islice(indices, _TIMED_INDICES))
    seconds = time.perf_counter() - start
    memory = max(0.0, own_memory_mib("status", "VmHWM") - before)
    sender.send(_Figures(first, memory, count / seconds))


def _index_source(
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


def _print(best: dict[str, _Figures], options: argparse.Namespace) -> None:
    rows = [
        (
            kind,
            f"{figures.first_s * 1e3:,.2f} ms",
            f"{figures.memory_mb:,.1f} MB",
            f"{figures.per_second / 1e6:.2f} million",
        )
        for kind, figures in best.items()
    ]
    print_table(
        f"{options.samples:,} samples, shuffled, one of {options.world_size} ranks; "
        f"best of {options.rounds}",
        ("sampler", "first index", "extra memory", "indices/s"),
        rows,
        text_columns=("sampler",),
    )
    if _STOCK in best:
        stock, ours = best[_STOCK], best[_GLOBAL]
        print(
            "GlobalBatchSampler next to torch's: first index "
            f"{stock.first_s / ours.first_s:,.0f} times sooner, "
            f"{stock.memory_mb / max(ours.memory_mb, 0.1):,.0f} times less memory"
        )
