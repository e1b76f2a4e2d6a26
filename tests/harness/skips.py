"""The last line of a run: which tests were skipped, and why."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import pytest

__all__ = ["pytest_unconfigure"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Comes after pytest's own summary.

    Workers have no terminal; their reports arrive at the process that has one.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    terminal.write_line(_skipped_line(terminal.stats.get("skipped", [])))


def _skipped_line(reports: Iterable[pytest.CollectReport | pytest.TestReport]) -> str:
    """One entry for each reason, with the files and how many of their tests it concerns."""
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        files[reason.removeprefix("Skipped: ")][report.nodeid.partition("::")[0]] += 1
    if not files:
        return "skipped: none"
    entries = [
        f"{reason} ({', '.join(f'{path}: {count}' for path, count in sorted(counts.items()))})"
        for reason, counts in sorted(files.items())
    ]
    total = sum(counts.total() for counts in files.values())
    return f"skipped: {total} tests: {'; '.join(entries)}".replace("\n", " ")
