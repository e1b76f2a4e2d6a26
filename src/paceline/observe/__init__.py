"""Seeing what a run does: status pages, verdicts on stalls, stragglers, timelines, progress."""

from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.session import trace

__all__ = ["Progress", "trace", "write_report"]
