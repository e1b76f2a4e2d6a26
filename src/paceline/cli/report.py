"""`paceline report DIR`: one page that shows a recorded timeline, and the same for Chrome and
Perfetto.
"""

from __future__ import annotations

import argparse
import pathlib

from paceline.diagnostics.report_page import write_report
from paceline.diagnostics.timeline import read_timeline

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=pathlib.Path, help="what `paceline run --trace DIR` recorded"
    )
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, metavar="PAGE.html",
        help="where to write the page; the trace JSON goes beside it (default: DIR/timeline.html)",
    )  # fmt: skip
    parser.add_argument("--words", action="store_true", help="only print what limits the run")


def run(options: argparse.Namespace) -> int:
    if not options.words:
        path = write_report(options.directory, options.output)
        print(f"timeline  {path}\nfor Perfetto (ui.perfetto.dev)  {path.with_suffix('.json')}")
    print(read_timeline(options.directory).summary())
    return 0
