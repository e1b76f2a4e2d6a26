"""`paceline ps`: what the jobs of this user on this host are doing, from outside, at any moment."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence

from paceline.diagnostics.diagnosis import RankView, diagnose
from paceline.diagnostics.rank_table import table
from paceline.diagnostics.stall_watcher import look_at_job, main_stacks
from paceline.launch.generation import Generation
from paceline.launch.job_page import JobPage, Word, find_job_pages
from paceline.launch.membership import FIRST_HOST

__all__ = ["NOTHING_RUNS", "add_arguments", "jobs_in", "look", "run", "show_job"]

_GENERATIONS_SHOWN = 5
_RANGE = (Word.MIN_RANKS, Word.MAX_RANKS, Word.TARGET)
NOTHING_RUNS = "none of your ranks are running on this host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="show one job only: the beginning of its id")
    parser.add_argument(
        "--watch", action="store_true", help="keep showing it, until Ctrl-C, as `paceline top` does"
    )
    parser.add_argument(
        "--stacks", action="store_true", help="also show the stack of each rank's main thread"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="for programs: one object per rank and line, with the generations of an elastic job",
    )


def run(options: argparse.Namespace) -> int:
    if options.watch:
        from paceline.cli.top import watch

        return watch(options.job or "", stacks=options.stacks)
    views = look(options.job or "")
    if options.json:
        for _, job in jobs_in(views):
            for line in _as_objects(job):
                print(json.dumps(line))
        return 0
    if not views:
        print(NOTHING_RUNS)
        return 1 if options.job else 0
    for _, job in jobs_in(views):
        print(show_job(job, stacks=options.stacks))
    return 0


def look(job: str) -> list[RankView]:
    """The ranks of all jobs on this host whose id begins like this."""
    return [view for view in look_at_job() if view.page and view.page.job.startswith(job)]


def jobs_in(views: Sequence[RankView]) -> Iterator[tuple[str, list[RankView]]]:
    """The ranks by the id of their job."""
    by_job = itertools.groupby(views, key=lambda view: view.page.job if view.page else "")
    return ((job, list(ranks)) for job, ranks in by_job)


def show_job(
    views: list[RankView], *, stacks: bool, width: int | None = None, pace: str = ""
) -> str:
    """A job on a few lines, with what is known of its pace; `width` is that of the terminal."""
    page = views[0].page
    assert page is not None
    now = time.monotonic_ns()
    running = (now - min(view.page.started_ns for view in views if view.page is not None)) / 1e9
    here = "" if len(views) == page.world else f" ({len(views)} of them on this host)"
    many = "" if page.world == 1 else "s"
    ranks, generations = f"{page.world} rank{many}{here}", ""
    # Several hosts may be simulated on one: their pages tell the same.
    for elastic in find_job_pages(page.job):
        ranks, generations = _count_members(elastic), _list_generations(elastic, now)
        views = [_by_slot(view, elastic) for view in views]
        elastic.close()
    lines = [
        f"{page.script}  job {page.job[:8]}  {ranks}  running for {running:.0f} s",
        *([pace] if pace else []),
        table(views, now, width=width),
        *([generations] if generations else []),
    ]
    # To someone who asks, even a wait of a second is worth a sentence.
    diagnosis = diagnose(views, now, 10**9)
    if stacks:
        for rank, stack in main_stacks(views).items():
            lines.append(f"rank {rank}, innermost call last:\n{stack.format()}")
    if diagnosis is not None:
        lines.append(f"so far: {diagnosis.sentence}")
    return "\n".join(lines)


def _count_members(page: JobPage) -> str:
    newest = page.newest()
    members = () if newest is None else newest.generation.members
    count, hosts = len(members), len({member.host for member in members})
    low, high, target = (page.words[word] for word in _RANGE)
    aim = "" if count == target else f", {target} wanted"
    where = f" on {hosts} hosts" if hosts > 1 else ""
    return f"{count} rank{'' if count == 1 else 's'}{where} (elastic {low}:{high}{aim})"


def _list_generations(page: JobPage, now_ns: int) -> str:
    """The latest changes of members, the newest last."""
    return "\n".join(
        f"  generation {published.generation.number}, {(now_ns - published.began_ns) / 1e9:.0f} s "
        f"ago: ranks {_slots(published.generation)}: {published.generation.reason}"
        for published in page.latest_published()[-_GENERATIONS_SHOWN:]
    )


def _slots(generation: Generation) -> str:
    """ "0 1", or "0 1 on host 0, 2 3 on host 1"."""
    by_host = itertools.groupby(generation.members, key=lambda member: member.host)
    slots = {host: " ".join(str(each.slot) for each in members) for host, members in by_host}
    if set(slots) <= {FIRST_HOST}:
        return "".join(slots.values())
    return ", ".join(f"{numbers} on host {host}" for host, numbers in slots.items())


def _by_slot(view: RankView, page: JobPage) -> RankView:
    """Ranks of an elastic job are called by their slots, which do not change with its members."""
    for slot in range(page.slots):
        if page.pid_in(slot) == view.pid:
            return dataclasses.replace(view, rank=slot)
    return view


def _as_objects(views: Sequence[RankView]) -> Iterator[dict[str, object]]:
    """Those of one job's ranks. Ranks of an elastic job tell what is known of its generations."""
    page = views[0].page
    assert page is not None
    now, elastic = time.monotonic_ns(), None
    for job_page in find_job_pages(page.job):
        elastic = _elastic_facts(job_page, now)
        views = [_by_slot(view, job_page) for view in views]
        job_page.close()
    for view in views:
        yield {**_as_object(view, now), "elastic": elastic}


def _elastic_facts(page: JobPage, now_ns: int) -> dict[str, object]:
    low, high, target = (int(page.words[word]) for word in _RANGE)
    generations = [
        {
            "generation": published.generation.number,
            "ranks": [member.slot for member in published.generation.members],
            "reason": published.generation.reason,
            "seconds_ago": (now_ns - published.began_ns) / 1e9,
        }
        for published in page.latest_published()
    ]
    return {"min": low, "max": high, "target": target, "generations": generations}


def _as_object(view: RankView, now: int) -> dict[str, object]:
    page = view.page
    assert page is not None
    return {
        "job": page.job,
        "script": page.script,
        "rank": view.rank,
        "world": page.world,
        "pid": page.pid,
        "state": view.activity.value,
        "phase": page.phase.name.lower(),
        "phase_seconds": (now - page.phase_since_ns) / 1e9,
        "step": page.step,
        "call": None if page.call is None else page.call.describe(),
        "call_seconds": None if page.call is None else (now - page.call.since_ns) / 1e9,
    }
