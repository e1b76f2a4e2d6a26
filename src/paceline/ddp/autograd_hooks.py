"""Everything that the reducer hangs into autograd, and how it is taken out again.

gradient hooks    on parameters: a gradient has been accumulated. On every parameter at first; where
                  only the end of backward counts, later on few (see `_needs_hook`).
output hooks      on what forward returned: backward has reached that forward. They come before any
                  parameter gets its gradient, and say which forward a backward belongs to.
sentinels         on parameters, before accumulation: a backward that bypasses the outputs (a loss
                  kept as an attribute, an opaque object) shows itself by its first gradient.
scaling hooks     on parameters, before accumulation: weigh a micro-batch against the first.
end of backward   a callback queued in the outermost graph task: nested backwards (re-entrant
                  checkpointing) run inside it. If backward raises, the engine drops it
                  uncalled, and its finalizer notices.

Parameters and outputs outlive the reducer, so no hook keeps it alive: all refer to it weakly.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from paceline._interpreter import NotifiesOnDrop
from paceline._torch_internals import (
    current_graph_task,
    drop_empty_hook_tables,
    queue_end_of_backward,
)
from paceline.ddp.buckets import Bucket, InPlaceBucket
from paceline.ddp.plan import ManagedParameter
from paceline.ddp.step import ForwardPass

__all__ = ["AutogradHooks", "BackwardListener", "queue_callback"]

# From here on a gradient goes into its bucket at once: it is still in the cache, and its own memory
# is freed early.
_COPY_AT_ONCE_BYTES = 256 * 1024


class BackwardListener(Protocol):
    """What a reducer is told by autograd."""

    def reached_output(self, forward: ForwardPass) -> None: ...
    def bypassed_outputs(self, forward: ForwardPass, gradient: torch.Tensor) -> torch.Tensor: ...
    def bucket_full(self, index: int) -> None: ...
    def copy_in(self, index: int, position: int) -> None: ...
    def end_of_backward(self, number: int) -> None: ...
    def backward_dropped(self, number: int) -> None: ...


class AutogradHooks:
    """The hooks of one reducer."""

    def __init__(self, listener: BackwardListener, managed: Sequence[ManagedParameter]) -> None:
        self._listener = weakref.ref(listener)
        self.managed = managed
        # Indices of parameters as their gradients arrive. The hooks append to this very list, so it
        # is emptied, never replaced.
        self.arrived: list[int] = []
        self.hooks_every_parameter = True
        self.lock = threading.RLock()  # modules on several devices run hooks from several threads
        self._bypasses_outputs = False  # backwards of this model do
        self._leaves_tables = False  # hooks before accumulation were removed
        self._handles: list[RemovableHandle] = []
        self._sentinels: list[RemovableHandle] = []
        self._scaling: _Scaling | None = None
        weakref.finalize(self, _remove_all, self._handles)
        weakref.finalize(self, _remove_all, self._sentinels)

    # ----------------------------------------------------------------------------- gradient hooks

    def install(self, buckets: Sequence[Bucket], sent_early: int) -> None:
        """Gradient hooks for these buckets, of which the first `sent_early` may go before the end
        of backward.
        """
        for bucket in buckets:
            for position, (index, parameter) in enumerate(
                zip(bucket.members, bucket.parameters, strict=True)
            ):
                if not parameter.requires_grad:
                    continue  # frozen since: it counts as unused until the next plan
                if self.hooks_every_parameter:
                    hook = self._gradient_hook(bucket, position, index, parameter)
                elif _needs_hook(bucket, position, sent_early):
                    hook = self._rare_hook(bucket, position, _is_large(parameter))
                else:
                    continue
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def hook_few_parameters(self) -> None:
        """From the next `install` on: only where a gradient has to be noticed before the end of
        backward.
        """
        # A hook is a call from the engine into Python, for every parameter in every backward. The
        # gradients themselves show at the end what has arrived (`Bucket.arrived`).
        self.hooks_every_parameter = False

    def _gradient_hook(
        self, bucket: Bucket, position: int, index: int, parameter: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        # Runs once per parameter and backward: as few steps as possible, all names bound
        # beforehand.
        fired, size, number = bucket.fired, bucket.size, bucket.index
        note_position, note_arrival = fired.append, self.arrived.append
        listener = self._listener

        def arrived(_: torch.Tensor) -> None:
            note_position(position)
            note_arrival(index)
            if len(fired) >= size:
                alive = listener()
                if alive is not None:
                    alive.bucket_full(number)

        def arrived_large(_: torch.Tensor) -> None:
            alive = listener()
            if alive is not None:
                alive.copy_in(number, position)
            arrived(_)

        return arrived_large if _is_large(parameter) else arrived

    def _rare_hook(
        self, bucket: Bucket, position: int, large: bool
    ) -> Callable[[torch.Tensor], None]:
        number, is_last, listener = bucket.index, position == bucket.size - 1, self._listener

        def arrived(_: torch.Tensor) -> None:
            alive = listener()
            if alive is not None:
                if large:
                    alive.copy_in(number, position)
                if is_last:
                    alive.bucket_full(number)

        return arrived

    def forget_arrivals(self, buckets: Sequence[Bucket]) -> None:
        """Whatever has arrived belongs to no backward that counts."""
        self.arrived.clear()
        for bucket in buckets:
            bucket.fired.clear()

    def remove(self) -> None:
        """Leave the parameters as they were."""
        _remove_all(self._handles)
        _remove_all(self._sentinels)
        self.remove_scaling()
        # A table that is left, though empty, does not go with the parameter when
        # torch.utils.swap_tensors gives it another tensor: hooks put into it would never be called.
        for managed in self.managed:
            drop_empty_hook_tables(managed.parameter)

    # ----------------------------------------------------------------------------- outputs

    def watch_outputs(self, tensors: Sequence[torch.Tensor], forward: ForwardPass) -> bool:
        """True if backward can reach any of them."""
        # The hooks hold `forward`, so it lives as long as an output does. The tracker refers to it
        # weakly and thereby sees when no backward can come any more.
        reached = functools.partial(_reached_output, self._listener, forward)
        hooked = False
        for tensor in tensors:
            if tensor.requires_grad:
                hooked = True
                tensor.register_hook(reached)
        return hooked

    def set_sentinels(self, forward: ForwardPass) -> None:
        """The next backward belongs to this forward, wherever it comes from."""
        self._leaves_tables = True
        self.remove_sentinels()
        # On every parameter: nobody knows which gets the first gradient. That first call removes
        # them all again.
        reached = functools.partial(_bypassed_outputs, self._listener, forward)
        self._sentinels += [
            managed.parameter.register_hook(reached)
            for managed in self.managed
            if managed.parameter.requires_grad
        ]

    def remove_sentinels(self) -> None:
        if self._sentinels:
            _remove_all(self._sentinels)

    @property
    def bypasses_outputs(self) -> bool:
        """Backwards of this model were seen to come another way than by the outputs."""
        return self._bypasses_outputs

    def note_bypass(self) -> bool:
        """A backward did; true the first time."""
        first, self._bypasses_outputs = not self._bypasses_outputs, True
        return first

    # ----------------------------------------------------------------------------- scaling

    def scale_by(self, factor: float) -> None:
        """Scale the gradients of this backward before they are accumulated."""
        if factor == 1.0:
            return

        # Zeros are made, not multiplied: the mean over an empty batch is NaN, and so is NaN * 0.
        def scale(gradient: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(gradient) if factor == 0 else gradient * factor

        self._leaves_tables = True
        handles = [
            managed.parameter.register_hook(scale)
            for managed in self.managed
            if managed.parameter.requires_grad
        ]
        self._scaling = _Scaling(scale, handles)

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient for which the scaling hooks of this backward were set too late."""
        return gradient if self._scaling is None else self._scaling.scale(gradient)

    def remove_scaling(self) -> None:
        if self._scaling is not None:
            _remove_all(self._scaling.handles)
            self._scaling = None

    def remove_empty_tables(self) -> None:
        """A hook that was removed leaves an empty table, for which autograd calls Python in every
        backward.
        """
        if not self._leaves_tables or self._sentinels or current_graph_task() >= 0:
            return  # not while autograd may be in one of them
        self._leaves_tables = False
        for managed in self.managed:
            drop_empty_hook_tables(managed.parameter)


