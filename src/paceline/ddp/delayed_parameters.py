"""`delay_all_reduce_named_params`: some gradients wait in one buffer until another parameter's
gradient is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.ddp.buffers import broadcast
from paceline.ddp.group_calls import all_reduce

__all__ = ["DelayedParameters"]


class DelayedParameters:
    """Parameters the reducer does not see; their gradients live in one buffer that is averaged in
    one go.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter,
        group: dist.ProcessGroup,
    ) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._buffer = torch.zeros(
            sum(one.numel() for one in parameters), device=parameters[0].device
        )
        broadcast(group, self._parameters, 0)
        trigger.register_hook(self._average)
        pieces = torch.split(self._buffer, [one.numel() for one in parameters])
        self._views = [piece.view(one.shape) for piece, one in zip(pieces, parameters, strict=True)]

    @classmethod
    def create(
        cls,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter | None,
        group: dist.ProcessGroup,
    ) -> DelayedParameters | None:
        return (
            cls([one for _, one in named], trigger, group)
            if named and trigger is not None
            else None
        )

    def prepare_gradients(self) -> None:
        """Before a backward: gradients accumulate in the buffer."""
        if all(one.grad is None for one in self._parameters):
            self._buffer.zero_()
        for one, view in zip(self._parameters, self._views, strict=True):
            if one.grad is None:
                view.zero_()
                one.grad = view

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        self._buffer.div_(self._group.size())
        self._work: Any = all_reduce(self._group, self._buffer)
        self._work.wait()
        return gradient
