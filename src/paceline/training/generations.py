"""How a training goes on when ranks die, join and leave: the generations of an elastic job.

A rank that loses the others in an exchange enters the next generation and says in a round how far
it is (`rounds.py`). It goes on where it was: in the middle of a batch, whose missing shards are
dealt out again. Newcomers are given the state between two batches. To whom a generation is news
without a loss hears of it in a message of a pass; then all change to it at the end of the batch.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.data.changing_ranks import share_of_range
from paceline.errors import CollectiveTimeout, GroupError, NativeError
from paceline.launch.elastic_group import ElasticGroup
from paceline.launch.process_context import ProcessContext
from paceline.launch.save_agreement import NO_REQUEST, SaveRequest
from paceline.telemetry.generation_log import append_generation
from paceline.telemetry.recorder import recorder
from paceline.telemetry.variables import RUN_ID
from paceline.training.elastic_exchange import ElasticExchange, Note
from paceline.training.group_exchange import Exchange
from paceline.training.rounds import Standing, Turn, decide, giver

__all__ = ["Generations"]

_Part = TypeVar("_Part")


class Generations:
    """Keeps one training in step with the job it belongs to.

    Args:
        group: enters and leaves generations.
        context: of this process; it hears the signals.
        alone: the exchange of a rank without others.
        new_exchange: makes that of the default group.
        start: what ranks do together that are all new.
        give: the state for newcomers.
        take: load such a state.
    """

    def __init__(
        self,
        group: ElasticGroup,
        context: ProcessContext,
        *,
        alone: Exchange,
        new_exchange: Callable[[], Exchange],
        start: Callable[[], None],
        give: Callable[[], Mapping[str, Any]],
        take: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._group = group
        self._alone, self._new_exchange = alone, new_exchange
        self._start, self._give, self._take = start, give, take
        self._signals = context.save_listener()
        self._has_asked_to_leave = False
        self._told = NO_REQUEST  # what the last note has told of the signals
        # Passes completed and batches ended, together; None before this rank has a state.
        self._progress: int | None = None
        self._is_settled = False
        self._together: Exchange | None = None  # with all of the generation, once made
        self._still_ns = 0  # how long this rank has met others since it last trained with all
        self._saved_at = time.monotonic()
        self.exchange = ElasticExchange(alone, self._own_note)

    def begin(self) -> None:
        """Join the job, and return with a state to go on from: that of the others, if they have
        begun.
        """
        self._group.enter_first()
        self._meet(between_batches=True, lost=None)

    def count_pass(self) -> None:
        """A pass is complete."""
        assert self._progress is not None
        self._progress += 1

    def recover(self, error: GroupError | NativeError) -> None:
        """The others were lost in the middle of a batch. Afterwards the exchange is one that works:
        with the next generation, or alone, until the end of the batch.

        Raises:
            GroupError, NativeError: the same one, if nobody was lost.
        """
        self._check_is_loss(error)
        self._meet(between_batches=False, lost=error)
        self.exchange.sharing.join_pass()

    def end_batch(self, step: int, *, is_last: bool) -> bool:
        """Between two batches: change to a newer generation if all know of one. False if this rank
        is to leave.

        Not after the last batch of an epoch, if it can wait: whoever joins there comes to what the
        script does after the loop over the batches without having seen one.
        """
        assert self._progress is not None
        self._progress += 1
        is_news = any(note.generation > self._group.number for note in self.exchange.heard)
        if not self.has_left and not (self._is_settled and (is_last or not is_news)):
            self._meet(between_batches=True, lost=None)
        if not self.has_left:
            self.report_step(step)
        return not self.has_left

    def report_step(self, step: int) -> None:
        """Tell the launcher that this rank has the state after so many steps."""
        self._group.job.report_step(step)

    # --- evaluation: `ChangingRanks` --------------------------------------------------------------

    def own_share(self, batches: range) -> range:
        """Which of some batches this rank evaluates."""
        return share_of_range(batches, self.exchange.rank, self.exchange.size)

    def gather_parts(self, parts: list[_Part]) -> list[_Part] | None:
        """Every rank's parts of an evaluation; None if ranks were lost, and the others are to try
        again.
        """
        if self.exchange.size == 1:
            return parts
        every: list[Any] = [None] * self.exchange.size
        error: GroupError | NativeError | None = None
        try:
            dist.all_gather_object(every, parts)
        except (GroupError, NativeError) as raised:
            error = raised
        if error is not None:
            self._check_is_loss(error)
            self._meet(between_batches=False, lost=error)
            return None
        return [part for own in every for part in own]

    def count_evaluation(self) -> None:
        """An evaluation is complete: as much a step of the script as a pass."""
        self.count_pass()

    @property
    def has_left(self) -> bool:
        """Whether the job goes on without this rank."""
        return self._group.has_left

    @property
    def is_settled(self) -> bool:
        """Whether this rank trains together with all others of its generation."""
        return self._is_settled

    # --- saves ------------------------------------------------------------------------------------

    def save_request(self) -> SaveRequest:
        """What signals have asked any rank for, up to the last pass."""
        heard = self.exchange.heard
        stop = any(note.is_asked_to_stop for note in heard)
        if not stop and not any(note.is_asked_to_save for note in heard):
            return NO_REQUEST
        # One that has come since is for the next batch.
        if self._told.due and self._told == self._signals.asked:
            self._signals.forget()
        return SaveRequest(True, stop)

    def is_older_than(self, interval_s: float) -> bool:
        """Whether the last checkpoint is, by the clock of the first rank."""
        if self.exchange.heard[0].unsaved_s < interval_s:
            return False
        self._saved_at = time.monotonic()
        return True

    def _own_note(self) -> Note:
        self._group.job.check_lease()
        asked = self._signals.asked
        if asked.stop and not self._group.job.is_ending():
            # This rank alone: the others go on without it.
            if not self._has_asked_to_leave:
                self._has_asked_to_leave = True
                self._group.job.leaving()
            asked = NO_REQUEST
        self._told = asked
        unsaved_s = time.monotonic() - self._saved_at
        return Note(self._group.newest, asked.due, asked.stop, unsaved_s)

    # --- rounds -----------------------------------------------------------------------------------

    def _meet(self, *, between_batches: bool, lost: Exception | None) -> None:
        """Enter the next generation, unless this one is still being settled, and hold rounds until
        it is this rank's turn.
        """
        began_ns = time.monotonic_ns()
        self._meet_others(between_batches=between_batches, lost=lost)
        self._still_ns += time.monotonic_ns() - began_ns
        if self._is_settled:
            self._log_generation()

    def _log_generation(self) -> None:
        """For the timeline, if there is one."""
        still_ns, self._still_ns = self._still_ns, 0
        if recorder.trace is not None and self.exchange.rank == 0:
            generation = self._group.generation
            append_generation(
                recorder.trace.path.parent,
                job=os.environ.get(RUN_ID, ""),
                number=generation.number,
                ranks=[member.slot for member in generation.members],
                reason=generation.reason,
                still_ns=still_ns,
            )

    def _meet_others(self, *, between_batches: bool, lost: Exception | None) -> None:
        needs_next = lost is not None or self._is_settled
        while True:
            if needs_next and not self._enter_next():
                return
            error: GroupError | NativeError | None = None
            try:
                if self._hold_round(between_batches) is not Turn.WAIT:
                    return
            except (GroupError, NativeError) as raised:
                error = raised
            # Outside of the handler: an error that is being handled would be told to the others.
            if error is not None:
                self._check_is_loss(error)
            needs_next = error is not None

    def _check_is_loss(self, error: GroupError | NativeError) -> None:
        """Raise an error that the next generation would not mend."""
        # Memory that was to be shared with a rank that has just ended, or an error of the machine.
        is_other = isinstance(error, NativeError) and not self._group.becomes_obsolete()
        if is_other or isinstance(error, CollectiveTimeout):
            raise error

    def _enter_next(self) -> bool:
        """False if the next generation is without this rank, which then ends the batch alone."""
        self.exchange.use(self._alone)
        self._is_settled, self._together = False, None
        return self._group.enter_next()

    def _hold_round(self, between_batches: bool) -> Turn:
        if self._together is None:
            self._together = self._new_exchange()
        self.exchange.use(self._together)
        own = Standing(self._progress, between_batches)
        messages = self.exchange.gather({"standing": own})
        standings = [Standing(*facts["standing"]) for facts, _ in messages]
        turn = decide(standings, self.exchange.rank)
        if turn is Turn.START:
            self._start()
            self._progress = 0
        elif turn is Turn.HAND_OVER:
            self._hand_over(standings)
        elif turn is Turn.ALONE:
            self.exchange.use(self._alone)
        self._is_settled = turn in (Turn.SETTLED, Turn.HAND_OVER, Turn.START)
        if self._is_settled:
            self._group.job.settled(self._group.generation)
        return turn

    def _hand_over(self, standings: list[Standing]) -> None:
        source = giver(standings)
        content = _packed(self._give()) if self.exchange.rank == source else bytearray()
        lengths = [facts["bytes"] for facts, _ in self.exchange.gather({"bytes": len(content)})]
        payload = torch.empty(lengths[source], dtype=torch.uint8)
        if content:
            payload.copy_(torch.frombuffer(content, dtype=torch.uint8))
        dist.broadcast(payload, source)
        if self._progress is None:
            self._take(torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True))
            self._progress = standings[source].progress
        # Before anybody says that all have the state, or ends, all of them have it.
        self.exchange.gather({})


def _packed(state: Mapping[str, Any]) -> bytearray:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return bytearray(file.getbuffer())
