"""Several hosts on one machine, for tests: those of the benchmark, or a skip where they cannot be
made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from paceline.bench import simulated_hosts as _simulated
from paceline.bench.simulated_hosts import SimulatedHosts, enter

__all__ = ["SimulatedHosts", "enter", "simulated_hosts"]


@contextlib.contextmanager
def simulated_hosts(
    count: int, delay: str | None = None, link: str | None = None
) -> Iterator[SimulatedHosts]:
    """`count` hosts on one switch, which holds packets for `delay`, each on a `link` of such a
    rate; yields the pid that stands for each.
    """
    if reason := _simulated.why_not():
        pytest.skip(reason)
    with _simulated.simulated_hosts(count, link, delay) as hosts:
        yield hosts
