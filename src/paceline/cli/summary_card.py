"""The card at the end of `paceline run`: a run in a few lines of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from paceline.diagnostics.run_summary import RunSummary, phase_label

__all__ = ["counted", "render_card"]

_NARROWEST = 24
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_SHOWN_FROM = 0.005  # a smaller share of the time is 0 %
_ENDS = {"finished": "finished", "failed": "failed", "stopped": "was stopped"}


def render_card(summary: RunSummary, *, width: int | None = None, colour: bool = False) -> str:
    """Lines for the screen.

    Args:
        summary: the run.
        width: of the terminal; None: lines as long as they are.
        colour: whether the terminal shows emphasis.
    """
    rows = list(_rows(summary))
    indent = 2 + max(len(label) for label, _ in rows) + 2
    bold, dim, plain = (_BOLD, _DIM, _PLAIN) if colour else ("", "", "")
    lines = [f"{bold}{line}{plain}" for line in _wrapped(_head(summary), width, 0, 2)]
    for label, text in rows:
        first, *more = _wrapped(text, width, indent, indent)
        start = f"  {dim}{label.ljust(indent - 2)}{plain}"
        lines += [start + first.strip(), *more]
    return "\n".join(lines)


def _wrapped(text: str, width: int | None, first_indent: int, indent: int) -> list[str]:
    if width is None:
        return [" " * first_indent + text]
    return textwrap.wrap(
        text,
        max(width, _NARROWEST, indent + _NARROWEST // 2),
        initial_indent=" " * first_indent,
        subsequent_indent=" " * indent,
        break_long_words=False,  # a path that is cut cannot be copied
        break_on_hyphens=False,
    )


def _head(summary: RunSummary) -> str:
    steps = counted(summary.steps, "step")
    return f"paceline: {summary.script} {_ENDS[summary.outcome]} after {steps} on {_ranks(summary)}"


def _ranks(summary: RunSummary) -> str:
    if summary.elastic is None and summary.ranks < summary.world:
        # The others are on other hosts, or have not trained.
        return f"{summary.ranks} of {summary.world} ranks"
    is_part = summary.elastic is not None and summary.elastic.of_this_host
    return counted(summary.ranks, "rank") + (" of this host" if is_part else "")


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    yield "speed", _speed(summary)
    # After an error that is what matters: it should not be out of sight.
    if summary.outcome != "failed":
        yield from _advice(summary)
    if (elastic := summary.elastic) is not None:
        yield (
            "elastic",
            f"{counted(elastic.generations, 'generation')}; {counted(elastic.lost, 'rank')} lost, "
            f"{elastic.joined} joined",
        )
    if summary.timeline is not None:
        yield "timeline", summary.timeline


def _advice(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if phases := _phases(summary):  # none yet in the middle of the first step
        yield "time", phases
    if summary.ranks > 1:
        yield "waiting", _waiting(summary)
    if (hint := summary.optimizer_hint) is not None:
        yield "optimizer", hint


def _speed(summary: RunSummary) -> str:
    parts = [f"{summary.seconds:.1f} s"]
    if (rate := summary.steps_per_second) is not None:
        parts.append(f"{1e3 / rate:.2f} ms a step")
    if (samples := summary.samples_per_second) is not None:
        parts.append(f"{samples:,.0f} samples per second")
    elif rate is not None:
        parts.append(f"{rate:,.1f} steps per second")
    return ", ".join(parts)


def _phases(summary: RunSummary) -> str:
    shares = sorted(summary.shares.items(), key=lambda item: -item[1])
    shown = [f"{phase_label(phase)} {share:.0%}" for phase, share in shares if share >= _SHOWN_FROM]
    return ", ".join(shown)


def _waiting(summary: RunSummary) -> str:
    share = f"{summary.waiting:.0%} of the ranks' time"
    late = summary.late_rank
    return (
        f"{share}; no rank is late all the time" if late is None else f"{share}; {late.describe()}"
    )


def counted(number: int, what: str) -> str:
    """So many of something, in words: 1 rank, 1,024 ranks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
