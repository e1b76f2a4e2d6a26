"""`paceline diff A B`: where two logs of `training.digest()` part: the step, and in what."""

from __future__ import annotations

import argparse
import pathlib

from paceline.diagnostics.digest_log import differing_names, read_digests
from paceline.errors import ConfigError

__all__ = ["add_arguments", "run"]

_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        parser.add_argument(
            name, type=pathlib.Path, help="a log with lines of print(training.digest())"
        )


def run(options: argparse.Namespace) -> int:
    first, second = dict(read_digests(options.first)), dict(read_digests(options.second))
    common = sorted(set(first) & set(second))
    if not common:
        raise ConfigError(
            f"no step is in both logs: {options.first} has steps {min(first)} to {max(first)}, "
            f"{options.second} has steps {min(second)} to {max(second)}"
        )
    for step in common:
        if different := differing_names(first[step], second[step]):
            print(
                f"step {step} is the first that differs, in {len(different)} of {len(first[step])}:"
            )
            for name in different[:_SHOWN]:
                one, other = (digests[step].get(name, "missing") for digests in (first, second))
                print(f"  {name}: {one} and {other}")
            if len(different) > _SHOWN:
                print(f"  and {len(different) - _SHOWN} more")
            return 1
    print(f"no difference in {len(common)} steps, {common[0]} to {common[-1]}")
    return 0
