"""Turns a timeline into one HTML page that needs nothing but itself."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from paceline.diagnostics.stragglers import WaitAttribution
from paceline.diagnostics.timeline import Timeline, write_chrome_trace
from paceline.telemetry.status_page import PHASES, Phase
from paceline.telemetry.trace_file import Kind, Span, read_traces

__all__ = ["page", "write_report"]

_TEMPLATE = pathlib.Path(__file__).with_name("report_page.html")
_MOST_SPANS = 400_000  # in a page: a browser draws that many without effort
_MOST_POINTS = 2000


def write_report(
    directory: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> pathlib.Path:
    """Make the page and the trace JSON of a directory of traces; returns where the page is."""
    timeline = Timeline(read_traces(directory))
    target = pathlib.Path(directory) / "timeline.html" if path is None else pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_chrome_trace(timeline, target.with_suffix(".json"))
    target.write_text(page(timeline), encoding="utf-8")
    return target


def page(timeline: Timeline) -> str:
    """The page of a timeline."""
    data = json.dumps(_data(timeline), separators=(",", ":"), allow_nan=False)
    # Inside a script element only this sequence ends it.
    return _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data.replace("</", "<\\/"))


def _data(timeline: Timeline) -> dict[str, Any]:
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
        "script": timeline.traces[0].names.get("script", ""),
        "words": timeline.words(),
        "tiles": _tiles(timeline),
        "phases": [phase.name.lower() for phase in PHASES],
        "used": [phase.name.lower() for phase in PHASES if phase in used | {Phase.SYNCHRONISE}],
        "duration": timeline.duration_ns,
        "ranks": _ranks(timeline),
        "waited": [
            [waits.waited_by_ns.get((a, b), 0) for b in timeline.ranks] for a in timeline.ranks
        ],
        "waits": _charges(waits),
        "buckets": _buckets(timeline),
        "communication": timeline.communication(),
        "names": {
            reducer: [one["names"] for one in planned]
            for reducer, planned in timeline.traces[0].names.get("buckets", {}).items()
        },
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
    return f"{first.names.get('script', '')}  {ranks} on {where}"


def _tiles(timeline: Timeline) -> list[tuple[str, str]]:
    hidden, exposed = timeline.communication()
    spent = [timeline.phase_ns(rank) for rank in timeline.ranks]
    whole = sum(sum(one.values()) for one in spent) or 1
    alone = timeline.traces[0].world == 1
    tiles = [(f"{timeline.steps:,}", "steps" if alone else "synchronised steps")]
    if (step := _median_step_ns(timeline)) is not None:
        tiles.append((f"{step / 1e6:.2f} ms", "median step"))
    points, _ = _throughput(timeline)
    if points:
        tiles.append(
            (f"{statistics.median(value for _, value in points):,.0f}", "samples per second")
        )
    if not alone:
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


def _ranks(timeline: Timeline) -> list[dict[str, Any]]:
    most = _MOST_SPANS // max(1, len(timeline.ranks))
    last = _last_to_come(timeline)
    found = []
    for rank in timeline.ranks:
        spans = timeline.spans[rank]
        kept = [
            span for span in spans if span.kind < Kind.BUCKET_FILL or span.kind == Kind.MEETING
        ][-most:]
        main = [_packed(span, last) for span in sorted(kept, key=lambda span: span.start_ns)]
        found.append(
            {
                "rank": rank,
                "main": main,
                "thin": _flights(spans)[-most:],
                "phase_ns": [timeline.phase_ns(rank).get(phase, 0) for phase in PHASES],
            }
        )
    return found


def _last_to_come(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Which rank came last to each sync_point."""
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in timeline.ranks:
        for span in timeline.spans[rank]:
            if span.kind == Kind.MEETING:
                key = (span.detail, span.extra)
                latest[key] = max(latest.get(key, (-1, -1)), (span.start_ns, rank))
    return {key: rank for key, (_, rank) in latest.items()}


def _packed(span: Span, last: dict[tuple[int, int], int]) -> list[int]:
    row = [span.kind, span.start_ns, span.end_ns, span.step, 0, 0]
    return [*row, 0, last.get((span.detail, span.extra), -1)] if span.kind == Kind.MEETING else row


def _flights(spans: Sequence[Span]) -> list[list[int]]:
    """The line below a rank: buckets under way, each cut where the rank's own work ended. One after
    another.
    """
    arrivals = {span.step: span.start_ns for span in spans if span.kind == Kind.MEETING}
    rows: list[list[int]] = []
    shown_until = 0
    for span in sorted(
        (one for one in spans if one.kind == Kind.BUCKET_FLIGHT), key=lambda one: one.start_ns
    ):
        cut = min(max(arrivals.get(span.step, span.end_ns), span.start_ns), span.end_ns)
        for start, end, exposed in ((span.start_ns, cut, 0), (cut, span.end_ns, 1)):
            visible = max(start, shown_until)
            if end > visible:
                rows.append([span.kind, visible, end, span.step, span.detail, span.extra, exposed])
                shown_until = end
    return rows


def _charges(waits: WaitAttribution) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"rank": rank, "phase": phase.words, "ns": ns, "share": waits.share(rank, phase)}
        for (rank, phase), ns in waits.waited_ns.items()
        if waits.share(rank, phase) >= 0.005
    ]
    return sorted(rows, key=lambda row: -row["ns"])[:8]


def _buckets(timeline: Timeline) -> list[dict[str, Any]]:
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


def _throughput(timeline: Timeline) -> tuple[list[tuple[int, float]], str]:
    """Samples per second where the script told its samples, else steps per second."""
    points = timeline.scalars()
    if len(points) > 2:
        rates = [
            (after.when_ns, after.samples / max(1e-9, (after.when_ns - before.when_ns) / 1e9))
            for before, after in itertools.pairwise(points)
        ]
        return _thinned(rates), ""
    ends = timeline.step_ends_ns(timeline.ranks[0])
    steps = [(b, 1e9 / max(1, b - a)) for a, b in itertools.pairwise(ends)]
    return _thinned(steps), "Steps per second: the script told no samples."


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points as a curve can show: means of neighbours."""
    every = -(-len(points) // _MOST_POINTS)
    if every <= 1:
        return points
    groups = [points[at : at + every] for at in range(0, len(points), every)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]
