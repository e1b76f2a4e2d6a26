"""What one rank and many have in common: knowing when a backward of this model begins, which
forwards it covers, and when it has finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

import torch

from paceline._torch_internals import autograd_context, current_graph_task
from paceline.ddp.autograd_hooks import AutogradHooks, queue_callback
from paceline.ddp.context_gradients import ContextGradients
from paceline.ddp.failures import StepHistory
from paceline.ddp.forward_tracker import ForwardTracker
from paceline.ddp.plan import ManagedParameter
from paceline.ddp.reducer_compat import ReducerCompat
from paceline.ddp.step import ForwardPass, Phase, Step
from paceline.ddp.weighting import AverageRule, Basis, SampleCount, SampleWindow, combined
from paceline.errors import ConfigError, PacelineError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase as TrainingPhase

__all__ = ["BackwardObserver", "StepActions"]

_logger = logging.getLogger("paceline")
_BACKWARD, _OTHER = int(TrainingPhase.BACKWARD), int(TrainingPhase.OTHER)


@dataclasses.dataclass(frozen=True, slots=True)
class StepActions:
    """What is done around the end of a synchronised step, beside the average."""

    before_scatter: Callable[[], None] | None = None
    after_step: Callable[[], None] | None = None
    on_unequal_counts: Callable[[list[float]], None] | None = None


class BackwardObserver(ReducerCompat):
    """Tracks forwards and backwards of one model. Subclasses say what a backward means."""

    def __init__(
        self,
        label: str,
        managed: Sequence[ManagedParameter],
        rule: AverageRule,
        history: StepHistory,
        actions: StepActions,
    ) -> None:
        self.label = label
        self.rule = rule
        self.history = history
        self._actions = actions
        self.hooks = AutogradHooks(self, managed)
        self.forwards = ForwardTracker()
        self.window = SampleWindow()
        self.step: Step | None = None
        self._next_backward_syncs = False  # whatever the forward it belongs to says

    @property
    def managed(self) -> Sequence[ManagedParameter]:
        return self.hooks.managed

    @property
    def in_backward(self) -> bool:
        return self.step is not None

    def use_rule(self, rule: AverageRule) -> None:
        """From the next step on, average by this rule."""
        self.rule = rule

    def renew_hooks(self) -> None:
        """The parameters may have lost their hooks: give them others."""
        self.hooks.remove()

    def remove_hooks(self) -> None:
        """Leave the parameters as they were."""
        self.hooks.remove()

    # ----------------------------------------------------------------------------- forward

    def begin_forward(self, count: SampleCount) -> None:
        """A forward of this weight is about to run, and backward may follow."""
        if self.window.basis is not None and count.basis is not self.window.basis:
            self._refuse_half_stated(count)
        self.forwards.begin(count)

    def _refuse_half_stated(self, count: SampleCount) -> None:
        """Numbers of samples that were stated cannot be weighed against those nobody stated."""
        if count.value and Basis.SAMPLES in (count.basis, self.window.basis):
            raise ConfigError(
                f"{self.label}: model.count(n) was around some micro-batches of this step, but not "
                "around others. State a number for every micro-batch, or for none."
            )

    def track_outputs(self, tensors: Sequence[torch.Tensor], sync: bool) -> None:
        """Forward returned these tensors: when backward reaches one, it belongs to this pass."""
        if self.step is None:
            self.hooks.remove_empty_tables()
            self._forget_arrivals()
        forward = ForwardPass(self.forwards.sample_count, sync, autograd_context())
        reachable = self.hooks.watch_outputs(tensors, forward)
        if (
            self.forwards.awaits_backward
            or self._is_learning
            or self.hooks.bypasses_outputs
            or not reachable
        ):
            self.hooks.set_sentinels(forward)
        self.forwards.returned(forward, reachable=reachable)

    def synchronise_next_backward(self) -> None:
        """The next backward is averaged, whichever forward it belongs to, and whether that has
        returned or is still running.
        """
        self.settle_dropped()
        if self.step is None and self.tracks(sync=True):
            self._forget_arrivals()
            self._next_backward_syncs = True
            # If it does not come by the outputs of a forward: that of the running one.
            count, context = self.forwards.sample_count, autograd_context()
            self.hooks.set_sentinels(ForwardPass(count, sync=True, context=context))

    def tracks(self, sync: bool) -> bool:
        """Whether a forward needs to be tracked at all."""
        del sync
        return True

    def follow_plan(self) -> bool:
        """Change to a better plan, where one has been made; true if there was one."""
        return False

    @property
    def _is_learning(self) -> bool:
        """How backwards of this model come is not known yet."""
        return True

    # ----------------------------------------------------------------------------- backward

    def reached_output(self, forward: ForwardPass) -> None:
        """Backward arrived at an output of forward."""
        task = current_graph_task()
        if forward.task == task:
            return
        with self.hooks.lock:
            forward.reach(task)
            self.settle_dropped()
            if self.step is None:
                self._arm(task, forward)
            else:
                self.step.cover(forward)
                if forward.sync and self.step.synchronise():
                    self._prepare()

    def _arm(self, task: int, forward: ForwardPass) -> None:
        self.hooks.remove_sentinels()
        sync = forward.sync or self._next_backward_syncs
        self._next_backward_syncs = False
        phase = Phase.FILLING if sync else Phase.ACCUMULATING
        others = self.forwards.reached(forward)
        step = Step(phase, task=task, count=forward.count, keeps_graph=torch.is_grad_enabled())
        self.step = step
        if forward.context is not None:
            step.context_gradients = ContextGradients(forward.context, self.managed)
        recorder.phase(_BACKWARD)
        self._begin_step(step, is_one_of_several=bool(others))
        queue_callback(self, step.number)
        if not self.rule.by_ranks and (self.window.open or phase is Phase.ACCUMULATING):
            counts = (other.count for other in others)
            self.hooks.scale_by(self.window.preview(functools.reduce(combined, counts, step.count)))
        if sync:
            self._prepare()

    def bypassed_outputs(self, forward: ForwardPass, gradient: torch.Tensor) -> torch.Tensor:
        """Backward arrived at a parameter before it came to an output of forward."""
        announced = self._next_backward_syncs
        if not announced and self.hooks.note_bypass() and not self._is_learning:
            _logger.warning(
                "%s: the loss was not computed from forward's outputs. Gradients of the previous "
                "backward may not have been averaged; later ones will be. Return from forward "
                "every tensor the loss depends on.",
                self.label,
            )
        self.reached_output(forward)
        return self.hooks.scaled(gradient)

    def end_of_backward(self, number: int) -> None:
        """The outermost backward has finished."""
        step = self.step
        if step is None or step.number != number:
            return
        self.hooks.remove_scaling()
        try:
            arrived = step.context_gradients and step.context_gradients.arrived()
            if arrived:
                self._finish_in_context(step, arrived)
            else:
                self._finish_step(step)
        except BaseException:
            self.history.step_failed()
            raise
        finally:
            self._end_step(step)
            if recorder.current == _BACKWARD:
                recorder.phase(_OTHER)

    def backward_dropped(self, number: int) -> None:
        """Backward raised, so the engine dropped our callback. The error is out of reach here: it
        is published where it shows, see `settle_dropped`.
        """
        step = self.step
        if step is not None and step.number == number:
            self.hooks.remove_scaling()
            if step.phase is Phase.ACCUMULATING:
                self.abandon_step()
            else:
                step.drop()

    def settle_dropped(self) -> None:
        """If the last backward raised and the program went on, let that be known now."""
        # What is raised to the program is its own business: peers that are gone are no error here.
        with contextlib.suppress(PacelineError):
            self.publish_dropped()

    def publish_dropped(self) -> None:
        """As `settle_dropped`, and raise if the peers are gone."""

    def abandon_step(self) -> None:
        """Forget the backward that is running and the samples counted so far."""
        self.hooks.remove_scaling()
        step = self.step if self.step is not None else Step(Phase.FILLING)
        self._end_step(step, abandoned=True)

    def _end_step(self, step: Step, *, abandoned: bool = False) -> None:
        self.step = None
        if step.synchronised or abandoned:
            self.window = SampleWindow()

    # ----------------------------------------------------------------------------- for subclasses

    def bucket_full(self, index: int) -> None:
        """As many gradients arrived as a bucket has."""

    def copy_in(self, index: int, position: int) -> None:
        """A large gradient arrived."""

    def _begin_step(self, step: Step, *, is_one_of_several: bool) -> None:
        """Backward has reached an output of forward."""

    def _prepare(self) -> None:
        """Gradients of this backward are averaged."""

    def _finish_step(self, step: Step) -> None:
        raise NotImplementedError

    def _finish_in_context(self, step: Step, arrived: dict[int, torch.Tensor]) -> None:
        """The gradients of this backward are in a context of torch.distributed.autograd."""
        assert step.context_gradients is not None
        with step.context_gradients.in_place_of_grad(arrived):
            self._finish_step(step)

    def _forget_arrivals(self) -> None:
        """What has arrived so far belongs to no backward."""
