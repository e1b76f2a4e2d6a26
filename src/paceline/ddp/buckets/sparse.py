"""The gradient of one embedding with `sparse=True`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from paceline.backend.sparse_all_reduce import SparseSum
from paceline.ddp.buckets.base import Bucket, Waitable
from paceline.ddp.group_calls import all_reduce

__all__ = ["SparseBucket"]


class SparseBucket(Bucket):
    """The gradient of one embedding with `sparse=True`."""

    def __init__(
        self, index: int, members: Sequence[int], parameters: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(index, members, parameters)
        self.value: torch.Tensor | None = None

    def gather(self, used: Collection[int], *, contribute: bool) -> set[int]:
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None or not contribute:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                torch.empty(
                    0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device
                ),
                parameter.shape,
                check_invariants=False,
            )
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        self.value = gradient.detach().clone()
        return set(used) if parameter.grad is not None else set()

    def is_finite(self) -> bool:
        assert self.value is not None
        return bool(torch.isfinite(self.value.coalesce().values()).all())

    def scale(self, factor: float) -> None:
        assert self.value is not None
        self.value = self.value * factor

    def all_reduce(
        self, group: dist.ProcessGroup, factor: float, wire_dtype: torch.dtype | None
    ) -> Waitable:
        del wire_dtype
        if factor != 1.0:
            self.scale(factor)
        assert self.value is not None

        # A sum in which every rank fills its own row: a gather that every backend has.
        def gather(row: torch.Tensor) -> Callable[[], torch.Tensor]:
            table = row.new_zeros(group.size(), *row.shape)
            table[group.rank()] = row
            work = all_reduce(group, table)

            def wait() -> torch.Tensor:
                work.wait()
                return table

            return wait

        self._sum = SparseSum(self.value, gather)
        return self._sum

    def received(self) -> None:
        self.value = self._sum.result

    def scatter(self, used_anywhere: Collection[int]) -> None:
        if used_anywhere:
            self.parameters[0].grad = self.value
        self.value = None
