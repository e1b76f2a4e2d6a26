"""Watches the ranks of this host from a thread and prints a page when they stop making progress."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping

from paceline.diagnostics.diagnosis import Diagnosis, RankView, diagnose
from paceline.diagnostics.process_state import Activity, activity_of
from paceline.diagnostics.rank_table import stall_page
from paceline.telemetry import stack_dump
from paceline.telemetry.stack_dump import Stack
from paceline.telemetry.status_page import StatusPage, find_pages, read_page

__all__ = ["StallWatch", "ask_stacks", "look", "look_at", "look_at_processes"]

_LOOK_EVERY_S = 0.5
_MOST_STACKS = 8  # a page shall stay one page

_Look = Callable[[], list[RankView]]


def look(job: str | None = None) -> list[RankView]:
    """All ranks of a job on this host, found by their pages."""
    return [look_at(page) for page in find_pages(job)]


def look_at(page: StatusPage) -> RankView:
    return RankView(page.rank, page.pid, page, activity_of(page.pid, page.main_tid))


def look_at_processes(
    pids: Mapping[int, int], exitcodes: Mapping[int, int | None], last: dict[int, StatusPage]
) -> list[RankView]:
    """Ranks a launcher started itself, with how they ended; `last` keeps what their pages said
    before.
    """
    views = []
    for rank, pid in sorted(pids.items()):
        if rank in exitcodes:
            views.append(RankView(rank, pid, last.get(rank), Activity.ENDED, exitcodes[rank]))
            continue
        page = read_page(pid)
        if page is not None:
            last[rank] = page
            views.append(look_at(page))
        else:
            views.append(RankView(rank, pid))
    return views


class StallWatch:
    """A thread that looks at the ranks twice a second. Says each stall once, and when it is over."""

    def __init__(
        self,
        look_now: _Look,
        say: Callable[[str], None],
        limit_s: float,
        on_duty: Callable[[], bool] = lambda: True,
        told: Callable[[Diagnosis], None] = lambda _: None,
    ) -> None:
        self._look = look_now
        self._say = say
        self._on_duty = on_duty
        self._mark = told
        self._limit_ns = int(limit_s * 1e9)
        self._pause_s = min(_LOOK_EVERY_S, limit_s / 4)
        self._stop = threading.Event()
        self._told: Diagnosis | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._owner = os.getpid()

    def start(self) -> None:
        if self._limit_ns > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive() and os.getpid() == self._owner:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            # Whoever told of a stall also tells of its end.
            if self._on_duty() or self._told is not None:
                self.look_once()

    def look_once(self) -> None:
        """One look; prints if a stall began or ended."""
        views = self._look()
        diagnosis = diagnose(views, time.monotonic_ns(), self._limit_ns)
        if diagnosis is None or not diagnosis.same_stall(self._told):
            self._tell_end(views)
        if diagnosis is not None and self._told is None and not diagnosis.told_by(views):
            self._told = diagnosis
            self._mark(diagnosis)
            self._tell(diagnosis, views)

    def _tell(self, diagnosis: Diagnosis, views: list[RankView]) -> None:
        found = ask_stacks([view for view in views if view.rank in diagnosis.stacks_of])
        views = [_with_line(view, found.get(view.rank)) for view in views]
        now = time.monotonic_ns()
        # Once more, now that the lines are known. If the stall has ended meanwhile, the first
        # diagnosis was true, too.
        again = diagnose(views, now, self._limit_ns)
        self._say(stall_page(again if again is not None else diagnosis, views, found, now))

    def _tell_end(self, views: list[RankView]) -> None:
        told, self._told = self._told, None
        if told is None:
            return
        waiting = {(view.rank, view.page.since_ns) for view in views if view.page is not None}
        if waiting & set(told.waiting):
            self._told = told
        elif any(view.activity is not Activity.ENDED for view in views):
            blamed = f" (it waited for rank {told.blamed[0]})" if told.blamed else ""
            self._say(f"the job makes progress again{blamed}")


def ask_stacks(views: list[RankView]) -> dict[int, Stack]:
    """The main threads' stacks of these ranks, as far as they can be had."""
    found: dict[int, Stack] = {}
    for view in views[:_MOST_STACKS]:
        if view.page is None or view.activity is Activity.ENDED:
            continue
        stack = stack_dump.main_stack(stack_dump.ask(view.page), view.page)
        if stack is not None:
            found[view.rank] = stack
    return found


def _with_line(view: RankView, stack: Stack | None) -> RankView:
    frame = stack.innermost if stack is not None else None
    return view if frame is None else dataclasses.replace(view, line=frame.words)
