"""How fast a running job is, from its status pages: between two looks, or since it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.diagnostics.page_reader import StatusPage
from paceline.telemetry.status_page import Phase

__all__ = ["JobPace"]


@dataclasses.dataclass(frozen=True)
class _Look:
    """What one process had done at some moment."""

    when_ns: int
    steps: int
    samples: int
    reported_samples: int
    spent_ns: tuple[int, ...]


class JobPace:
    """Compares each look at a job with the one before."""

    def __init__(self) -> None:
        self._before: dict[int, _Look] = {}  # by pid

    def update(self, pages: Sequence[StatusPage], now_ns: int) -> str:
        """The pace since the last call, and at the first one since training began; "" for a job
        that does not train.
        """
        training = [page for page in pages if page.training_since_ns]
        before = {page.pid: self._before.get(page.pid, _nothing(page)) for page in training}
        self._before = {page.pid: _look_at(page, now_ns) for page in training}
        changes = [_change(before[page.pid], self._before[page.pid]) for page in training]
        return ", ".join(_describe(changes)) if any(change.steps for change in changes) else ""


def _nothing(page: StatusPage) -> _Look:
    return _Look(page.training_since_ns, 0, 0, 0, (0,) * len(page.spent_ns))


def _look_at(page: StatusPage, now_ns: int) -> _Look:
    return _Look(now_ns, page.step, page.samples, page.reported_samples, page.spent_ns)


def _change(before: _Look, after: _Look) -> _Look:
    return _Look(
        after.when_ns - before.when_ns,
        after.steps - before.steps,
        after.samples - before.samples,
        after.reported_samples - before.reported_samples,
        tuple(
            later - earlier for later, earlier in zip(after.spent_ns, before.spent_ns, strict=True)
        ),
    )


def _describe(changes: Sequence[_Look]) -> list[str]:
    seconds = max(change.when_ns for change in changes) / 1e9
    if seconds <= 0:
        return []
    parts = [f"{max(change.steps for change in changes) / seconds:,.1f} steps/s"]
    samples = max(change.reported_samples for change in changes)
    samples = samples or sum(change.samples for change in changes)
    if samples:
        parts.append(f"{samples / seconds:,.0f} samples/s")
    whole = sum(sum(change.spent_ns) for change in changes)
    if whole and len(changes) > 1:
        waited = sum(change.spent_ns[Phase.SYNCHRONISE] for change in changes)
        parts.append(f"waiting {waited / whole:.0%}")
    return parts
