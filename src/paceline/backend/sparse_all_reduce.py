"""All-reduce of sparse tensors: gather everyone's indices and values, add them up here."""

from __future__ import annotations

import torch

from paceline.backend.engine import Engine, Reduction
from paceline.errors import ConfigError

__all__ = ["allreduce"]

_SUM, _AVG = 0, 1


def allreduce(engine: Engine, tensor: torch.Tensor, op: Reduction, timeout_ns: int) -> torch.Tensor:
    """Sum a sparse COO tensor over the ranks, in order of rank, in place."""
    if op.code not in (_SUM, _AVG):
        raise ConfigError(
            "all_reduce of sparse tensors can SUM or AVG only; give tensor.to_dense()"
        )
    mine = tensor.coalesce()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(engine.size)]
    engine.allgather(counts, torch.tensor([mine._nnz()]), wait=True, timeout_ns=timeout_ns)
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    all_indices = [indices.new_empty((indices.shape[0], int(n))) for n in counts]
    all_values = [values.new_empty((int(n), *values.shape[1:])) for n in counts]
    engine.allgather(all_indices, indices, wait=True, timeout_ns=timeout_ns)
    engine.allgather(all_values, values, wait=True, timeout_ns=timeout_ns)
    parts = [
        torch.sparse_coo_tensor(i, v, tensor.shape, is_coalesced=True)
        for i, v in zip(all_indices, all_values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = total.coalesce()
    if op.code == _AVG:
        total = total / engine.size
    tensor.copy_(total)
    return tensor
