"""`paceline compare A B`: two runs side by side."""

from __future__ import annotations

import argparse
import json
import pathlib

from paceline.diagnostics.run_comparison import RunComparison
from paceline.diagnostics.run_summary import read_summary

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, which in (("first", "one run"), ("second", "the other one")):
        parser.add_argument(
            name, type=pathlib.Path,
            help=f"{which}: a file of `paceline run --summary-json`, or a directory of `--trace`",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs: one object")


def run(options: argparse.Namespace) -> int:
    comparison = RunComparison(
        str(options.first),
        read_summary(options.first),
        str(options.second),
        read_summary(options.second),
    )
    if options.json:
        print(json.dumps(comparison.dump()))
    else:
        print(comparison.table())
        print(comparison.sentence())
    return 0
