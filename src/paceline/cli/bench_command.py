"""`paceline bench <name>`: measure one part beside its stock counterpart; `paceline bench all`
measures every part.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

__all__ = ["add_arguments", "run"]

# Name -> (module with `add_arguments(parser)` and `run(options) -> int`, one line of help).
_BENCHMARKS: dict[str, tuple[str, str]] = {
    "collectives": (
        "paceline.bench.bench_collectives",
        "all-reduce of every size against Gloo and Open MPI",
    ),
    "launch": (
        "paceline.bench.bench_launch",
        "from the command to the first training step, beside torchrun",
    ),
    "dp": (
        "paceline.bench.bench_dp",
        "training steps under DataParallel against torch's, the bare module and DDP",
    ),
    "ddp": (
        "paceline.bench.bench_ddp",
        "training steps of six models against torch's DistributedDataParallel",
    ),
    "optim": (
        "paceline.bench.bench_optim",
        "training steps with AdamW and SGD: torch's optimizers and paceline.optim",
    ),
    "training": (
        "paceline.bench.bench_training",
        "training steps with a fixed number of shards against a bare loop and DDP",
    ),
    "elastic": (
        "paceline.bench.bench_elastic",
        "an elastic job beside a plain one, and its recovery when ranks are killed",
    ),
    "observe": (
        "paceline.bench.bench_telemetry",
        "what the status page and the timeline cost a step",
    ),
    "sampler": (
        "paceline.bench.bench_sampler",
        "shuffled indices for one rank: time, memory, throughput",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, (_, summary) in _BENCHMARKS.items():
        _module(name).add_arguments(names.add_parser(name, help=summary, description=summary))
    summary = "every benchmark, each with its defaults"
    names.add_parser("all", help=summary, description=summary)


def run(options: argparse.Namespace) -> int:
    if options.benchmark != "all":
        status: int = _module(options.benchmark).run(options)
        return status
    failed = [name for name in _BENCHMARKS if _run_with_defaults(name) != 0]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run_with_defaults(name: str) -> int:
    print(f"== paceline bench {name}", flush=True)
    parser = argparse.ArgumentParser()
    _module(name).add_arguments(parser)
    status: int = _module(name).run(parser.parse_args([]))
    return status


def _module(name: str) -> ModuleType:
    return importlib.import_module(_BENCHMARKS[name][0])
