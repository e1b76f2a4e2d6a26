"""Reads what the ranks write (`paceline.telemetry`): why a job makes no progress, which rank is
slow, timelines, progress bars.

Names are imported on first use: every rank imports parts of this package, and few need all of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.diagnostics.progress import Progress
    from paceline.diagnostics.report_page import write_report
    from paceline.diagnostics.session import trace

_LAZY = {
    "Progress": "paceline.diagnostics.progress",
    "trace": "paceline.diagnostics.session",
    "write_report": "paceline.diagnostics.report_page",
}

__all__ = ["Progress", "trace", "write_report"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline.diagnostics' has no attribute {name!r}")
    attribute: object = getattr(importlib.import_module(_LAZY[name]), name)
    return attribute
