"""Reads logs with lines of `training.digest()`, and finds where two runs part."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from paceline.errors import ConfigError

__all__ = ["Digests", "differing_names", "read_digests"]

# What a line of `training.digest()` begins with; not imported, because that would load torch.
_LINE = "paceline digest "

Digests = Mapping[str, str]


def read_digests(path: pathlib.Path, *, may_be_cut_off: bool = False) -> list[tuple[int, Digests]]:
    """The digests in a log, each with its step. Lines may have something in front, such as the
    rank, or a line that a killed process did not complete, if `may_be_cut_off`.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found: list[tuple[int, Digests]] = []
    for line in text.splitlines():
        _, marker, content = line.rpartition(_LINE)
        if not marker:
            continue
        try:
            entry = json.loads(content)
            found.append((int(entry["step"]), entry["digests"]))
        except (ValueError, KeyError, TypeError):
            if not may_be_cut_off:
                raise ConfigError(
                    f"{path} has a line of digests that was cut off: {line[:60]}"
                ) from None
    if not found:
        raise ConfigError(f"{path} has no lines of digests: print(training.digest()) in every step")
    return found


def differing_names(one: Digests, other: Digests) -> list[str]:
    """What differs between two steps: parameters, buffers, optimizer states."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]
