"""`GlobalBatch`: what `training.batches()` yields."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from paceline.errors import GroupError, NativeError, StepError
from paceline.training.audit import Audit
from paceline.training.shard_inputs import BatchInputs
from paceline.training.shard_pass import PassResult, PassSetting, ShardPass
from paceline.training.shard_plan import BatchPlan, Shard
from paceline.training.shard_price import ShardPrice
from paceline.training.shard_queue import ShardQueue, Task, TaskKind
from paceline.training.shard_random import ShardSeeds, seed_generators

__all__ = ["GlobalBatch"]


class _State(enum.Enum):
    """How far the loop over the shards is."""

    NOT_BEGUN = enum.auto()
    IN_LOOP = enum.auto()
    LEFT_EARLY = enum.auto()
    FAILED = enum.auto()
    COMPLETE = enum.auto()


class GlobalBatch:
    """One global batch. `shards()` yields this rank's shards of it and ends when the gradient of
    the whole batch is in `.grad`.

    `epoch`, `number` and `step` say which batch it is: of which epoch, which of that epoch, and
    which of all, from 0 on. `samples` is how many samples it has, on all ranks together.
    """

    def __init__(
        self,
        *,
        epoch: int,
        number: int,
        step: int,
        plan: BatchPlan,
        audit: Audit | None,
        price: ShardPrice | None,
        inputs: BatchInputs,
        new_queue: Callable[[], ShardQueue],
        setting: PassSetting,
        seeds: Callable[[int], ShardSeeds],
        on_complete: Callable[[PassResult], None],
    ) -> None:
        self.epoch, self.number, self.step, self.samples = epoch, number, step, plan.samples
        self._plan, self._audit, self._inputs, self._new_queue = plan, audit, inputs, new_queue
        self._price = price
        self._setting, self._seeds, self._on_complete = setting, seeds, on_complete
        self._passes = 0
        self._state = _State.NOT_BEGUN
        self._metrics = _Metrics()
        self._pass: ShardPass | None = None
        self._in_shard = False
        seed_generators(seeds(0).before)

    def shards(self) -> Iterator[Any]:
        """This rank's shards of the batch, one after the other, as the loader's `collate_fn` makes
        them. Call `backward` for each.

        When the loop ends, `.grad` is the mean over the global batch, equal on every rank, added to
        what was there before the loop. Another loop over the same batch is another pass: it yields
        the same shards, for a second backward with the parameters of then.

        Raises:
            StepError: a shard had no backward, on this rank or another, or the loop before was left
                early. No rank's gradients have changed.
        """
        self.check_not_in_loop("batch.shards() was called again")
        seeds = self._seeds(self._passes)
        work = self._pass = ShardPass(
            self._setting, self._plan, seeds, self._audit, step=self.step, number=self._passes
        )
        self._passes += 1
        queue = self._new_queue()
        failure: StepError | None = None
        result: PassResult | None = None
        # Once, unless ranks are lost: then some of their shards are handed over.
        while result is None:
            self._state = _State.IN_LOOP
            try:
                with nullcontext() if self._price is None else self._price.watching():
                    computed = list[tuple[Shard, float]]()
                    while failure is None and (task := queue.next()) is not None:
                        inputs = self._inputs.of(task.shard)
                        work.begin(task.shard)
                        self._in_shard, began = True, time.perf_counter()
                        yield inputs
                        self._in_shard = False
                        computed.append((task.shard, time.perf_counter() - began))
                        failure = _end(work, task)
                    if self._price is not None and failure is None:
                        self._measure(self._price, work, computed)
            except GeneratorExit:
                self._state = _State.LEFT_EARLY
                raise
            self._state = _State.FAILED
            result = self._complete(work, queue, failure)
        self._pass = None
        self._metrics = _Metrics({**self._metrics, **result.metrics})
        self._state = _State.COMPLETE
        self._on_complete(result)

    def __iter__(self) -> Iterator[Any]:
        """Refused: samples come in shards."""
        raise StepError("a global batch is not looped over itself: use batch.shards()")

    def _complete(
        self, work: ShardPass, queue: ShardQueue, failure: StepError | None
    ) -> PassResult | None:
        """The result of the pass; None if it is to be tried again, after the shards in the queue,
        if there are any.
        """
        lost: GroupError | NativeError | None = None
        try:
            outcome = work.complete(queue.pace(), failure)
        except (GroupError, NativeError) as error:
            lost = error
        # Outside of the handler: an error that is being handled would be told to the other ranks.
        if lost is not None:
            self._setting.recover(lost)
            outcome = ()
        if isinstance(outcome, PassResult):
            queue.close()
            return outcome
        queue.hand_over(outcome)
        return None

    def _measure(
        self, price: ShardPrice, work: ShardPass, computed: Sequence[tuple[Shard, float]]
    ) -> None:
        """Whether it would pay to have fewer shards; leaves no trace in what is trained."""
        if self._audit is None and computed:
            last, _ = computed[-1]
            price.measure(last.samples, [seconds for _, seconds in computed])
            work.forget_shard()

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Log numbers of the current shard: the mean over its samples, or a tensor with one or more
        numbers for each sample. `metrics` then has the mean over the global batch.

        Raises:
            StepError: this is not inside the loop over `shards()`, or a name was logged twice.
        """
        if self._pass is None or not self._in_shard:
            raise StepError(
                f"batch.log({', '.join(metrics)}) belongs inside the loop over batch.shards()"
            )
        for name, value in metrics.items():
            self._pass.log(name, value)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each logged name over the global batch: the same number on every rank, and
        at any number of ranks.

        Raises:
            StepError: the loop over `shards()` has not ended.
        """
        if self._state is not _State.COMPLETE:
            raise StepError(
                "batch.metrics is known when the loop over batch.shards() has ended, on every rank"
            )
        return self._metrics

    @property
    def is_open(self) -> bool:
        """Whether the loop over the shards has begun but did not come to its end."""
        return self._state not in (_State.NOT_BEGUN, _State.COMPLETE)

    def check_not_in_loop(self, what: str) -> None:
        """Raise `StepError` if the loop over the shards has begun but not ended."""
        if self._state is _State.IN_LOOP:
            raise StepError(
                f"{what} inside the loop over batch.shards(), in step {self.step}. The gradient of "
                "the global batch is complete when that loop has ended: do it after the loop"
            )
        if self._state is _State.LEFT_EARLY:
            raise StepError(
                f"{what}, but the loop over batch.shards() of step {self.step} was left early, so "
                "that the gradient of the global batch is not complete. Let it run to its end. "
                "After an error in it, a single rank may begin the step again with another loop "
                "over training.batches(); of several ranks, the others wait for this one's shards"
            )
        if self._state is _State.FAILED:
            raise StepError(
                f"{what}, but step {self.step} has failed. Another loop over training.batches(), "
                "on every rank, begins it again"
            )

    def abandon(self, *, ranks: int) -> None:
        """The loop over the batches was left amid this one: undo it, if no other rank waits for its
        shards, so that it can begin again.
        """
        if ranks > 1 and self._state is not _State.FAILED:
            return
        if self._pass is not None:
            self._pass.abandon()
            self._pass = None
        self._state = _State.NOT_BEGUN

    def close(self) -> None:
        """At the end of the loop's body."""
        self.check_not_in_loop("The next batch was asked for")
        if self._state is _State.NOT_BEGUN:
            self._on_complete(PassResult({}, set()))
        self.release_inputs()

    def release_inputs(self) -> None:
        """Let go of the inputs and of the loader."""
        self._inputs.release()


class _Metrics(dict[str, float]):
    """Says what to do about a name that was not logged."""

    def __missing__(self, name: str) -> float:
        raise KeyError(
            f"{name!r} was not logged ({', '.join(self) or 'nothing was'}): call "
            f"batch.log({name}=...) inside the loop over batch.shards()"
        )


def _end(work: ShardPass, task: Task) -> StepError | None:
    """Take what a shard has computed; what is wrong with it, all ranks must hear."""
    if task.kind is TaskKind.AUDIT:
        work.end_audit(task.shard)
        return None
    try:
        work.end(task.shard)
    except StepError as error:
        return error
    return None
