"""`paceline ps`: what the jobs of this user on this host are doing, from outside, at any moment."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from paceline.diagnostics.diagnosis import RankView, diagnose
from paceline.diagnostics.rank_table import table
from paceline.diagnostics.stall_watcher import look_at_job, main_stacks

__all__ = ["add_arguments", "run"]

_REFRESH_S = 0.5
_NOTHING_RUNS = "none of your ranks are running on this host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="show one job only: the beginning of its id")
    parser.add_argument("--watch", action="store_true", help="keep showing it, until Ctrl-C")
    parser.add_argument(
        "--stacks", action="store_true", help="also show the stack of each rank's main thread"
    )
    parser.add_argument(
        "--json", action="store_true", help="for programs: one object per rank and line"
    )


def run(options: argparse.Namespace) -> int:
    if options.watch:
        return _watch(options)
    views = _look(options)
    if options.json:
        for view in views:
            print(json.dumps(_as_object(view)))
        return 0
    if not views:
        print(_NOTHING_RUNS)
        return 1 if options.job else 0
    for _, job in _jobs(views):
        print(_show(job, stacks=options.stacks))
    return 0


def _look(options: argparse.Namespace) -> list[RankView]:
    views = look_at_job()
    return [view for view in views if view.page and view.page.job.startswith(options.job or "")]


def _jobs(views: Sequence[RankView]) -> Iterator[tuple[str, Iterator[RankView]]]:
    return itertools.groupby(views, key=lambda view: view.page.job if view.page else "")


def _show(job: Iterable[RankView], *, stacks: bool) -> str:
    views = list(job)
    page = views[0].page
    assert page is not None
    now = time.monotonic_ns()
    running = (now - min(view.page.started_ns for view in views if view.page is not None)) / 1e9
    here = "" if len(views) == page.world else f" ({len(views)} of them on this host)"
    lines = [
        f"{page.script}  job {page.job[:8]}  {page.world} ranks{here}  running for {running:.0f} s",
        table(views, now),
    ]
    # To someone who asks, even a wait of a second is worth a sentence.
    diagnosis = diagnose(views, now, 10**9)
    if stacks:
        for rank, stack in main_stacks(views).items():
            lines.append(f"rank {rank}, innermost call last:\n{stack.format()}")
    if diagnosis is not None:
        lines.append(f"so far: {diagnosis.sentence}")
    return "\n".join(lines)


def _watch(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def render() -> Text:
        views = _look(options)
        jobs = [_show(list(job), stacks=options.stacks) for _, job in _jobs(views)]
        return Text("\n\n".join(jobs) or _NOTHING_RUNS)

    console = Console()
    try:
        with Live(
            render(), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live:
            while True:
                time.sleep(_REFRESH_S)
                live.update(render(), refresh=True)
    except KeyboardInterrupt:
        sys.stdout.flush()
    return 0


def _as_object(view: RankView) -> dict[str, object]:
    page = view.page
    assert page is not None
    now = time.monotonic_ns()
    return {
        "job": page.job,
        "script": page.script,
        "rank": page.rank,
        "world": page.world,
        "pid": page.pid,
        "state": view.activity.value,
        "phase": page.phase.name.lower(),
        "phase_seconds": (now - page.phase_since_ns) / 1e9,
        "step": page.step,
        "call": None if page.call is None else page.call.describe(),
        "call_seconds": None if page.call is None else (now - page.call.since_ns) / 1e9,
    }
