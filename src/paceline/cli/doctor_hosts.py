"""`paceline doctor --hosts`: what is between and inside the hosts of a job, and how far training
will scale on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
from typing import TYPE_CHECKING, Any

from paceline.cli.summary_card import counted
from paceline.diagnostics.scaling_model import (
    Algorithm,
    Cluster,
    Link,
    Network,
    Workload,
    efficiency,
    step_s,
)
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.diagnostics.network_figures import NetworkFigures

__all__ = ["run_between_hosts"]

_HOST_COUNTS = tuple(2**power for power in range(1, 11))
_HOSTS_LISTED = 16
_BYTES_PER_PARAMETER = 4
_START = (
    "start it on every rank as you start training, for example "
    "`paceline run -n 2 --nnodes 2 --rdzv-endpoint HOST:PORT -m paceline doctor --hosts` on each "
    "host, or `srun paceline doctor --hosts`"
)


def run_between_hosts(options: argparse.Namespace) -> int:
    """Measure with all ranks, report on rank 0."""
    from paceline.rank_env import find_rank_env

    workload = _workload(options)
    if find_rank_env(os.environ).world_size < 2:
        raise ConfigError(f"doctor --hosts measures between ranks, and there is one: {_START}")

    import torch.distributed as dist

    from paceline.diagnostics.network_figures import slow_parts
    from paceline.diagnostics.network_probe import measure_network
    from paceline.launch.init import destroy_process_group, init_process_group, rank

    init_process_group(quiet=True)
    backend, figures, reports = dist.get_backend(), measure_network(), rank() == 0
    destroy_process_group()
    if not reports:
        return 0
    slow = slow_parts(figures)
    if options.json:
        print(json.dumps(_facts(backend, figures, slow, workload), indent=1))
    else:
        _print(backend, figures, slow, workload)
    return 0


# --- the model that is asked about ----------------------------------------------------------------


def _workload(options: argparse.Namespace) -> Workload | None:
    if (options.parameters is None) != (options.step_ms is None):
        raise ConfigError(
            "--parameters and --step-ms describe one model: give both, e.g. --parameters 17e6 "
            "--step-ms 80"
        )
    if options.parameters is not None and options.trace is not None:
        raise ConfigError("give either a recorded run or --parameters and --step-ms, not both")
    if options.trace is not None:
        return _recorded_workload(options.trace)
    if options.parameters is None:
        return None
    if not (options.parameters > 0 and options.step_ms > 0):
        raise ConfigError(
            f"--parameters and --step-ms should be above zero, got {options.parameters:g} and "
            f"{options.step_ms:g}"
        )
    return Workload(_BYTES_PER_PARAMETER * options.parameters, options.step_ms / 1e3)


def _recorded_workload(directory: pathlib.Path) -> Workload:
    """The gradients of a recorded run, and its median step without what ranks waited for each
    other.
    """
    from paceline.diagnostics.timeline import Timeline
    from paceline.diagnostics.trace_reader import read_traces
    from paceline.telemetry.status_page import Phase

    timeline = Timeline(read_traces(directory))
    gradients = sum(
        bucket.nbytes for plan in timeline.traces[0].buckets.values() for bucket in plan
    )
    first = timeline.ranks[0]
    ends = timeline.step_ends_ns(first)
    if not gradients or len(ends) < 3:
        raise ConfigError(
            f"{directory} has no steps of DistributedDataParallel to tell from; record some with "
            "`paceline run --trace DIR`, or give --parameters and --step-ms"
        )
    between = [later - earlier for earlier, later in itertools.pairwise(ends[1:])]
    waited = timeline.phase_ns(first).get(Phase.SYNCHRONISE, 0) / len(ends)
    step_ns = statistics.median(between)
    return Workload(gradients, max(step_ns - waited, step_ns / 100) / 1e9)


# --- the report -----------------------------------------------------------------------------------


def _predictions(
    figures: NetworkFigures, workload: Workload
) -> dict[int, dict[Algorithm, tuple[float, float]]]:
    """(seconds of a step, share of perfect scaling) by number of hosts and algorithm."""
    per_host = min(host.ranks for host in figures.hosts)
    network = figures.network()
    found: dict[int, dict[Algorithm, tuple[float, float]]] = {}
    for hosts in _HOST_COUNTS:
        cluster = Cluster(hosts, per_host, network)
        found[hosts] = {
            algorithm: (
                step_s(cluster, workload, algorithm),
                efficiency(cluster, workload, algorithm),
            )
            for algorithm in Algorithm
        }
    return found


def _facts(
    backend: str, figures: NetworkFigures, slow: list[str], workload: Workload | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"backend": backend, **dataclasses.asdict(figures), "slow": slow}
    if workload is not None and figures.pairs:
        facts["workload"] = {
            "gradient_bytes": workload.gradient_bytes,
            "compute_s": workload.compute_s,
        }
        facts["scaling"] = [
            {"hosts": hosts, "algorithm": str(algorithm), "step_s": seconds, "efficiency": share}
            for hosts, row in _predictions(figures, workload).items()
            for algorithm, (seconds, share) in row.items()
        ]
    return facts


def _print(
    backend: str, figures: NetworkFigures, slow: list[str], workload: Workload | None
) -> None:
    ranks = counted(sum(host.ranks for host in figures.hosts), "rank")
    hosts = counted(len(figures.hosts), "host")
    print(f"paceline doctor --hosts: {ranks} on {hosts}, {backend}")
    for number, host in enumerate(figures.hosts[:_HOSTS_LISTED]):
        inside = "" if host.inside is None else f", inside {_shown(host.inside)}"
        print(f"   host {number}   {host.name}, {counted(host.ranks, 'rank')}{inside}")
    if len(figures.hosts) > _HOSTS_LISTED:
        print(f"   and {len(figures.hosts) - _HOSTS_LISTED} more")
    if not figures.pairs:
        print("All ranks are on one host: there is no link to measure.")
        return
    network = figures.network()
    best = max(pair.link.bytes_per_s for pair in figures.pairs)
    print(f"   between  {_shown(network.between)} for the slowest host; best {_rate(best)}")
    for said in slow:
        print(f"!  {said}")
    if workload is None:
        print("Add --parameters N --step-ms MS, or a recorded run, to see how training scales.")
    else:
        _print_scaling(figures, workload, network)


def _print_scaling(figures: NetworkFigures, workload: Workload, network: Network) -> None:
    crossing = workload.gradient_bytes / network.between.bytes_per_s
    print(
        f"A step of {workload.compute_s * 1e3:.0f} ms with {workload.gradient_bytes / 1e6:.0f} MB "
        f"of gradients, which one link carries in {crossing * 1e3:.0f} ms."
    )
    print("Share of perfect scaling to expect, all hosts and links being as the slowest here:")
    columns = [str(algorithm) for algorithm in Algorithm]
    print("   hosts  " + "  ".join(f"{column:>18}" for column in columns))
    for hosts, row in _predictions(figures, workload).items():
        cells = (f"{share:.0%} ({_ms(seconds)})" for seconds, share in row.values())
        print(f"   {hosts:>5}  " + "  ".join(f"{cell:>18}" for cell in cells))


def _shown(link: Link) -> str:
    return f"{link.latency_s * 1e6:.0f} us, {_rate(link.bytes_per_s)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"
