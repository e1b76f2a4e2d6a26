"""When `Training(checkpoint=...)` saves, and from which file it goes on.

All ranks must decide alike. Steps are counted on every rank. The clock is rank 0's: it turns the
interval into a number of steps, which the others learn when that step has come. Signals are agreed
on by `save_requested()`.
"""

from __future__ import annotations

import datetime
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.errors import ConfigError
from paceline.launch.save_agreement import NO_REQUEST, SaveRequest
from paceline.launch.save_request import save_requested
from paceline.training.checkpoint_directory import CheckpointDirectory
from paceline.training.generations import Generations
from paceline.training.group_exchange import Exchange

__all__ = ["AutomaticSaves", "SaveEvery"]

SaveEvery: TypeAlias = int | datetime.timedelta | None
_State: TypeAlias = dict[str, Any]


class AutomaticSaves:
    """The checkpoints of one training. Rank 0 writes; all ranks read.

    Raises:
        ConfigError: `save_every` is neither a number of steps nor a length of time.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        every: SaveEvery,
        exchange: Exchange,
        generations: Generations | None = None,
    ) -> None:
        length = every.total_seconds() if isinstance(every, datetime.timedelta) else every
        # Neither a number nor a length of time: the annotation is not checked at run time.
        if length is not None and not (type(length) in (int, float) and length > 0):
            raise ConfigError(
                "save_every must be a positive number of steps or a datetime.timedelta, found "
                f"{every!r}"
            )
        self._directory, self._exchange = directory, exchange
        self._steps = every if isinstance(every, int) else None
        self._clock: _StepClock | _ElasticClock | None = None
        if isinstance(every, datetime.timedelta):
            self._clock = (
                _StepClock(every, exchange)
                if generations is None
                else _ElasticClock(every, generations)
            )
        self._requested = _save_requested if generations is None else generations.save_request
        self._saved: object = None

    def resume(self, load: Callable[[_State], None]) -> None:
        """Load the newest checkpoint that all ranks can read, if there is one.

        Raises:
            ConfigError: there are checkpoints, but none that can be read, or the newest one is of
                another way of training.
        """
        names: list[str] = self._of_rank_0(self._directory.names())
        problems: list[str] = []
        for name in names:
            state, problem = None, ""
            try:
                state = self._directory.read(name)
            except ConfigError as error:
                problem = f"rank {self._exchange.rank}: {error}"
            found = [text for text in self._from_all(problem) if text]
            if not found:
                assert state is not None
                load(state)
                return
            problems += found
            self._say(f"{found[0]}; going back to the checkpoint before it")
        if names:
            raise ConfigError(
                f"none of the {len(names)} checkpoints in {self._directory.path} can be read by "
                f"all ranks, which need a directory they share: {'; '.join(problems)}. Move them "
                "away to start from the beginning"
            )

    def after_step(self, step: int, place: object, state: Callable[[], _State]) -> bool:
        """Between two global batches: save if it is time. True if training is asked to stop."""
        request = self._requested()
        due = (self._steps is not None and step % self._steps == 0) or (
            self._clock is not None and self._clock.is_due(step)
        )
        if due or request.due:
            self.save(step, place, state)
        if request.stop:
            self._wait()
        return request.stop

    def save(self, step: int, place: object, state: Callable[[], _State]) -> None:
        """Save, unless `place` is where the last save was."""
        if place == self._saved:
            return
        self._saved = place
        if self._exchange.rank == 0:
            self._directory.write(step, state())

    def finish(self, step: int, place: object, state: Callable[[], _State]) -> None:
        """At the end: the last state, in place when this returns on rank 0."""
        self.save(step, place, state)
        self._wait()

    def skip(self, place: object) -> None:
        """What is at this place needs no save: it was loaded."""
        self._saved = place

    def _wait(self) -> None:
        if self._exchange.rank == 0:
            self._directory.wait()

    def _of_rank_0(self, value: Any) -> Any:
        return self._from_all(value)[0]

    def _from_all(self, value: Any) -> list[Any]:
        return [facts["value"] for facts, _ in self._exchange.gather({"value": value})]

    def _say(self, text: str) -> None:
        if self._exchange.rank == 0:
            sys.stderr.write(f"paceline: {text}\n")


class _StepClock:
    """Turns a length of time into a number of steps, the same on every rank."""

    def __init__(self, interval: datetime.timedelta, exchange: Exchange) -> None:
        self._interval_s, self._exchange = interval.total_seconds(), exchange
        self._since, self._since_step, self._look_at = time.monotonic(), 0, 1

    def is_due(self, step: int) -> bool:
        if step < self._look_at:
            return False
        elapsed = time.monotonic() - self._since
        steps = max(1, step - self._since_step)
        left = math.ceil((self._interval_s - elapsed) / max(elapsed / steps, 1e-6))
        # At most as many steps again as were measured: the first ones may be slow.
        (facts, _), *_ = self._exchange.gather({"left": min(max(left, 0), steps)})
        left = facts["left"]
        if left > 0:
            self._look_at = step + left
            return False
        self._since, self._since_step, self._look_at = time.monotonic(), step, step + 1
        return True


class _ElasticClock:
    """The same in an elastic job, where ranks tell the time in the messages of every pass."""

    def __init__(self, interval: datetime.timedelta, generations: Generations) -> None:
        self._interval_s, self._generations = interval.total_seconds(), generations

    def is_due(self, step: int) -> bool:
        return self._generations.is_older_than(self._interval_s)


def _save_requested() -> SaveRequest:
    # Signals are delivered to the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    return save_requested() if is_main else NO_REQUEST
