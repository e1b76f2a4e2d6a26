"""The environment variables of telemetry. Imports next to nothing: launchers read them before
anything else.
"""

from __future__ import annotations

import math

from paceline.errors import ConfigError

__all__ = ["RUN_ID", "SCRIPT", "STALL_AFTER", "TRACE", "WATCHED", "stall_after_s"]

RUN_ID = "PACELINE_RUN_ID"
# The name of what runs: a launcher knows it before the rank does.
SCRIPT = "PACELINE_SCRIPT"
STALL_AFTER = "PACELINE_STALL_AFTER"
TRACE = "PACELINE_TRACE"
# "1": a launcher watches for stalls, so no rank needs to.
WATCHED = "PACELINE_WATCHED"
_DEFAULT_STALL_AFTER_S = 30.0


def stall_after_s(text: str | None) -> float:
    """How long a wait may last before it is reported; 0 turns the stall watch off."""
    if not text:
        return _DEFAULT_STALL_AFTER_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"{STALL_AFTER} (--stall-after) must be a number of seconds, or 0 for never, "
            f"not {text!r}"
        )
    return seconds
