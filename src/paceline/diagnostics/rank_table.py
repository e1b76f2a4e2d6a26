"""The table of ranks, and the page that is printed when a job makes no progress: plain text, one
line per rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from paceline.diagnostics.diagnosis import Diagnosis, RankView
from paceline.diagnostics.process_state import Activity
from paceline.diagnostics.stack_reader import Stack
from paceline.errors import describe_exit

__all__ = ["COLUMNS", "cells", "stall_page", "table"]

COLUMNS = ("rank", "pid", "state", "phase", "step", "since", "where")
_LEFT_OUT = ("where", "pid", "since", "state")  # the first of them first
_RIGHT = {"rank", "pid", "step", "since"}


def cells(view: RankView, now_ns: int) -> tuple[str, ...]:
    """One rank's row."""
    page = view.page
    if page is None or view.activity is Activity.ENDED:
        ended = describe_exit(view.exitcode) if view.exitcode is not None else "ended"
        state = ended if view.activity is Activity.ENDED else "no status page"
        return (str(view.rank), str(view.pid), state, "", "", "", "")
    state = view.activity.value
    if page.call is not None and view.activity is not Activity.STOPPED:
        state = "waiting"
    where = page.call.describe() if page.call is not None else view.line
    since = f"{(now_ns - page.since_ns) / 1e9:.1f} s"
    phase = page.phase.name.lower()
    return (str(view.rank), str(view.pid), state, phase, str(page.step), since, where)


def table(
    views: Sequence[RankView],
    now_ns: int,
    blamed: Sequence[int] = (),
    *,
    width: int | None = None,
) -> str:
    """A row for each rank, those to blame marked. If `width` is given and not enough for all, what
    matters least is left out.
    """
    rows = [COLUMNS, *(cells(view, now_ns) for view in views)]
    widths = {name: max(len(row[column]) for row in rows) for column, name in enumerate(COLUMNS)}
    shown = _fitting(widths, width)
    lines = []
    for index, row in enumerate(rows):
        mark = ">" if index and views[index - 1].rank in blamed else " "
        parts = [
            text.rjust(widths[name]) if name in _RIGHT else text.ljust(widths[name])
            for text, name in zip(row, COLUMNS, strict=True)
            if name in shown
        ]
        lines.append(f"{mark} {'  '.join(parts)}".rstrip())
    return "\n".join(lines)


def _fitting(widths: Mapping[str, int], width: int | None) -> list[str]:
    """The columns that there is room for."""
    shown = list(COLUMNS)
    for name in _LEFT_OUT:
        if width is None or sum(2 + widths[each] for each in shown) <= width:
            break
        shown.remove(name)
    return shown


def stall_page(
    diagnosis: Diagnosis,
    views: Sequence[RankView],
    stacks: Mapping[int, Stack],
    now_ns: int | None = None,
) -> str:
    """Everything about a stall on one page; the sentence comes last, where the eye is."""
    now = time.monotonic_ns() if now_ns is None else now_ns
    page = next((view.page for view in views if view.page is not None), None)
    job = f" ({page.script}, job {page.job[:8]})" if page is not None else ""
    parts = [
        f"no progress for {diagnosis.waited_ns / 1e9:.1f} s{job}",
        table(views, now, diagnosis.blamed),
    ]
    for view in views:
        if view.rank in diagnosis.stacks_of:
            parts.append(_describe_stack(view, stacks.get(view.rank)))
    parts.append(f"diagnosis: {diagnosis.sentence}")
    return "\n".join(parts)


def _describe_stack(view: RankView, stack: Stack | None) -> str:
    rank = f"rank {view.rank} (pid {view.pid})"
    if stack is not None:
        return f"{rank}, innermost call last:\n{stack.format()}"
    if view.activity is Activity.STOPPED:
        return f"{rank}: no stack while it is stopped (with py-spy installed, one could be read)"
    return f"{rank}: its stack could not be read"
