"""A whole run in a few figures: steps, speed, where the time went, who was waited for.

Pure: from the status pages that ranks have left behind, or from a timeline. `paceline run` shows
and writes a summary, `paceline compare` sets two side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.diagnostics.optimizer_facts import OptimizerFacts
from paceline.diagnostics.page_reader import StatusPage
from paceline.diagnostics.stragglers import Straggler, find_late_rank
from paceline.diagnostics.timeline import (
    WORTH_MENTIONING,
    SlowOptimizer,
    Timeline,
    read_timeline,
)
from paceline.errors import ConfigError
from paceline.telemetry.status_page import Phase
from paceline.telemetry.trace_writer import Kind

__all__ = [
    "ElasticFigures",
    "RankLife",
    "RunSummary",
    "phase_label",
    "read_summary",
    "summarise_timeline",
]

_FORMAT = 1
_IN_STEP = frozenset({Phase.LOADER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


def phase_label(phase: Phase) -> str:
    """What a table calls it."""
    return "waiting" if phase is Phase.SYNCHRONISE else phase.name.lower()


@dataclasses.dataclass(frozen=True)
class RankLife:
    """A process that was a rank: its number, its status page when it ended, and the host whose
    clock that page has.
    """

    rank: int
    page: StatusPage
    host: int = 0


@dataclasses.dataclass(frozen=True)
class ElasticFigures:
    """What became of the ranks of an elastic job: how many processes have ended while the job went
    on, and how many have joined it after its beginning. The first host knows of those of all hosts,
    any other one of its own.
    """

    generations: int
    lost: int
    joined: int
    of_this_host: bool = False  # on any host but the first


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One run. On several hosts: what the ranks of one of them did; of an elastic job's, what its
    first host has heard of all.

    Args:
        script: its name.
        outcome: "finished", "failed", "stopped", or "recorded" for a timeline.
        world: the ranks of all hosts.
        steps: that were made.
        seconds: from the first to the last of them.
        samples: of all steps; None if nobody has told.
        spent_s: for each rank, how long it was in each phase.
        optimizer: one that torch steps with a loop, if there is one.
        elastic: what became of the ranks of an elastic job.
        timeline: the path of the page.
    """

    script: str
    outcome: str
    world: int
    steps: int
    seconds: float
    samples: int | None
    spent_s: Mapping[int, Mapping[Phase, float]]
    optimizer: SlowOptimizer | None = None
    elastic: ElasticFigures | None = None
    timeline: str | None = None

    @property
    def ranks(self) -> int:
        """Those that the figures are of."""
        return len(self.spent_s)

    @property
    def steps_per_second(self) -> float | None:
        return self.steps / self.seconds if self.seconds > 0 and self.steps else None

    @property
    def samples_per_second(self) -> float | None:
        if self.samples is None or self.seconds <= 0:
            return None
        return self.samples / self.seconds

    @property
    def shares(self) -> dict[Phase, float]:
        """Which part of the ranks' time went into each phase."""
        whole = sum(itertools.chain.from_iterable(each.values() for each in self.spent_s.values()))
        return {phase: total / whole for phase, total in self._totals().items()} if whole else {}

    @property
    def step_ms(self) -> dict[Phase, float]:
        """How long a rank was in each phase, for each step: the mean over the ranks."""
        count = self.ranks * self.steps
        return (
            {phase: 1e3 * total / count for phase, total in self._totals().items()} if count else {}
        )

    def _totals(self) -> dict[Phase, float]:
        used = [phase for phase in Phase if any(each.get(phase) for each in self.spent_s.values())]
        return {
            phase: sum(each.get(phase, 0.0) for each in self.spent_s.values()) for phase in used
        }

    @property
    def waiting(self) -> float:
        """The share of the ranks' time that went into waiting for one another."""
        return self.shares.get(Phase.SYNCHRONISE, 0.0)

    @property
    def late_rank(self) -> Straggler | None:
        """The rank that the others have waited for, if it is one and the same."""
        return find_late_rank(self.spent_s)

    @property
    def optimizer_hint(self) -> str | None:
        """What to do about the optimizer, if it is worth it."""
        slow = self.optimizer
        return slow.hint() if slow is not None and slow.share >= WORTH_MENTIONING else None

    # -- as JSON -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """For programs; `read_summary` reads it."""
        late = self.late_rank
        return {
            "format": _FORMAT,
            "script": self.script,
            "outcome": self.outcome,
            "world": self.world,
            "steps": self.steps,
            "seconds": self.seconds,
            "samples": self.samples,
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "waiting": self.waiting,
            "late_rank": None
            if late is None
            else {"rank": late.rank, "phase": late.phase.name.lower(), "share": late.share},
            "step_ms": {phase.name.lower(): ms for phase, ms in self.step_ms.items()},
            "ranks": [
                {
                    "rank": rank,
                    "seconds": {phase.name.lower(): spent for phase, spent in by_phase.items()},
                }
                for rank, by_phase in self.spent_s.items()
            ],
            "optimizer": None
            if self.optimizer is None
            else {**dataclasses.asdict(self.optimizer), "hint": self.optimizer_hint},
            "elastic": None if self.elastic is None else dataclasses.asdict(self.elastic),
            "timeline": self.timeline,
        }

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> RunSummary:
        """What `dump` has made.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        if values["format"] != _FORMAT:
            raise ValueError(f"format {values['format']!r}, not {_FORMAT}")
        optimizer = values["optimizer"]
        return cls(
            script=str(values["script"]),
            outcome=str(values["outcome"]),
            world=int(values["world"]),
            steps=int(values["steps"]),
            seconds=float(values["seconds"]),
            samples=None if values["samples"] is None else int(values["samples"]),
            spent_s={
                int(each["rank"]): {
                    Phase[name.upper()]: float(spent) for name, spent in each["seconds"].items()
                }
                for each in values["ranks"]
            },
            optimizer=None
            if optimizer is None
            else SlowOptimizer(
                OptimizerFacts.load(optimizer["facts"]),
                optimizer["share"],
                optimizer["step_ns"],
                optimizer["is_only_one"],
            ),
            elastic=None if values["elastic"] is None else ElasticFigures(**values["elastic"]),
            timeline=values["timeline"],
        )

    # -- from status pages -------------------------------------------------------------------------

    @classmethod
    def of_pages(
        cls,
        lives: Sequence[RankLife],
        *,
        script: str,
        outcome: str,
        elastic: ElasticFigures | None = None,
        timeline: str | None = None,
    ) -> RunSummary:
        """What ranks have left behind; those that never trained count for nothing."""
        pages = [life.page for life in lives if life.page.step]
        steps = _steps(lives)
        spent_s: dict[int, dict[Phase, float]] = {}
        for life in sorted(lives, key=lambda life: life.rank):
            if life.page.step:
                _add_life(spent_s.setdefault(life.rank, {}), life.page)
        return cls(
            script=script,
            outcome=outcome,
            world=max((page.world for page in pages), default=0),
            steps=steps,
            seconds=_seconds(lives),
            samples=_samples(lives, steps),
            spent_s=spent_s,
            optimizer=_optimizer(pages),
            elastic=elastic,
            timeline=timeline,
        )


def _add_life(spent_s: dict[Phase, float], page: StatusPage) -> None:
    for phase in Phase:
        if page.spent_ns[phase] and phase is not Phase.STARTING:
            spent_s[phase] = spent_s.get(phase, 0.0) + page.spent_ns[phase] / 1e9


def _seconds(lives: Sequence[RankLife]) -> float:
    """From the first to the last step, on the host that trained longest: each has its own clock."""
    longest = 0
    for host in {life.host for life in lives}:
        pages = [life.page for life in lives if life.host == host and life.page.step]
        began = min((page.training_since_ns for page in pages), default=0)
        longest = max(longest, max((page.last_step_ns for page in pages), default=0) - began)
    return longest / 1e9


def _steps(lives: Sequence[RankLife]) -> int:
    """A training's own count goes over all processes of a job. Others count in each process."""
    numbered = [life.page for life in lives if life.page.reached_step]
    if numbered:
        first = min(page.steps_before for page in numbered)
        return max(page.reached_step for page in numbered) - first
    return max((life.page.step for life in lives), default=0)


