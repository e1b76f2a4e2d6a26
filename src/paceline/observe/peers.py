"""The other ranks of this job on this host, as seen by one of them while it runs."""

from __future__ import annotations

import time

from paceline.observe.recorder import recorder
from paceline.observe.status import find_pages, read_page
from paceline.observe.stragglers import Straggler, charge, find_straggler

__all__ = ["Peers"]

_LOOK_EVERY_S = 2.0


class Peers:
    """Finds the ranks' pages once, then looks at them again every two seconds when asked."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._looked = float("-inf")
        self._straggler: Straggler | None = None

    def straggler(self) -> Straggler | None:
        """Who holds the others up, over the last meetings that all pages still show."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S and recorder.shared:
            self._looked = now
            self._straggler = self._look()
        return self._straggler

    def _look(self) -> Straggler | None:
        if not self._pids:
            self._pids = [page.pid for page in find_pages(recorder.job)]
        pages = [page for pid in self._pids if (page := read_page(pid)) is not None]
        return find_straggler(charge({page.rank: page.meetings for page in pages}), len(pages))
