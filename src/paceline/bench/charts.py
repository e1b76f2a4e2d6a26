"""matplotlib for `--plot`, which is no dependency: asked for before anything is measured."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError

__all__ = ["pyplot"]


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
