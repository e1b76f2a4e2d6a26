"""Draws the plots of docs/scale.md: `python -m tools.draw_scale_plots`.

Every number is computed by the scaling model, none is measured. The seed is fixed, so that the
files change only when the model does.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Callable

from tools.svg_chart import Axis, Chart

from paceline.diagnostics.scaling_model import (
    Algorithm,
    Cluster,
    Link,
    Network,
    Variation,
    Workload,
    all_reduce_s,
    efficiency,
    simulated_steps,
    step_s,
)

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"

# What docs/scale.md says it is drawn for.
_RANKS_PER_HOST = 8
_TEN_GBIT = Network(Link(50e-6, 1.18e9), Link(20e-6, 5e9), message_s=10e-6)
_MODEL = Workload(4 * 100e6, 1.0)  # 100 M parameters, a second per step
_HOSTS = tuple(2**power for power in range(1, 11))
_RANKS = (8, 16, 64, 256, 1_000, 4_000, 16_000, 40_000, 100_000)
_RANK_STEPS, _SEED = 500_000, 1
_VARIATIONS = {
    "all ranks alike": Variation(),
    "speeds differ by 2 %, steps by 5 %": Variation(speed=0.02, jitter=0.05),
    "and one rank in 10,000 takes twice as long": Variation(0.02, 0.05, 1e-4, 2.0),
    "and one link has half the rate": Variation(0.02, 0.05, 1e-4, 2.0, slowest_link=0.5),
}


# --- the plots ------------------------------------------------------------------------------------


def scaling() -> Chart:
    """Share of perfect scaling over hosts."""
    clusters = [Cluster(hosts, _RANKS_PER_HOST, _TEN_GBIT) for hosts in _HOSTS]
    return Chart(
        "100 M parameters, 1 s per step, 8 ranks per host, 10 Gbit/s: share of perfect scaling",
        Axis("hosts", 2, 1024, [(hosts, f"{hosts:,}") for hosts in _HOSTS]),
        Axis("", 0.0, 1.3, [(n / 5, f"{20 * n} %") for n in range(6)], logarithmic=False),
        {
            str(algorithm): [(c.hosts, efficiency(c, _MODEL, algorithm)) for c in clusters]
            for algorithm in Algorithm
        },
    )


def all_reduces() -> Chart:
    """Seconds of one all-reduce over ranks."""
    ticks = [(10.0**power, f"{10**power:,}") for power in range(1, 6)]
    sizes = {"4 KB": 4e3, "400 MB": 4e8}
    return Chart(
        "One all-reduce, 8 ranks per host, 10 Gbit/s",
        Axis("ranks", 16, 100_000, ticks[1:]),
        Axis("seconds", 1e-5, 1e4, [(10.0**power, f"{10.0**power:g}") for power in range(-4, 3)]),
        {
            f"{algorithm}, {size}": [
                (ranks, all_reduce_s(_cluster(ranks), nbytes, algorithm)) for ranks in _RANKS[1:]
            ]
            for size, nbytes in sizes.items()
            for algorithm in (Algorithm.FLAT_RING, Algorithm.HIERARCHY)
        },
    )


def stragglers() -> Chart:
    """The mean step of unlike ranks over that of one host, ours."""
    alone = step_s(_cluster(_RANKS_PER_HOST), _MODEL, Algorithm.HIERARCHY)
    ticks = [(10.0**power, f"{10**power:,}") for power in range(1, 6)]
    return Chart(
        "A step where ranks are not alike, over a step of one host alone (paceline)",
        Axis("ranks", 8, 100_000, ticks),
        Axis("times as long", 1.0, 100.0, [(n, f"{n:g}") for n in (1, 2, 5, 10, 20, 50)]),
        {
            name: [(ranks, _mean_step_s(ranks, variation) / alone) for ranks in _RANKS]
            for name, variation in _VARIATIONS.items()
        },
    )


def _cluster(ranks: int) -> Cluster:
    return Cluster(ranks // _RANKS_PER_HOST, _RANKS_PER_HOST, _TEN_GBIT)


def _mean_step_s(ranks: int, variation: Variation) -> float:
    cluster, ours = _cluster(ranks), Algorithm.HIERARCHY
    steps = min(_RANK_STEPS // ranks, 500)
    seconds = simulated_steps(cluster, _MODEL, ours, variation, steps=steps, seed=_SEED)
    return statistics.fmean(seconds)


PLOTS: dict[str, Callable[[], Chart]] = {
    "scale-hosts.svg": scaling,
    "scale-all-reduce.svg": all_reduces,
    "scale-stragglers.svg": stragglers,
}


def main() -> None:
    argparse.ArgumentParser(description="Draw the plots of docs/scale.md.").parse_args()
    for name, draw in PLOTS.items():
        (IMAGES / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
