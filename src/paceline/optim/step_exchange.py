"""What ranks that step together tell each other about their gradients in the middle of a step.

Between the two meetings of a `SharedStep` there may be two more: whether a GradScaler has found a
gradient that is not finite on any rank, and the sums of squares for `max_norm=`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from paceline.core.communicator import Communicator
from paceline.core.meeting import Meeting, meeting_bytes
from paceline.core.shared_memory import open_shared_memory
from paceline.core.update import NORM_BLOCK_BYTES
from paceline.errors import MismatchError
from paceline.optim.gradient_norm import total_of
from paceline.optim.parameter_table import GradientArrays, ParameterTable

__all__ = ["StepExchange"]

_CACHE_LINE = 64


class StepExchange:
    """Memory for these exchanges, made by all ranks together."""

    def __init__(self, comm: Communicator, parameters: Sequence[torch.Tensor]) -> None:
        self._rank = comm.rank
        blocks = sum(-(-parameter.nbytes // NORM_BLOCK_BYTES) for parameter in parameters)
        offset = -(-meeting_bytes(comm.size) // _CACHE_LINE) * _CACHE_LINE
        self._memory = open_shared_memory(comm, offset + 8 * max(blocks, 1))
        self._meeting = Meeting(comm, torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr())
        self._blocks = torch.frombuffer(self._memory, dtype=torch.float64, offset=offset)

    def is_true_anywhere(self, flag: bool, present: Sequence[int], number: int) -> list[int]:
        """The ranks, of those present, on which `flag` is true. `number` is that of the meeting
        that has begun the step.
        """
        answers = self._meeting.meet(number, present, (int(flag), 0))
        return [rank for rank, (answer, _) in zip(present, answers, strict=True) if answer]

    def sum_squares(
        self,
        tables: Sequence[tuple[ParameterTable, GradientArrays]],
        besides: Sequence[float],
        present: Sequence[int],
        number: int,
    ) -> float:
        """The sum of squares of all gradients, the same bits on all ranks that are present,
        whatever part of the tables each has. `besides`: those of gradients outside the tables.
        """
        count = 0
        for table, gradients in tables:
            table.sum_squares(gradients, self._blocks.data_ptr() + 8 * count)
            count += table.update.norm_blocks
        (bits,) = struct.unpack("Q", struct.pack("d", total_of(besides)))
        answers = self._meeting.meet(number + 1, present, (bits, 0))
        if any(answer != bits for answer, _ in answers):
            norms = {
                rank: struct.unpack("d", struct.pack("Q", answer))[0] ** 0.5
                for rank, (answer, _) in zip(present, answers, strict=True)
            }
            raise MismatchError(
                f"max_norm: gradients that DistributedDataParallel does not average have norms "
                f"that differ between ranks ({norms}; this is rank {self._rank}), so the ranks "
                "cannot clip alike. Give those parameters to an optimizer of their own",
                norms,
            )
        return total_of([*self._blocks[:count].tolist(), *besides])
