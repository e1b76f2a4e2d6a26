"""Which batches the training loop holds at the moment, and what each weighs.

A loader or sampler that cuts global batches knows how large this rank's share of each one is.
`DistributedDataParallel` needs that number, but a forward gets tensors that do not tell where they
came from: moved to a device, cut into micro-batches, batched by nodes instead of graphs. So whoever
hands out batches announces them here, and a forward asks what its batch weighs.

The weight of a share is relative to an even cut of its global batch: 1 for even shares, which is
nearly always. The answer is therefore clear whenever all batches that the loop may be using weigh
the same. Where they do not - the last, smaller batch fetched ahead of time, two loaders at their
ends - the one whose number of samples is the input's leading dimension is meant; and if that does
not decide it either, nothing is known, and nobody guesses.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from paceline.data.shares import Share
from paceline.telemetry.recorder import recorder

__all__ = ["BatchSource", "ReceivedBatch", "weight_of_input"]


class ReceivedBatch(NamedTuple):
    """This rank's share of a global batch: its samples, and what it weighs."""

    samples: int
    weight: float

    @classmethod
    def of(cls, share: Share) -> ReceivedBatch:
        return cls(share.count, share.weight)


class BatchSource:
    """One loader or sampler that hands out batches, seen from the training loop.

    A loader notices when the loop comes back for the next batch: the one before is then done with.
    Unless no forward has asked for it yet; such a loop fetches ahead, and is one batch behind from
    then on. A batch sampler notices nothing of the kind, because torch's loader asks it for many
    batches in advance (`keeps_all=True`): all kinds of batches of the pass remain possible.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_asked_in_pass",
        "_fetches_ahead",
        "_last",
        "batches",
        "keeps_all",
    )

    def __init__(self, *, keeps_all: bool = False) -> None:
        self.keeps_all = keeps_all
        self.batches: set[ReceivedBatch] = set()  # what the loop may be using
        self._last: ReceivedBatch | None = None
        self._asked = False  # by a forward, since the last batch was handed out
        self._asked_in_pass = False
        self._fetches_ahead = False

    def begin(self) -> None:
        """A pass begins."""
        self.batches = set()
        self._last = None
        self._asked = self._asked_in_pass = self._fetches_ahead = False
        _received.discard(self)

    def hand_out(self, batch: ReceivedBatch) -> None:
        """The training loop receives this batch."""
        if self._last is not None and not self._asked:
            self._fetches_ahead = True
        if not self.keeps_all:
            self._forget_all_but_last()
        self.batches.add(batch)
        self._last, self._asked = batch, False
        _received.add(self)

    def ask(self) -> set[ReceivedBatch]:
        """A forward asks which batches it may be of."""
        if not self._asked and not self.keeps_all and self._last is not None:
            recorder.add_samples(self._last.samples)
        self._asked = self._asked_in_pass = True
        return self.batches

    def finish(self) -> None:
        """The loop came back, and there is no batch left for it."""
        if self.keeps_all:
            return
        self._forget_all_but_last()
        # A pass without a single question is an evaluation: nothing of it is to come.
        if not self.batches or not self._asked_in_pass:
            self.begin()
        else:
            # The loader may be gone before its last batch is used.
            _received.add(self)
            _received.keep(self)

    def _forget_all_but_last(self) -> None:
        self.batches = {self._last} if self._fetches_ahead and self._last is not None else set()


class _Received:
    """What all sources have handed out. A forward asks in every step, so the answer is kept until a
    batch comes or goes.
    """

    __slots__ = ("_answer", "_answered", "_finished", "_sources")

    def __init__(self) -> None:
        # Weak: a loader that is gone hands out no more. But for the last one whose pass ended ahead
        # of its loop.
        self._sources: list[weakref.ref[BatchSource]] = []
        self._finished: BatchSource | None = None
        self._answer: float | None = None
        self._answered = True  # `_answer` is right, whatever the leading dimension

    def add(self, source: BatchSource) -> None:
        self._answered = False
        if not any(known() is source for known in self._sources):
            self._sources.append(weakref.ref(source, self._remove))

    def discard(self, source: BatchSource) -> None:
        self._answered = False
        self._sources = [known for known in self._sources if known() not in (source, None)]

    def keep(self, source: BatchSource) -> None:
        self._finished = source

    def clear(self) -> None:
        self._sources, self._finished, self._answered = [], None, False

    def _remove(self, source: weakref.ref[BatchSource]) -> None:
        self._answered = False
        self._sources = [known for known in self._sources if known is not source]

    def weight_of_input(self, leading_dimension: int) -> float | None:
        """What a forward weighs whose input has this leading dimension; None if that is not
        known.
        """
        if self._answered:
            return self._answer
        sources = [source for known in self._sources if (source := known()) is not None]
        batches = set().union(*(source.ask() for source in sources))
        weights = {batch.weight for batch in batches}
        self._answered = len(weights) <= 1
        if not self._answered:
            weights = {batch.weight for batch in batches if batch.samples == leading_dimension}
        self._answer = weights.pop() if len(weights) == 1 else None
        return self._answer


_received = _Received()
weight_of_input = _received.weight_of_input
