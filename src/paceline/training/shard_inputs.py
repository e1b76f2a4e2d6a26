"""Where the inputs of shards come from: any rank can have those of any shard at any time.

Shards that are dealt to this rank are loaded ahead, in order, by the loader's workers. Any other
shard, one that is taken over from another rank for example, is loaded when it is asked for. Both
have the same bytes: what a dataset draws belongs to its samples, and each shard is collated on its
own.

What is loaded ahead follows the deal of the moment. If it is another one by the time a batch
begins, or if another rank takes a shard over, inputs that are not asked for are dropped.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline._pytree import tensors_in
from paceline._torch_internals import version_of
from paceline.data.batch_requests import BatchRange
from paceline.data.loader import RangeLoader
from paceline.errors import StepError
from paceline.training.input_alignment import align_inputs
from paceline.training.shard_plan import Shard

__all__ = ["BatchInputs", "EpochInputs"]


class EpochInputs:
    """The inputs of the rest of an epoch, batch after batch.

    Args:
        loader: of ranges of global batches.
        epoch: whose batches these are.
        batches: their numbers.
        dealt: the shards of a batch that this rank will compute, as far as that is known now.
    """

    def __init__(
        self,
        loader: RangeLoader,
        epoch: int,
        batches: range,
        dealt: Callable[[int], Sequence[Shard]],
    ) -> None:
        self._loader, self._epoch, self._batches, self._dealt = loader, epoch, batches, dealt
        self._current = batches.start
        # By batch: what is loaded ahead and has not been received yet.
        self._expected: dict[int, list[Shard]] = {}
        # What workers have been asked for and have not delivered, in order.
        self._requested: collections.deque[tuple[int, Shard]] = collections.deque()
        self._received = iter(()) if loader.loads_on_demand else loader.load_ahead(self._requests())

    def begin(self, number: int) -> BatchInputs:
        """The inputs of a batch; those of the batches before are not needed any more."""
        self._current = number
        for passed in [other for other in self._expected if other < number]:
            del self._expected[passed]
        return BatchInputs(self, number)

    def load(self, number: int, shard: Shard, keep: Callable[[Shard, Any], None]) -> None:
        """Give the inputs of a shard of the current batch to `keep`, perhaps others before it."""
        expected: list[Shard] = []
        if not self._loader.loads_on_demand:
            expected = self._expected_of(number)
        while shard in expected:
            inputs = next(self._received)
            of, received = self._requested.popleft()
            if of == number:
                expected.remove(received)
                keep(received, inputs)
                if received == shard:
                    return
        keep(shard, self._loader.load(self._range(number, shard)))

    def release(self) -> None:
        """The loop over the batches is over: let the loader's workers end."""
        self._received = iter(())
        self._loader.release()

    def _expected_of(self, number: int) -> list[Shard]:
        if number not in self._expected:
            self._expected[number] = list(self._dealt(number))
        return self._expected[number]

    def _requests(self) -> Iterator[BatchRange]:
        """What is loaded ahead. A request is made when there is a worker for it: what is not wanted
        any more by then is never loaded.
        """
        for number in self._batches:
            if number < self._current:
                continue
            for shard in tuple(self._expected_of(number)):
                if number < self._current:
                    break
                self._requested.append((number, shard))
                yield self._range(number, shard)

    def _range(self, number: int, shard: Shard) -> BatchRange:
        return BatchRange(self._epoch, number, shard.start, shard.stop)


class BatchInputs:
    """The inputs of the shards of one global batch, kept for another pass over it."""

    def __init__(self, source: EpochInputs, number: int) -> None:
        self._source: EpochInputs | None = source
        self._number = number
        self._kept: dict[int, _Kept] = {}

    def of(self, shard: Shard) -> Any:
        """The inputs of a shard, as the loader's `collate_fn` made them: what a pass before has
        changed in place is loaded anew, as it would be on another rank.
        """
        kept = self._kept.get(shard.number)
        if kept is not None and kept.is_unchanged():
            return kept.inputs
        if self._source is None:
            raise StepError(
                f"the loop over training.batches() is over, so that shard {shard.number} of batch "
                f"{self._number} cannot be loaded any more: use a batch inside that loop"
            )
        self._source.load(self._number, shard, self._keep)
        return self._kept[shard.number].inputs

    def release(self) -> None:
        """The batch is over."""
        self._source = None
        self._kept.clear()

    def _keep(self, shard: Shard, inputs: Any) -> None:
        self._kept[shard.number] = _Kept(align_inputs(inputs))


class _Kept:
    """Inputs, and what shows whether their tensors were changed since."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs
        self._tensors: list[torch.Tensor] = tensors_in(inputs)
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def is_unchanged(self) -> bool:
        """Whether no tensor was written to. (A write through numpy or `.data` leaves no trace.)"""
        return [version_of(tensor) for tensor in self._tensors] == self._versions
