"""`paceline bench <name>`: measure one part beside its stock counterpart; `paceline bench all`
measures every part.

A benchmark prints its tables and returns its figures. With `--json` they are written to a file,
together with the command and the machine: figures without these cannot be compared.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import shlex
import sys
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError, PacelineError

__all__ = ["add_arguments", "run"]

# Name -> (module with `add_arguments(parser)` and `run(options)` -> figures, one line of help).
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
        benchmark = names.add_parser(name, help=summary, description=summary)
        _module(name).add_arguments(benchmark)
        benchmark.add_argument(
            "--json", metavar="FILE", help="write the figures, the command and the machine here"
        )
    summary = "every benchmark, each with its defaults"
    everything = names.add_parser("all", help=summary, description=summary)
    everything.add_argument(
        "--json", metavar="DIRECTORY", help="write a file for each benchmark into this directory"
    )


def run(options: argparse.Namespace) -> int:
    if options.benchmark == "all":
        return _run_all(options.json and pathlib.Path(options.json))
    _measure(options.benchmark, options, options.json)
    return 0


def _run_all(directory: pathlib.Path | None) -> int:
    """Run each with its defaults; one that fails does not keep the next ones from running."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in _BENCHMARKS:
        print(f"== paceline bench {name}", flush=True)
        file = None if directory is None else directory / f"{name}.json"
        try:
            _measure(name, _defaults(name), file)
        except PacelineError as error:
            print(f"paceline: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _measure(name: str, options: argparse.Namespace, file: str | pathlib.Path | None) -> None:
    if file is not None and not pathlib.Path(file).absolute().parent.is_dir():
        raise ConfigError(f"--json {file}: there is no such directory; make it first")
    command = _command(name, options)
    figures: dict[str, Any] = _module(name).run(options)
    if file is not None:
        from paceline.bench.bench_tools import machine, write_json

        about = {"benchmark": name, "command": command, "machine": machine()}
        write_json(file, {**about, "figures": figures})


def _command(name: str, options: argparse.Namespace) -> str:
    """What to type to measure the same again: only options that are not the default."""
    words = ["paceline", "bench", name]
    for option, default in vars(_defaults(name)).items():
        value = getattr(options, option)
        if value != default:
            words.append(f"--{option.replace('_', '-')}")
            if value is not True:
                words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def _defaults(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    _module(name).add_arguments(parser)
    return parser.parse_args([])


def _module(name: str) -> ModuleType:
    return importlib.import_module(_BENCHMARKS[name][0])
