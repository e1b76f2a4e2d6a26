"""What benchmarks share: joining a group, reading own memory, tables, JSON files, charts."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline._linux import processor_name
from paceline._version import __version__
from paceline.errors import ConfigError, PacelineError

__all__ = [
    "in_turn",
    "join_group",
    "machine",
    "medians",
    "own_memory_mib",
    "print_table",
    "pyplot",
    "ratio_quartiles",
    "slowest_of_ranks",
    "write_json",
]


def join_group(backend: str, directory: str, rank: int, world_size: int) -> None:
    """Make this process, with one thread, a rank of the group that meets in `directory`."""
    import torch
    import torch.distributed as dist

    import paceline  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size
    )


def in_turn(ways: Sequence[str], number: int) -> list[str]:
    """The order of a round: each way is the first in some rounds and the last in others, because
    what one of them leaves in caches and queues meets the next.
    """
    start = number % len(ways)
    return [*ways[start:], *ways[:start]]


def slowest_of_ranks(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Times of rounds by way, the longest of all ranks in each: the ranks of a round wait for each
    other. Called by every rank.
    """
    import torch
    import torch.distributed as dist

    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median round of each way. The best one would be a matter of luck: of several ways that
    take equally long, the one with more rounds, or with more settings to choose from, would win.
    """
    return {way: statistics.median(rounds) for way, rounds in times.items()}


def ratio_quartiles(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The quartiles of how many times as long one way took as another, round by round."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def machine() -> dict[str, Any]:
    """What figures depend on beside the code: processor, cores, and versions."""
    import torch

    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "paceline": __version__,
        "date": datetime.date.today().isoformat(),
    }


def own_memory_mib(file: str, field: str) -> float:
    """A field of `/proc/self/<file>` that is given in kB, such as VmRSS of `status`."""
    for line in pathlib.Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise PacelineError(f"/proc/self/{file} has no {field}: this benchmark needs Linux")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_columns: Collection[str] = (),
) -> None:
    """Print a table that is as wide as it must be; all columns but `text_columns` hold numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        justify: Any = "left" if column in text_columns else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


def write_json(path: str | os.PathLike[str], figures: object) -> None:
    """Write the figures of a benchmark."""
    pathlib.Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files, for `--plot`. Matplotlib is no dependency of
    Paceline: call this before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
