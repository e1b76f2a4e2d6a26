"""Sums of gradients over replicas, in the order of the replicas: the same bits each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.backend.host_engine import DTYPE_CODES
from paceline.core.wakeup import sum_in_order

__all__ = ["sum_gradients"]

_Gradients = Sequence[torch.Tensor | None]


def sum_gradients(
    own: _Gradients, others: Sequence[_Gradients], is_mine: Sequence[bool] | None = None
) -> list[torch.Tensor | None]:
    """For each parameter, the sum of what this and the other replicas found; None where nobody
    found anything.

    The results do not lie in the others' memory, which is used again. Where nobody else has our own
    term (`is_mine`), it becomes the result.
    """
    results: list[torch.Tensor | None] = [None] * len(own)
    inside: list[int] = []
    pairs: list[int] = []
    for index, terms in enumerate(zip(own, *others, strict=True)):
        if len(terms) == 2 and all(term is not None and not term.is_sparse for term in terms):
            can_hold_sum = is_mine is not None and is_mine[index] and terms[0].is_contiguous()
            (inside if can_hold_sum else pairs).append(index)
        else:
            found = [term for term in terms if term is not None]
            if found:
                results[index] = _sum(found, is_own=len(found) == 1 and terms[0] is not None)
    for indices, add in ((pairs, torch._foreach_add), (inside, _add_inside)):
        if indices:
            first: list[Any] = [own[index] for index in indices]
            second: list[Any] = [others[0][index] for index in indices]
            for index, total in zip(indices, add(first, second), strict=True):
                results[index] = total
    return results


def _add_inside(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        torch._foreach_add_(first, second)
    return first


def _sum(terms: list[torch.Tensor], is_own: bool) -> torch.Tensor:
    if len(terms) == 1:
        return terms[0] if is_own else terms[0].clone()
    if all(term.is_contiguous() for term in terms if not term.is_sparse) and not any(
        t.is_sparse for t in terms
    ):
        total = torch.empty_like(terms[0])
        sum_in_order(
            total.data_ptr(),
            [term.data_ptr() for term in terms],
            total.numel(),
            DTYPE_CODES[total.dtype],
        )
        return total
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
