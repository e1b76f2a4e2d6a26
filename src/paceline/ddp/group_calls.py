"""The calls of a process group that averaging needs, in the one form that groups written in Python
take too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline._torch_internals import AllgatherOptions

__all__ = ["all_gather_into", "all_reduce", "broadcast_from"]

_SUM = dist.AllreduceOptions()


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """Start the sum of a tensor over the ranks, in place; a `Work`."""
    work: dist.Work = group.allreduce([tensor], _SUM)
    return work


def all_gather_into(group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> dist.Work:
    """Start to collect every rank's part, one after the other; a `Work`."""
    # Versions of torch differ in what they call this, except here.
    work: dist.Work = group._allgather_base(whole, part, AllgatherOptions())
    return work


def broadcast_from(source: int, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Overwrite a tensor with that of the group's rank `source`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    group.broadcast([tensor], options).wait()
