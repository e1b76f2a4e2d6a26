"""Turns a timeline into one self-contained HTML page."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from paceline.diagnostics.chrome_trace import write_chrome_trace
from paceline.diagnostics.stragglers import WaitAttribution
from paceline.diagnostics.timeline import Timeline, read_timeline
from paceline.diagnostics.trace_reader import Span
from paceline.telemetry.status_page import PHASES, Phase
from paceline.telemetry.trace_writer import Kind

__all__ = ["render_page", "write_report"]

_TEMPLATE = pathlib.Path(__file__).with_name("report_page.html")
_MOST_SPANS = 400_000  # a browser draws that many without effort
_MOST_POINTS = 2000

_Curve: TypeAlias = list[tuple[int, float]]


def write_report(
    directory: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Write the page and the trace JSON of a directory of traces.

    Args:
        directory: what `paceline run --trace` or `paceline.trace` wrote.
        path: of the page; `timeline.html` in the directory by default.

    Returns:
        The path of the page.

    Example:
        ```python
        with paceline.trace("runs/today"):
            train()
        page = paceline.diagnostics.write_report("runs/today")
        ```
    """
    timeline = read_timeline(directory)
    target = pathlib.Path(directory) / "timeline.html" if path is None else pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(timeline, target.with_suffix(".json"))
    target.write_text(render_page(timeline), encoding="utf-8")
    return target


def render_page(timeline: Timeline) -> str:
    """The page of a timeline, its data embedded as JSON."""
    data = json.dumps(_data(timeline), separators=(",", ":"), allow_nan=False)
    # Inside a script element only this sequence ends it.
    return _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data.replace("</", "<\\/"))


def _data(timeline: Timeline) -> dict[str, object]:
    waits = timeline.waits()
    throughput, note = _throughput(timeline)
    used = {
        Phase(span.kind)
        for spans in timeline.spans.values()
        for span in spans
        if span.kind < Kind.BUCKET_FILL
    }
    return {
        "facts": _facts(timeline),
        "script": timeline.traces[0].script,
        "summary": timeline.summary(),
        "tiles": _tiles(timeline),
        "phases": [phase.name.lower() for phase in PHASES],
        "used": [phase.name.lower() for phase in PHASES if phase in used | {Phase.SYNCHRONISE}],
        "duration": timeline.duration_ns,
        "ranks": _ranks(timeline),
        "waited": [
            [waits.waited_by_ns.get((waiting, late), 0) for late in timeline.ranks]
            for waiting in timeline.ranks
        ],
        "waits": _waits(waits),
        "buckets": _buckets(timeline),
        "communication": timeline.communication(),
        "names": {
            reducer: [bucket.names for bucket in planned]
            for reducer, planned in timeline.traces[0].buckets.items()
        },
        "changes": [
            [change.when_ns, change.generation, change.ranks, change.reason, change.still_ns]
            for change in timeline.changes
        ],
        "throughput": throughput,
        "throughput_note": note,
        "loss": _thinned(
            [
                (point.when_ns, point.loss)
                for point in timeline.scalars()
                if math.isfinite(point.loss)
            ]
        ),
    }


def _facts(timeline: Timeline) -> str:
    first = timeline.traces[0]
    hosts = sorted({trace.host for trace in timeline.traces})
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    missing = "" if len(timeline.ranks) == first.world else f" of {first.world}"
    ranks = f"{len(timeline.ranks)}{missing} rank{'' if first.world == 1 else 's'}"
    return f"{first.script}  {ranks} on {where}"


def _tiles(timeline: Timeline) -> list[tuple[str, str]]:
    hidden, exposed = timeline.communication()
    spent = [timeline.phase_ns(rank) for rank in timeline.ranks]
    whole = sum(sum(by_phase.values()) for by_phase in spent) or 1
    single = timeline.traces[0].world == 1
    tiles = [(f"{timeline.steps:,}", "steps" if single else "synchronised steps")]
    if (step := _median_step_ns(timeline)) is not None:
        tiles.append((f"{step / 1e6:.2f} ms", "median step"))
    points, note = _throughput(timeline)
    if points:
        unit = "steps per second" if note else "samples per second"
        tiles.append((f"{statistics.median(value for _, value in points):,.0f}", unit))
    if not single:
        tiles.append((f"{exposed / whole:.1%}", "of the time waiting for others"))
    if hidden + exposed:
        tiles.append((f"{hidden / (hidden + exposed):.0%}", "of communication hidden"))
    return tiles


