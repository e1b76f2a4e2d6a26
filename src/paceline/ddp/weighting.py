"""How much each rank's gradient weighs: the exact average over samples, or the plain average over
ranks. Pure, and the only place that knows the formula: transports get the weights as numbers.

A rank that ran micro-batches of n1, n2, ... samples since the last exchange holds G = sum((n_i /
n1) * g_i), where g_i is what backward of micro-batch i produced (a mean over its samples, divided
by the caller as usual). With N = all samples of all ranks and K = the number of micro-batches, the
exact gradient is sum over ranks of G * n1 * K / N. When all micro-batches of all ranks are equal,
that weight is 1 / world: what torch uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NOTHING", "AverageRule", "Contribution", "SampleWindow", "weights_of"]


class Contribution(NamedTuple):
    """What one rank contributes to an exchange: samples of its reference micro-batch, of all, and
    how many there were.
    """

    reference: float = 0.0
    total: float = 0.0
    micro_batches: int = 0

    @property
    def empty(self) -> bool:
        return self.total == 0


NOTHING = Contribution()


class SampleWindow:
    """What has gathered since the last exchange: the samples of the micro-batches, and which
    parameters they used. A synchronised step ends it; the next one begins with a new window.
    """

    __slots__ = ("_micro_batches", "_reference", "_total", "open", "used")

    def __init__(self) -> None:
        self._reference = 0.0
        self._total = 0.0
        self._micro_batches = 0
        self.open = False  # there are some; no property, it is read before every forward
        self.used: set[int] = set()  # by backwards that only accumulated

    def add(self, count: float) -> float:
        """Enter one micro-batch; returns the factor of its gradients before they accumulate."""
        self._micro_batches += 1
        self.open = True
        self._total += count
        if count == 0:
            return 0.0
        if self._reference == 0:
            self._reference = float(count)
        return count / self._reference

    def preview(self, count: float) -> float:
        """The factor that `add` would return."""
        return count / self._reference if self._reference else float(count != 0)

    def contribution(self) -> Contribution:
        return Contribution(self._reference, self._total, self._micro_batches)


@dataclasses.dataclass(frozen=True, slots=True)
class AverageRule:
    """Which average: over samples or over ranks. `divide_by_world` is torch's rule for ranks that
    ran out of data: the others' gradients shrink with them.
    """

    by_samples: bool = True
    divide_by_world: bool = False


def weights_of(contributions: Sequence[Contribution], rule: AverageRule) -> list[float]:
    """Every rank's factor in the sum over ranks; 0 for a rank that contributes no samples."""
    world = len(contributions)
    active = [contribution for contribution in contributions if contribution.micro_batches]
    if not rule.by_samples:
        return [1.0 / (world if rule.divide_by_world else max(len(active), 1))] * world
    counted = [contribution for contribution in active if not contribution.empty]
    if not counted:
        return [0.0] * world
    micro_batches = max(contribution.micro_batches for contribution in active)
    samples = sum(contribution.total for contribution in counted)
    divisor = world if rule.divide_by_world else len(counted)
    # Equal shares get 1 / divisor itself, so that the bits are those of a plain average.
    equal = all(
        contribution.reference * micro_batches * len(counted) == samples for contribution in counted
    )
    return [
        0.0
        if contribution.empty
        else 1.0 / divisor
        if equal
        else contribution.reference * micro_batches / samples * len(counted) / divisor
        for contribution in contributions
    ]
