"""Watches the ranks of this host from a thread and reports when they stop making progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping

from paceline.diagnostics.diagnosis import Diagnosis, RankView, diagnose
from paceline.diagnostics.page_reader import StatusPage, find_pages, read_page
from paceline.diagnostics.process_state import Activity, activity_of
from paceline.diagnostics.rank_table import stall_page
from paceline.diagnostics.stack_reader import Stack, main_stack, request_stacks

__all__ = ["StallWatch", "look_at_job", "look_at_page", "look_at_processes", "main_stacks"]

_LOOK_EVERY_S = 0.5
_MOST_STACKS = 8  # a stall page shall stay one page


def look_at_job(job: str | None = None) -> list[RankView]:
    """All ranks of a job on this host, or of all jobs, found by their pages."""
    return [look_at_page(page) for page in find_pages(job)]


def look_at_page(page: StatusPage) -> RankView:
    """A rank that has this page."""
    return RankView(page.rank, page.pid, page, activity_of(page.pid, page.main_tid))


def look_at_processes(
    pids: Mapping[int, int], exitcodes: Mapping[int, int | None], last: dict[int, StatusPage]
) -> list[RankView]:
    """The ranks that a launcher started itself, with their exit codes if they have ended; `last`
    keeps the latest page of each.
    """
    views = []
    for rank, pid in sorted(pids.items()):
        if rank in exitcodes:
            views.append(RankView(rank, pid, last.get(rank), Activity.ENDED, exitcodes[rank]))
            continue
        page = read_page(pid)
        if page is not None:
            last[rank] = page
            views.append(look_at_page(page))
        else:
            views.append(RankView(rank, pid))
    return views


class StallWatch:
    """A thread that looks at the ranks twice a second and reports each stall once, and its end.

    Where there is no launcher, every rank runs such a thread and one of them is on duty: `on_duty`
    answers that. Two may believe it for a moment, and one that was stopped goes on with what it saw
    before: `may_report` is true for one of them.

    No look ends the watch: a rank may be starting, ending or broken in whatever way, and the next
    look may be the one that matters. The first look that fails is reported.
    """

    def __init__(
        self,
        look: Callable[[], list[RankView]],
        report: Callable[[str], None],
        limit_s: float,
        on_duty: Callable[[], bool] = lambda: True,
        may_report: Callable[[Diagnosis], bool] = lambda _: True,
    ) -> None:
        self._look = look
        self._report = report
        self._on_duty = on_duty
        self._may_report = may_report
        self._limit_ns = int(limit_s * 1e9)
        self._pause_s = min(_LOOK_EVERY_S, limit_s / 4)
        self._stop = threading.Event()
        # The stall that was reported and is not over yet.
        self._current: Diagnosis | None = None
        self._has_failed = False
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
            try:
                # Whoever reported a stall also reports its end.
                if self._on_duty() or self._current is not None:
                    self.look_once()
            except Exception as error:
                self._report_failed_look(error)

    def _report_failed_look(self, error: Exception) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        # It may be the report itself that fails: standard error is closed.
        with contextlib.suppress(Exception):
            self._report(
                f"a look at the ranks failed ({type(error).__name__}: {error}); watching for "
                "stalls goes on, but may miss some"
            )

    def look_once(self) -> None:
        """Look at the ranks, and report if a stall has begun or ended."""
        views = self._look()
        diagnosis = diagnose(views, time.monotonic_ns(), self._limit_ns)
        if diagnosis is None or not diagnosis.same_stall(self._current):
            self._report_if_over(views)
        if diagnosis is not None and self._current is None and self._may_report(diagnosis):
            self._current = diagnosis
            self._report_stall(diagnosis, views)

    def _report_stall(self, diagnosis: Diagnosis, views: list[RankView]) -> None:
        stacks = main_stacks([view for view in views if view.rank in diagnosis.stacks_of])
        views = [_with_line(view, stacks.get(view.rank)) for view in views]
        now = time.monotonic_ns()
        # Once more, now that the lines are known. If the stall has ended meanwhile, the first
        # diagnosis was still true.
        again = diagnose(views, now, self._limit_ns)
        self._report(stall_page(again if again is not None else diagnosis, views, stacks, now))

    def _report_if_over(self, views: list[RankView]) -> None:
        stall = self._current
        if stall is None:
            return
        waiting = {(view.rank, view.page.since_ns) for view in views if view.page is not None}
        if waiting & set(stall.waiting):
            return
        self._current = None
        if any(view.activity is not Activity.ENDED for view in views):
            blamed = f" (it was waiting for rank {stall.blamed[0]})" if stall.blamed else ""
            self._report(f"the job is making progress again{blamed}")


def main_stacks(views: list[RankView]) -> dict[int, Stack]:
    """The main threads' stacks of these ranks, as far as they can be read."""
    stacks: dict[int, Stack] = {}
    for view in views[:_MOST_STACKS]:
        if view.page is None or view.activity is Activity.ENDED:
            continue
        stack = main_stack(request_stacks(view.page), view.page)
        if stack is not None:
            stacks[view.rank] = stack
    return stacks


def _with_line(view: RankView, stack: Stack | None) -> RankView:
    frame = stack.innermost if stack is not None else None
    return view if frame is None else dataclasses.replace(view, line=frame.describe())