def _samples(lives: Sequence[RankLife], steps: int) -> int | None:
    """Of all ranks as reported, or else what the loaders of these ranks have counted."""
    longest = max(
        (life.page for life in lives), key=lambda page: page.reported_samples, default=None
    )
    if longest is None:
        return None
    if longest.reported_samples and longest.reached_step:
        # This process may not have been there for all steps.
        made = longest.reached_step - longest.steps_before
        return round(longest.reported_samples * steps / made)
    return longest.reported_samples or sum(life.page.samples for life in lives) or None


def _optimizer(pages: Sequence[StatusPage]) -> SlowOptimizer | None:
    described = [page for page in pages if page.optimizer]
    spent = sum(page.spent_ns[Phase.OPTIMIZER] for page in pages)
    whole = sum(sum(page.spent_ns) for page in pages)
    stepped = sum(page.optimizer_steps for page in pages)
    if not described or not whole or not stepped:
        return None
    try:
        content = json.loads(described[0].optimizer)
        facts, is_only_one = OptimizerFacts.load(content["facts"]), content["is_only_one"]
    except ValueError:  # a rank was killed while it wrote
        return None
    return SlowOptimizer(facts, spent / whole, spent / stepped, is_only_one)


# -- from files ------------------------------------------------------------------------------------


