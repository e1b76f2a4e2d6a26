"""`paceline top`: what running jobs are doing and how fast, again and again."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable

from paceline.cli.ps import NOTHING_RUNS, jobs_in, look, show_job
from paceline.diagnostics.diagnosis import RankView
from paceline.diagnostics.job_pace import JobPace
from paceline.errors import ConfigError

__all__ = ["add_arguments", "run", "watch"]

_INTERVAL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="show one job only: the beginning of its id")
    parser.add_argument(
        "--interval", default=f"{_INTERVAL_S:g}", metavar="SECONDS",
        help="between two looks (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="look once")


def run(options: argparse.Namespace) -> int:
    if options.once:
        print(_Screenful(options.job or "").render())
        return 0
    return watch(options.job or "", interval_s=_interval_s(options.interval))


def _interval_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--interval should be a number of seconds above 0 but is {text!r}")
    return seconds


def watch(job: str, *, interval_s: float = _INTERVAL_S, stacks: bool = False) -> int:
    """Show jobs until Ctrl-C: in place on a terminal, one look after the other elsewhere."""
    render = _Screenful(job, stacks=stacks).render
    # Only an exception gives the terminal its former contents back.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _show_again_and_again(render, interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _show_again_and_again(render: Callable[[], str], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        shown = ""
        while True:
            text = render()
            if text != NOTHING_RUNS or text != shown:  # once is enough
                print(text, end="\n\n", flush=True)
            shown = text
            time.sleep(interval_s)

    def screenful() -> Text:
        return Text(render(), no_wrap=True, overflow="crop")

    with Live(screenful(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(screenful(), refresh=True)


class _Screenful:
    """What is shown at each look. Keeps the look before, for the pace since then."""

    def __init__(self, job: str, *, stacks: bool = False) -> None:
        self._job, self._stacks = job, stacks
        self._paces: dict[str, JobPace] = {}

    def render(self) -> str:
        jobs = list(jobs_in(look(self._job)))
        shown = [self._show(job, views) for job, views in jobs]
        self._paces = {job: self._paces[job] for job, _ in jobs}
        return "\n\n".join(shown) or NOTHING_RUNS

    def _show(self, job: str, views: list[RankView]) -> str:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        pages = [view.page for view in views if view.page is not None]
        pace = self._paces.setdefault(job, JobPace()).update(pages, time.monotonic_ns())
        return show_job(views, stacks=self._stacks, width=width, pace=pace)
