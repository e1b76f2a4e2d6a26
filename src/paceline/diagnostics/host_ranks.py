"""The ranks of this job on this host, as seen by one of them while it runs."""

from __future__ import annotations

import os
import time

from paceline.diagnostics.diagnosis import Diagnosis, RankView
from paceline.diagnostics.page_reader import StatusPage, find_pages, lock_report, read_page
from paceline.diagnostics.process_state import Activity
from paceline.diagnostics.stall_watcher import look_at_page
from paceline.diagnostics.stragglers import Straggler, attribute_wait, find_straggler
from paceline.telemetry.recorder import recorder

__all__ = ["HostRanks"]

_LOOK_EVERY_S = 2.0
_SEARCH_EVERY_S = 10.0  # a search goes through all processes of the host
_WATCHES_WITHIN_NS = 2 * 10**9


class HostRanks:
    """Finds the ranks' pages once, and looks at those alone from then on."""

    def __init__(self) -> None:
        # By pid, as last read.
        self._pages: dict[int, StatusPage] = {}
        self._searched = self._looked = float("-inf")
        self._straggler: Straggler | None = None
        # That of the stall this rank has reported last.
        self._report_lock: int | None = None

    def views(self) -> list[RankView]:
        """What each rank is doing now; a rank that has left is shown as it was last."""
        self._search()
        views = []
        for pid, last in self._pages.items():
            page = read_page(pid)
            if page is not None:
                self._pages[pid] = page
                views.append(look_at_page(page))
            else:
                views.append(RankView(last.rank, pid, last, Activity.ENDED))
        return sorted(views, key=lambda view: view.rank)

    def straggler(self) -> Straggler | None:
        """The rank that holds the others up, over the latest sync points that all pages still show;
        looked for every two seconds.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S and recorder.shared:
            self._looked = now
            pages = self._read_pages()
            sync_points = {page.rank: page.sync_points for page in pages}
            self._straggler = find_straggler(attribute_wait(sync_points), len(pages))
        return self._straggler

    def is_watched_below(self, rank: int) -> bool:
        """Whether a lower rank than this one watches for stalls, and is itself able to."""
        self._search()
        lower = [page.pid for page in self._pages.values() if page.rank < rank]
        return any(_watches(pid) for pid in lower)

    def may_report(self, stall: Diagnosis) -> bool:
        """Whether this rank is to report a stall: true on one rank of the host, and once.

        The lock is kept until this rank reports another stall, because a rank that was stopped may
        come with what it saw long ago.
        """
        rank, since_ns = stall.longest_wait
        for page in self._pages.values():
            if page.rank == rank and (lock := lock_report(page.pid, since_ns)) is not None:
                self.close()
                self._report_lock = lock
                return True
        return False

    def close(self) -> None:
        """Give up the report lock."""
        if self._report_lock is not None:
            os.close(self._report_lock)
            self._report_lock = None

    def _read_pages(self) -> list[StatusPage]:
        self._search()
        for pid in self._pages:
            self._pages[pid] = read_page(pid) or self._pages[pid]
        return list(self._pages.values())

    def _search(self) -> None:
        """Look for ranks that are not known yet: they may still be starting, or be on another
        host.
        """
        now = time.monotonic()
        world = max((page.world for page in self._pages.values()), default=1)
        every_s = _SEARCH_EVERY_S if len(self._pages) > 1 else _LOOK_EVERY_S
        if len(self._pages) < world and now - self._searched >= every_s:
            self._searched = now
            for page in find_pages(recorder.job):
                self._pages.setdefault(page.pid, page)


def _watches(pid: int) -> bool:
    page = read_page(pid)
    return page is not None and time.monotonic_ns() - page.watched_at_ns < _WATCHES_WITHIN_NS
