"""`one_pass=True`: gradients are summed over ranks in the step itself, together with the update.

    backward   leaves each rank's own gradient, and exchanges signals
    begin      all ranks that had data are here (`SharedStep`)
    pass       each rank takes its part of the elements: sums, updates
    end        all parts are made

Each byte of a gradient is read once and never written: an average in backward reads and writes it
on every rank before the step reads it again. The sum has the bits of that average.

Small gradients are in buckets that all ranks have mapped. Large ones stay where autograd put them,
in their rank's own memory: each rank writes down where that is, and the others read them from
there, as much at a time as stays in the cache. Where the system forbids that, they are copied to
buckets, too.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Sequence

import torch

from paceline.core.communicator import Communicator
from paceline.core.shared_memory import open_shared_memory
from paceline.core.update import PrivateGradients
from paceline.ddp import DistributedDataParallel
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.reducer import Reducer
from paceline.ddp.shm_transport import ShmTransport
from paceline.optim.parameter_table import GradientArrays, ParameterTable
from paceline.optim.shared_step import SharedStep

__all__ = ["OnePass", "say_what_grad_holds"]

_logger = logging.getLogger("paceline")


class OnePass:
    """The sums that one optimizer takes in its steps."""

    def __init__(
        self,
        shared: SharedStep,
        model: DistributedDataParallel,
        deferred: DeferredSum,
    ) -> None:
        """Made by all ranks together, after a step of the model. `shared` has the parameters."""
        self.goes_with = shared
        self._deferred = deferred
        self._addresses = _AddressTable(shared.comm, len(deferred))
        self._model = weakref.ref(model)
        model.defer_sums(deferred)

    # Backward may leave them at any time.
    are_left = True

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._deferred

    def place(self) -> None:
        """Gradients that were put elsewhere since backward go where peers find them."""
        if self._deferred.weights is not None:
            self._reducer.place_deferred()

    def prepare(
        self,
        present: Sequence[int],
        tables: Sequence[tuple[ParameterTable, GradientArrays]],
    ) -> bytes:
        """Let these tables sum over the ranks that are present; what that means, for comparison.
        Gradients that backward has averaged, or that were not left by it, are taken as they are.
        """
        weights = self._deferred.weights
        tables = [each for each in tables if each[0].parameters[0] in self._deferred]
        if weights is None:
            for table, _ in tables:
                table.update.sum_over_ranks((), ())
            return b""
        transport = self._reducer.transport
        assert isinstance(transport, ShmTransport)
        distances = [transport.distance_to(rank) for rank in present]
        factors = [weights[rank] for rank in present]
        own = transport.bucket_addresses
        places, columns = b"", 0
        for table, gradients in tables:
            private = self._addresses.write(columns, gradients.outside(own), present)
            table.update.sum_over_ranks(distances, factors, private)
            places += gradients.places_in(own)
            columns += len(gradients.addresses)
        return repr(factors).encode() + places

    def forget_gradients(self) -> None:
        """They were zeroed."""
        self._deferred.forget()

    @property
    def _reducer(self) -> Reducer:
        model = self._model()
        assert model is not None, "the ranks of a step have a model"
        assert isinstance(model.reducer, Reducer)
        return model.reducer


def say_what_grad_holds(rank: int, optimizer: str, whose: str) -> None:
    """Once for all ranks: `.grad` is not what it was."""
    if rank == 0:
        _logger.info(
            "%s(one_pass=True): from now on .grad is each rank's own gradient, and the step sums "
            "them; %s.averaged_gradients() gives the average.",
            optimizer,
            whose,
        )


class _AddressTable:
    """Where each rank has gradients in its own memory: a row for each rank, in memory that all have
    mapped. A rank writes its own before the meeting that begins a step, and not again before the
    one that ends it.
    """

    def __init__(self, comm: Communicator, parameters: int) -> None:
        self._comm, self._stride = comm, parameters
        memory = open_shared_memory(comm, 8 * comm.size * max(parameters, 1))
        self._rows = torch.frombuffer(memory, dtype=torch.int64).view(comm.size, -1)

    def write(
        self, column: int, addresses: array[int], present: Sequence[int]
    ) -> PrivateGradients | None:
        """Write down this rank's, from a column on; whose gradients are to be read how. None if
        there are none of its own.
        """
        if not any(addresses):
            return None
        assert self._comm.reads_directly, "a gradient was not placed"
        row = torch.frombuffer(addresses, dtype=torch.int64)
        self._rows[self._comm.rank, column : column + len(addresses)].copy_(row)
        at = self._rows.data_ptr() + 8 * column
        return PrivateGradients(self._comm, tuple(present), at, self._stride)
