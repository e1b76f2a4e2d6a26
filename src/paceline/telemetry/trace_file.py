"""The trace of one rank: a ring of spans in a file it has mapped, bounded in size, whole after any
kind of death.

DIR/rank-00003.trace   4096 bytes of header, then records of six 8-byte words, the oldest overwritten first
DIR/rank-00003.json    names: the groups and the buckets that the records number
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import mmap
import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.telemetry.status_page import Phase, script_name

__all__ = ["CAPACITY", "Kind", "RankTrace", "Span", "TraceWriter", "read_traces"]

CAPACITY = 1 << 17  # spans a rank keeps: 6 MiB, some ten thousand steps
_MAGIC = 0x7061_6365_7472_0001
_HEADER_BYTES = 4096
_WORDS = 6
_RECORD_BYTES = _WORDS * 8
_write_record = struct.Struct(f"<{_WORDS}q").pack_into
_HEADER = struct.Struct(
    "<10q"
)  # magic, rank, world, pid, capacity, written, clock offset, started, ended, boot


class Kind(enum.IntEnum):
    """What a record is; numbers below 32 are phases."""

    BUCKET_FILL = 32  # first gradient to the hand-over: detail is the bucket, extra its reducer
    BUCKET_FLIGHT = 33  # hand-over to the average
    MEETING = 34  # a wait: detail is the group, extra the number of the call
    SCALARS = 35  # end is the number of samples, detail the loss as bits of a double


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One record."""

    kind: int
    start_ns: int
    end_ns: int
    step: int
    detail: int
    extra: int


class TraceWriter:
    """Records spans. One `add` is one write of 48 bytes."""

    def __init__(
        self, directory: str | os.PathLike[str], rank: int, world: int, capacity: int = CAPACITY
    ) -> None:
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05d}.trace"
        size = _HEADER_BYTES + capacity * _WORDS * 8
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, size)  # sparse: takes room as it fills
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("q")
        self._capacity = capacity
        self._count = 0
        self._names: dict[str, Any] = {"host": socket.gethostname(), "buckets": {}}
        offset = time.time_ns() - time.monotonic_ns()
        started = time.monotonic_ns()
        _HEADER.pack_into(
            self._map,
            0,
            _MAGIC,
            rank,
            world,
            os.getpid(),
            capacity,
            0,
            offset,
            started,
            0,
            _boot_number(),
        )
        self.name(rank=rank, world=world, script=script_name())

    def add(
        self, kind: int, start_ns: int, end_ns: int, step: int, detail: int = -1, extra: int = -1
    ) -> None:
        count = self._count
        at = _HEADER_BYTES + (count % self._capacity) * _RECORD_BYTES
        _write_record(self._memory, at, kind, start_ns, end_ns, step, detail, extra)
        self._count = self._words[5] = count + 1  # the header's sixth word

    def scalars(self, step: int, loss: float, samples: int) -> None:
        """What the script tells about a step."""
        (bits,) = struct.unpack("<q", struct.pack("<d", loss))
        self.add(Kind.SCALARS, time.monotonic_ns(), samples, step, bits)

    def name(self, **facts: Any) -> None:
        """Facts for the file of names, over those of before; mappings are joined."""
        for key, value in facts.items():
            if isinstance(value, Mapping):
                self._names.setdefault(key, {}).update(value)
            else:
                self._names[key] = value
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(self._names))
        os.replace(temporary, self.path.with_suffix(".json"))

    def close(self) -> None:
        self._words[8] = time.monotonic_ns()
        self._words.release()
        self._memory.release()
        self._map.close()


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. Times are its host's monotonic clock; `wall_offset_ns` makes them
    wall-clock times.
    """

    rank: int
    world: int
    pid: int
    host: str
    boot: int
    spans: tuple[Span, ...]
    dropped: int
    wall_offset_ns: int
    names: Mapping[str, Any]


def read_traces(directory: str | os.PathLike[str]) -> list[RankTrace]:
    """All ranks' traces in a directory, in rank order."""
    folder = pathlib.Path(directory)
    paths = sorted(folder.glob("rank-*.trace"))
    if not paths:
        raise ConfigError(
            f"no trace in {folder}: record one with `paceline run --trace {folder} train.py` or paceline.trace(...)"
        )
    found = sorted((_read(path) for path in paths), key=lambda one: one.rank)
    # A directory that was used before may hold the files of ranks that the latest run did not have.
    return [one for one in found if one.world == found[0].world]


def _read(path: pathlib.Path) -> RankTrace:
    data = path.read_bytes()
    header = _HEADER.unpack_from(data) if len(data) >= _HEADER_BYTES else (0,) * 10
    magic, rank, world, pid, capacity, written, offset, _, _, boot = header
    if magic != _MAGIC:
        raise ConfigError(f"{path} is not a trace of this version of Paceline")
    kept = min(written, capacity)
    first = written % capacity if written > capacity else 0
    words = memoryview(data)[_HEADER_BYTES : _HEADER_BYTES + capacity * _WORDS * 8].cast("q")
    spans = []
    for index in range(kept):
        at = (first + index) % capacity * _WORDS
        spans.append(Span(*words[at : at + _WORDS].tolist()))
    names: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        names = json.loads(path.with_suffix(".json").read_text())
    return RankTrace(
        rank, world, pid, names.get("host", ""), boot, tuple(spans), written - kept, offset, names
    )


def _boot_number() -> int:
    """Equal for processes that share a clock."""
    try:
        text = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        return int(text.replace("-", "")[:15], 16)
    except OSError:
        return 0


assert max(Phase) < min(Kind)
