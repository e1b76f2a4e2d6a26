"""Sums without rounding: the result does not depend on the order, the batches or the ranks in which
the numbers came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["ExactSum"]


class ExactSum:
    """Adds floats exactly. `terms` are a handful of floats whose true sum is the true sum of all
    that was added.

    `math.fsum` rounds the exact sum once. Subtracting that and summing again gives what the
    rounding lost, and so on until nothing is lost: two or three terms for ordinary numbers.
    """

    def __init__(self, terms: Iterable[float] = ()) -> None:
        self.terms: list[float] = []
        self.add(terms)

    def add(self, numbers: Iterable[float]) -> None:
        """Add numbers; those that are not finite make the sum infinite or NaN, as they would."""
        # Each round takes the rounded sum of what is left and leaves what the rounding lost, which
        # is smaller by 53 bits; so the loop ends after a few rounds.
        rest = [*self.terms, *numbers]
        self.terms = []
        while (term := _fsum(rest)) != 0.0:
            self.terms.append(term)
            # Nothing can be subtracted from an infinity or a NaN; the term itself is the sum.
            if not math.isfinite(term):
                return
            rest.append(-term)

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return _fsum(self.terms)


def _fsum(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except ValueError:  # infinities of both signs
        return math.nan
