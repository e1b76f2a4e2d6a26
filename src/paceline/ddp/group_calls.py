"""The calls of a process group that averaging needs, in the one form that groups written in Python
take too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline._torch_internals import AllgatherOptions
from paceline.backend import PacelineGroup

__all__ = [
    "all_gather_into",
    "all_reduce",
    "all_reduce_scaled",
    "all_to_all_into",
    "broadcast_from",
    "reduce_scatter_into",
    "start_broadcast",
]

_SUM = dist.AllreduceOptions()


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """Start the sum of a tensor over the ranks, in place; a `Work`."""
    work: dist.Work = group.allreduce([tensor], _SUM)
    return work


def all_reduce_scaled(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    factor: float,
    wire_dtype: torch.dtype | None = None,
) -> dist.Work:
    """The same, times a factor that is the same on all ranks. Our groups multiply while they sum,
    and round between hosts if there is a `wire_dtype`; it is float32 only that is rounded.
    """
    if isinstance(group, PacelineGroup) and tensor.is_cpu and tensor.dtype is torch.float32:
        return group.allreduce_scaled(tensor, factor, wire_dtype)
    if factor != 1.0:
        tensor.mul_(factor)
    return all_reduce(group, tensor)


def all_gather_into(group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> dist.Work:
    """Start to collect every rank's part, one after the other; a `Work`."""
    # Versions of torch differ in what they call this, except here.
    work: dist.Work = group._allgather_base(whole, part, AllgatherOptions())
    return work


def all_to_all_into(
    group: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor
) -> dist.Work:
    """Start to send each rank its slice, and to receive one from each; a `Work`."""
    work: dist.Work = group.alltoall_base(received, sent, [], [], dist.AllToAllOptions())
    return work


def reduce_scatter_into(
    group: dist.ProcessGroup, part: torch.Tensor, whole: torch.Tensor
) -> dist.Work:
    """Start the sum over ranks of this rank's slice of what each of them has; a `Work`."""
    work: dist.Work = group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions())
    return work


def start_broadcast(source: int, group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """Start to overwrite a tensor with that of the group's rank `source`; a `Work`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    work: dist.Work = group.broadcast([tensor], options)
    return work


def broadcast_from(source: int, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Overwrite a tensor with that of the group's rank `source`."""
    start_broadcast(source, group, tensor).wait()
