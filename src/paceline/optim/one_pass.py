"""`one_pass=True`: gradients are summed over ranks in the step itself, together with the update.

    backward   leaves each rank's own gradient in shared memory, and exchanges signals
    begin      all ranks that had data are here (`SharedStep`)
    pass       each rank takes its part of the elements: sums, updates
    end        all parts are made

Each byte of a gradient is read once and never written: an average in backward reads and writes it
on every rank before the step reads it again. The sum has the bits of that average.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from paceline.ddp import DistributedDataParallel
from paceline.ddp.deferred_sum import DeferredSum
from paceline.ddp.reducer import Reducer
from paceline.ddp.shm_transport import ShmTransport
from paceline.optim.parameter_table import GradientArrays, ParameterTable
from paceline.optim.shared_step import SharedStep

__all__ = ["OnePass"]

_logger = logging.getLogger("paceline")


class OnePass:
    """The sums that one optimizer takes in its steps."""

    def __init__(
        self,
        shared: SharedStep,
        deferred: DeferredSum,
        name: str,
        *,
        replaces: bool,
    ) -> None:
        """Made by all ranks together, after a step of the model. `shared` has the parameters;
        `replaces`: there was one before, of the same optimizer.
        """
        self.goes_with = shared
        self._deferred = deferred
        model = shared.model
        model.defer_sums(deferred)
        if not replaces and model.process_group.rank() == 0:
            _logger.info(
                "%s(one_pass=True): from now on backward leaves each rank's own gradient in .grad, "
                "and the step sums them; model.averaged_gradients() gives the average.",
                name,
            )

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._deferred

    def place(self, model: DistributedDataParallel) -> None:
        """Gradients that were put elsewhere since backward go where peers find them."""
        if self._deferred.weights is not None:
            _reducer_of(model).place_deferred()

    def prepare(
        self,
        model: DistributedDataParallel,
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
        transport = _reducer_of(model).transport
        assert isinstance(transport, ShmTransport)
        distances = [transport.distance_to(rank) for rank in present]
        factors = [weights[rank] for rank in present]
        own = transport.bucket_addresses
        places = b""
        for table, gradients in tables:
            table.update.sum_over_ranks(distances, factors)
            places += gradients.places_in(own)
        return repr(factors).encode() + places

    def forget_gradients(self) -> None:
        """They were zeroed."""
        self._deferred.forget()


def _reducer_of(model: DistributedDataParallel) -> Reducer:
    reducer = model.reducer
    assert isinstance(reducer, Reducer)
    return reducer
