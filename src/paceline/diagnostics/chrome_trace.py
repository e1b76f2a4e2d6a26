"""A timeline in the format of chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import TypeAlias

from paceline.diagnostics.timeline import Timeline
from paceline.diagnostics.trace_reader import Span
from paceline.telemetry.status_page import Phase
from paceline.telemetry.trace_writer import Kind

__all__ = ["chrome_trace", "write_chrome_trace"]

_Event: TypeAlias = dict[str, object]
_THREADS = ("phases", "bucket fill", "bucket in flight")


def chrome_trace(timeline: Timeline) -> Iterator[_Event]:
    """Events for chrome://tracing and ui.perfetto.dev: a process per rank, phases above buckets."""
    for trace in timeline.traces:
        rank = trace.rank
        name = f"rank {rank} (pid {trace.pid}, {trace.host})"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in enumerate(_THREADS):
            named = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": named}
        for span in timeline.spans[rank]:
            yield from _events(rank, span)


def _events(rank: int, span: Span) -> Iterator[_Event]:
    begin: _Event = {"ts": span.start_ns / 1e3, "pid": rank}
    if span.kind == Kind.SCALARS:
        loss = span.loss
        # JSON has no other numbers.
        if math.isfinite(loss):
            yield {"ph": "C", "name": "loss", **begin, "args": {"loss": loss}}
        return
    duration = (span.end_ns - span.start_ns) / 1e3
    complete: _Event = {"ph": "X", **begin, "dur": duration, "args": {"step": span.step}}
    if span.kind < Kind.BUCKET_FILL:
        yield {**complete, "name": Phase(span.kind).name.lower(), "tid": 0}
    elif span.kind == Kind.SYNC_POINT:
        yield {**complete, "name": "synchronise", "tid": 0}
    else:
        thread = 1 if span.kind == Kind.BUCKET_FILL else 2
        yield {**complete, "name": f"bucket {span.detail}", "tid": thread}


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the events of a timeline as JSON, one to a line."""
    with pathlib.Path(path).open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(chrome_trace(timeline)):
            text = json.dumps(event, separators=(",", ":"), allow_nan=False)
            file.write(f",\n{text}" if index else text)
        file.write("\n]}\n")
