"""Trains every model at every number of ranks and compares the hashes of all that comes out.

    python -m tests.harness.exact_table --steps 200 --ranks 1,2,3,4,6

One line for each number of ranks and kind of group; on several hosts if they can be simulated here.
Ends with status 1 if a hash differs from that of one rank.
"""

from __future__ import annotations

import argparse
import sys
import time

from paceline.bench import simulated_hosts
from tests.harness import init_group, run_ranks
from tests.harness.exact_models import CASES, train

HOSTS = 3


def hashes(rank, world, backend, hosts, names, steps):
    """On every rank: the hash of each model."""
    if hosts:
        simulated_hosts.enter(hosts[rank % len(hosts)])
    if world > 1:
        init_group(backend)
    return {name: train(name, steps) for name in names}


def table(names, steps, ranks, backends, timeout):
    """Yields one line after the other: what was run, and the hashes."""
    yield "1 rank", run_ranks(1, hashes, "", [], names, steps, timeout=timeout)
    for backend in backends:
        for world in [world for world in ranks if world > 1]:
            found = run_ranks(world, hashes, backend, [], names, steps, timeout=timeout)
            yield f"{world} ranks, {backend}", found
    if reason := simulated_hosts.why_not():
        sys.stdout.write(f"no hosts are simulated: {reason}\n")
        return
    for backend in backends:
        for world in [world for world in ranks if world >= HOSTS]:
            with simulated_hosts.simulated_hosts(HOSTS) as hosts:
                found = run_ranks(world, hashes, backend, hosts, names, steps, timeout=timeout)
            yield f"{world} ranks, {backend}, {HOSTS} hosts", found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", default="1,2,3,4,6")
    parser.add_argument("--backends", default="paceline,gloo")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--timeout", type=float, default=900.0, help="of a line, in seconds")
    options = parser.parse_args()
    names = options.models.split(",")
    ranks = [int(count) for count in options.ranks.split(",")]
    expected, differ = None, False
    sys.stdout.write(f"{'':28}" + "".join(f"{name:>14}" for name in names) + "\n")
    began = time.monotonic()
    lines = table(names, options.steps, ranks, options.backends.split(","), options.timeout)
    for what, found in lines:
        expected = expected or found[0]
        same = all(each == expected for each in found)
        differ = differ or not same
        row = "".join(f"{found[0][name][:12]:>14}" for name in names)
        seconds = time.monotonic() - began
        sys.stdout.write(f"{what:28}{row}  {'' if same else 'DIFFERS '}{seconds:6.0f} s\n")
        sys.stdout.flush()
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
