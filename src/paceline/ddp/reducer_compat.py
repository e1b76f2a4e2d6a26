"""Torch's private face of a reducer: what libraries built on torch's class call on `model.reducer`
to steer a backward themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ReducerCompat"]


class ReducerCompat:
    """Mixed into the reducers. Whatever does something hands it to their public methods."""

    label: str

    @property
    def in_backward(self) -> bool:
        raise NotImplementedError

    def follow_plan(self) -> bool:
        raise NotImplementedError

    def synchronise_next_backward(self) -> None:
        raise NotImplementedError

    def remove_hooks(self) -> None:
        raise NotImplementedError

    def prepare_for_forward(self) -> None:
        """A forward begins with its own call here; nothing has to come before it."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        """The next backward synchronises. Accelerate calls this for a forward made inside
        no_sync(), Lightning for a backward that runs inside forward.

        `outputs` are for torch's search for unused parameters, which are found here by the
        gradients that do not come.
        """
        del outputs
        self.synchronise_next_backward()

    def _rebuild_buckets(self) -> bool:
        """Use the buckets planned from the first step; true the one time that changes them."""
        return self.follow_plan()

    def _delay_all_reduce(self) -> None:
        """For torch's static graphs, whose first step leaves gradients that nobody has averaged.
        Here the end of every backward averages them.
        """

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        if self.in_backward:
            raise RuntimeError(
                f"the previous backward of {self.label} did not finish, so its gradients are not "
                "averaged; rerun the step"
            )
