"""Compares the scaling model with runs between simulated hosts (needs root and iproute2):

    python tools/check_scaling_model.py                      # all of them
    python tools/check_scaling_model.py --hosts 2x2 --links 1gbit --delays 2ms

In each run the ranks measure their network as `paceline doctor --hosts` does, and the parts of a
step without exchange. From these alone the model says what all-reduces and steps take; then they
are timed, in turns, and of each the best counts. The last column is predicted over measured. Exit
status 1 if one is off by more than a fifth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.bench.bench_tools import join_group, print_table
from paceline.bench.simulated_hosts import enter, hosts_and_ranks, simulated_hosts
from paceline.diagnostics.scaling_model import (
    Algorithm,
    Cluster,
    Link,
    Network,
    Workload,
    all_reduce_s,
    step_s,
)

_HOSTS = ("2x2", "3x1", "4x1")
_LINKS = ("200mbit", "500mbit", "1gbit")
_DELAYS = ("0", "2ms")
_SIZES = (2 << 20, 8 << 20)
_WIDTH, _LAYERS, _BATCH = 1024, 4, 64
_WARM_UPS, _REPEATS = 2, 7
_TOLERANCE = 0.2
_MS = 1e3


@dataclasses.dataclass(frozen=True)
class _Row:
    """One thing that was predicted and timed, in seconds."""

    what: str
    algorithm: Algorithm
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the scaling model with measured runs.")
    parser.add_argument("--hosts", nargs="+", default=_HOSTS, metavar="HxR")
    parser.add_argument("--links", nargs="+", default=_LINKS, metavar="RATE")
    parser.add_argument("--delays", nargs="+", default=_DELAYS, metavar="TIME", help="0: none")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    report: list[dict[str, Any]] = []
    for hosts, link, delay in itertools.product(options.hosts, options.links, options.delays):
        network, rows = _compare(*hosts_and_ranks(hosts), link, None if delay == "0" else delay)
        _print(f"{hosts} hosts x ranks, {link}, delay {delay}", network, rows)
        report += [{"hosts": hosts, "link": link, "delay": delay} | _figures(row) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    off = [entry for entry in report if abs(entry["ratio"] - 1) > _TOLERANCE]
    good = len(report) - len(off)
    sys.stdout.write(f"{good} of {len(report)} predictions are within {_TOLERANCE:.0%}\n")
    return 1 if off else 0


def _figures(row: _Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"algorithm": str(row.algorithm), "ratio": row.ratio}


def _compare(hosts: int, per_host: int, link: str, delay: str | None) -> tuple[Network, list[_Row]]:
    from torch.multiprocessing.spawn import start_processes

    world = hosts * per_host
    with tempfile.TemporaryDirectory() as directory, simulated_hosts(hosts, link, delay) as pids:
        result = pathlib.Path(directory, "result.json")
        start_processes(
            _run_rank, args=(world, pids, directory, result), nprocs=world, start_method="spawn"
        )
        found = json.loads(result.read_text())
    between, inside = (Link(*found["network"][kind]) for kind in ("between", "inside"))
    shares = (found["network"][name] for name in ("message_s", "core_share", "rounding_s_per_byte"))
    cluster = Cluster(hosts, per_host, Network(between, inside, *shares))
    rows = [
        _Row(
            f"all-reduce of {size >> 20} MiB", algorithm, all_reduce_s(cluster, size, algorithm), s
        )
        for algorithm in Algorithm
        for size, s in zip(_SIZES, found["all_reduce_s"][str(algorithm)], strict=True)
    ]
    for algorithm in Algorithm:
        buckets = tuple(found["buckets"][str(algorithm)])
        work = Workload(sum(buckets), **found["compute"], bucket_bytes=buckets)
        measured = found["step_s"][str(algorithm)]
        rows.append(_Row("step", algorithm, step_s(cluster, work, algorithm), measured))
    return cluster.network, rows


def _print(where: str, network: Network, rows: list[_Row]) -> None:
    between = network.between
    title = f"{where}: found {between.latency_s * 1e6:.0f} us, "
    title += f"{between.bytes_per_s / 1e6:.1f} MB/s; message {network.message_s * 1e6:.0f} us; "
    title += f"{network.core_share:.0%} of cores; "
    title += f"rounds a MB in {network.rounding_s_per_byte * 1e12:.0f} us; "
    inside = network.inside
    title += f"inside {inside.latency_s * 1e6:.0f} us, {inside.bytes_per_s / 1e6:.0f} MB/s"
    cells = [
        (
            row.what,
            str(row.algorithm),
            f"{row.predicted_s * _MS:.1f} ms",
            f"{row.measured_s * _MS:.1f} ms",
            f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    columns = ("what", "way", "predicted", "measured", "ratio")
    print_table(title, columns, cells, text_columns=("what", "way"))


# --- on every rank --------------------------------------------------------------------------------


def _run_rank(rank: int, world: int, pids: list[int], directory: str, result: pathlib.Path) -> None:
    enter(pids[rank * len(pids) // world])
    import torch.distributed as dist

    from paceline.diagnostics.network_probe import measure_network

    join_group("paceline", directory, rank, world)
    network = measure_network().network()
    found: dict[str, Any] = {"network": dataclasses.asdict(network), "compute": _parts_of_step()}
    found["network"] |= {
        kind: dataclasses.astuple(getattr(network, kind)) for kind in ("between", "inside")
    }
    found |= _timed_all_reduces() | _timed_steps()
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _groups() -> dict[Algorithm, Any]:
    import torch
    import torch.distributed as dist

    import paceline

    rounded = paceline.GroupOptions(wire_dtype=torch.bfloat16)
    return {
        Algorithm.FLAT_RING: dist.new_group(backend="gloo"),
        Algorithm.HIERARCHY: dist.group.WORLD,
        Algorithm.HIERARCHY_BFLOAT16: dist.new_group(pg_options=rounded),
    }


def _timed_all_reduces() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    groups = _groups()
    found: dict[str, list[float]] = {str(algorithm): [] for algorithm in groups}
    for size in _SIZES:
        tensor = torch.zeros(size // 4)
        actions = {
            str(algorithm): functools.partial(dist.all_reduce, tensor, group=group)
            for algorithm, group in groups.items()
        }
        for name, seconds in _best_s(actions).items():
            found[name].append(seconds)
    return {"all_reduce_s": found}


def _parts_of_step() -> dict[str, float]:
    """What a step takes without exchange, and the shares of its forward and its update."""
    forward, backward, update = _forward_backward_update(_model())
    actions = {
        "forward": forward,
        "both": lambda: (forward(), backward()),
        "step": lambda: (forward(), backward(), update()),
    }
    seconds = _best_s(actions)
    step_s = seconds["step"]
    shares = {
        "forward_share": seconds["forward"] / step_s,
        "update_share": 1 - seconds["both"] / step_s,
    }
    return {"compute_s": step_s} | {name: max(share, 0.0) for name, share in shares.items()}


def _timed_steps() -> dict[str, Any]:
    import torch

    import paceline

    stock = torch.nn.parallel.DistributedDataParallel
    ours = paceline.DistributedDataParallel
    groups = _groups()
    models: dict[Algorithm, Any] = {
        Algorithm.FLAT_RING: stock(_model(), process_group=groups[Algorithm.FLAT_RING]),
        Algorithm.HIERARCHY: ours(_model()),
        Algorithm.HIERARCHY_BFLOAT16: ours(_model(), wire_dtype=torch.bfloat16),
    }
    seconds = _best_s({str(algorithm): _step(model) for algorithm, model in models.items()})
    planned = [bucket.nbytes for bucket in models[Algorithm.HIERARCHY].reducer.buckets]
    layer = planned[0]  # a bucket of stock DDP after the first, of one layer, is 25 MiB
    buckets = dict.fromkeys(seconds, planned)
    buckets[str(Algorithm.FLAT_RING)] = [layer, sum(planned) - layer]
    return {"step_s": seconds, "buckets": buckets}


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers)


def _step(model: Any) -> Callable[[], object]:
    parts = _forward_backward_update(model)
    return lambda: [part() for part in parts]


def _forward_backward_update(model: Any) -> tuple[Callable[[], object], ...]:
    import torch

    batch = torch.randn(_BATCH, _WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []

    def forward() -> None:
        optimizer.zero_grad()
        losses[:] = [model(batch).square().mean()]

    return forward, lambda: losses.pop().backward(), optimizer.step


def _best_s(actions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each, on the slowest rank. They take turns; in the first few they only
    warm up.
    """
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(_WARM_UPS + _REPEATS):
        for name, action in actions.items():
            dist.barrier()
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    slowest = torch.tensor([taken[_WARM_UPS:] for taken in times.values()])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.min(dim=1).values.tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
