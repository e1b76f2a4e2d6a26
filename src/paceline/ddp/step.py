"""One backward, from the moment it reaches an output of forward until its averages are given out.

    (none) --begin--> ACCUMULATING                        inside no_sync(): gradients only gather
                `---> FILLING --first bucket--> EXCHANGING    buckets are sent in plan order
    any --the engine drops its callback--> DROPPED        backward raised; peers do not know yet
    any --end of backward, or a failure that all ranks know of--> (none)

The reducer makes a `Step` when backward arms and drops it at the end: there is nothing to reset.
What outlives a step is elsewhere: samples and used parameters of backwards that only accumulated in
`SampleWindow`, counters in `StepHistory`, what is known of the model in the plan.
"""

from __future__ import annotations

import enum
import itertools

from paceline.ddp.context_gradients import ContextGradients
from paceline.ddp.weighting import (
    NO_SAMPLES,
    Contribution,
    SampleCount,
    SampleWindow,
    combined,
)

__all__ = ["ForwardPass", "Phase", "Step"]

_numbers = itertools.count(1)


class Phase(enum.Enum):
    """How far a backward has come."""

    ACCUMULATING = "accumulating"
    FILLING = "filling"
    EXCHANGING = "exchanging"
    DROPPED = "dropped"


class ForwardPass:
    """One call of forward: what it weighs and whether its backward synchronises."""

    __slots__ = ("__weakref__", "context", "count", "spent", "sync", "task")

    def __init__(self, count: SampleCount, sync: bool, context: int | None = None) -> None:
        self.count = count
        self.sync = sync
        self.context = context  # of torch.distributed.autograd
        self.task = -1  # the graph task in which backward last reached it
        self.spent = False  # a backward covers it

    def reach(self, task: int) -> None:
        """Backward has come to an output of this forward, in this graph task."""
        self.task = task

    def spend(self) -> None:
        """A backward covers this forward: it is no longer outstanding."""
        self.spent = True


class Step:
    """The state of one backward."""

    __slots__ = (
        "_counted",
        "averages_deferred",
        "context_gradients",
        "count",
        "cursor",
        "defers_to_end",
        "failure_text",
        "has_data",
        "keeps_graph",
        "number",
        "phase",
        "ready",
        "synchronised",
        "task",
        "used_count",
        "weights",
        "without_gradient",
    )

    def __init__(
        self,
        phase: Phase,
        *,
        task: int = -1,
        count: SampleCount = NO_SAMPLES,
        keeps_graph: bool = False,
        has_data: bool = True,
    ) -> None:
        self.number = next(_numbers)  # by which the end-of-backward callback knows its step
        self.phase = phase
        self.synchronised = phase is not Phase.ACCUMULATING
        self.task = task  # the outermost graph task
        self.count = count  # what the forwards weigh that this backward has reached
        self.keeps_graph = keeps_graph  # backward(create_graph=True): gradients have a history
        self.has_data = has_data  # not so: this rank only takes part in the step of others
        # What was to be left to a step is averaged: on some rank nobody would sum it.
        self.averages_deferred = False
        self.defers_to_end = False  # no bucket is sent before the end of backward
        self.cursor = 0  # buckets before this one have been sent
        self.ready: set[int] = set()  # buckets that are full and wait for those before them
        # Parameters that were reached, but got no gradient.
        self.without_gradient: set[int] = set()
        self.used_count = 0  # parameters that got a gradient, in the buckets sent so far
        self.weights: list[float] = []  # of every rank's gradients in the sum
        self.failure_text: str | None = None
        # Where gradients may be instead of `.grad`, if forward ran in such a context.
        self.context_gradients: ContextGradients | None = None
        self._counted = False

    def cover(self, forward: ForwardPass) -> None:
        """Backward has come to one more forward."""
        forward.spend()
        self.count = combined(self.count, forward.count)

    @property
    def failed(self) -> bool:
        return self.failure_text is not None

    @property
    def is_filling(self) -> bool:
        """Gradients of this backward go into buckets that are sent."""
        return self.phase is Phase.FILLING or self.phase is Phase.EXCHANGING

    def has_sealed(self, index: int) -> bool:
        """A gradient for this bucket comes too late."""
        return index < self.cursor or index in self.ready

    def fail(self, text: str) -> None:
        """This rank cannot complete the step; `text` is what its peers get to read."""
        self.failure_text = text

    def drop(self) -> None:
        """Backward raised."""
        self.phase = Phase.DROPPED

    def synchronise(self) -> bool:
        """A forward outside no_sync() takes part as well; true if that changes something."""
        if self.phase is not Phase.ACCUMULATING:
            return False
        self.phase, self.synchronised = Phase.FILLING, True
        return True

    def count_samples(self, window: SampleWindow) -> Contribution:
        """Enter this backward's samples, once; returns what this rank contributes."""
        if not self._counted:
            self._counted = True
            window.add(self.count)
        return window.contribution()
