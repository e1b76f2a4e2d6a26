"""The other ranks of this job on this host, as seen by one of them while it runs."""

from __future__ import annotations

import time

from paceline.diagnostics.diagnosis import RankView
from paceline.diagnostics.process_state import Activity
from paceline.diagnostics.stall_watcher import look_at
from paceline.diagnostics.stragglers import Straggler, attribute_wait, find_straggler
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import StatusPage, find_pages, read_page

__all__ = ["Peers"]

_LOOK_EVERY_S = 2.0
_SEARCH_EVERY_S = 10.0  # a search goes through all processes of the host
_ON_DUTY_NS = 2 * 10**9


class Peers:
    """Knows the ranks' pages once they were found, and looks at those alone from then on."""

    def __init__(self) -> None:
        self._known: dict[int, StatusPage] = {}  # by pid, as last seen
        self._searched = self._looked = float("-inf")
        self._straggler: Straggler | None = None

    def pages(self) -> list[StatusPage]:
        """What the ranks that can be seen are doing now."""
        self._search()
        for pid in self._known:
            self._known[pid] = read_page(pid) or self._known[pid]
        return list(self._known.values())

    def views(self) -> list[RankView]:
        """The same, with what the kernel knows; a rank that has left is shown as it was last."""
        self._search()
        views = []
        for pid, last in self._known.items():
            page = read_page(pid)
            if page is not None:
                self._known[pid] = page
            views.append(
                look_at(page)
                if page is not None
                else RankView(last.rank, pid, last, Activity.ENDED)
            )
        return sorted(views, key=lambda view: view.rank)

    def _search(self) -> None:
        """All ranks may not be there yet, or not all on this host."""
        now = time.monotonic()
        world = max((page.world for page in self._known.values()), default=0)
        if (
            not self._known or len(self._known) < world
        ) and now - self._searched >= self._patience_s():
            self._searched = now
            self._known.update(
                {page.pid: page for page in find_pages(recorder.job) if page.pid not in self._known}
            )

    def _patience_s(self) -> float:
        return _SEARCH_EVERY_S if len(self._known) > 1 else _LOOK_EVERY_S

    def straggler(self) -> Straggler | None:
        """Who holds the others up, over the last sync_points that all pages still show; looked for
        every two seconds.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S and recorder.shared:
            self._looked = now
            pages = self.pages()
            self._straggler = find_straggler(
                attribute_wait({page.rank: page.sync_points for page in pages}), len(pages)
            )
        return self._straggler

    def nobody_watches_before(self, rank: int) -> bool:
        """Whether no rank below this one looks after the others: they are stopped, gone or stuck
        themselves.
        """
        self._search()
        for last in sorted(self._known.values(), key=lambda page: page.rank):
            if last.rank >= rank:
                break
            page = read_page(last.pid)
            if page is not None and time.monotonic_ns() - page.watched_at_ns < _ON_DUTY_NS:
                return False
        return True
