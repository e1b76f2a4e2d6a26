"""How much each rank's gradient weighs. Pure, and the only place that knows the formula: transports
get the weights as numbers.

What a forward weighs is known in one of two ways, or not at all (`Basis`):

- SAMPLES: the program stated a number, `with model.count(n):` (or chose to trust the leading
  dimension, `average="samples"`). A rank that ran micro-batches of n1, n2, ... samples since the
  last exchange holds G = sum((n_i / n1) * g_i), where g_i is what backward of micro-batch i
  produced (a mean over its samples, divided by the caller as usual). With N = all samples of all
  ranks and K = the number of micro-batches, the exact gradient is the sum over ranks of
  G * n1 * K / N.
- SHARE: the batch came from a loader that cut it out of a global batch. Its weight is the rank's
  part of that batch, relative to an even cut: 1 for even shares, whatever their size. Micro-batches
  then accumulate as the program scaled them, just as they would in one process: with the weights
  w_i of its micro-batches, a rank's part of the sum is G * w1 / (sum over ranks of the mean w_i).
- RANK: nothing is known. Ranks count equally and micro-batches are added up as they are, as torch
  does, to the bit.

Whenever all weights of a step are equal, the factor is 1 / world itself, which is torch's.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "NOTHING",
    "NO_SAMPLES",
    "AverageRule",
    "Basis",
    "Contribution",
    "SampleCount",
    "SampleWindow",
    "combined",
    "weights_of",
]


class Basis(enum.IntEnum):
    """On what the weight of a forward rests."""

    RANK = 0
    SHARE = 1
    SAMPLES = 2

    def __str__(self) -> str:
        return (
            "no number of samples is known",
            "its batch is a share of a global batch",
            "a number of samples was stated",
        )[int(self)]


class SampleCount(NamedTuple):
    """What one forward weighs; 0: it contributes nothing. `leading` is the leading dimension of its
    input where that is all there is to go by: it is compared over ranks, to warn of a difference.
    """

    value: float
    basis: Basis = Basis.SAMPLES
    leading: float = 0.0


NO_SAMPLES = SampleCount(0.0, Basis.RANK)


def combined(first: SampleCount, second: SampleCount) -> SampleCount:
    """What a backward weighs that covers two forwards."""
    leading = first.leading + second.leading
    if not first.value or not second.value:
        return (second if second.value else first)._replace(leading=leading)
    if first.basis is not second.basis:
        # Generated inputs beside those of a batch, for example: the batch decides.
        return max(first, second, key=lambda count: count.basis)._replace(leading=leading)
    if first.basis is Basis.SAMPLES:
        return SampleCount(first.value + second.value, Basis.SAMPLES, leading)
    if first.value == second.value:
        return first._replace(leading=leading)
    # Shares of different global batches: their gradients cannot be told apart after backward.
    return SampleCount(1.0, Basis.RANK, leading)


class Contribution(NamedTuple):
    """What one rank contributes to an exchange: the weight of its reference micro-batch, of all,
    and how many there were.
    """

    reference: float = 0.0
    total: float = 0.0
    micro_batches: int = 0
    basis: Basis = Basis.SAMPLES
    leading: float = 0.0

    @property
    def empty(self) -> bool:
        return self.total == 0


NOTHING = Contribution()


class SampleWindow:
    """What has gathered since the last exchange: the weights of the micro-batches, and which
    parameters they used. A synchronised step ends it; the next one begins with a new window.
    """

    __slots__ = ("_leading", "_micro_batches", "_reference", "_total", "basis", "open", "used")

    def __init__(self) -> None:
        self._reference = 0.0
        self._total = 0.0
        self._leading = 0.0
        self._micro_batches = 0
        self.basis: Basis | None = None  # of the micro-batches so far; None: all were empty
        self.open = False  # there are some; no property, it is read before every forward
        self.used: set[int] = set()  # by backwards that only accumulated

    def add(self, count: SampleCount) -> float:
        """Enter one micro-batch; returns the factor of its gradients before they accumulate."""
        factor = self.preview(count)
        self._micro_batches += 1
        self.open = True
        self._total += count.value
        self._leading += count.leading
        if count.value:
            if self._reference == 0:
                self._reference = count.value
            self.basis = count.basis if self.basis is None else min(self.basis, count.basis)
        return factor

    def preview(self, count: SampleCount) -> float:
        """The factor that `add` would return."""
        if count.basis is Basis.RANK or not self._reference:
            return float(count.value != 0)
        return count.value / self._reference

    def contribution(self) -> Contribution:
        basis = Basis.SAMPLES if self.basis is None else self.basis
        return Contribution(self._reference, self._total, self._micro_batches, basis, self._leading)


@dataclasses.dataclass(frozen=True, slots=True)
class AverageRule:
    """Which average.

    by_ranks: ranks count equally even where more is known.
    divide_by_world: the others' gradients shrink as ranks run out of data.
    divide_ranks_by_world: likewise, but only where ranks count equally for want of a count.
    """

    by_ranks: bool = False
    divide_by_world: bool = False
    divide_ranks_by_world: bool = False


def weights_of(contributions: Sequence[Contribution], rule: AverageRule) -> list[float]:
    """Every rank's factor in the sum over ranks; 0 for a rank that contributes no samples."""
    world = len(contributions)
    active = [contribution for contribution in contributions if contribution.micro_batches]
    if rule.by_ranks:
        return [1.0 / (world if rule.divide_by_world else max(len(active), 1))] * world
    counted = [contribution for contribution in active if not contribution.empty]
    if not counted:
        return [0.0] * world
    divisor = world if rule.divide_by_world else len(counted)
    if any(contribution.basis is Basis.RANK for contribution in counted):
        divisor = world if rule.divide_ranks_by_world else divisor
        return [0.0 if contribution.empty else 1.0 / divisor for contribution in contributions]
    # Where a number of samples was stated, a micro-batch counts by its samples, in all ranks'
    # micro-batches together. A share counts by itself: its micro-batches are parts of one batch.
    by_samples = counted[0].basis is Basis.SAMPLES
    scale = max(contribution.micro_batches for contribution in active) if by_samples else 1
    whole = sum(
        contribution.total / (1 if by_samples else contribution.micro_batches)
        for contribution in counted
    )
    # Equal shares get 1 / divisor itself, so that the bits are those of a plain average.
    equal = all(contribution.reference * scale * len(counted) == whole for contribution in counted)
    return [
        0.0
        if contribution.empty
        else 1.0 / divisor
        if equal
        else contribution.reference * scale / whole * len(counted) / divisor
        for contribution in contributions
    ]