class _Scaling(NamedTuple):
    scale: Callable[[torch.Tensor], torch.Tensor]
    handles: list[RemovableHandle]


class _EndOfBackward(NotifiesOnDrop):
    """Queued in the autograd engine. If backward raises, the engine drops it uncalled: that is how
    we learn of it. The error itself is on its way through C++ then, out of reach.
    """

    __slots__ = ("_called", "_listener", "_number")

    def __init__(self, listener: BackwardListener, number: int) -> None:
        self._listener = weakref.ref(listener)
        self._number = number
        self._called = False

    def __call__(self) -> None:
        self._called = True
        listener = self._listener()
        if listener is not None:
            listener.end_of_backward(self._number)

    def on_drop(self) -> None:
        listener = None if self._called else self._listener()
        if listener is not None:
            listener.backward_dropped(self._number)


def queue_callback(listener: BackwardListener, number: int) -> None:
    """Call `listener.end_of_backward(number)` when the outermost backward has finished. Only
    the engine keeps the callback.
    """
    queue_end_of_backward(_EndOfBackward(listener, number))


def _needs_hook(bucket: Bucket, position: int, sent_early: int) -> bool:
    """The last gradient of a bucket to arrive, unless it is sent at the end anyway; and those
    copied at once.
    """
    is_last = position == bucket.size - 1 and bucket.index < sent_early
    return is_last or (
        _is_large(bucket.parameters[position]) and not isinstance(bucket, InPlaceBucket)
    )


def _is_large(parameter: torch.Tensor) -> bool:
    return parameter.nbytes >= _COPY_AT_ONCE_BYTES


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _reached_output(
    listener: weakref.ref[BackwardListener], forward: ForwardPass, _: torch.Tensor
) -> None:
    alive = listener()
    if alive is not None:
        alive.reached_output(forward)


def _bypassed_outputs(
    listener: weakref.ref[BackwardListener], forward: ForwardPass, gradient: torch.Tensor
) -> torch.Tensor:
    alive = listener()
    return gradient if alive is None else alive.bypassed_outputs(forward, gradient)
