"""What is shown before each line of a rank: by default its number in brackets, else a template of
the user's (`--log-prefix`).
"""

from __future__ import annotations

import socket
import string
import time

from paceline.errors import ConfigError

__all__ = ["FIELDS", "LinePrefix"]

FIELDS = ("rank", "local_rank", "host", "time", "generation")
_COLOURS = (36, 33, 32, 35, 34, 31)  # of ranks, repeated as needed


class LinePrefix:
    """Makes the prefix of a line.

    Args:
        template: with the names of `FIELDS` in braces, each with a format after a colon if it needs
            one; None for the rank in brackets.
        width: of the largest rank's number, for the default.
        colour: whether each rank has a colour.

    Raises:
        ConfigError: the template has other names, or cannot be used.
    """

    def __init__(
        self, template: str | None = None, *, width: int = 1, colour: bool = False
    ) -> None:
        # The blank after the default has no colour, so that it does not look like part of it.
        self._template, self._end = (
            (f"[{{rank:>{width}}}]", " ") if template is None else (_checked(template), "")
        )
        self._colour = colour
        self._host = socket.gethostname()

    def render(self, rank: int, local_rank: int, generation: int) -> bytes:
        """The prefix of a line that is shown now."""
        text = _fill(self._template, rank, local_rank, self._host, generation)
        if self._colour and text:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return f"{text}{self._end}".encode(errors="replace")


def _fill(template: str, rank: int, local_rank: int, host: str, generation: int) -> str:
    return template.format(
        rank=rank,
        local_rank=local_rank,
        host=host,
        time=time.strftime("%H:%M:%S"),
        generation=generation,
    )


def _checked(template: str) -> str:
    allowed = " ".join(f"{{{name}}}" for name in FIELDS)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = [name for name in names if name not in FIELDS]
        if unknown:
            raise ConfigError(
                f"--log-prefix {template!r} has the field {{{unknown[0]}}}, but may have only "
                f"{allowed}; a brace itself is written twice"
            )
        _fill(template, 0, 0, "host", 0)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"--log-prefix should be a template such as '[{{rank}}] ', with any of {allowed}, but "
            f"is {template!r} ({error})"
        ) from None
    return template
