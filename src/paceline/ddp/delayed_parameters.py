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
        self.named = [(name, module.get_parameter(name)) for name in names.names]
        self.parameters = [parameter for _, parameter in self.named]
        self._group = group
        self._buffer = torch.zeros(
            sum(parameter.numel() for parameter in self.parameters),
            device=self.parameters[0].device,
        )
        self._lengths = [parameter.numel() for parameter in self.parameters]
        self._handle = module.get_parameter(names.trigger).register_hook(self._average)
        self._adopt_gradients()

    def _adopt_gradients(self) -> None:
        """Gradients that lie elsewhere, because they accumulated before or a caller gave them other
        memory, go on in the buffer.
        """
        places = torch.split(self._buffer, self._lengths)
        moved = [
            (parameter, parameter.grad.clone(), place.view(parameter.shape))
            for parameter, place in zip(self.parameters, places, strict=True)
            if parameter.grad is not None and not _lies_at(parameter.grad, place)
        ]
        for parameter, gradient, view in moved:
            view.copy_(gradient)
            parameter.grad = view

    def remove(self) -> None:
        """Leave the parameters to another of these."""
        self._handle.remove()

    def prepare_gradients(self) -> None:
        """Before a backward: gradients accumulate in the buffer."""
        self._adopt_gradients()
        places = torch.split(self._buffer, self._lengths)
        for parameter, place in zip(self.parameters, places, strict=True):
            if parameter.grad is None:
                parameter.grad = place.zero_().view(parameter.shape)

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self._adopt_gradients()
        self._buffer.div_(self._group.size())
        all_reduce(self._group, self._buffer).wait()
        return gradient


def _lies_at(gradient: torch.Tensor, place: torch.Tensor) -> bool:
    return gradient.data_ptr() == place.data_ptr() and gradient.is_contiguous()
