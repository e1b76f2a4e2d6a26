"""A failure on one rank becomes an error on every rank, with the text of the one that failed."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.ddp.signals import Signal
from paceline.errors import PacelineError, StepError

__all__ = ["StepHistory", "concerns_more_than_the_step", "failure_text", "step_error"]

_UNKNOWN_ERROR = (
    "{where} raised an error. The program caught it, so its text is not known here; "
    "`with model.all_or_none():` around the step publishes it.\n"
)


_averages = itertools.count(1)


class StepHistory:
    """What has become of the steps of one model. It outlives the reducers that take them: a model
    whose buckets are planned anew inside `all_or_none()` still knows what happened before.
    """

    __slots__ = (
        "absent",
        "agreed_failures",
        "failures",
        "last_average",
        "last_error",
        "last_sync_seconds",
        "steps",
        "unequal_counts_reported",
        "used_counts",
    )

    def __init__(self) -> None:
        self.steps = 0  # that were averaged
        self.last_average = 0  # its number among those of all models of this process, from 1 on
        self.absent: tuple[int, ...] = ()  # ranks that had no data in the last step
        self.failures = 0  # steps that ended in an error here
        self.agreed_failures = 0  # those that every rank knows of, so that all can leave them out
        self.last_error = ""
        # What the last backward spent on synchronising after its own work was done.
        self.last_sync_seconds = 0.0
        # How many ranks used each parameter in the last step. None: all used all.
        self.used_counts: torch.Tensor | None = None
        self.unequal_counts_reported = False

    def step_averaged(self) -> None:
        self.steps += 1
        self.last_average = next(_averages)

    def note_absent(self, ranks: tuple[int, ...]) -> None:
        self.absent = ranks

    def step_failed(self) -> None:
        self.failures += 1

    def failure_agreed(self) -> None:
        self.agreed_failures += 1

    def note_error(self, text: str) -> None:
        self.last_error = text

    def note_used(self, counts: torch.Tensor | None) -> None:
        self.used_counts = counts

    def note_unequal_counts(self) -> None:
        self.unequal_counts_reported = True

    def note_sync(self, seconds: float) -> None:
        self.last_sync_seconds = seconds


def failure_text(error: BaseException | None, where: str) -> str:
    """What the peers get to read: who called, and the error with its traceback."""
    callers = traceback.format_stack()[:-2]
    ending = (
        [_UNKNOWN_ERROR.format(where=where)] if error is None else traceback.format_exception(error)
    )
    return "".join(callers + ending)


def concerns_more_than_the_step(
    error: BaseException, handled_before: BaseException | None = None
) -> bool:
    """Whether an error that passes through a step is not the step's own: the group is lost, ranks
    disagree, the package is used wrongly, or the program is asked to end.

    Looks at causes, contexts and exception groups too: a program may have wrapped the error.
    `handled_before` was being handled when the step began, and is part of every context since.
    """
    involved = [
        found for found in _all_involved(error, handled_before) if not isinstance(found, StepError)
    ]
    return any(
        isinstance(found, PacelineError | dist.DistError) or not isinstance(found, Exception)
        for found in involved
    )


def _all_involved(
    error: BaseException, handled_before: BaseException | None
) -> Iterator[BaseException]:
    found: list[BaseException] = [error]
    seen = {id(handled_before)}
    while found:
        current = found.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        found += [other for other in (current.__cause__, current.__context__) if other is not None]
        if isinstance(current, BaseExceptionGroup):
            found += current.exceptions


def step_error(rank: int, signals: Sequence[Signal], texts: Sequence[str]) -> StepError:
    """What this rank raises, given every rank's signal and text."""
    failed = [peer for peer, signal in enumerate(signals) if signal.failed]
    if rank in failed:
        return StepError(texts[rank], rank=rank, traceback=texts[rank])
    errors = "\n".join(f"rank {peer}:\n{texts[peer].rstrip()}" for peer in failed)
    return StepError(
        f"rank {failed[0]} failed in this step, so no rank applies it (this is rank {rank}). "
        f"Its error:\n{errors}",
        rank=failed[0],
        traceback=texts[failed[0]],
    )
