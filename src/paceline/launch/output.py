"""Shows the ranks' output: whole lines, each with its rank before it, and a copy per rank in a
directory.
"""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.launch.line_prefix import LinePrefix

__all__ = ["Lines", "Output", "TAIL_LINES"]

TAIL_LINES = 30
_LONGEST_LINE = 1 << 20


class Lines:
    """Cuts a byte stream into lines. Progress bars redraw a line with carriage returns: only its
    last state counts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that became complete, without their ends."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        elif b"\r" in self._rest[:-1]:
            # What a later carriage return overwrites need not be kept.
            self._rest = self._rest[self._rest.rindex(b"\r", 0, -1) + 1 :]
        return [_last_state(line) for line in whole]

    def end(self) -> list[bytes]:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Output:
    """Writes lines of ranks to `write(stream, bytes)`, stream 1 or 2."""

    def __init__(
        self,
        ranks: int,
        write: Callable[[int, bytes], None],
        *,
        first_rank: int = 0,
        colour: bool = False,
        prefix: str | None = None,
        shown: frozenset[int] | None = None,
        log_dir: pathlib.Path | None = None,
        has_room: Callable[[int], bool] = lambda stream: True,
    ) -> None:
        self._write = write
        self.has_room = has_room  # whether more bytes of a stream are welcome now
        self._shown = shown
        self._first_rank = first_rank
        width = len(str(first_rank + ranks - 1))
        self._prefix = LinePrefix(prefix, width=width, colour=colour)
        self._generation = 0
        self._lines = {(rank, stream): Lines() for rank in range(ranks) for stream in (1, 2)}
        self.tails = [collections.deque[str](maxlen=TAIL_LINES) for _ in range(ranks)]
        self._logs = (
            {rank: _open_log(log_dir, first_rank + rank) for rank in range(ranks)}
            if log_dir
            else {}
        )

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Bytes that local rank `rank` wrote."""
        self._emit(rank, stream, self._lines[rank, stream].feed(data))
        self._log(rank, data)

    def end(self, rank: int) -> None:
        """A rank's output is complete."""
        for stream in (1, 2):
            self._emit(rank, stream, self._lines[rank, stream].end())

    def number_ranks_from(self, first_rank: int) -> None:
        """Local rank 0 turned out to be this one of the job."""
        self._first_rank = first_rank

    def begin_generation(self, number: int) -> None:
        """Lines that follow are shown in this generation of an elastic job."""
        self._generation = number

    def report(self, rank: int, text: str) -> None:
        """Lines of the launcher's own about a rank, in its log as well."""
        self._emit(rank, 2, text.encode(errors="replace").splitlines(), always=True)
        self._log(rank, text.encode(errors="replace"))

    def report_job(self, text: str) -> None:
        """Lines of the launcher's own about the whole job."""
        self._write(2, f"{text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            os.close(log)
        self._logs = {}

    def _log(self, rank: int, data: bytes) -> None:
        log = self._logs.get(rank)
        if log is None:
            return
        try:
            _write_all(log, data)
        except OSError as error:
            # The disk is full: no reason to end the job.
            del self._logs[rank]
            os.close(log)
            name = f"rank-{self._first_rank + rank}.log"
            self.report_job(f"paceline: {name} is not written any more: {error.strerror}")

    def _emit(self, rank: int, stream: int, lines: list[bytes], *, always: bool = False) -> None:
        if not lines:
            return
        if stream == 2 and not always:
            self.tails[rank].extend(line.decode(errors="replace") for line in lines)
        if always or self._shown is None or rank in self._shown:
            prefix = self._prefix.render(self._first_rank + rank, rank, self._generation)
            self._write(stream, b"".join(prefix + line + b"\n" for line in lines))


def _open_log(directory: pathlib.Path, rank: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory / f"rank-{rank}.log", flags, 0o644)
    except OSError as error:
        raise ConfigError(
            f"--log-dir should be a directory that can be written, but {error.filename!r} cannot: "
            f"{error.strerror}"
        ) from error


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
