"""Sums of gradients over replicas, in the order of the replicas: the same bits each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.groups.engine import DTYPE_CODES
from paceline.shm.flags import sum_in_order

__all__ = ["sum_gradients"]

_Gradients = Sequence[torch.Tensor | None]


def sum_gradients(own: _Gradients, others: Sequence[_Gradients], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """For each parameter, the sum of what this and the other replicas found; None where nobody found anything.

    The results are new tensors: what the others found may lie in memory that is used again.
    """
    results: list[torch.Tensor | None] = [None] * len(own)
    pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for index, first in enumerate(own):
        if not needed[index]:
            continue
        terms = [term for term in (first, *(found[index] for found in others)) if term is not None]
        if len(terms) == 2 and not terms[0].is_sparse and not terms[1].is_sparse:
            pairs.append((index, terms[0], terms[1]))
        elif terms:
            results[index] = _sum(terms, is_own=len(terms) == 1 and first is not None)
    if pairs:
        sums = torch._foreach_add([one for _, one, _ in pairs], [other for _, _, other in pairs])
        for (index, _, _), total in zip(pairs, sums, strict=True):
            results[index] = total
    return results


def _sum(terms: list[torch.Tensor], is_own: bool) -> torch.Tensor:
    if len(terms) == 1:
        return terms[0] if is_own else terms[0].clone()
    if all(term.is_contiguous() for term in terms if not term.is_sparse) and not any(t.is_sparse for t in terms):
        total = torch.empty_like(terms[0])
        sum_in_order(total.data_ptr(), [term.data_ptr() for term in terms], total.numel(), DTYPE_CODES[total.dtype])
        return total
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
