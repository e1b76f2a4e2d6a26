"""The environment variables of being observed. Light: a launcher reads them before it starts
anything.
"""

from __future__ import annotations

from paceline.errors import ConfigError

__all__ = ["RUN_ID", "SCRIPT", "STALL_AFTER", "TRACE", "WATCHED", "stall_after_s"]

RUN_ID = "PACELINE_RUN_ID"
SCRIPT = "PACELINE_SCRIPT"  # what runs, in a word: a launcher knows it before the rank does
STALL_AFTER = "PACELINE_STALL_AFTER"
TRACE = "PACELINE_TRACE"
WATCHED = "PACELINE_WATCHED"  # a launcher watches: no rank needs to
_DEFAULT_STALL_AFTER_S = 30.0


def stall_after_s(text: str | None) -> float:
    """How long a wait may last before it is reported; 0 turns the watch off."""
    if not text:
        return _DEFAULT_STALL_AFTER_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ConfigError(
            f"{STALL_AFTER} (--stall-after) should be a number of seconds, or 0 for never, not {text!r}"
        )
    return seconds
