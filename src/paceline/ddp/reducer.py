"""The reducer: gradients of one model, averaged over the ranks of one group during backward.

    plan       which gradient goes into which bucket (`BucketLayout`)
    hooks      tell when backward begins, gradients arrive, backward ends (`AutogradHooks`)
    step       one backward: made when it arms, dropped at its end (`Step`)
    transport  carries signals and buckets to the peers (`Transport`)

In one step: the hook on forward's outputs arms a `Step`. Gradient hooks fill buckets; a full bucket
is sent in plan order, the first one together with this rank's signal, the last one with its closing
signal. The end of backward sends what is left, waits for the averages, agrees on which parameters
were used at all, and gives the averages out. A parameter whose gradient has not arrived by then is
unused; nobody walks the graph to find it.

Everything a reducer needs comes with its constructor. Whoever wants another one (parameters were
unfrozen, a hook was registered, the group was replaced, the model was unpickled) makes a new one:
`DistributedDataParallel._rebuild` is the only place that does.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from paceline._torch_internals import current_graph_task, in_distributed_backward
from paceline.ddp.backward_observer import BackwardObserver, StepActions
from paceline.ddp.bucket_layout import BucketLayout
from paceline.ddp.bucket_telemetry import BucketTelemetry
from paceline.ddp.buckets import Bucket, DenseBucket
from paceline.ddp.comm_hooks import CommHook, HookBucket
from paceline.ddp.config import DDPConfig
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.failures import StepHistory, failure_text, step_error
from paceline.ddp.group_calls import all_reduce
from paceline.ddp.plan import BucketLimits, ManagedParameter
from paceline.ddp.signals import (
    Call,
    Signal,
    calls_mismatch,
    common_call,
    refuse_half_stated,
    weights_by_signals,
)
from paceline.ddp.step import Phase, Step
from paceline.ddp.transport import Transport, TransportState
from paceline.ddp.weighting import weights_of
from paceline.errors import ConfigError, MismatchError, PacelineError, StepError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Field
from paceline.telemetry.status_page import Phase as TrainingPhase

__all__ = ["Reducer"]

_OTHER = int(TrainingPhase.OTHER)
_SYNCS = int(Field.SYNCS)
_NAMES_SHOWN = 10


class Reducer(BackwardObserver):
    """Averages the gradients of one model over several ranks while backward computes them."""

    def __init__(
        self,
        config: DDPConfig,
        label: str,
        managed: Sequence[ManagedParameter],
        transport: Transport,
        *,
        history: StepHistory,
        actions: StepActions,
        comm_hook: CommHook | None = None,
        bucket_dtype: torch.dtype | None = None,
        deferred_sums: Sequence[DeferredSum] = (),
    ) -> None:
        super().__init__(label, managed, config.average_rule, history, actions)
        self._config = config
        self.transport = transport
        self.comm_hook = comm_hook
        # A hook is given what is weighed already. Sparse gradients take several calls, and those of
        # other devices have their own order.
        self._weighs_late = (
            transport.weighs_late
            and comm_hook is None
            and all(entry.parameter.is_cpu and not entry.sparse for entry in managed)
        )
        # Before the first bucket is launched.
        self._awaits_signals = transport.needs_signals_first and not self._weighs_late
        self._deferred_sums = deferred_sums
        self._layout = BucketLayout(
            managed,
            transport,
            config.limits,
            bucket_dtype,
            bucketed_from_start=config.is_bucketed_from_start,
            replans=config.replans,
        )
        self._telemetry = BucketTelemetry(label, transport.members)
        self._name_buckets()
        # Hooks come with the first forward that may have a backward: wrapping for inference costs
        # none.
        self._lacks_hooks = True

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._layout.buckets

    @property
    def limits(self) -> BucketLimits:
        return self._layout.limits

    @property
    def frozen(self) -> Sequence[torch.Tensor]:
        """Parameters that were frozen when the plan was made."""
        return self._layout.frozen

    @property
    def was_replanned(self) -> bool:
        return self._layout.was_replanned

    @property
    def _is_learning(self) -> bool:
        return self._layout.is_learning

    def _name_buckets(self) -> None:
        names = [managed.name for managed in self.managed]
        members = self.transport.members
        self._telemetry.name_buckets(self.label, members, self._layout.buckets, names)

    def follow_plan(self) -> bool:
        """Change to the plan made after the first step, before a forward; true the one time that
        happens.
        """
        if not self._layout.has_next_plan or self.step is not None:
            return False
        self.renew_hooks()
        self._layout.follow_next_plan()
        if self.transport.reduces_at_end:
            self.hooks.hook_few_parameters()
        self._name_buckets()
        return True

    @property
    def relies_on_hooks(self) -> bool:
        """Gradients show by hooks that they have arrived, not only by themselves."""
        return not self.transport.reduces_at_end

    def renew_hooks(self) -> None:
        self.hooks.remove()
        self._lacks_hooks = True

    def remove_hooks(self) -> None:
        super().remove_hooks()
        self._lacks_hooks = False

    # ------------------------------------------------------------------- called by torch's own code

    def _run_allreduce_hook(self, bucket: HookBucket) -> torch.futures.Future[list[torch.Tensor]]:
        """Called by this name by torch's optimizer-in-backward and mixed-precision hooks: a plain
        sum.
        """
        return all_reduce(self.transport.group, bucket.buffer()).get_future()

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last step."""
        if self.history.used_counts is None:
            return torch.full((len(self.managed),), self.transport.world, dtype=torch.int32)
        return self.history.used_counts

    # ------------------------------------------------------------------- forward

    def track_outputs(self, tensors: Sequence[torch.Tensor], sync: bool) -> None:
        self._install_hooks()
        super().track_outputs(tensors, sync)

    def synchronise_next_backward(self) -> None:
        self.follow_plan()  # as before a forward: the backward may belong to none
        self._install_hooks()
        super().synchronise_next_backward()

    def _install_hooks(self) -> None:
        if self._lacks_hooks:
            self._lacks_hooks = False
            self.hooks.install(self._layout.buckets, self._layout.sent_early)

    def exchange_signals(self, signal: Signal, detail: str = "") -> list[Signal]:
        """Exchange signals outside backward. Raises if a peer has failed, or does something else;
        it then gets to read `detail`.
        """
        self._telemetry.enter_forward_wait(self.history.steps)
        try:
            self.transport.post(signal)
            signals = self.transport.signals()
            self._check(signals, detail)
            self.transport.complete()
        except BaseException:
            self.history.step_failed()
            raise
        finally:
            recorder.leave()
        return signals

    def agree_on_new_plan(self, changes: Sequence[str]) -> list[Signal]:
        """Other buckets are about to replace these on all ranks. Raises on every rank if one of
        them does something else.
        """
        self.follow_plan()  # as peers did before their forward, if that is what they are doing
        return self.exchange_signals(Signal(Call.REPLAN), "; ".join(changes))

    def _forget_arrivals(self) -> None:
        self.hooks.forget_arrivals(self._layout.buckets)
        if not self.hooks.hooks_every_parameter:
            for bucket in self._layout.buckets:
                bucket.remember_gradients()

    # ------------------------------------------------------------------- during backward

    def _begin_step(self, step: Step, *, is_one_of_several: bool) -> None:
        self._telemetry.backward_began()
        layout = self._layout
        # Nothing to overlap with one bucket; with several forwards outstanding, how many samples
        # this backward covers is known at its end only; and the first step is the one that shows
        # how gradients arrive.
        step.defers_to_end = (
            layout.defers_always
            or layout.is_learning
            or layout.defers_sums
            or len(layout.buckets) == 1
            or is_one_of_several
        )
        if not self.window.open:
            for deferred in self._deferred_sums:
                deferred.begin()

    def _prepare(self) -> None:
        buckets = self._layout.buckets
        # A caller may have put one bucket's gradient where another's belongs. All step aside before
        # the first is filled.
        if len(buckets) > 1:
            for bucket in buckets:
                bucket.restore_views()
        for bucket in buckets:
            bucket.prepare()

    def copy_in(self, index: int, position: int) -> None:
        """A large gradient arrived."""
        step = self.step
        if step is not None and step.is_filling and not step.has_sealed(index):
            self._layout.buckets[index].copy_in(position)

    def bucket_full(self, index: int) -> None:
        """As many gradients arrived as the bucket has: send it, and those after it that had to wait
        for it.
        """
        step = self.step
        if step is None or not step.is_filling:
            return
        buckets = self._layout.buckets
        bucket = buckets[index]
        with self.hooks.lock:
            if step.has_sealed(index):
                self._arrived_too_late(step, bucket)
                return
            if not self._is_full(step, bucket):
                return
            # A nested backward may add gradients to parameters that already have one.
            if step.defers_to_end or current_graph_task() != step.task:
                step.defers_to_end = True
                return
            # Ranks may fill buckets in different orders, but have to launch them in the same one,
            # or the all-reduces of different buckets would meet. So a bucket that is full before
            # its turn waits in `ready`.
            step.ready.add(index)
            while step.cursor < self._layout.sent_early and step.cursor in step.ready:
                self._send(step, buckets[step.cursor])

    def _is_full(self, step: Step, bucket: Bucket) -> bool:
        # More arrivals than parameters mean that some arrived twice: then only distinct ones count.
        if self.hooks.hooks_every_parameter:
            return len(bucket.fired) <= bucket.size or len(set(bucket.fired)) >= bucket.size
        return bucket.surely_full and not step.keeps_graph

    def _arrived_too_late(self, step: Step, bucket: Bucket) -> None:
        name = self.managed[bucket.members[bucket.fired[-1]]].name
        self._layout.defer_always()
        step.fail(
            f"{name} received a second gradient after its bucket was all-reduced. From now on "
            "buckets are reduced at the end of backward; rerun this step. The cause is nested "
            "backward passes (re-entrant checkpointing) over shared parameters; "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) avoids it."
        )

    def _send(self, step: Step, bucket: Bucket) -> None:
        """Fill what is not filled and hand the bucket to the transport."""
        with torch.no_grad():
            used = self._fill(step, bucket)
            if step.phase is Phase.FILLING:
                self._post(step)
            if bucket.index == len(self._layout.buckets) - 1:
                self._close(step)
            step.cursor = bucket.index + 1
            # Without hooks, a gradient that changes from here on has come too late:
            # `_look_for_late_arrivals` compares with what is remembered now.
            if not self.hooks.hooks_every_parameter and not step.defers_to_end:
                bucket.remember_gradients()
            if self._config.skip_unused and not used and not self._carries_signal(bucket):
                return
            self._launch(step, bucket)
            self._telemetry.launched(bucket.index)

    def _fill(self, step: Step, bucket: Bucket) -> set[int]:
        """Bring all gradients in; which there are."""
        contribution = step.count_samples(self.window)
        self._note_arrivals(bucket)
        reached = self._used_in(bucket)
        is_empty = contribution.empty and not self.rule.by_ranks
        used = bucket.gather(reached, contribute=not is_empty)
        step.used_count += len(used)
        if len(used) < len(reached):
            step.without_gradient.update(bucket.members[position] for position in reached - used)
        if self._config.check_finite and not bucket.is_finite():
            step.fail(self._name_non_finite(bucket))
        return used

    def _send_what_is_not_deferred(self, step: Step) -> None:
        """Fill all buckets, tell the peers, and send those that are not left to a step. Everything
        is known by then: no closing signal follows.
        """
        buckets = self._layout.buckets
        used = [self._fill(step, bucket) for bucket in buckets]
        self._post(step)
        for bucket in buckets:
            step.cursor = bucket.index + 1
            if not bucket.is_deferred and (used[bucket.index] or not self._config.skip_unused):
                self._launch(step, bucket)
                self._telemetry.launched(bucket.index)

    def _carries_signal(self, bucket: Bucket) -> bool:
        """Where nobody waits for signals by themselves, the last bucket shows that all ranks have
        written their closing one: it cannot be left out.
        """
        is_last = bucket.index == len(self._layout.buckets) - 1
        return is_last and not self.transport.needs_signals_first

    def _post(self, step: Step) -> None:
        """Tell the peers what this rank contributes; where buckets have to wait for that, learn
        whether any of them has failed.
        """
        step.phase = Phase.EXCHANGING
        signal = Signal(
            Call.BACKWARD,
            self.window.contribution(),
            failed=step.failed,
            unused=self._has_unused(step),
            sums_nothing_later=not all(each.is_wanted for each in self._deferred_sums),
        )
        is_single = len(self._layout.buckets) == 1 and not self._layout.defers_sums
        weigh = functools.partial(weights_by_signals, rule=self.rule) if self._weighs_late else None
        self.transport.post(signal, single_bucket=is_single, weigh=weigh)
        if self._awaits_signals:
            self._telemetry.enter_step_wait(self.history.steps, at_end=False)
            try:
                signals = self.transport.signals()
                self._check(signals)
                self._set_weights(step, signals)
            finally:
                recorder.leave()

    def _close(self, step: Step) -> None:
        """Send the closing signal. With one bucket everything was known when it was sent, and there
        is none.
        """
        if len(self._layout.buckets) > 1 and not self._layout.defers_sums:
            signal = Signal(Call.CLOSE, failed=step.failed, unused=self._has_unused(step))
            # A hook sends a bucket in its own way, and one that is skipped is not sent at all.
            is_sent = self.comm_hook is None and not self._config.skip_unused
            self.transport.close(signal, self._layout.buckets[-1] if is_sent else None)

    def _set_weights(self, step: Step, signals: Sequence[Signal]) -> None:
        weights = weights_of([signal.contribution for signal in signals], self.rule)
        step.weights = weights
        self.transport.set_weights(weights)
        answers = [signal.call is Call.ANSWER for signal in signals]
        self.history.note_absent(tuple(itertools.compress(range(len(answers)), answers)))

    def _launch(self, step: Step, bucket: Bucket) -> None:
        if self.comm_hook is None:
            self.transport.launch(bucket)
        else:
            # A hook divides by the world size itself: it gets what makes that division exact.
            bucket.scale(step.weights[self.transport.rank] * self.transport.world)
            is_last = bucket.index == len(self._layout.buckets) - 1
            self.comm_hook.start(bucket, is_last=is_last)

    def _has_unused(self, step: Step) -> bool:
        """Known once every bucket has been gathered: at the end of a step, which is where it is
        asked.
        """
        return step.used_count < len(self.managed)

    def _note_arrivals(self, bucket: Bucket) -> None:
        """Parameters without a hook: look which of them have a gradient."""
        if not self.hooks.hooks_every_parameter:
            bucket.fired[:] = bucket.arrived()
            self.hooks.arrived.extend(bucket.members[position] for position in bucket.fired)

    def _used_in(self, bucket: Bucket) -> set[int]:
        used, before = set(bucket.fired), self.window.used
        if before and len(used) < bucket.size:
            used.update(
                position for position, index in enumerate(bucket.members) if index in before
            )
        return used

    def _name_non_finite(self, bucket: Bucket) -> str:
        names = [
            self.managed[index].name
            for index, parameter in zip(bucket.members, bucket.parameters, strict=True)
            if not _is_finite(parameter.grad)
        ]
        return f"non-finite gradient of {', '.join(names[:_NAMES_SHOWN])}\n"

    # ------------------------------------------------------------------- end of backward

    def _finish_step(self, step: Step) -> None:
        if not self._anything_arrived(step):
            # torch.autograd.grad, or parameters that stand in for ours: nothing of ours was
            # touched.
            if step.context_gradients is None and in_distributed_backward():
                raise ConfigError(
                    f"forward of {self.label} ran outside of the context in which its backward "
                    "runs, so its gradients cannot be found and averaged. Call it inside `with "
                    "torch.distributed.autograd.context() as context_id:`, too."
                )
            return
        if step.phase is Phase.ACCUMULATING:
            step.count_samples(self.window)
            for bucket in self._layout.buckets:
                self._note_arrivals(bucket)
            self.window.used.update(self.hooks.arrived)
            return
        start = time.perf_counter()
        with torch.no_grad():
            self._synchronise(step)
        self.history.note_sync(time.perf_counter() - start)

    def _finish_in_context(self, step: Step, arrived: dict[int, torch.Tensor]) -> None:
        self.hooks.arrived[:] = list(arrived)
        for bucket in self._layout.buckets:
            bucket.fired[:] = [i for i, index in enumerate(bucket.members) if index in arrived]
        super()._finish_in_context(step, arrived)
        counts = self.history.used_counts
        if step.synchronised and counts is not None:
            self._refuse_partial_use(counts)

    def _refuse_partial_use(self, counts: torch.Tensor) -> None:
        """A context takes gradients from autograd only: where a parameter has none, the average
        cannot be put. All ranks have the same counts, so all raise.
        """
        partly = ((counts > 0) & (counts < self.transport.world)).nonzero().flatten().tolist()
        if partly:
            names = ", ".join(self.managed[index].name for index in partly[:_NAMES_SHOWN])
            raise MismatchError(
                f"{names}: used on some ranks only. Where gradients are in a context of "
                "torch.distributed.autograd, every rank has to use the same parameters."
            )

    def _anything_arrived(self, step: Step) -> bool:
        if self.hooks.hooks_every_parameter or step.cursor:
            return bool(self.hooks.arrived)
        return any(bucket.arrived() for bucket in self._layout.buckets)

    def _synchronise(self, step: Step) -> None:
        buckets = self._layout.buckets
        if self._layout.defers_sums:
            self._send_what_is_not_deferred(step)
            self._finish(step)
            return
        if not self.hooks.hooks_every_parameter:
            if len(buckets) == 1 and self._synchronise_in_one_call(step, buckets[0]):
                return
            self._look_for_late_arrivals(step)
        for bucket in buckets[step.cursor :]:
            self._send(step, bucket)
        self._finish(step)

    def _synchronise_in_one_call(self, step: Step, bucket: Bucket) -> bool:
        """The usual step of a small model: every gradient is there, one call does the rest. False:
        nothing is done.
        """
        if step.failed or self._config.check_finite or not isinstance(bucket, DenseBucket):
            return False
        contribution = step.count_samples(self.window)
        # Micro-batches of one size: then ranks whose signals are equal weigh 1 / world.
        reference, total, micro_batches, *_ = contribution
        if not total or reference * micro_batches != total or not bucket.copy_in_fast():
            return False
        bucket.fired.extend(bucket.positions)
        self.hooks.arrived.extend(bucket.members)
        step.used_count, step.phase, step.cursor = bucket.size, Phase.EXCHANGING, 1
        self._telemetry.launched(0)
        self._telemetry.enter_step_wait(self.history.steps, at_end=True)
        try:
            signal = Signal(Call.BACKWARD, contribution)
            is_done = self.transport.reduce_single_bucket(signal, bucket)
            if is_done:
                self.history.note_absent(())
            signals: Sequence[Signal] = () if is_done else self._wait_for_all(step)
        finally:
            recorder.leave(then=_OTHER)
        self._telemetry.all_averaged()
        recorder.count(_SYNCS)
        self._scatter(step, signals)
        return True

    def _look_for_late_arrivals(self, step: Step) -> None:
        """Gradients that have changed since their bucket was sent, of parameters whose hook would
        have noticed.
        """
        for bucket in self._layout.buckets[: step.cursor]:
            late = bucket.arrived()
            if late:
                bucket.fired[:] = late
                self._arrived_too_late(step, bucket)

    def _finish(self, step: Step) -> None:
        """Wait for all buckets, agree on what was used, give out the averages. Also run by ranks
        without data.
        """
        self._telemetry.enter_step_wait(self.history.steps, at_end=True)
        try:
            signals = self._wait_for_all(step)
        finally:
            recorder.leave(then=_OTHER)
        self._telemetry.all_averaged()
        recorder.count(_SYNCS)
        self._scatter(step, signals)

    def _wait_for_all(self, step: Step) -> list[Signal]:
        if self.comm_hook is not None:
            self.comm_hook.finish()
        self.forwards.wait_for_futures()
        if not self._awaits_signals:
            signals = self.transport.signals()
            self._check(signals)
            self._set_weights(step, signals)
            self._average_deferred_if_unwanted(step, signals)
        elif self._layout.defers_sums:
            self._average_deferred_if_unwanted(step, self.transport.signals())
        # Checked again: what failed after the first bucket was sent shows in the closing signals
        # only.
        signals = self.transport.complete(self._telemetry)
        self._check(signals)
        return signals

    def _scatter(self, step: Step, signals: Sequence[Signal]) -> None:
        """Give the averages to the parameters."""
        used = self._agree_on_used(step, any(signal.unused for signal in signals))
        if self._layout.defers_sums and step.has_data:
            for deferred in self._deferred_sums:
                if step.averages_deferred:
                    deferred.forget()
                else:
                    deferred.leave(step.weights, self.label)
        if self._actions.before_scatter is not None:
            self._actions.before_scatter()
        if self.comm_hook is None or not self.comm_hook.steps_optimizer:
            for bucket in self._layout.buckets:
                if bucket.is_deferred and not step.has_data and not step.averages_deferred:
                    continue
                bucket.scatter(
                    bucket.positions
                    if used is None
                    else [i for i, index in enumerate(bucket.members) if index in used]
                )
        self.history.step_averaged()
        if self._layout.is_learning:
            self._layout.learn(self.hooks.arrived)
        if self._actions.after_step is not None:
            self._actions.after_step()

    def _agree_on_used(self, step: Step, some_unused: bool) -> set[int] | None:
        """Parameters that got a gradient on any rank; None means all."""
        # The usual step saves this exchange. Every rank has read the same signals, so either all
        # take part in it or none does.
        if not some_unused:
            self.history.note_used(None)
            return None
        local = torch.zeros(len(self.managed), dtype=torch.int32)
        local[sorted(self.window.used.union(self.hooks.arrived) - step.without_gradient)] = 1
        counts = self.transport.all_reduce_small(local)
        self.history.note_used(counts)
        used = set(counts.nonzero().flatten().tolist())
        return None if len(used) == len(self.managed) else used

    def _end_step(self, step: Step, *, abandoned: bool = False) -> None:
        super()._end_step(step, abandoned=abandoned)
        self.transport.abandon()
        if not self.hooks.hooks_every_parameter and self.forwards.outstanding():
            self._forget_arrivals()  # the next backward needs no forward before it
        else:
            self.hooks.forget_arrivals(self._layout.buckets)

    def _average_deferred_if_unwanted(self, step: Step, signals: Sequence[Signal]) -> None:
        """An optimizer that summed gradients is gone on some rank: all average what was left to it.
        It may still be there on others, where garbage was not collected yet.
        """
        if not any(signal.sums_nothing_later for signal in signals):
            return
        step.averages_deferred = True
        for bucket in self._layout.buckets:
            if bucket.is_deferred:
                if not step.has_data:
                    bucket.gather((), contribute=False)
                self._launch(step, bucket)

    def place_deferred(self) -> None:
        """Before a step sums them: gradients that were left to it lie where peers find them."""
        with torch.no_grad():
            for bucket in self._layout.buckets:
                if bucket.is_deferred:
                    assert isinstance(bucket, DenseBucket)
                    bucket.place()

    # ------------------------------------------------------------------- without data

    def participate_without_data(
        self, on_forward: Callable[[Sequence[Signal]], None]
    ) -> list[Signal]:
        """Take part in whatever the peers do next, contributing nothing. Returns their signals;
        all ANSWER: all done.
        """
        self.settle_dropped()
        self.follow_plan()
        self.transport.post(Signal(Call.ANSWER))
        at_end = not self._awaits_signals
        self._telemetry.enter_step_wait(self.history.steps, at_end=at_end)
        try:
            signals = self.transport.signals()
        finally:
            recorder.leave()
        self._check(signals)
        call = common_call(signals)
        if call is Call.BACKWARD:
            self._participate_in_backward(signals)
        else:
            self.transport.complete()
            if call is not Call.ANSWER:
                on_forward(signals)
        return signals

    def _participate_in_backward(self, signals: Sequence[Signal]) -> None:
        step = self.step = Step(Phase.EXCHANGING, has_data=False)
        try:
            with torch.no_grad():
                if self.transport.needs_signals_first:
                    self._set_weights(step, signals)
                self._send_nothing(step)
                self._finish(step)
        finally:
            self._end_step(step)

    def _send_nothing(self, step: Step) -> None:
        """Take part in the buckets that are not under way yet, contributing zeros."""
        # None may be left out: peers that have launched a bucket wait for this rank's share of it.
        buckets = self._layout.buckets
        for bucket in buckets[step.cursor :]:
            step.cursor = bucket.index + 1
            if step.cursor == len(buckets):
                self._close(step)
            if not bucket.is_deferred:
                bucket.gather((), contribute=False)
                self._launch(step, bucket)

    # ------------------------------------------------------------------- failures

    def _check(self, signals: Sequence[Signal], detail: str = "") -> None:
        """Everybody sees the same signals, so everybody raises or nobody does. If they do different
        things, `detail` is what the peers get to read about this rank's.
        """
        first = signals[0]
        if not first.failed and signals.count(first) == len(signals):
            return
        if any(signal.failed for signal in signals):
            self._raise_failure(signals)
        if common_call(signals) is None:
            step = self.step or Step(Phase.EXCHANGING)
            raise calls_mismatch(signals, self.label, self._end_together(step, signals, detail))
        try:
            refuse_half_stated(signals, self.label)
        except MismatchError as error:
            self._end_together(self.step or Step(Phase.EXCHANGING), signals, str(error))
            raise
        self._notice_unequal_counts(signals)

    def _raise_failure(self, signals: Sequence[Signal]) -> NoReturn:
        step = self.step or Step(Phase.EXCHANGING)
        texts = self._end_together(step, signals, step.failure_text or "")
        raise step_error(self.transport.rank, signals, texts)

    def _end_together(self, step: Step, signals: Sequence[Signal], text: str) -> list[str]:
        """End a step that cannot count on all ranks, and exchange what went wrong: every rank's
        text.
        """
        transport = self.transport
        if transport.state is not TransportState.IDLE:
            if not transport.needs_signals_first and any(
                signal.call is Call.BACKWARD for signal in signals
            ):
                # Peers did not wait for our signal and have buckets under way: bring them to their
                # end.
                self._set_weights(step, signals)
                with torch.no_grad():
                    self._send_nothing(step)
            transport.complete()
        texts = transport.all_gather_text(text)
        self.history.note_error("\n".join(filter(None, texts)))
        self.history.failure_agreed()
        self.abandon_step()
        return texts

    def fail(self, error: BaseException | None, where: str) -> None:
        """This rank cannot finish its step: take part in what is left of it, contributing nothing,
        and publish why.
        """
        self.history.step_failed()
        if isinstance(error, PacelineError) and not isinstance(error, StepError):
            self.abandon_step()
            return
        text = failure_text(error, where)
        step = self.step
        if step is not None and self.transport.state is not TransportState.IDLE:
            step.fail(text)
            signals = self._complete_with_nothing(step)
        else:
            self.step = None
            self.follow_plan()  # as the peers did before their forward
            step = Step(Phase.EXCHANGING)
            step.fail(text)
            self.transport.post(Signal(Call.ANSWER, failed=True))
            signals = self.transport.signals()
        self._end_together(step, signals, text)

    def _complete_with_nothing(self, step: Step) -> list[Signal]:
        with torch.no_grad():
            self._send_nothing(step)
        if self.comm_hook is not None:
            self.comm_hook.finish()
        signals = self.transport.signals()
        self._set_weights(step, signals)
        with torch.no_grad():
            self._average_deferred_if_unwanted(step, signals)
        return self.transport.complete()

    def publish_dropped(self) -> None:
        """If the last backward raised and the program went on, publish that now: peers wait for it.

        An error that nobody catches needs no help: it ends the process, and the failure channel
        publishes it. One that was caught is known here only while it is being handled.
        """
        step = self.step
        if step is None or (step.phase is not Phase.DROPPED and current_graph_task() >= 0):
            return
        try:
            self.fail(sys.exception(), "backward")
        finally:
            if self.step is step:
                self.abandon_step()

    def _notice_unequal_counts(self, signals: Sequence[Signal]) -> None:
        """Inputs of different leading dimensions, which may or may not be numbers of samples."""
        action = self._actions.on_unequal_counts
        if action is None or self.history.unequal_counts_reported or self.rule.by_ranks:
            return
        leading = [signal.contribution.leading for signal in signals]
        if len({size for size in leading if size}) > 1:
            self.history.note_unequal_counts()
            action(leading)


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(
        torch.isfinite(tensor.coalesce().values() if tensor.is_sparse else tensor).all()
    )
