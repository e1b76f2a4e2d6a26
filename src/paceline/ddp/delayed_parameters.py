"""`delay_all_reduce_named_params`: some gradients wait in one buffer until another parameter's
gradient is there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.ddp.config import DelayedNames
from paceline.ddp.group_calls import all_reduce

__all__ = ["DelayedParameters"]


class DelayedParameters:
    """Parameters the reducer does not see; their gradients live in one buffer that is averaged in
    one go.
    """

    def __init__(
        self, module: torch.nn.Module, names: DelayedNames, group: dist.ProcessGroup
    ) -> None:
        self.parameters = [module.get_parameter(name) for name in names.names]
        self._group = group
        self._buffer = torch.zeros(
            sum(parameter.numel() for parameter in self.parameters),
            device=self.parameters[0].device,
        )
        pieces = torch.split(self._buffer, [parameter.numel() for parameter in self.parameters])
        self._views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self.parameters, strict=True)
        ]
        self._handle = module.get_parameter(names.trigger).register_hook(self._average)
        self._adopt_gradients()

    def _adopt_gradients(self) -> None:
        """What has accumulated before goes on here."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view

    def remove(self) -> None:
        """Leave the parameters to another of these."""
        self._handle.remove()

    def prepare_gradients(self) -> None:
        """Before a backward: gradients accumulate in the buffer."""
        if all(parameter.grad is None for parameter in self.parameters):
            self._buffer.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        self._buffer.div_(self._group.size())
        all_reduce(self._group, self._buffer).wait()
        return gradient
