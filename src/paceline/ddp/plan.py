"""Which gradient goes into which bucket, and in which order buckets are sent. Pure: planning looks
at sizes and kinds, not at tensors or ranks.

The rule is the one users of torch know: gradients of one dtype and device fill a bucket until it
holds at least its limit; the first bucket is small, so that communication starts early. The same
rule gives the same buckets as torch, hence the same order of additions on transports whose order
depends on the layout.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Hashable, Sequence

import torch

__all__ = [
    "MIB",
    "UNLIMITED",
    "BucketLimits",
    "BucketPlan",
    "GradientSpec",
    "ManagedParameter",
    "first_plan",
    "limit_for",
    "plan_buckets",
    "plan_order",
]

MIB = 1024 * 1024
UNLIMITED = sys.maxsize
_FIRST_BUCKET_BYTES = MIB
_DEFAULT_BUCKET_MIB = 25
_COST_SHARE = 20
_SMALLEST_MEASURED, _LARGEST_MEASURED = MIB, 64 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedParameter:
    """One parameter whose gradient is averaged."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False
    deferred: bool = False  # its gradient is left to an optimizer's step, see `DeferredSum`


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSpec:
    """What the plan needs to know of one parameter's gradient. Gradients with equal `kind` may
    share a bucket.
    """

    nbytes: int
    kind: Hashable
    sparse: bool = False
    in_place: bool = False  # not copied: a bucket of its own that is sent after all others


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameter indices per bucket, in the order buckets are sent."""

    buckets: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.buckets)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketLimits:
    """How many bytes a bucket may hold before the next is begun: the first ones, then the last for
    all others.
    """

    bytes: tuple[int, ...]
    # by the caller; if not, measurement may choose others where the sums do not depend on it
    given: bool = True

    @classmethod
    def create(
        cls, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
    ) -> BucketLimits:
        """From the constructor's arguments; a list wins over a single number, as in torch."""
        if bucket_cap_mb_list:
            return cls(tuple(int(mb * MIB) for mb in bucket_cap_mb_list))
        if bucket_cap_mb is None:
            return cls((_FIRST_BUCKET_BYTES, _DEFAULT_BUCKET_MIB * MIB), given=False)
        return cls((int(bucket_cap_mb * MIB),))


def limit_for(seconds_per_bucket: float, bytes_per_second: float) -> int:
    """A size, a power of two, at which what a bucket costs whatever its size is a twentieth of
    summing it.
    """
    worth = _COST_SHARE * seconds_per_bucket * bytes_per_second
    exponent = round(math.log2(max(worth, 1.0)))
    return min(max(1 << exponent, _SMALLEST_MEASURED), _LARGEST_MEASURED)


def plan_buckets(
    gradients: Sequence[GradientSpec], limits: BucketLimits, order: Sequence[int]
) -> BucketPlan:
    """Fill buckets with gradients in `order`."""
    closed: list[tuple[int, ...]] = []
    in_place: list[tuple[int, ...]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    limit_at: dict[Hashable, int] = {}
    for index in order:
        gradient = gradients[index]
        if gradient.sparse or gradient.in_place:
            (in_place if gradient.in_place else closed).append((index,))
            continue
        members, size = filling.get(gradient.kind, ([], 0))
        members.append(index)
        size += gradient.nbytes
        position = limit_at.get(gradient.kind, 0)
        if size >= limits.bytes[min(position, len(limits.bytes) - 1)]:
            closed.append(tuple(members))
            filling.pop(gradient.kind, None)
            limit_at[gradient.kind] = position + 1
        else:
            filling[gradient.kind] = (members, size)
    closed.extend(tuple(members) for members, _ in filling.values())
    return BucketPlan((*closed, *reversed(in_place)))  # what came last may still be in the cache


def first_plan(gradients: Sequence[GradientSpec], limits: BucketLimits) -> BucketPlan:
    """Before anything is known of the order gradients arrive in: parameters in reverse, bucket by
    bucket.
    """
    plan = plan_buckets(gradients, limits, range(len(gradients)))
    last = {members for members in plan.buckets if gradients[members[0]].in_place}
    return BucketPlan(
        tuple(sorted(plan.buckets, key=lambda members: (members in last, -min(members))))
    )


def plan_order(arrived: Sequence[int], total: int) -> list[int]:
    """The order of the next plan: gradients as they arrived (the last time counts), then those
    that did not arrive.
    """
    seen = dict.fromkeys(reversed(arrived))
    order = list(reversed(seen))
    return order + [index for index in reversed(range(total)) if index not in seen]
