"""Reads the traces that the ranks of a run have written: see `paceline.telemetry.trace_writer`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import struct

from paceline.diagnostics.optimizer_facts import OptimizerFacts
from paceline.errors import ConfigError
from paceline.telemetry.trace_writer import (
    RECORD_WORDS,
    TRACE_HEADER,
    TRACE_HEADER_BYTES,
    TRACE_MAGIC,
)

__all__ = ["BucketNames", "RankTrace", "Span", "read_traces"]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One record. What `detail` and `extra` mean depends on the kind."""

    kind: int
    start_ns: int
    end_ns: int
    step: int
    detail: int
    extra: int

    @property
    def loss(self) -> float:
        """The loss in a record of scalars."""
        (value,) = struct.unpack("<d", struct.pack("<q", self.detail))
        return float(value)


@dataclasses.dataclass(frozen=True)
class BucketNames:
    """The parameters in a bucket and their bytes."""

    names: str = ""
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Times are of its host's monotonic clock; `wall_offset_ns` makes them wall-clock times. Ranks
    with the same `boot` share a clock. `buckets` has the bucket names of each reducer; `optimizers`
    those that have stepped. `job` is "" for a rank that no launcher has started.
    """

    job: str

    rank: int
    world: int
    pid: int
    host: str
    script: str
    boot: int
    started_ns: int
    spans: tuple[Span, ...]
    dropped: int
    wall_offset_ns: int
    buckets: dict[int, list[BucketNames]]
    optimizers: tuple[OptimizerFacts, ...]


def read_traces(directory: str | os.PathLike[str]) -> list[RankTrace]:
    """All ranks' traces in a directory, in rank order."""
    folder = pathlib.Path(directory)
    paths = sorted(folder.glob("rank-*.trace"))
    if not paths:
        raise ConfigError(
            f"no trace in {folder}: record one with `paceline run --trace {folder} train.py` "
            "or paceline.trace(...)"
        )
    traces = sorted(map(_read_trace, paths), key=lambda trace: (trace.rank, trace.started_ns))
    # A directory that was used before may hold the files of ranks that the latest run did not have.
    newest = max(traces, key=lambda trace: trace.started_ns + trace.wall_offset_ns)
    latest = [each for each in traces if (each.job, each.world) == (newest.job, newest.world)]
    return [_joined(list(lives)) for _, lives in itertools.groupby(latest, lambda each: each.rank)]


def _joined(lives: list[RankTrace]) -> RankTrace:
    """The processes that have had one rank, one after the other, as one trace."""
    spans = tuple(span for life in lives for span in life.spans)
    dropped = sum(life.dropped for life in lives)
    return dataclasses.replace(lives[-1], spans=spans, dropped=dropped)


def _read_trace(path: pathlib.Path) -> RankTrace:
    data = path.read_bytes()
    header = TRACE_HEADER.unpack_from(data) if len(data) >= TRACE_HEADER_BYTES else (0,) * 10
    magic, rank, world, pid, capacity, written, offset, started, _, boot = header
    if magic != TRACE_MAGIC:
        raise ConfigError(f"{path} is not a trace of this version of Paceline")
    metadata = _read_metadata(path.with_suffix(".json"))
    return RankTrace(
        job=metadata.job,
        rank=rank,
        world=world,
        pid=pid,
        host=metadata.host,
        script=metadata.script,
        boot=boot,
        started_ns=started,
        spans=_spans(data, capacity, written),
        dropped=max(0, written - capacity),
        wall_offset_ns=offset,
        buckets=metadata.buckets,
        optimizers=metadata.optimizers,
    )


def _spans(data: bytes, capacity: int, written: int) -> tuple[Span, ...]:
    """The records of the ring, oldest first."""
    end = TRACE_HEADER_BYTES + capacity * RECORD_WORDS * 8
    words = memoryview(data)[TRACE_HEADER_BYTES:end].cast("q")
    spans = []
    for index in range(max(0, written - capacity), written):
        at = index % capacity * RECORD_WORDS
        spans.append(Span(*words[at : at + RECORD_WORDS].tolist()))
    return tuple(spans)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """What is written beside the spans; empty if the rank died before it wrote them."""

    job: str = ""
    host: str = ""
    script: str = ""
    buckets: dict[int, list[BucketNames]] = dataclasses.field(default_factory=dict)
    optimizers: tuple[OptimizerFacts, ...] = ()


def _read_metadata(path: pathlib.Path) -> _Metadata:
    with contextlib.suppress(OSError, ValueError):
        metadata = json.loads(path.read_text())
        buckets = {
            int(reducer): [BucketNames(bucket["names"], bucket["bytes"]) for bucket in planned]
            for reducer, planned in metadata.get("buckets", {}).items()
        }
        optimizers = tuple(map(OptimizerFacts.load, metadata.get("optimizers", ())))
        job, host, script = (metadata.get(name, "") for name in ("job", "host", "script"))
        return _Metadata(job, host, script, buckets, optimizers)
    return _Metadata()