def read_summary(path: str | os.PathLike[str]) -> RunSummary:
    """What `paceline run --summary-json` wrote, or of what `--trace` recorded in a directory.

    Raises:
        ConfigError: it is neither.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return summarise_timeline(read_timeline(path), path)
    try:
        return RunSummary.load(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} should be a file that `paceline run --summary-json FILE` wrote, or a "
            f"directory of `paceline run --trace DIR`, but is neither ({error})"
        ) from None


def summarise_timeline(
    timeline: Timeline, directory: str | os.PathLike[str] | None = None
) -> RunSummary:
    """The same figures, from what the ranks have recorded."""
    began = {rank: _training_began(timeline, rank) for rank in timeline.ranks}
    spent_s = {rank: _spent_from(timeline, rank, began[rank]) for rank in timeline.ranks}
    ends = {rank: timeline.step_ends_ns(rank) for rank in timeline.ranks}
    last = max((each[-1] for each in ends.values() if each), default=0)
    samples = sum(point.samples for point in timeline.scalars())
    return RunSummary(
        script=timeline.traces[0].script,
        outcome="recorded",
        world=timeline.traces[0].world,
        steps=max(map(len, ends.values()), default=0),
        seconds=max(0, last - min(began.values(), default=0)) / 1e9,
        samples=samples or None,
        spent_s=spent_s,
        optimizer=timeline.slow_optimizer(),
        timeline=None if directory is None else str(directory),
    )


def _training_began(timeline: Timeline, rank: int) -> int:
    """When the first phase of a step began, as on a status page."""
    return min((span.start_ns for span in timeline.spans[rank] if span.kind in _IN_STEP), default=0)


def _spent_from(timeline: Timeline, rank: int, began_ns: int) -> dict[Phase, float]:
    spent: dict[Phase, float] = {}
    for span in timeline.spans[rank]:
        if span.start_ns < began_ns or not _is_phase(span.kind):
            continue
        phase = Phase.SYNCHRONISE if span.kind == Kind.SYNC_POINT else Phase(span.kind)
        spent[phase] = spent.get(phase, 0.0) + (span.end_ns - span.start_ns) / 1e9
    return dict(sorted(spent.items()))


def _is_phase(kind: int) -> bool:
    return kind < Kind.BUCKET_FILL or kind == Kind.SYNC_POINT
