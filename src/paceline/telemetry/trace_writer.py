"""The trace of one rank: a ring of spans in a mapped file, bounded in size.

    DIR/rank-00003.trace   a header of 4096 bytes, then records of six 8-byte words, the oldest
                           overwritten first
    DIR/rank-00003.json    metadata: the host, the script, the parameters of each bucket, optimizers
    DIR/rank-00003.1.*     the same of the process that has taken the rank's place in an elastic job

The file is mapped, so every record that was written is in it, however the rank dies.
`paceline.diagnostics.trace_reader` reads it.
"""

from __future__ import annotations

import enum
import itertools
import json
import mmap
import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from paceline._linux import boot_id
from paceline.telemetry.status_page import Phase, script_name
from paceline.telemetry.variables import RUN_ID

__all__ = [
    "Kind",
    "RECORD_WORDS",
    "TRACE_CAPACITY",
    "TRACE_HEADER",
    "TRACE_HEADER_BYTES",
    "TRACE_MAGIC",
    "TraceWriter",
]

TRACE_CAPACITY = 1 << 17  # spans a rank keeps: 6 MiB, some ten thousand steps
TRACE_MAGIC = 0x7061_6365_7472_0001
TRACE_HEADER_BYTES = 4096
# magic, rank, world, pid, capacity, written, wall clock - monotonic clock, started, ended, boot
TRACE_HEADER = struct.Struct("<10q")
_WRITTEN, _ENDED = 5, 8
RECORD_WORDS = 6
_RECORD_BYTES = RECORD_WORDS * 8
_write_record = struct.Struct(f"<{RECORD_WORDS}q").pack_into


class Kind(enum.IntEnum):
    """What a record is; numbers below 32 are phases."""

    # From a bucket's first gradient to its hand-over: detail is the bucket, extra its reducer.
    BUCKET_FILL = 32
    # From the hand-over to the average; detail and extra as above.
    BUCKET_FLIGHT = 33
    # A wait: detail is the group, extra the number of the call.
    SYNC_POINT = 34
    # What the script reported: end is the number of samples, detail the loss as bits of a double.
    SCALARS = 35


class TraceWriter:
    """Records spans. One `add` is one write of 48 bytes."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        world: int,
        capacity: int = TRACE_CAPACITY,
        script: str | None = None,
    ) -> None:
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        job = os.environ.get(RUN_ID, "")
        self.path = _path_of(folder, rank, job)
        size = TRACE_HEADER_BYTES + capacity * _RECORD_BYTES
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, size)  # sparse: it takes up room as it fills
            self._mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._memory = memoryview(self._mapping)
        self._words = self._memory.cast("q")
        self._capacity = capacity
        self._count = 0
        self._buckets: dict[str, list[dict[str, str | int]]] = {}
        self._optimizers: list[Mapping[str, object]] = []
        self._metadata = {
            "job": job,
            "host": socket.gethostname(),
            "buckets": self._buckets,
            "optimizers": self._optimizers,
            "rank": rank,
            "world": world,
            "script": script_name() if script is None else script,
        }
        self._write_header(rank, world)
        self._write_metadata()

    def _write_header(self, rank: int, world: int) -> None:
        now = time.monotonic_ns()
        offset = time.time_ns() - now
        facts = (TRACE_MAGIC, rank, world, os.getpid(), self._capacity, 0, offset, now, 0)
        TRACE_HEADER.pack_into(self._memory, 0, *facts, _boot_number())

    def _write_metadata(self) -> None:
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(self._metadata))
        os.replace(temporary, self.path.with_suffix(".json"))

    def add(
        self, kind: int, start_ns: int, end_ns: int, step: int, detail: int = -1, extra: int = -1
    ) -> None:
        count = self._count
        at = TRACE_HEADER_BYTES + (count % self._capacity) * _RECORD_BYTES
        _write_record(self._memory, at, kind, start_ns, end_ns, step, detail, extra)
        self._count = self._words[_WRITTEN] = count + 1

    def add_scalars(self, step: int, loss: float, samples: int) -> None:
        """Record what the script reports about a step."""
        (bits,) = struct.unpack("<q", struct.pack("<d", loss))
        self.add(Kind.SCALARS, time.monotonic_ns(), samples, step, bits)

    def set_buckets(self, reducer: int, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Write down which parameters the buckets of a reducer hold, and how many bytes."""
        self._buckets[str(reducer)] = [
            {"names": bucket_names, "bytes": size}
            for bucket_names, size in zip(names, sizes, strict=True)
        ]
        self._write_metadata()

    def add_optimizer(self, facts: Mapping[str, object]) -> None:
        """Write down what is known of an optimizer that this rank steps."""
        self._optimizers.append(facts)
        self._write_metadata()

    def close(self) -> None:
        self._words[_ENDED] = time.monotonic_ns()
        self._words.release()
        self._memory.release()
        self._mapping.close()


def _path_of(folder: pathlib.Path, rank: int, job: str) -> pathlib.Path:
    """The file of a rank; one more if this process has taken the place of another in its job."""
    path = folder / f"rank-{rank:05d}.trace"
    for number in itertools.count(1):
        if not job or _job_of(path) != job or _pid_of(path) == os.getpid():
            break
        path = folder / f"rank-{rank:05d}.{number}.trace"
    return path


def _job_of(trace: pathlib.Path) -> str | None:
    try:
        job: str | None = json.loads(trace.with_suffix(".json").read_text()).get("job")
    except (OSError, ValueError):
        return None
    return job


def _pid_of(trace: pathlib.Path) -> int | None:
    try:
        with trace.open("rb") as file:
            return int(TRACE_HEADER.unpack(file.read(TRACE_HEADER.size))[3])
    except (OSError, struct.error):
        return None


def _boot_number() -> int:
    """Equal for processes that share a monotonic clock."""
    return int(boot_id().replace("-", "")[:15], 16)


assert max(Phase) < min(Kind)
