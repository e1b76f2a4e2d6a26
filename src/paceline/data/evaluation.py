"""Exact evaluation: each sample once, sums with counts, outputs in dataset order, one exchange at
the very end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.exact_sum import ExactSum
from paceline.data.loader import DataLoader
from paceline.data.shares import find_rank, share_of
from paceline.errors import ConfigError, MismatchError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase

__all__ = ["Evaluation", "EvaluationPart", "EvaluationResult"]

# batches whose values stay on their device before they are fetched, so that the device can run
# ahead
_PENDING = 32


@dataclasses.dataclass(frozen=True)
class EvaluationPart:
    """What one rank found over samples `start` to `stop` of `length`. Can be pickled and merged
    anywhere.
    """

    rank: int
    start: int
    stop: int
    length: int
    sums: dict[str, tuple[list[float], int]]  # exact terms, count
    outputs: dict[str, list[Any]]  # batches of rows


class EvaluationResult:
    """What all ranks found together: the same on each of them, and the same as in one process."""

    def __init__(self, sums: Mapping[str, tuple[float, int]], outputs: Mapping[str, Any]) -> None:
        self._sums = dict(sums)
        self.outputs: dict[str, Any] = dict(outputs)

    @property
    def names(self) -> list[str]:
        """The names of all sums."""
        return sorted(self._sums)

    def sum(self, name: str) -> float:
        """The exact sum of all values of a name, rounded once."""
        return self._of(name)[0]

    def count(self, name: str) -> int:
        """How many values there were."""
        return self._of(name)[1]

    def mean(self, name: str) -> float:
        """The sum of all values over their count: never a mean of means."""
        total, count = self._of(name)
        if count == 0:
            raise ConfigError(f"{name!r} has no mean: its count is 0")
        return total / count

    def _of(self, name: str) -> tuple[float, int]:
        if name not in self._sums:
            raise ConfigError(f"nothing was added as {name!r}, found {self.names}")
        return self._sums[name]


class Evaluation:
    """Evaluate a dataset on all ranks, with the result of one process.

    Iterate over it for the batches of this rank, add values, and ask for the result::

        evaluation = paceline.Evaluation(dataset, batch_size=64)
        for inputs, labels in evaluation:
            logits = model(inputs) evaluation.add(loss=cross_entropy(logits, labels,
            reduction="none"), accuracy=logits.argmax(1) == labels)
            evaluation.collect(prediction=logits.argmax(1))
        result = evaluation.result()
        result.mean("loss"), result.mean("accuracy"), result.outputs["prediction"]

    Each rank visits one contiguous part of the dataset, once; parts may differ by a sample, and
    ranks by a batch. The ranks do not talk to each other before `result()`. A model that
    communicates in its forward would: evaluate the bare module. Sums are exact, so that equal
    values per sample give an equal result, to the last bit, on any number of ranks and with any
    batch size.

    Args:
        dataset: map-style.
        batch_size: samples at a time on this rank.
        group: the process group to evaluate in, None for the default one.
        rank, world_size: both, to evaluate one part without any group; see `part()` and `merge()`.
        options: for the `DataLoader`, as `num_workers`, `collate_fn`, `device`.
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
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, found {batch_size}")
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{type(dataset).__name__} has no length, so it cannot be divided among ranks: evaluate a map-style "
                "dataset, or list(dataset)"
            )
        self._communicates = rank is None and dist.is_available() and dist.is_initialized()
        self._group = group
        if group is not None:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.rank, self.world_size = find_rank(rank, world_size)
        self.length = len(dataset)
        share = share_of(self.length, self.rank, self.world_size)
        self.start, self.stop = share.start, share.stop
        self._batches = [
            range(at, min(at + batch_size, self.stop))
            for at in range(self.start, self.stop, batch_size)
        ]
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **options)  # type: ignore[arg-type]  # ranges do for lists
        self._reset()

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, from the start; what was added before is forgotten."""
        self._reset()
        recorder.phase(Phase.EVALUATION)
        for rows, batch in zip(self._batches, self._loader, strict=True):
            self._current = rows
            self._named.clear()
            yield batch
            self._visited = rows.stop - self.start
        self._current = range(0)
        recorder.phase(Phase.OTHER)

    def add(self, **values: torch.Tensor) -> None:
        """Add values of the current batch, by name: tensors with one row for each sample.

        Rows may hold several numbers (one for each token, say): each of them counts.
        """
        for name, value in values.items():
            self._check_rows(name, value)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"{name!r} must be a tensor to be summed, found {type(value).__name__}"
                )
            self._pending.setdefault(name, []).append(value.detach())
            self._counts[name] = self._counts.get(name, 0) + value.numel()
            if len(self._pending[name]) >= _PENDING:
                self._fetch(name)

    def add_sum(self, name: str, total: float | torch.Tensor, count: int) -> None:
        """Add a sum over `count` values, where there is no tensor of them (tokens that are not
        padding, say).
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
        """
        for name, value in rows.items():
            self._check_rows(f"outputs of {name}", value)
            kept = value.detach().cpu() if isinstance(value, torch.Tensor) else list(value)
            self._outputs.setdefault(name, []).append(kept)

    def result(self) -> EvaluationResult:
        """What all ranks found together. Every rank of the group must call this: it is the only
        exchange.
        """
        part = self.part()
        if not self._communicates:
            if self.world_size > 1:
                raise ConfigError(
                    f"rank {self.rank} of world_size={self.world_size} has no process group to exchange results in. "
                    "Bring the ranks' evaluation.part() together and use Evaluation.merge(parts)"
                )
            return self.merge([part])
        parts: list[Any] = [None] * self.world_size
        with recorder.during(Phase.EVALUATION):
            dist.all_gather_object(parts, part, group=self._group)
        return self.merge(parts)

    def part(self) -> EvaluationPart:
        """What this rank found."""
        if self._visited < self.stop - self.start:
            raise ConfigError(
                f"rank {self.rank} evaluated {self._visited} of its {self.stop - self.start} samples: "
                "iterate over the evaluation to its end first"
            )
        for name, batches in self._outputs.items():
            if (found := sum(len(batch) for batch in batches)) != self.stop - self.start:
                raise ConfigError(
                    f"rank {self.rank} collected {found} rows of {name!r} for {self.stop - self.start} samples: "
                    "collect them for every batch"
                )
        for name in list(self._pending):
            self._fetch(name)
        sums = {name: (total.terms, self._counts[name]) for name, total in self._sums.items()}
        return EvaluationPart(
            self.rank, self.start, self.stop, self.length, sums, dict(self._outputs)
        )

    @staticmethod
    def merge(parts: Sequence[EvaluationPart]) -> EvaluationResult:
        """The result of all ranks' parts, in any order."""
        parts = sorted(parts, key=lambda part: part.start)
        _check_parts(parts)
        sums = {}
        for name in sorted({name for part in parts for name in part.sums}):
            found = [part.sums[name] for part in parts if name in part.sums]
            terms = [term for terms, _ in found for term in terms]
            sums[name] = ExactSum(terms).value, sum(count for _, count in found)
        outputs = {
            name: _joined([batch for part in parts for batch in part.outputs.get(name, [])])
            for name in sorted({name for part in parts for name in part.outputs})
        }
        return EvaluationResult(sums, outputs)

    def _reset(self) -> None:
        self._current = range(0)
        self._named: set[str] = set()
        self._visited = 0
        self._sums: dict[str, ExactSum] = {}
        self._counts: dict[str, int] = {}
        self._pending: dict[str, list[torch.Tensor]] = {}
        self._outputs: dict[str, list[Any]] = {}

    def _check_rows(self, name: str, value: Any) -> None:
        if not self._current:
            raise ConfigError(
                f"{name!r} is added outside of a batch: do so while iterating over the evaluation"
            )
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            raise ConfigError(
                f"{name!r} is a single number for {len(self._current)} samples, and nobody can tell a sum from a mean. "
                'Add one value for each sample (reduction="none"), or use add_sum(name, sum, count)'
            )
        if len(value) != len(self._current):
            raise ConfigError(
                f"{name!r} has {len(value)} rows for a batch of {len(self._current)} samples"
            )
        if name in self._named:
            raise ConfigError(
                f"{name!r} was added twice for one batch (samples from {self._current.start} on)"
            )
        self._named.add(name)

    def _fetch(self, name: str) -> None:
        total = self._sums.setdefault(name, ExactSum())
        for values in self._pending.pop(name):
            total.add(values.double().flatten().tolist())


def _check_parts(parts: Sequence[EvaluationPart]) -> None:
    """Every sample in one part and one only, and the same names wherever there are samples."""
    spans = {part.rank: f"samples {part.start} to {part.stop} of {part.length}" for part in parts}
    bounds = [0, *(part.stop for part in parts)]
    whole = (
        parts
        and bounds[:-1] == [part.start for part in parts]
        and {bounds[-1]} == {part.length for part in parts}
    )
    if not whole:
        raise MismatchError(
            f"the parts do not cover the dataset once: {spans}. Every rank's part is needed, of one dataset",
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


def _joined(batches: list[Any]) -> Any:
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return torch.cat(batches)
    return [row for batch in batches for row in batch]
