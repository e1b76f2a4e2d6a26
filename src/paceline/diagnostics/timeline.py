"""All ranks' traces together: where the time went, what hid behind backward, who waited for whom."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
import statistics
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.diagnostics.stragglers import (
    Straggler,
    WaitAttribution,
    attribute_wait,
    find_straggler,
)
from paceline.telemetry.status_page import PHASES, Phase, SyncPoint
from paceline.telemetry.trace_file import Kind, RankTrace, Span

__all__ = ["BucketRow", "StepPoint", "Timeline", "chrome_trace", "write_chrome_trace"]

_STEP_PHASES = (
    Phase.LOADER,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.SYNCHRONISE,
    Phase.OPTIMIZER,
    Phase.OTHER,
)


@dataclasses.dataclass(frozen=True)
class BucketRow:
    """One bucket over the whole run: mean times in nanoseconds."""

    reducer: int
    bucket: int
    names: str
    nbytes: int
    count: int
    fill_ns: float
    hidden_ns: float  # in flight while backward went on
    waited_ns: float  # in flight after backward, before the last rank had handed it over
    reduced_ns: float  # the rest: the reduction itself, seen by the ranks
    late_rank: int  # which handed it over last most often


@dataclasses.dataclass(frozen=True)
class StepPoint:
    """What the script told about one step: when (ns since the start), loss, samples."""

    when_ns: int
    step: int
    loss: float
    samples: int


class Timeline:
    """Spans of every rank on one clock that starts at 0."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.traces = list(traces)
        one_clock = len({trace.boot for trace in traces}) == 1
        # Ranks of several hosts have only the wall clock in common.
        self._offsets = {trace.rank: 0 if one_clock else trace.wall_offset_ns for trace in traces}
        # How long imports took says nothing about the run.
        kept = {
            trace.rank: [span for span in trace.spans if span.kind != Phase.STARTING]
            for trace in traces
        }
        starts = [
            min(span.start_ns for span in spans) + self._offsets[rank]
            for rank, spans in kept.items()
            if spans
        ]
        self.origin_ns = min(starts, default=0)
        if any(trace.dropped for trace in traces):
            # Ranks that noted more remember less: begin where all of them do.
            self.origin_ns = max(starts, default=0)
            kept = {
                rank: [one for one in spans if self._from_origin(one, rank)]
                for rank, spans in kept.items()
            }
        self.spans = {
            rank: [self._moved(span, rank) for span in spans] for rank, spans in kept.items()
        }
        ends = [
            span.end_ns
            for spans in self.spans.values()
            for span in spans
            if span.kind != Kind.SCALARS
        ]
        self.duration_ns = max(ends, default=0)
        self.dropped = {trace.rank: trace.dropped for trace in traces}

    def _from_origin(self, span: Span, rank: int) -> bool:
        return span.start_ns + self._offsets[rank] >= self.origin_ns

    def _moved(self, span: Span, rank: int) -> Span:
        shift = self._offsets[rank] - self.origin_ns
        end = span.end_ns if span.kind == Kind.SCALARS else span.end_ns + shift
        return dataclasses.replace(span, start_ns=span.start_ns + shift, end_ns=end)

    @property
    def ranks(self) -> list[int]:
        return [trace.rank for trace in self.traces]

    # -- where the time went ---------------------------------------------------------------------------------------

    def phase_ns(self, rank: int) -> dict[Phase, int]:
        """How long a rank was in each phase, its start left out."""
        spent = dict.fromkeys(PHASES, 0)
        for span in self.spans[rank]:
            if span.kind < Kind.BUCKET_FILL:
                spent[Phase(span.kind)] += span.end_ns - span.start_ns
            elif span.kind == Kind.MEETING:
                spent[Phase.SYNCHRONISE] += span.end_ns - span.start_ns
        del spent[Phase.STARTING]
        return spent

    def sync_points(self, rank: int) -> list[SyncPoint]:
        """A rank's waits, each with how it spent the time since the one before."""
        spent = [0] * len(PHASES)
        found = []
        for span in sorted(
            self.spans[rank],
            key=lambda one: one.end_ns if one.kind != Kind.SCALARS else one.start_ns,
        ):
            if span.kind < Kind.BUCKET_FILL:
                spent[span.kind] += span.end_ns - span.start_ns
            elif span.kind == Kind.MEETING:
                found.append(
                    SyncPoint(span.detail, span.extra, span.start_ns, span.end_ns, tuple(spent))
                )
                spent = [0] * len(PHASES)
        return found

    def waits(self) -> WaitAttribution:
        return attribute_wait({rank: self.sync_points(rank) for rank in self.ranks})

    def straggler(self) -> Straggler | None:
        return find_straggler(self.waits(), len(self.ranks))

    def scalars(self) -> list[StepPoint]:
        """Loss and samples, from the first rank that told any."""
        for rank in self.ranks:
            found = [span for span in self.spans[rank] if span.kind == Kind.SCALARS]
            if found:
                return [
                    StepPoint(one.start_ns, one.step, _double(one.detail), one.end_ns)
                    for one in found
                ]
        return []

    @property
    def steps(self) -> int:
        """Synchronised ones; alone there is nothing to synchronise, and the optimizer's count."""
        synchronised = max(
            (span.step for spans in self.spans.values() for span in spans), default=0
        )
        return synchronised or max((len(self.step_ends_ns(rank)) for rank in self.ranks), default=0)

    def step_ends_ns(self, rank: int) -> list[int]:
        """When each step of a rank was complete: its last wait, or else its optimizer."""
        ends = {span.step: span.end_ns for span in self.spans[rank] if span.kind == Kind.MEETING}
        if ends:
            return sorted(ends.values())
        return [span.end_ns for span in self.spans[rank] if span.kind == Phase.OPTIMIZER]

    # -- buckets ---------------------------------------------------------------------------------------------------

    def buckets(self) -> list[BucketRow]:
        """Every bucket, the one that held the ranks up longest first."""
        gathered: dict[tuple[int, int], list[_Flight]] = collections.defaultdict(list)
        for flight in self._flights():
            gathered[flight.reducer, flight.bucket].append(flight)
        rows = [self._bucket_row(key, flights) for key, flights in gathered.items()]
        return sorted(rows, key=lambda row: row.waited_ns + row.reduced_ns, reverse=True)

    def _bucket_row(self, key: tuple[int, int], flights: list[_Flight]) -> BucketRow:
        reducer, bucket = key
        planned = self.traces[0].names.get("buckets", {}).get(str(reducer), [])
        named: dict[str, Any] = (
            planned[bucket] if bucket < len(planned) else {"names": "", "bytes": 0}
        )
        late = collections.Counter(flight.late_rank for flight in flights).most_common(1)[0][0]
        return BucketRow(
            reducer=reducer,
            bucket=bucket,
            names=named["names"],
            nbytes=named["bytes"],
            count=len(flights),
            fill_ns=statistics.fmean(flight.fill_ns for flight in flights),
            hidden_ns=statistics.fmean(flight.hidden_ns for flight in flights),
            waited_ns=statistics.fmean(flight.waited_ns for flight in flights),
            reduced_ns=statistics.fmean(flight.reduced_ns for flight in flights),
            late_rank=late,
        )

    def _flights(self) -> Iterator[_Flight]:
        launched: dict[tuple[int, int, int], dict[int, Span]] = collections.defaultdict(dict)
        filled: dict[tuple[int, int, int, int], int] = {}
        for rank in self.ranks:
            for span in self.spans[rank]:
                key = (span.step, span.extra, span.detail)
                if span.kind == Kind.BUCKET_FLIGHT:
                    launched[key][rank] = span
                elif span.kind == Kind.BUCKET_FILL:
                    filled[(rank, *key)] = span.end_ns - span.start_ns
        arrivals = {rank: _arrivals(self.spans[rank]) for rank in self.ranks}
        for (step, reducer, bucket), found in launched.items():
            last = max(found.values(), key=lambda span: span.start_ns)
            late = next(rank for rank, span in found.items() if span is last)
            for rank, span in found.items():
                # The end of this rank's own work in the step: what flies until then is hidden.
                arrived = arrivals[rank].get(step, span.end_ns)
                exposed_from = min(max(arrived, span.start_ns), span.end_ns)
                all_there = min(max(last.start_ns, exposed_from), span.end_ns)
                yield _Flight(
                    reducer,
                    bucket,
                    filled.get((rank, step, reducer, bucket), 0),
                    exposed_from - span.start_ns,
                    all_there - exposed_from,
                    span.end_ns - all_there,
                    late,
                )

    def communication(self) -> tuple[int, int]:
        """(hidden, exposed) nanoseconds of all ranks: buckets under way during backward, and waits
        after it.
        """
        hidden = sum(self._hidden_ns(rank) for rank in self.ranks)
        exposed = sum(self.phase_ns(rank)[Phase.SYNCHRONISE] for rank in self.ranks)
        return hidden, exposed

    def _hidden_ns(self, rank: int) -> int:
        """How long some bucket of a rank was under way while the rank worked; several at once count
        once.
        """
        arrivals = _arrivals(self.spans[rank])
        flights = [span for span in self.spans[rank] if span.kind == Kind.BUCKET_FLIGHT]
        total = covered_until = 0
        for span in sorted(flights, key=lambda one: one.start_ns):
            end = min(span.end_ns, arrivals.get(span.step, span.end_ns))
            start = max(span.start_ns, covered_until)
            if end > start:
                total += end - start
                covered_until = end
        return total

    # -- in words --------------------------------------------------------------------------------------------------

    def words(self) -> str:
        """What limits this run and what to try, in a few sentences."""
        if not self.duration_ns:
            return "Nothing was recorded: the ranks ended before they did anything that is noted."
        spent = [self.phase_ns(rank) for rank in self.ranks]
        whole = sum(sum(one.values()) for one in spent) or 1
        share = {phase: sum(one[phase] for one in spent) / whole for phase in _STEP_PHASES}
        largest = max(
            (phase for phase in share if phase is not Phase.SYNCHRONISE),
            key=lambda phase: share[phase],
        )
        parts = [self._sum_up(share[Phase.SYNCHRONISE], share[largest], largest)]
        straggler = self.straggler()
        if straggler is not None:
            waits = self.waits()
            parts.append(
                f"Rank {straggler.rank} is the one the others wait for: "
                f"{waits.share(straggler.rank, straggler.phase):.0%} of all waiting comes from "
                f"{straggler.phase.words} on that rank. {_ADVICE_SLOW.get(straggler.phase, _ADVICE_SLOW[Phase.OTHER])}"
            )
        elif share[Phase.SYNCHRONISE] > 0.15:
            parts.append(_ADVICE_SYNC)
        elif largest in _ADVICE:
            parts.append(_ADVICE[largest])
        if any(self.dropped.values()):
            parts.append(
                f"The oldest {max(self.dropped.values()):,} spans were overwritten: this is the end of the run."
            )
        return " ".join(parts)

    def _sum_up(self, waiting: float, share: float, largest: Phase) -> str:
        seconds = f"{self.duration_ns / 1e9:.1f} s"
        if self.traces[0].world == 1:
            return f"One rank made {self.steps:,} steps in {seconds}. {share:.0%} of its time went into {largest.words}."
        return (
            f"{len(self.ranks)} ranks made {self.steps:,} synchronised steps in {seconds}. "
            f"{waiting:.0%} of the ranks' time went into waiting for one another, "
            f"{share:.0%} into {largest.words}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    reducer: int
    bucket: int
    fill_ns: int
    hidden_ns: int
    waited_ns: int
    reduced_ns: int
    late_rank: int


_ADVICE_SLOW = {
    Phase.LOADER: "Give it more workers (num_workers) or faster storage, or look at what its samples have in common.",
    Phase.FORWARD: "Look whether it gets larger or longer inputs than the others, or shares its cores with someone.",
    Phase.BACKWARD: "Look whether it gets larger or longer inputs than the others, or shares its cores with someone.",
    Phase.OPTIMIZER: "Look whether it shares its cores with another process.",
    Phase.OTHER: "Look at what the script does on that rank alone: printing, logging, saving, metrics.",
}
_ADVICE_SYNC = (
    "No rank is slow all the time; ranks hold each other up in turn, or the exchange itself takes long. Larger batches "
    "or gradient accumulation (no_sync) make it rarer, other bucket sizes (bucket_cap_mb) hide more of it."
)
_ADVICE = {
    Phase.LOADER: "The data loader limits this run: use more workers (num_workers), or prepare samples beforehand.",
    Phase.FORWARD: "Computation limits this run: more ranks will make it faster.",
    Phase.BACKWARD: "Computation limits this run: more ranks will make it faster.",
    Phase.OPTIMIZER: "The optimizer limits this run: try its fused or foreach variant, or larger batches.",
    Phase.OTHER: "The script's own code between the phases limits this run: look at its loss, metrics and logging.",
}


def _arrivals(spans: Sequence[Span]) -> dict[int, int]:
    """Step -> when a rank had done its own work: the start of the last wait of the step."""
    return {span.step: span.start_ns for span in spans if span.kind == Kind.MEETING}


def _double(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


# ---------------------------------------------------------------------------------------------- Chrome and Perfetto


def chrome_trace(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Events for chrome://tracing and ui.perfetto.dev: a process per rank, phases above buckets."""
    for trace in timeline.traces:
        named = {"name": f"rank {trace.rank} (pid {trace.pid}, {trace.host})"}
        yield {"ph": "M", "name": "process_name", "pid": trace.rank, "args": named}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": trace.rank,
            "args": {"sort_index": trace.rank},
        }
        for thread, name in ((0, "phases"), (1, "bucket fill"), (2, "bucket in flight")):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": trace.rank,
                "tid": thread,
                "args": {"name": name},
            }
        for span in timeline.spans[trace.rank]:
            yield from _chrome_event(trace.rank, span)


def _chrome_event(rank: int, span: Span) -> Iterator[dict[str, Any]]:
    micro = {"ts": span.start_ns / 1e3, "pid": rank}
    if span.kind == Kind.SCALARS:
        loss = _double(span.detail)
        if math.isfinite(loss):  # JSON has no others
            yield {"ph": "C", "name": "loss", **micro, "args": {"loss": loss}}
        return
    complete = {
        "ph": "X",
        **micro,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {"step": span.step},
    }
    if span.kind < Kind.BUCKET_FILL:
        yield {**complete, "name": Phase(span.kind).name.lower(), "tid": 0}
    elif span.kind == Kind.MEETING:
        yield {**complete, "name": "synchronise", "tid": 0}
    else:
        yield {
            **complete,
            "name": f"bucket {span.detail}",
            "tid": 1 if span.kind == Kind.BUCKET_FILL else 2,
        }


def write_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    with pathlib.Path(path).open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(chrome_trace(timeline)):
            file.write(
                (",\n" if index else "") + json.dumps(event, separators=(",", ":"), allow_nan=False)
            )
        file.write("\n]}\n")
