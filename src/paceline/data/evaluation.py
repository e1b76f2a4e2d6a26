"""Exact evaluation: each sample once, sums with counts, outputs in dataset order, one exchange at
the very end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.changing_ranks import (
    ChangingRanks,
    gaps_between,
    share_of_range,
    without_overlaps,
)
from paceline.data.evaluation_setting import EvaluationSetting, current_setting
from paceline.data.exact_sum import ExactSum
from paceline.data.loader import DataLoader
from paceline.data.shares import check_batch_size, resolve_rank, share_of
from paceline.errors import ConfigError, MismatchError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase

__all__ = ["Evaluation", "EvaluationPart", "EvaluationResult"]

# Batches whose values stay on their device before they are fetched, so that the device can run
# ahead.
_MAX_PENDING = 32


@dataclasses.dataclass(frozen=True)
class EvaluationPart:
    """One rank's results over samples `start` to `stop - 1` of `length`. Can be pickled and merged
    anywhere.

    `sums` has the exact terms and the count of each name, `outputs` the collected batches of rows.
    """

    rank: int
    start: int
    stop: int
    length: int
    sums: dict[str, tuple[list[float], int]]
    outputs: dict[str, list[Any]]


class EvaluationResult:
    """The results of all ranks together: the same on each of them, and the same as in a single
    process.

    `outputs` has, by name, what was collected, in dataset order.
    """

    def __init__(self, sums: Mapping[str, tuple[float, int]], outputs: Mapping[str, Any]) -> None:
        self._sums = dict(sums)
        self.outputs: dict[str, Any] = dict(outputs)

    @property
    def names(self) -> list[str]:
        """The names of all sums."""
        return sorted(self._sums)

    def sum(self, name: str) -> float:
        """The exact sum of all values of a name, rounded once."""
        return self._sum_and_count(name)[0]

    def count(self, name: str) -> int:
        """How many values there were."""
        return self._sum_and_count(name)[1]

    def mean(self, name: str) -> float:
        """The sum of all values over their count: never a mean of means.

        Raises:
            ConfigError: nothing was added under this name, or its count is 0.
        """
        total, count = self._sum_and_count(name)
        if count == 0:
            raise ConfigError(f"{name!r} has no mean: its count is 0")
        return total / count

    def _sum_and_count(self, name: str) -> tuple[float, int]:
        if name not in self._sums:
            raise ConfigError(f"nothing was added as {name!r}; the names are {self.names}")
        return self._sums[name]


class Evaluation:
    """Evaluate a dataset on all ranks, with the result of a single process.

    Each rank visits one contiguous part of the dataset, once; parts may differ by a sample, and
    ranks by a batch. The ranks do not communicate before `result()`. A model that communicates in
    its forward would: evaluate the bare module. Sums are exact, so that equal values per sample
    give an equal result, to the last bit, on any number of ranks and with any batch size.

    While a `paceline.Training` exists, batches are those of a single rank, of which each rank takes
    some, and torch has the threads of the training: also the values of a sample are then equal on
    any number of ranks.

    Args:
        dataset: map-style.
        batch_size: samples at a time on this rank.
        group: the process group to evaluate in, None for the default one.
        rank: with `world_size`, to evaluate one part without any group; see `part()` and
            `merge()`. Neither, to take them from the group or, before there is one, from the
            launcher's environment.
        world_size: the number of parts.
        options: for the `DataLoader`, as `num_workers`, `collate_fn`, `device`.

    Raises:
        ConfigError: an argument is out of range, or the dataset has no length.

    Example:
        ```python
        evaluation = paceline.Evaluation(dataset, batch_size=64)
        for x, y in evaluation:  # the batches of this rank
            prediction = model(x)
            evaluation.add(error=(prediction - y).square().mean(1))  # a value for each sample
            evaluation.collect(prediction=prediction)
        result = evaluation.result()
        print(result.mean("error"), result.outputs["prediction"].shape)
        ```
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        batch_size = check_batch_size(batch_size, world_size=1)
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{type(dataset).__name__} has no length, so it cannot be divided among ranks: "
                "evaluate a map-style dataset, or list(dataset)"
            )
        self._uses_group = rank is None
        self._group = group
        if group is not None:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.length = len(dataset)
        self._dataset, self._batch_size, self._options = dataset, batch_size, options
        self._merged: EvaluationResult | None = None
        self._take_samples(self._own_samples())

    def _setting(self) -> EvaluationSetting | None:
        return current_setting() if self._uses_group and self._group is None else None

    def _own_samples(self) -> range:
        """This rank's part of the dataset."""
        if self._setting() is None:
            share = share_of(self.length, self.rank, self.world_size)
            return range(share.start, share.stop)
        batches = self._batches_of(range(self.length))
        return self._samples_of(share_of_range(batches, self.rank, self.world_size))

    def _batches_of(self, samples: range) -> range:
        """The numbers of the batches that a single rank would make of samples which it would begin
        a batch with.
        """
        return range(samples.start // self._batch_size, -(-samples.stop // self._batch_size))

    def _samples_of(self, batches: range) -> range:
        first, last = (
            min(number * self._batch_size, self.length) for number in (batches.start, batches.stop)
        )
        return range(first, last)

    def _take_samples(self, samples: range) -> None:
        """These are what this rank evaluates next."""
        self.start, self.stop = samples.start, samples.stop
        # Batches do not cross ranks, so their boundaries may depend on the number of ranks; results
        # do not, since sums are exact.
        self._batches = [
            range(first, min(first + self._batch_size, self.stop))
            for first in range(self.start, self.stop, self._batch_size)
        ]
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=self._batches,  # type: ignore[arg-type]  # ranges serve as lists here
            **self._options,
        )
        self._reset()

    def __len__(self) -> int:
        """The number of batches of this rank."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, from the start; discards what was added before. In an elastic job
        they are followed by those that ranks have not come to that were lost.
        """
        setting = self._setting()
        return self._visit() if setting is None else self._visit_during_training(setting)

    def _visit_during_training(self, setting: EvaluationSetting) -> Iterator[Any]:
        """As `_visit`; among ranks that may change, if there are such."""
        with setting.in_force():
            if setting.ranks is not None:
                yield from map(setting.prepare, self._visit_among(setting.ranks))
                return
            # The training may be younger than the evaluation.
            if (own := self._own_samples()) != range(self.start, self.stop):
                self._take_samples(own)
            yield from map(setting.prepare, self._visit())

    def _visit_among(self, ranks: ChangingRanks) -> Iterator[Any]:
        """As `_visit`, and bring the parts of all ranks together at the end."""
        self._merged = None
        parts: list[EvaluationPart] = []
        missing = [range(self.length)]
        while self._merged is None:
            for samples in missing:
                if own := self._samples_of(ranks.own_share(self._batches_of(samples))):
                    self._take_samples(own)
                    yield from self._visit()
                    parts.append(self.part())
            gathered = ranks.gather_parts(parts)
            missing = []
            if gathered is not None:
                chosen = without_overlaps(gathered)
                missing = gaps_between(chosen, self.length)
                if not missing:
                    self._merged = self.merge(chosen or [self._empty_part()])
        ranks.count_evaluation()

    def _empty_part(self) -> EvaluationPart:
        return EvaluationPart(self.rank, 0, 0, self.length, {}, {})

    def _visit(self) -> Iterator[Any]:
        self._reset()
        recorder.phase(Phase.EVALUATION)
        for rows, batch in zip(self._batches, self._loader, strict=True):
            self._current = rows
            self._added.clear()
            yield batch
            # Counted after the loop body: a batch that raised was not evaluated.
            self._visited = rows.stop - self.start
        self._current = range(0)
        recorder.phase(Phase.OTHER)

    def add(self, **values: torch.Tensor) -> None:
        """Add values of the current batch, by name: tensors with one row for each sample.

        Rows may hold several numbers, for example one for each token: each of them counts.

        Raises:
            ConfigError: outside of a batch, twice for one batch, or with another number of rows
                than the batch has samples.
        """
        for name, value in values.items():
            self._check_rows(name, value)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"{name!r} must be a tensor to be summed, found {type(value).__name__}"
                )
            # Fetching a value waits for the device, so several batches are fetched together.
            self._pending.setdefault(name, []).append(value.detach())
            self._counts[name] = self._counts.get(name, 0) + value.numel()
            if len(self._pending[name]) >= _MAX_PENDING:
                self._fetch(name)

    def add_sum(self, name: str, total: float | torch.Tensor, count: int) -> None:
        """Add a sum over `count` values where there is no tensor of them, for example over the
        tokens that are not padding.

        Raises:
            ConfigError: `total` is a tensor of more than one number.
        """
        if isinstance(total, torch.Tensor) and total.numel() != 1:
            raise ConfigError(
                f"{name!r} must be one number with its count, found shape {tuple(total.shape)}"
            )
        self._sums.setdefault(name, ExactSum()).add([float(total)])
        self._counts[name] = self._counts.get(name, 0) + int(count)

    def collect(self, **rows: torch.Tensor | Sequence[Any]) -> None:
        """Keep outputs of the current batch, by name: tensors or lists with one row for each
        sample.

        Raises:
            ConfigError: as `add` does.
        """
        for name, value in rows.items():
            self._check_rows(f"outputs of {name}", value)
            batch = value.detach().cpu() if isinstance(value, torch.Tensor) else list(value)
            self._outputs.setdefault(name, []).append(batch)

    def result(self) -> EvaluationResult:
        """The results of all ranks together. Every rank of the group must call this: it is the
        only exchange.

        Raises:
            ConfigError: this rank has not visited all of its samples, or there is no process group
                of the ranks that share the dataset.
            MismatchError: ranks added different names, or evaluated different datasets.
        """
        if (setting := self._setting()) is not None and setting.ranks is not None:
            if self._merged is None:
                raise ConfigError(
                    "the evaluation has no result yet: iterate over it to its end first, inside "
                    "the loops of the Training"
                )
            return self._merged
        part = self.part()
        if not (self._uses_group and dist.is_available() and dist.is_initialized()):
            if self.world_size > 1:
                raise ConfigError(
                    f"rank {self.rank} of world_size={self.world_size} has no process group to "
                    "exchange results in. Call init_process_group first, or bring the ranks' "
                    "evaluation.part() together and use Evaluation.merge(parts)"
                )
            return self.merge([part])
        self._check_group()
        parts: list[Any] = [None] * self.world_size
        with recorder.during(Phase.EVALUATION):
            dist.all_gather_object(parts, part, group=self._group)
        return self.merge(parts)

    def part(self) -> EvaluationPart:
        """The results of this rank.

        Raises:
            ConfigError: this rank has not visited all of its samples, or collected outputs for some
                batches only.
        """
        if self._visited < self.stop - self.start:
            raise ConfigError(
                f"rank {self.rank} evaluated {self._visited} of its {self.stop - self.start} "
                "samples: iterate over the evaluation to its end first"
            )
        for name, batches in self._outputs.items():
            if (rows := sum(len(batch) for batch in batches)) != self.stop - self.start:
                raise ConfigError(
                    f"rank {self.rank} collected {rows} rows of {name!r} for "
                    f"{self.stop - self.start} samples: collect them for every batch"
                )
        for name in list(self._pending):
            self._fetch(name)
        sums = {name: (total.terms, self._counts[name]) for name, total in self._sums.items()}
        return EvaluationPart(
            self.rank, self.start, self.stop, self.length, sums, dict(self._outputs)
        )

    @staticmethod
    def merge(parts: Sequence[EvaluationPart]) -> EvaluationResult:
        """The result of all ranks' parts, given in any order.

        Raises:
            MismatchError: the parts do not cover one dataset once, or have different names.
        """
        parts = sorted(parts, key=lambda part: part.start)
        _check_parts(parts)
        sums = {}
        for name in sorted({name for part in parts for name in part.sums}):
            named = [part.sums[name] for part in parts if name in part.sums]
            terms = [term for terms, _ in named for term in terms]
            sums[name] = ExactSum(terms).value, sum(count for _, count in named)
        outputs = {
            name: _concatenated([batch for part in parts for batch in part.outputs.get(name, [])])
            for name in sorted({name for part in parts for name in part.outputs})
        }
        return EvaluationResult(sums, outputs)

    def _check_group(self) -> None:
        """Whether the group is that of the ranks among which the dataset was divided: it may have
        been made later.
        """
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if (rank, world_size) != (self.rank, self.world_size):
            raise ConfigError(
                f"the evaluation was made as rank {self.rank} of {self.world_size}, but this is "
                f"rank {rank} of {world_size} of the process group. Make the Evaluation after "
                "init_process_group"
            )

    def _reset(self) -> None:
        self._current = range(0)
        self._added: set[str] = set()
        self._visited = 0
        self._sums: dict[str, ExactSum] = {}
        self._counts: dict[str, int] = {}
        self._pending: dict[str, list[torch.Tensor]] = {}
        self._outputs: dict[str, list[Any]] = {}

    def _check_rows(self, name: str, value: torch.Tensor | Sequence[Any]) -> None:
        if not self._current:
            raise ConfigError(
                f"{name!r} is added outside of a batch: do so while iterating over the evaluation"
            )
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            raise ConfigError(
                f"{name!r} is a single number for {len(self._current)} samples, which could be a "
                'sum or a mean. Add one value for each sample (reduction="none"), or use '
                "add_sum(name, sum, count)"
            )
        if len(value) != len(self._current):
            raise ConfigError(
                f"{name!r} has {len(value)} rows for a batch of {len(self._current)} samples"
            )
        if name in self._added:
            raise ConfigError(
                f"{name!r} was added twice for one batch (samples from {self._current.start} on)"
            )
        self._added.add(name)

    def _fetch(self, name: str) -> None:
        total = self._sums.setdefault(name, ExactSum())
        for values in self._pending.pop(name):
            total.add(values.double().flatten().tolist())


def _check_parts(parts: Sequence[EvaluationPart]) -> None:
    """Every sample is in exactly one part, and names are the same wherever there are samples."""
    spans = {part.rank: f"samples {part.start} to {part.stop} of {part.length}" for part in parts}
    bounds = [0, *(part.stop for part in parts)]
    complete = (
        parts
        and bounds[:-1] == [part.start for part in parts]
        and {bounds[-1]} == {part.length for part in parts}
    )
    if not complete:
        raise MismatchError(
            f"the parts do not cover the dataset once: {spans}. Every rank's part is needed, all "
            "of one dataset",
            spans,
        )
    names = {
        part.rank: f"{sorted(part.sums)} and {sorted(part.outputs)}"
        for part in parts
        if part.stop > part.start
    }
    if len(set(names.values())) > 1:
        raise MismatchError(
            f"ranks added different names: {names}. Add the same ones on every rank", names
        )


def _concatenated(batches: list[Any]) -> Any:
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return torch.cat(batches)
    return [row for batch in batches for row in batch]
