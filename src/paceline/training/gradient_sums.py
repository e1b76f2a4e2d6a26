"""Sums of gradients: how the gradients of two nodes of the tree are added.

A list has one entry for each parameter: None where no shard has used it so far, else a tensor of
real numbers. Complex gradients are seen as pairs of real numbers; those of half precision become
float32 and are rounded once, at the end.

A parameter that one shard uses and another does not counts as zeros there: it adds up to `x + 0.0`,
whether the two shards meet on one rank or travel between ranks as zeros. (That differs from x
where x is -0.0.) Sparse gradients have no zeros to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias, cast

import torch

from paceline._torch_internals import foreach_add_, foreach_mul_
from paceline.errors import StepError

__all__ = [
    "DENSE",
    "NO_GRADIENT",
    "SPARSE",
    "SUMMED_AS",
    "SUMMED_AS_THEY_ARE",
    "GradientKinds",
    "Gradients",
    "add_gradients",
    "kinds_of",
    "merged_kinds",
    "summands",
    "weighted",
    "with_values",
]

Gradients: TypeAlias = list[torch.Tensor | None]

# What the gradients are: one of these letters for each parameter.
GradientKinds: TypeAlias = str
NO_GRADIENT = "-"
DENSE = "d"
SPARSE = "s"

# Types in which sums would lose too much, and those in which they are taken instead.
SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
SUMMED_AS_THEY_ARE = {torch.float32, torch.float64}
_STRIDED = {torch.strided}

_dtype_of, _layout_of = attrgetter("dtype"), attrgetter("layout")
_requires_grad = attrgetter("requires_grad")


def summands(gradients: Gradients) -> tuple[Gradients, GradientKinds]:
    """The gradients of a shard in the form in which they are summed, and what they are."""
    if _are_summed_as_they_are(gradients):
        return gradients, DENSE * len(gradients)
    found = [None if gradient is None else _summand(gradient) for gradient in gradients]
    return found, kinds_of(found)


def _are_summed_as_they_are(gradients: Gradients) -> bool:
    # Nearly always, and asked for every shard.
    try:
        return (
            set(map(_dtype_of, gradients)) <= SUMMED_AS_THEY_ARE
            and set(map(_layout_of, gradients)) <= _STRIDED
            and not any(map(_requires_grad, gradients))
        )
    except AttributeError:  # of None
        return False


def _summand(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient.coalesce()
    if gradient.dtype.is_complex:
        return torch.view_as_real(gradient.resolve_conj())
    return gradient.to(SUMMED_AS.get(gradient.dtype, gradient.dtype))


def weighted(gradients: Gradients, weight: int) -> Gradients:
    """The gradients times a shard's weight. Uses them up."""
    if weight == 1:
        return gradients
    # A sum with a factor (`add(..., alpha=...)`) would round once where two shards meet on one
    # rank, and twice where they do not.
    dense = [g for g in gradients if g is not None and not g.is_sparse]
    if dense:
        foreach_mul_(dense, weight)
    return [
        with_values(g, g.values() * weight) if g is not None and g.is_sparse else g
        for g in gradients
    ]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two nodes, in the memory of either."""
    if _are_summed_as_they_are(left) and _are_summed_as_they_are(right):
        foreach_add_(cast("list[torch.Tensor]", left), cast("list[torch.Tensor]", right))
        return left
    pairs = [
        (one, other)
        for one, other in zip(left, right, strict=True)
        if one is not None and other is not None and not one.is_sparse and not other.is_sparse
    ]
    if pairs:
        foreach_add_([one for one, _ in pairs], [other for _, other in pairs])
    return [_rest_of_sum(one, other) for one, other in zip(left, right, strict=True)]


def _rest_of_sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two entries, of which those that are both dense have been added already."""
    if one is None or other is None:
        only = other if one is None else one
        return only if only is None or only.is_sparse else only.add_(0.0)
    if one.is_sparse != other.is_sparse:
        raise _mixed_kinds()
    return (one + other).coalesce() if one.is_sparse else one


def kinds_of(gradients: Gradients) -> GradientKinds:
    """What each entry is."""
    return "".join(
        NO_GRADIENT if gradient is None else SPARSE if gradient.is_sparse else DENSE
        for gradient in gradients
    )


def merged_kinds(kinds: Sequence[GradientKinds]) -> GradientKinds:
    """What the gradients of several nodes or ranks are together."""
    if len(set(kinds)) == 1:
        return kinds[0]
    merged = ""
    for letters in zip(*kinds, strict=True):
        found = set(letters) - {NO_GRADIENT}
        if len(found) > 1:
            raise _mixed_kinds()
        merged += found.pop() if found else NO_GRADIENT
    return merged


def _mixed_kinds() -> StepError:
    return StepError(
        "the gradient of a parameter is sparse in some shards and dense in others, which has no "
        "fixed order of summation: use sparse=False for its layer"
    )


def with_values(sparse: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A coalesced sparse tensor with other values."""
    return torch.sparse_coo_tensor(
        sparse.indices(), values, sparse.shape, is_coalesced=True, check_invariants=False
    )
