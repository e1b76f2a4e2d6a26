"""The plan in force, the buckets made from it, and the plan that will replace it.

The first step runs with one plan and shows the order in which gradients arrive; from that all ranks
agree on the plan for the rest. Nobody changes buckets while gradients are on their way: the new
plan is followed before the next forward, on every rank at the same point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.ddp.buckets import Bucket, DenseBucket, InPlaceBucket, SparseBucket
from paceline.ddp.plan import (
    UNLIMITED,
    BucketLimits,
    BucketPlan,
    GradientSpec,
    ManagedParameter,
    first_plan,
    plan_buckets,
    plan_order,
)
from paceline.ddp.transport import Transport

__all__ = ["BucketLayout"]


class BucketLayout:
    """Plan and buckets of one reducer."""

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        transport: Transport,
        limits: BucketLimits,
        dtype: torch.dtype | None,
        *,
        bucketed_from_start: bool,
        replans: bool,
    ) -> None:
        self._managed, self._transport = managed, transport
        # Some gradients are left to an optimizer's step: then nothing is sent before the end of
        # backward, where one signal says all there is to say.
        self.defers_sums = any(entry.deferred for entry in managed)
        self._dtype = dtype  # of floating-point averages, if it is not that of the parameters
        self.limits = limits = transport.bucket_limits(limits)
        self.is_learning = True  # no step yet that shows how gradients arrive
        self.was_replanned = False
        self.defers_always = False  # buckets of this model are sent at the end of backward
        self._replans = replans
        self._next_plan: BucketPlan | None = None
        # The first step sends everything at its end, to see how gradients arrive, and a better plan
        # follows: until then small buckets would cost calls and overlap nothing.
        start = limits if bucketed_from_start else BucketLimits((UNLIMITED,))
        self._build(first_plan(self._specs(), start))

    def _specs(self) -> list[GradientSpec]:
        return [
            GradientSpec(
                managed.parameter.nbytes,
                (managed.parameter.dtype, managed.parameter.device, managed.deferred),
                managed.sparse,
                self._transport.sums_in_place(managed),
            )
            for managed in self._managed
        ]

    def _build(self, plan: BucketPlan) -> None:
        self._transport.forget_buckets()
        self.buckets: list[Bucket] = [
            self._bucket(index, members, is_last=0 < index == len(plan) - 1)
            for index, members in enumerate(plan.buckets)
        ]
        # The last bucket waits for the end of backward, because this rank's closing signal goes
        # with it and has to cover the whole step. So do gradients that are summed in place: for
        # those the ranks wait for each other.
        at_end = sum(isinstance(bucket, InPlaceBucket) for bucket in self.buckets)
        self.sent_early = 0 if self.defers_sums else len(self.buckets) - max(at_end, 1)
        self.frozen = [
            parameter
            for bucket in self.buckets
            for parameter in bucket.parameters
            if not parameter.requires_grad
        ]

    def _bucket(self, index: int, members: Sequence[int], *, is_last: bool) -> Bucket:
        """`is_last`: of several."""
        parameters = [self._managed[member].parameter for member in members]
        dtype = self._dtype if parameters[0].is_floating_point() else None
        if self._managed[members[0]].sparse:
            return SparseBucket(index, members, parameters)
        if self._transport.sums_in_place(self._managed[members[0]]):
            return InPlaceBucket(
                index,
                members[0],
                parameters[0],
                dtype,
                is_deferred=self._managed[members[0]].deferred,
            )
        transport = self._transport
        is_deferred = self._managed[members[0]].deferred
        carries_signal = is_last and not is_deferred and parameters[0].is_floating_point()
        return DenseBucket(
            index,
            members,
            parameters,
            transport.allocate,
            dtype,
            transport.fill_function(),
            transport.reallocate,
            is_deferred=is_deferred,
            trailer=transport.closing_numbers if carries_signal else 0,
        )

    def defer_always(self) -> None:
        """Nested backwards: a parameter may get several gradients in one backward."""
        self.defers_always = True

    def learn(self, arrived: Sequence[int]) -> None:
        """After the first step: agree on buckets in the order of rank 0's gradients."""
        self.is_learning = False
        # Some parameter got two gradients in one backward: a bucket sent early could miss the
        # second.
        if len(set(arrived)) < len(arrived):
            self.defer_always()
        if not self._replans:
            return
        # Every rank measures, because measuring exchanges signals. But timings and arrival orders
        # differ between ranks, and the plan must not: rank 0 proposes, the others add zeros, and
        # the sum is its proposal.
        limit = 0 if self.limits.given else self._transport.measure_limit()
        order = plan_order(arrived, len(self._managed))
        proposal = torch.tensor([limit, *order], dtype=torch.int64)
        if self._transport.rank != 0:
            proposal.zero_()
        limit, *order = self._transport.all_reduce_small(proposal).tolist()
        if limit:
            self.limits = BucketLimits((limit,))
        self._next_plan = plan_buckets(self._specs(), self.limits, order)

    @property
    def has_next_plan(self) -> bool:
        return self._next_plan is not None

    def follow_next_plan(self) -> None:
        """Change to the plan that `learn` made."""
        plan, self._next_plan = self._next_plan, None
        assert plan is not None
        # The new buckets may get the memory of the old ones, in which gradients still lie.
        for bucket in self.buckets:
            bucket.vacate()
        self._build(plan)
        self.was_replanned = True
