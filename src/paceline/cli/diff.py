"""`paceline diff A B`: where two logs of `training.digest()` part: the step, and in what."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping

from paceline.errors import ConfigError

__all__ = ["add_arguments", "run"]

# What a line of `training.digest()` begins with; not imported, because that would load torch.
_LINE = "paceline digest "
_SHOWN = 5

_Digests = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        parser.add_argument(
            name, type=pathlib.Path, help="a log with lines of print(training.digest())"
        )


def run(options: argparse.Namespace) -> int:
    first, second = _read(options.first), _read(options.second)
    common = sorted(set(first) & set(second))
    if not common:
        raise ConfigError(
            f"no step is in both logs: {options.first} has steps {min(first)} to {max(first)}, "
            f"{options.second} has steps {min(second)} to {max(second)}"
        )
    for step in common:
        if different := _differences(first[step], second[step]):
            print(
                f"step {step} is the first that differs, in {len(different)} of {len(first[step])}:"
            )
            for name in different[:_SHOWN]:
                one, other = (digests[step].get(name, "missing") for digests in (first, second))
                print(f"  {name}: {one} and {other}")
            if len(different) > _SHOWN:
                print(f"  and {len(different) - _SHOWN} more")
            return 1
    print(f"no difference in {len(common)} steps, {common[0]} to {common[-1]}")
    return 0


def _read(path: pathlib.Path) -> dict[int, _Digests]:
    """The digests in a log, by step. Lines may have something in front, such as the rank."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found: dict[int, _Digests] = {}
    for line in text.splitlines():
        _, marker, content = line.partition(_LINE)
        if not marker:
            continue
        try:
            entry = json.loads(content)
            found[int(entry["step"])] = entry["digests"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path} has a line of digests that was cut off: {line[:60]}"
            ) from None
    if not found:
        raise ConfigError(f"{path} has no lines of digests: print(training.digest()) in every step")
    return found


def _differences(one: _Digests, other: _Digests) -> list[str]:
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]
