"""One large gradient, averaged where autograd put it: to copy it costs as much as to sum it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from paceline._torch_internals import storage_users
from paceline.ddp.buckets.dense import DenseBucket, strides_of

__all__ = ["InPlaceBucket"]

# Who refers to the memory of a gradient that nobody else uses: its tensor, and the storage object
# that is asked.
_OWN_STORAGE_REFERENCES = 2


class InPlaceBucket(DenseBucket):
    """One large gradient, averaged where autograd put it."""

    def __init__(
        self,
        index: int,
        member: int,
        parameter: torch.Tensor,
        dtype: torch.dtype | None = None,
        *,
        is_deferred: bool = False,
    ) -> None:
        super().__init__(index, [member], [parameter], _no_memory, dtype, is_deferred=is_deferred)
        self._strides, self._is_contiguous = strides_of(parameter), parameter.is_contiguous()
        self._data: torch.Tensor | None = None

    def prepare(self) -> None:
        """The gradient brings its memory."""

    def restore_views(self) -> None:
        """There are none: in each step the gradient is looked at anew."""

    def copy_in(self, position: int) -> None:
        """It stays where it is."""

    def copy_in_fast(self) -> bool:
        return False

    def place(self) -> None:
        """Peers read it wherever it is."""

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        gradient = self.parameters[0].grad
        used = set(used) if gradient is not None else set()
        if gradient is not None and used and contribute:
            data = gradient if self._stays(gradient) else self._own_copy(gradient)
        else:
            data = self._own_memory().zero_()
        self._data, self._flat = data, data.as_strided((self.numel,), (1,))
        return used

    def _own_memory(self) -> torch.Tensor:
        return torch.empty_strided(
            self.parameters[0].shape, self._strides, dtype=self.dtype, device=self.device
        )

    def _own_copy(self, gradient: torch.Tensor) -> torch.Tensor:
        own = self._own_memory()
        self._copy([own], [gradient.detach()])
        return own

    def _stays(self, gradient: torch.Tensor) -> bool:
        """It lies in memory as on every other rank, and nobody else uses that memory."""
        return (
            not gradient.is_sparse
            and not gradient.requires_grad
            and gradient.dtype is self.dtype
            and (
                gradient.stride() == self._strides
                or (gradient.is_contiguous() and self.parameters[0].is_contiguous())
            )
            and storage_users(gradient) <= _OWN_STORAGE_REFERENCES
        )

    def scatter(self, used_anywhere: Collection[int]) -> None:
        parameter, result = self.parameters[0], self._data
        self._data = self._flat = None
        gradient = parameter.grad
        if result is None or gradient is result or not used_anywhere:
            return
        if gradient is not None and gradient.requires_grad:  # create_graph=True: the graph stays
            gradient.detach().copy_(result)
        else:
            parameter.grad = result.to(parameter.dtype) if self._converts else result


def _no_memory(nbytes: int, device: torch.device) -> torch.Tensor | None:
    del nbytes, device
    return None
