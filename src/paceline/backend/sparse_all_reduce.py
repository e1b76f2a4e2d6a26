"""All-reduce of sparse tensors: gather everyone's indices and values, add them up here.

How a dense row of every rank is gathered differs: a `paceline` group has an all-gather, any other
group sums rows that are zero elsewhere. The rest is `SparseSum`, for both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.backend.engine import Engine, Reduction
from paceline.errors import ConfigError

__all__ = ["Gather", "SparseSum", "allreduce"]

_SUM, _AVG = 0, 1

# Starts gathering a row of equal shape from every rank; what it returns waits for the rows, one
# below the other.
Gather = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


class SparseSum:
    """The sum of sparse tensors over ranks, in order of rank.

    Only the counts travel at first: the rest needs them and follows in `wait`. So a caller may
    start the sum, compute, and wait.
    """

    def __init__(self, tensor: torch.Tensor, gather: Gather) -> None:
        self._tensor, self._gather = tensor.coalesce(), gather
        self._counts = gather(torch.tensor([self._tensor._nnz()], device=tensor.device))
        self.result: torch.Tensor = tensor

    def wait(self) -> None:
        counts: list[int] = self._counts().flatten().tolist()
        longest = max(counts)
        tensor = self._tensor
        waits = [self._gather(_padded(tensor.indices().t(), longest))]
        waits.append(self._gather(_padded(tensor.values(), longest)))
        all_indices, all_values = waits[0](), waits[1]()
        parts = [
            torch.sparse_coo_tensor(
                indices[:count].t(),
                values[:count],
                tensor.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            for indices, values, count in zip(all_indices, all_values, counts, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        self.result = total.coalesce()


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def allreduce(engine: Engine, tensor: torch.Tensor, op: Reduction, timeout_ns: int) -> torch.Tensor:
    """Sum a sparse COO tensor over the ranks, in place."""
    if op.code not in (_SUM, _AVG):
        raise ConfigError(
            "all_reduce of sparse tensors can SUM or AVG only; give tensor.to_dense()"
        )

    def gather(row: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = [torch.empty_like(row) for _ in range(engine.size)]
        engine.allgather(rows, row, wait=True, timeout_ns=timeout_ns)
        return lambda: torch.stack(rows)

    sparse_sum = SparseSum(tensor, gather)
    sparse_sum.wait()
    total = sparse_sum.result
    tensor.copy_(total / engine.size if op.code == _AVG else total)
    return tensor
