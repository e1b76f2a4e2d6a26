"""All ranks' traces together: where the time went, what was hidden behind backward, who waited for
whom.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence

from paceline.diagnostics.optimizer_facts import OptimizerFacts
from paceline.diagnostics.page_reader import SyncPoint
from paceline.diagnostics.stragglers import (
    Straggler,
    WaitAttribution,
    attribute_wait,
    find_straggler,
)
from paceline.diagnostics.trace_reader import BucketNames, RankTrace, Span, read_traces
from paceline.telemetry.generation_log import GenerationRecord, read_generations
from paceline.telemetry.status_page import PHASES, Phase
from paceline.telemetry.trace_writer import Kind

__all__ = [
    "BucketRow",
    "RankChange",
    "SlowOptimizer",
    "StepScalars",
    "Timeline",
    "WORTH_MENTIONING",
    "read_timeline",
]

WORTH_MENTIONING = 0.03  # of the time

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
    """One bucket over the whole run: mean times in nanoseconds.

    A bucket is in flight from its hand-over to its average: `hidden_ns` while backward goes on,
    `waited_ns` after that until the last rank has handed it over, `reduced_ns` for the rest, which
    is the reduction itself. `late_rank` is the one that handed it over last most often.
    """

    reducer: int
    bucket: int
    names: str
    nbytes: int
    count: int
    fill_ns: float
    hidden_ns: float
    waited_ns: float
    reduced_ns: float
    late_rank: int


@dataclasses.dataclass(frozen=True)
class StepScalars:
    """What the script reported about one step, and when."""

    when_ns: int
    step: int
    loss: float
    samples: int


@dataclasses.dataclass(frozen=True)
class SlowOptimizer:
    """An optimizer that torch steps with a loop on the CPU. Times are those of all optimizers of
    the run: `share` of the ranks' time, `step_ns` for a usual step.
    """

    facts: OptimizerFacts
    share: float
    step_ns: float
    is_only_one: bool

    def describe(self) -> str:
        """What it is and takes."""
        most = "" if self.is_only_one else "at most "
        return (
            f"{self.facts.describe()} is stepped by torch's default code on the CPU, which passes "
            f"over memory once for each operation: {most}{self.share:.0%} of the ranks' time, "
            f"{self.step_ns / 1e6:.2f} ms a step."
        )

    def hint(self) -> str:
        """Both in a line, for a summary."""
        most = "" if self.is_only_one else "at most "
        return (
            f"{self.facts.describe()} takes {most}{self.share:.0%} of the time, stepped by torch's "
            f"loop: paceline.optim.{self.facts.name}, or fused=True, passes over memory once"
        )

    def advice(self) -> str:
        """What to do about it."""
        return (
            f"paceline.optim.{self.facts.name}, or fused=True, passes once; `paceline doctor DIR` "
            "with the directory of this trace measures what that saves."
        )


@dataclasses.dataclass(frozen=True)
class RankChange:
    """The ranks of an elastic job have changed: which there are from then on, why, and how long the
    first of them stood still for it.
    """

    when_ns: int
    generation: int
    ranks: Sequence[int]
    reason: str
    still_ns: int


class Timeline:
    """Spans of every rank on one clock that starts at 0, and the changes of ranks on the same."""

    def __init__(
        self, traces: Sequence[RankTrace], generations: Sequence[GenerationRecord] = ()
    ) -> None:
        self.traces = list(traces)
        one_clock = len({trace.boot for trace in traces}) == 1
        # Ranks of several hosts have only the wall clock in common.
        self._offsets = {trace.rank: 0 if one_clock else trace.wall_offset_ns for trace in traces}
        # How long the imports took is no part of the run.
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
            # A rank that recorded more has overwritten more: begin where the records of all do.
            self.origin_ns = max(starts, default=0)
            kept = {
                rank: [span for span in spans if self._from_origin(span, rank)]
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
        self.changes = [
            RankChange(
                each.settled_ns + (0 if one_clock else each.wall_offset_ns) - self.origin_ns,
                each.number,
                each.ranks,
                each.reason,
                each.still_ns,
            )
            for each in generations
            if each.number > 0  # before the first there is nothing to change
        ]
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

    # -- where the time went -----------------------------------------------------------------------

    def phase_ns(self, rank: int) -> dict[Phase, int]:
        """How long a rank was in each phase, startup left out."""
        spent = dict.fromkeys(PHASES, 0)
        for span in self.spans[rank]:
            if span.kind < Kind.BUCKET_FILL:
                spent[Phase(span.kind)] += span.end_ns - span.start_ns
            elif span.kind == Kind.SYNC_POINT:
                spent[Phase.SYNCHRONISE] += span.end_ns - span.start_ns
        del spent[Phase.STARTING]
        return spent

    def sync_points(self, rank: int) -> list[SyncPoint]:
        """A rank's waits, each with the time it spent in each phase since the one before."""
        spent = [0] * len(PHASES)
        points = []
        recorded = [span for span in self.spans[rank] if span.kind != Kind.SCALARS]
        for span in sorted(recorded, key=lambda span: span.end_ns):
            if span.kind < Kind.BUCKET_FILL:
                spent[span.kind] += span.end_ns - span.start_ns
            elif span.kind == Kind.SYNC_POINT:
                points.append(
                    SyncPoint(span.detail, span.extra, span.start_ns, span.end_ns, tuple(spent))
                )
                spent = [0] * len(PHASES)
        return points

    def waits(self) -> WaitAttribution:
        return attribute_wait({rank: self.sync_points(rank) for rank in self.ranks})

    def straggler(self) -> Straggler | None:
        return find_straggler(self.waits(), len(self.ranks))

    def scalars(self) -> list[StepScalars]:
        """Loss and samples, from the first rank that reported any."""
        for rank in self.ranks:
            reported = [
                StepScalars(span.start_ns, span.step, span.loss, span.end_ns)
                for span in self.spans[rank]
                if span.kind == Kind.SCALARS
            ]
            if reported:
                return reported
        return []

    @property
    def steps(self) -> int:
        """Synchronised steps; a single process has none, and its optimizer steps count."""
        synchronised = max(
            (span.step for spans in self.spans.values() for span in spans), default=0
        )
        return synchronised or max((len(self.step_ends_ns(rank)) for rank in self.ranks), default=0)

    def step_ends_ns(self, rank: int) -> list[int]:
        """When each step of a rank was complete: its last wait, or else its optimizer."""
        ends = {span.step: span.end_ns for span in self.spans[rank] if span.kind == Kind.SYNC_POINT}
        if ends:
            return sorted(ends.values())
        return [span.end_ns for span in self.spans[rank] if span.kind == Phase.OPTIMIZER]

    # -- buckets -----------------------------------------------------------------------------------

    def buckets(self) -> list[BucketRow]:
        """Every bucket, the one that held the ranks up longest first."""
        gathered: dict[tuple[int, int], list[_Flight]] = collections.defaultdict(list)
        for flight in self._flights():
            gathered[flight.reducer, flight.bucket].append(flight)
        rows = [self._bucket_row(key, flights) for key, flights in gathered.items()]
        return sorted(rows, key=lambda row: row.waited_ns + row.reduced_ns, reverse=True)

    def _bucket_row(self, key: tuple[int, int], flights: list[_Flight]) -> BucketRow:
        reducer, bucket = key
        planned = self.traces[0].buckets.get(reducer, [])
        named = planned[bucket] if bucket < len(planned) else BucketNames()
        late = collections.Counter(flight.late_rank for flight in flights).most_common(1)[0][0]
        return BucketRow(
            reducer=reducer,
            bucket=bucket,
            names=named.names,
            nbytes=named.nbytes,
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
        for (step, reducer, bucket), flights in launched.items():
            last = max(flights.values(), key=lambda span: span.start_ns)
            late = next(rank for rank, span in flights.items() if span is last)
            for rank, span in flights.items():
                # The end of this rank's own work in the step; what is in flight before is hidden.
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
        """(hidden, exposed) nanoseconds of all ranks: buckets in flight during backward, and waits
        after it.
        """
        hidden = sum(self._hidden_ns(rank) for rank in self.ranks)
        exposed = sum(self.phase_ns(rank)[Phase.SYNCHRONISE] for rank in self.ranks)
        return hidden, exposed

    def _hidden_ns(self, rank: int) -> int:
        """How long some bucket of a rank was in flight while the rank worked; several at once count
        once.
        """
        arrivals = _arrivals(self.spans[rank])
        flights = [span for span in self.spans[rank] if span.kind == Kind.BUCKET_FLIGHT]
        total = covered_until = 0
        for span in sorted(flights, key=lambda span: span.start_ns):
            end = min(span.end_ns, arrivals.get(span.step, span.end_ns))
            start = max(span.start_ns, covered_until)
            if end > start:
                total += end - start
                covered_until = end
        return total

    # -- summary -----------------------------------------------------------------------------------

    def summary(self) -> str:
        """What limits this run and what to try, in a few sentences."""
        if not self.duration_ns:
            return "Nothing was recorded: the ranks ended before they did anything worth recording."
        spent = [self.phase_ns(rank) for rank in self.ranks]
        whole = sum(sum(by_phase.values()) for by_phase in spent) or 1
        share = {phase: sum(ns[phase] for ns in spent) / whole for phase in _STEP_PHASES}
        waiting = share.pop(Phase.SYNCHRONISE)
        largest = max(share, key=lambda phase: share[phase])
        sentences = [self._summarise_time(waiting, share[largest], largest)]
        straggler = self.straggler()
        if straggler is not None:
            sentences.append(self._describe_straggler(straggler))
        elif waiting > 0.15:
            sentences.append(_ADVICE_SYNC)
        elif largest in _ADVICE:
            sentences.append(_ADVICE[largest])
        if (slow := self.slow_optimizer()) is not None and slow.share >= WORTH_MENTIONING:
            sentences += [slow.describe(), slow.advice()]
        if any(self.dropped.values()):
            sentences.append(
                f"The oldest {max(self.dropped.values()):,} spans were overwritten: "
                "this is the end of the run."
            )
        return " ".join(sentences)

    def slow_optimizer(self) -> SlowOptimizer | None:
        """The largest optimizer that torch steps with a loop on the CPU, and what that takes."""
        facts = {
            each for trace in self.traces for each in trace.optimizers if each.code.could_be_fused
        }
        spent = [self.phase_ns(rank) for rank in self.ranks]
        whole = sum(sum(by_phase.values()) for by_phase in spent)
        spans = [
            span.end_ns - span.start_ns
            for rank in self.ranks
            for span in self.spans[rank]
            if span.kind == Phase.OPTIMIZER
        ]
        if not facts or not whole or not spans:
            return None
        return SlowOptimizer(
            max(facts, key=lambda each: each.elements),
            sum(by_phase[Phase.OPTIMIZER] for by_phase in spent) / whole,
            statistics.median(spans),
            is_only_one=all(len(trace.optimizers) <= 1 for trace in self.traces),
        )

    def _summarise_time(self, waiting: float, share: float, largest: Phase) -> str:
        seconds = f"{self.duration_ns / 1e9:.1f} s"
        if self.traces[0].world == 1:
            return (
                f"One rank made {self.steps:,} steps in {seconds}. "
                f"{share:.0%} of its time went into {largest.describe()}."
            )
        return (
            f"{len(self.ranks)} ranks made {self.steps:,} synchronised steps in {seconds}. "
            f"{waiting:.0%} of the ranks' time went into waiting for one another, "
            f"{share:.0%} into {largest.describe()}."
        )

    def _describe_straggler(self, straggler: Straggler) -> str:
        share = self.waits().share(straggler.rank, straggler.phase)
        advice = _ADVICE_SLOW.get(straggler.phase, _ADVICE_SLOW[Phase.OTHER])
        return (
            f"Rank {straggler.rank} is the one the others wait for: {share:.0%} of all waiting "
            f"comes from {straggler.phase.describe()} on that rank. {advice}"
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


_ADVICE_INPUTS = (
    "Check whether it gets larger or longer inputs than the others, or shares its cores with "
    "another process."
)
_ADVICE_SLOW = {
    Phase.LOADER: (
        "Give it more workers (num_workers) or faster storage, or check what its samples have in "
        "common."
    ),
    Phase.FORWARD: _ADVICE_INPUTS,
    Phase.BACKWARD: _ADVICE_INPUTS,
    Phase.OPTIMIZER: "Check whether it shares its cores with another process.",
    Phase.OTHER: (
        "Check what the script does on that rank alone: printing, logging, saving, metrics."
    ),
}
_ADVICE_SYNC = (
    "No rank is slow all the time; ranks hold each other up in turn, or the exchange itself takes "
    "long. Larger batches or gradient accumulation (no_sync) make it rarer; other bucket sizes "
    "(bucket_cap_mb) hide more of it."
)
_ADVICE_COMPUTE = "Computation limits this run: more ranks will make it faster."
_ADVICE = {
    Phase.LOADER: (
        "The data loader limits this run: use more workers (num_workers), or prepare samples "
        "beforehand."
    ),
    Phase.FORWARD: _ADVICE_COMPUTE,
    Phase.BACKWARD: _ADVICE_COMPUTE,
    Phase.OPTIMIZER: (
        "The optimizer limits this run: larger batches, or several micro-batches to a step "
        "(no_sync), make its steps rarer."
    ),
    Phase.OTHER: (
        "The script's own code between the phases limits this run: check its loss, metrics and "
        "logging."
    ),
}


def _arrivals(spans: Sequence[Span]) -> dict[int, int]:
    """By step, when a rank had done its own work: the start of the step's last wait."""
    return {span.step: span.start_ns for span in spans if span.kind == Kind.SYNC_POINT}


def read_timeline(directory: str | os.PathLike[str]) -> Timeline:
    """What the latest run has recorded in a directory."""
    traces = read_traces(directory)
    return Timeline(traces, read_generations(directory, traces[0].job))