def _median_step_ns(timeline: Timeline) -> float | None:
    gaps = [
        after - before
        for before, after in itertools.pairwise(timeline.step_ends_ns(timeline.ranks[0]))
    ]
    return statistics.median(gaps) if gaps else None


def _ranks(timeline: Timeline) -> list[dict[str, object]]:
    most = _MOST_SPANS // max(1, len(timeline.ranks))
    last = _last_to_arrive(timeline)
    rows: list[dict[str, object]] = []
    for rank in timeline.ranks:
        spans = timeline.spans[rank]
        kept = [
            span for span in spans if span.kind < Kind.BUCKET_FILL or span.kind == Kind.SYNC_POINT
        ][-most:]
        main = [_packed(span, last) for span in sorted(kept, key=lambda span: span.start_ns)]
        rows.append(
            {
                "rank": rank,
                "main": main,
                "thin": _flights(spans)[-most:],
                "phase_ns": [timeline.phase_ns(rank).get(phase, 0) for phase in PHASES],
            }
        )
    return rows


def _last_to_arrive(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Which rank arrived last at each sync point."""
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in timeline.ranks:
        for span in timeline.spans[rank]:
            if span.kind == Kind.SYNC_POINT:
                key = (span.detail, span.extra)
                latest[key] = max(latest.get(key, (-1, -1)), (span.start_ns, rank))
    return {key: rank for key, (_, rank) in latest.items()}


def _packed(span: Span, last: dict[tuple[int, int], int]) -> list[int]:
    row = [span.kind, span.start_ns, span.end_ns, span.step, 0, 0]
    return (
        [*row, 0, last.get((span.detail, span.extra), -1)] if span.kind == Kind.SYNC_POINT else row
    )


def _flights(spans: Sequence[Span]) -> list[list[int]]:
    """The thin line below a rank: its buckets in flight one after another, each cut in two where
    the rank's own work ended.
    """
    arrivals = {span.step: span.start_ns for span in spans if span.kind == Kind.SYNC_POINT}
    rows: list[list[int]] = []
    shown_until = 0
    flights = [span for span in spans if span.kind == Kind.BUCKET_FLIGHT]
    for span in sorted(flights, key=lambda span: span.start_ns):
        cut = min(max(arrivals.get(span.step, span.end_ns), span.start_ns), span.end_ns)
        for start, end, exposed in ((span.start_ns, cut, 0), (cut, span.end_ns, 1)):
            visible = max(start, shown_until)
            if end > visible:
                rows.append([span.kind, visible, end, span.step, span.detail, span.extra, exposed])
                shown_until = end
    return rows


def _waits(waits: WaitAttribution) -> list[dict[str, object]]:
    """What the others waited for, longest first."""
    longest = sorted(waits.waited_ns.items(), key=lambda entry: -entry[1])
    rows: list[dict[str, object]] = [
        {"rank": rank, "phase": phase.describe(), "ns": ns, "share": waits.share(rank, phase)}
        for (rank, phase), ns in longest
        if waits.share(rank, phase) >= 0.005
    ]
    return rows[:8]


def _buckets(timeline: Timeline) -> list[dict[str, object]]:
    return [
        {
            "bucket": row.bucket,
            "names": row.names,
            "bytes": row.nbytes,
            "count": row.count,
            "fill": row.fill_ns,
            "hidden": row.hidden_ns,
            "waited": row.waited_ns,
            "reduced": row.reduced_ns,
            "late": row.late_rank,
        }
        for row in timeline.buckets()
    ]


def _throughput(timeline: Timeline) -> tuple[_Curve, str]:
    """Samples per second if the script reported samples, else steps per second; with a note."""
    points = timeline.scalars()
    if len(points) > 2:
        rates = [
            (after.when_ns, after.samples / max(1e-9, (after.when_ns - before.when_ns) / 1e9))
            for before, after in itertools.pairwise(points)
        ]
        return _thinned(rates), ""
    ends = timeline.step_ends_ns(timeline.ranks[0])
    steps = [(after, 1e9 / max(1, after - before)) for before, after in itertools.pairwise(ends)]
    return _thinned(steps), "Steps per second: the script reported no samples."


def _thinned(points: _Curve) -> _Curve:
    """At most as many points as a curve can show: means of neighbours."""
    every = -(-len(points) // _MOST_POINTS)
    if every <= 1:
        return points
    groups = [points[at : at + every] for at in range(0, len(points), every)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]
