"""How much each rank's gradient weighs: the exact average over samples, or the plain average over
ranks. Pure.

A rank that ran micro-batches of n1, n2, ... samples since the last exchange holds G = sum((n_i /
n1) * g_i), where g_i is what backward of micro-batch i produced (a mean over its samples, divided
by the caller as usual). With N = all samples of all ranks and K = the number of micro-batches, the
exact gradient is sum over ranks of G * n1 * K / N. When all micro-batches of all ranks are equal,
that weight is 1 / world: what torch uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["NOTHING", "Contribution", "SampleWindow", "weight_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brings to an exchange: samples of its reference micro-batch, of all, and how
    many there were.
    """

    reference: float = 0.0
    total: float = 0.0
    micro_batches: int = 0

    @property
    def empty(self) -> bool:
        return self.total == 0


NOTHING = Contribution()


class SampleWindow:
    """Counts the samples of the micro-batches since the last exchange."""

    __slots__ = ("_micro_batches", "_reference", "_total", "open")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._reference = 0.0
        self._total = 0.0
        self._micro_batches = 0
        self.open = False  # there are some; no property, it is asked before every forward

    def add(self, count: float) -> float:
        """Enter one micro-batch; returns the factor its gradients take before they are accumulated."""
        self._micro_batches += 1
        self.open = True
        self._total += count
        if count == 0:
            return 0.0
        if self._reference == 0:
            self._reference = float(count)
        return count / self._reference

    def contribution(self) -> Contribution:
        return Contribution(self._reference, self._total, self._micro_batches)


def weight_of(
    rank: int, all_ranks: Sequence[Contribution], *, by_samples: bool, divide_by_world: bool
) -> float:
    """The factor of this rank's gradient in the sum over ranks.

    `divide_by_world` is torch's rule for ranks that ran out of data: the others' gradients shrink
    with them.
    """
    world = len(all_ranks)
    active = [one for one in all_ranks if one.micro_batches]
    if not by_samples:
        return 1.0 / (world if divide_by_world else max(len(active), 1))
    counted = [one for one in active if not one.empty]
    if not counted or all_ranks[rank].empty:
        return 0.0
    micro_batches = max(one.micro_batches for one in active)
    samples = sum(one.total for one in counted)
    equal = all(one.reference * micro_batches * len(counted) == samples for one in counted)
    divisor = world if divide_by_world else len(counted)
    if equal:
        return 1.0 / divisor
    weight = all_ranks[rank].reference * micro_batches / samples
    return weight * len(counted) / divisor
