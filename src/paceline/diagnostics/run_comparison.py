"""Two runs side by side: which is faster, and in which phase. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from paceline.diagnostics.run_summary import RunSummary, phase_label
from paceline.telemetry.status_page import Phase

__all__ = ["RunComparison"]

_SAME_WITHIN = 0.02
_LONGEST_NAME = 28


@dataclasses.dataclass(frozen=True)
class _Row:
    """One figure of both runs; None where a run does not have it."""

    label: str
    first: float | None
    second: float | None
    digits: int = 0
    has_ratio: bool = True
    is_share: bool = False

    @property
    def ratio(self) -> float | None:
        if not self.has_ratio or not self.first or self.second is None:
            return None
        return self.second / self.first

    def cells(self) -> tuple[str, str, str, str]:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (self.label, self._shown(self.first), self._shown(self.second), ratio)

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.0%}" if self.is_share else f"{value:,.{self.digits}f}"


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two runs and what they are called."""

    first_name: str
    first: RunSummary
    second_name: str
    second: RunSummary

    @property
    def speed_ratio(self) -> float | None:
        """How many times as fast the second run is: in samples if both know them, else in steps."""
        return self._samples.ratio or self._steps.ratio

    @property
    def _samples(self) -> _Row:
        return _Row(
            "samples per second", self.first.samples_per_second, self.second.samples_per_second, 1
        )

    @property
    def _steps(self) -> _Row:
        return _Row(
            "steps per second", self.first.steps_per_second, self.second.steps_per_second, 2
        )

    def _rows(self) -> Iterator[_Row]:
        first, second = self.first, self.second
        yield _Row("ranks", first.ranks, second.ranks, has_ratio=False)
        yield _Row("steps", first.steps, second.steps, has_ratio=False)
        yield _Row("seconds", first.seconds, second.seconds, 1)
        yield self._steps
        yield self._samples
        yield _Row("waiting", first.waiting, second.waiting, has_ratio=False, is_share=True)
        yield from self._phases()

    def _phases(self) -> Iterator[_Row]:
        first, second = self.first.step_ms, self.second.step_ms
        for phase in Phase:
            if phase in first or phase in second:
                label = f"{phase_label(phase)}, ms a step"
                yield _Row(label, first.get(phase, 0.0), second.get(phase, 0.0), 2)

    def table(self) -> str:
        """Plain text, one figure a line."""
        head = ("", _shortened(self.first_name), _shortened(self.second_name), "ratio")
        cells = [head, *(row.cells() for row in self._rows())]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        return "\n".join(
            "  ".join(
                text.rjust(width) if column else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )

    def sentence(self) -> str:
        """Which run is faster, and where that comes from."""
        ratio = self.speed_ratio
        if ratio is None:
            return "Which is faster cannot be told: a run without steps has no speed."
        if abs(ratio - 1) < _SAME_WITHIN:
            return f"Both are as fast as one another, within {_SAME_WITHIN:.0%}."
        is_second = ratio > 1
        name = self.second_name if is_second else self.first_name
        times = ratio if is_second else 1 / ratio
        unit = "samples" if self._samples.ratio else "steps"
        return (
            f"{name} is {times:.2f} times as fast, in {unit} per second{self._reason(is_second)}."
        )

    def _reason(self, is_second: bool) -> str:
        """The phase in which the faster run saves most; that of each step."""
        sign = 1 if is_second else -1
        saved = {
            phase: sign * (self.first.step_ms.get(phase, 0.0) - self.second.step_ms.get(phase, 0.0))
            for phase in (*self.first.step_ms, *self.second.step_ms)
        }
        best = max(saved, key=lambda phase: saved[phase], default=None)
        if best is None or saved[best] <= 0:
            return ""
        return f"; it saves most in {best.describe()}, {saved[best]:.2f} ms a step"

    def dump(self) -> dict[str, Any]:
        """For programs."""
        return {
            "first": {"name": self.first_name, **self.first.dump()},
            "second": {"name": self.second_name, **self.second.dump()},
            "speed_ratio": self.speed_ratio,
            "step_ms_ratio": {row.label.partition(",")[0]: row.ratio for row in self._phases()},
            "sentence": self.sentence(),
        }


def _shortened(name: str) -> str:
    """Its end, which tells runs apart."""
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"
