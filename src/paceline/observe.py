"""The former name of `paceline.diagnostics`, for programs that import from it."""

from __future__ import annotations

import warnings
from typing import Any

from paceline import diagnostics

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in diagnostics.__all__:
        raise AttributeError(f"module 'paceline.observe' has no attribute {name!r}")
    warnings.warn(
        f"paceline.observe is now called paceline.diagnostics: import {name} from there",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(diagnostics, name)
