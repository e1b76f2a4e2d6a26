"""What a step writes to the status page and to the trace about its buckets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from paceline.ddp.buckets import Bucket
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import WaitLabel

__all__ = ["BucketTelemetry", "list_names"]

_NAMES_SHOWN = 4
_reducers = itertools.count()  # made in the same order on every rank


class BucketTelemetry:
    """The wait labels of one plan's buckets, and when each was filled and launched in this step.

    Times are taken only while a trace is written.
    """

    def __init__(self, label: str, members: tuple[int, ...]) -> None:
        self.number = next(_reducers)
        forward = f"{label}'s exchange before forward"
        self._before_forward = WaitLabel(forward, "", group_number(forward), members).packed()
        self._wait_labels: list[WaitLabel] = []
        self._filling_since = 0
        self._launched: dict[int, int] = {}  # bucket -> when

    def name_buckets(
        self, label: str, members: tuple[int, ...], buckets: Sequence[Bucket], names: Sequence[str]
    ) -> None:
        """The buckets of a new plan. `names` are those of all parameters, by index."""
        contents = [list_names([names[index] for index in bucket.members]) for bucket in buckets]
        number = group_number(f"{label} {self.number}")
        self._wait_labels = [
            WaitLabel("all_reduce", label, number, members, content).packed()
            for content in contents
        ]
        sizes = [sum(parameter.nbytes for parameter in bucket.parameters) for bucket in buckets]
        recorder.buckets_planned(self.number, contents, sizes)

    def enter_step_wait(self, steps: int, *, at_end: bool) -> None:
        """This rank has come to a point of the step where it waits for the others."""
        recorder.enter(self._wait_labels[0], 2 * steps + at_end, 0)

    def enter_forward_wait(self, steps: int) -> None:
        recorder.enter(self._before_forward, steps)

    def waiting_for(self, index: int) -> None:
        """Inside the wait at the end; it began as the first bucket's."""
        if index > 0:
            recorder.at_bucket(self._wait_labels[index], index)

    def backward_began(self) -> None:
        if recorder.trace is not None:
            self._filling_since = time.monotonic_ns()
            self._launched.clear()

    def launched(self, index: int) -> None:
        if recorder.trace is not None:
            now = time.monotonic_ns()
            recorder.bucket_filled(index, self.number, self._filling_since, now)
            self._filling_since = now
            self._launched[index] = now

    def averaged(self, index: int) -> None:
        if recorder.trace is not None and (since := self._launched.pop(index, 0)):
            recorder.bucket_averaged(index, self.number, since, time.monotonic_ns())

    def all_averaged(self) -> None:
        """Whatever has not been reported one by one is done now."""
        for index in list(self._launched):
            self.averaged(index)


def list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
