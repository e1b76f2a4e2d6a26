"""A `paceline` group on several hosts: an all-reduce per bucket, as on any group, but nobody waits
for signals before the end of backward.

Its calls run one after the other, on a thread of the group. So the opening signals and the first
buckets are queued one behind the other, and backward goes on: what the signals say is known when it
is a bucket's turn. Then it is weighed, or not sent at all. All ranks have read the same signals, so
all decide alike.

A model that has one short bucket offers it with its signal, weighed as if all ranks did the same:
if they do, that one exchange is the step. The closing signals of a model that has several buckets
travel with the last of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.backend import PacelineGroup
from paceline.backend.engine import SUM, Reduction
from paceline.backend.hierarchical_offer import NumberTable, Offer
from paceline.backend.multi_host_engine import MultiHostEngine
from paceline.ddp.bucket_telemetry import BucketTelemetry
from paceline.ddp.buckets import Bucket, DenseBucket
from paceline.ddp.buckets.base import Waitable
from paceline.ddp.group_transport import GroupTransport
from paceline.ddp.plan import MIB, BucketLimits, ManagedParameter
from paceline.ddp.signals import Call, Signal
from paceline.ddp.transport import Weigh, describe_step

__all__ = ["MultiHostTransport"]

# The first bucket, and all others.
_BYTES_BETWEEN_HOSTS = (MIB, 8 * MIB)
_GROUPS_OWN = -1  # its time limit


class MultiHostTransport(GroupTransport):
    """Averages the buckets of ranks on several hosts."""

    weighs_late = True

    def __init__(
        self,
        group: PacelineGroup,
        wire_dtype: torch.dtype | None = None,
        managed: Sequence[ManagedParameter] = (),
        twin: int = 0,
    ) -> None:
        super().__init__(group, torch.device("cpu"), wire_dtype)
        assert isinstance(group.engine, MultiHostEngine)
        self._engine = group.engine
        shapes = [(entry.name, tuple(entry.parameter.shape)) for entry in managed]
        # Steps of models that are alike are calls that are alike, but for this.
        key = repr((shapes, twin))
        self._label = self._engine.name_exchange(key, describe_step(managed, twin))
        # Not where longer buckets are summed in another order.
        self.closing_numbers = self.world
        self._opening = _Opening(self._engine, self._label, Signal(Call.ANSWER), None)
        self._offered: Bucket | None = None
        self._carried: _Carried | None = None

    @classmethod
    def serves(cls, group: dist.ProcessGroup) -> bool:
        """Whether this group is on several hosts."""
        return isinstance(group, PacelineGroup) and isinstance(group.engine, MultiHostEngine)

    def bucket_limits(self, chosen: BucketLimits) -> BucketLimits:
        """The link should be busy from the first gradients on, and have little left to do after the
        last. A number that was measured would be another in each run, and so might be the bits of
        what is rounded.
        """
        return chosen if chosen.given else dataclasses.replace(chosen, bytes=_BYTES_BETWEEN_HOSTS)

    # ----------------------------------------------------------------------------- the step's calls

    def _post(self, signal: Signal, single_bucket: bool) -> None:
        self._opening = _Opening(self._engine, self._label, signal, self._weigh)
        # Otherwise the bucket goes with it, or the signals are all that comes next: then it is the
        # thread that waits for them which exchanges them.
        if self._weigh is not None and not single_bucket:
            self._opening.start()

    def _signals(self) -> list[Signal]:
        self._wait(self._opening)
        return self._opening.signals()

    def _launch(self, bucket: Bucket) -> None:
        opening = self._opening
        if self._carried is not None:
            self._carried.put(bucket, self.rank)
        if self._weigh is None:
            self._in_flight.append((self._send_weighed(bucket), bucket))
        elif not opening.is_started and opening.offer_if_usual(bucket, self.world):
            self._offered = bucket
        else:
            opening.start()
            self._in_flight.append((self._send_behind_signals(bucket), bucket))

    def _send_weighed(self, bucket: Bucket) -> Waitable:
        factor = self._scale(bucket, self._weights)
        if self._carried is not None:
            self._carried.factor = factor
        return bucket.all_reduce(self.group, factor, self._wire_dtype)

    def _send_behind_signals(self, bucket: Bucket) -> Waitable:
        """Queue it behind the opening signals, which decide about it."""
        assert isinstance(bucket, DenseBucket), "others are launched when the signals were read"
        opening, carried, sent = self._opening, self._carried, bucket.sent

        def reduction() -> Reduction | None:
            weights = opening.weights()
            if weights is None:
                return None
            factor = self._scale(bucket, weights)
            if carried is not None:
                carried.factor = factor
            if sent.dtype is torch.float32:
                return Reduction.scaled(factor, self._wire_dtype)
            if factor != 1.0:
                sent.mul_(factor)
            return SUM

        return self._engine.allreduce_when_known(sent, reduction, timeout_ns=_GROUPS_OWN)

    def _close(self, signal: Signal, carrier: Bucket | None) -> None:
        if carrier is not None and carrier.trailer is not None:
            self._carried = _Carried(signal)
        else:
            super()._close(signal, None)

    def _sum_table(self, table: torch.Tensor) -> Waitable:
        if self._weigh is None:
            return super()._sum_table(table)
        opening = self._opening
        return self._engine.allreduce_when_known(
            table, lambda: None if opening.refuses else SUM, timeout_ns=_GROUPS_OWN
        )

    def _complete(self, telemetry: BucketTelemetry | None) -> list[Signal]:
        signals = self._signals()
        opening, offered, carried = self._opening, self._offered, self._carried
        self._offered = self._carried = None
        refuses, is_averaged = opening.refuses, opening.take_back()
        if refuses:
            self._closing = None  # it was not sent, nor was any bucket
        elif offered is not None and not is_averaged:
            self._in_flight.append((self._send_behind_signals(offered), offered))
        closing = super()._complete(telemetry)
        return signals if refuses else closing if carried is None else carried.read()

    def _abandon(self) -> None:
        super()._abandon()
        self._offered = self._carried = None
        self._opening.take_back()


class _Opening:
    """All ranks' opening signals, to be exchanged or on their way, and what follows from them."""

    def __init__(
        self, engine: MultiHostEngine, label: int, mine: Signal, weigh: Weigh | None
    ) -> None:
        self._engine, self._label, self._weigh = engine, label, weigh
        self._row = mine.pack()
        self._mine = mine
        self._offer: Offer | None = None
        self._table: NumberTable | None = None
        self._ticket: Waitable | None = None
        self.is_started = False
        self._signals: list[Signal] | None = None

    def offer_if_usual(self, bucket: Bucket, world: int) -> bool:
        """Let a bucket travel with the signal, if it counts like that of each rank that sends the
        same signal. False: it has to wait for the others' signals.
        """
        assert self._weigh is not None
        equal = [1.0 / world] * world
        if (
            not isinstance(bucket, DenseBucket)
            or bucket.sent.dtype is not torch.float32
            or not self._engine.can_offer(bucket.sent)
            or self._weigh([self._mine] * world) != equal
        ):
            return False
        weigh, mine, row = self._weigh, self._mine, self._row

        # No method: nothing that the offer keeps may keep the offer, and with it the bucket.
        def counts_equally(rows: list[list[float]]) -> bool:
            return weigh(_unpack(rows, mine, row)) == equal

        self._offer = Offer(bucket.sent, 1.0 / world, counts_equally)
        return True

    def take_back(self) -> bool:
        """Let go of what was offered, so that its memory counts as unused; whether it holds the
        average.
        """
        offer, self._offer = self._offer, None
        return offer is not None and offer.is_taken

    def start(self) -> None:
        """Exchange them, unless that has begun."""
        if not self.is_started:
            self._exchange(wait=False)

    def wait(self, *args: Any) -> None:
        """Until all are there. If the exchange has not begun, it is made on this thread."""
        if not self.is_started:
            self._exchange(wait=True)
        elif self._ticket is not None:
            self._ticket.wait(*args)

    def _exchange(self, *, wait: bool) -> None:
        self.is_started = True
        self._table, self._ticket = self._engine.exchange_numbers(
            self._row, self._offer, self._label, wait=wait, timeout_ns=_GROUPS_OWN
        )

    def signals(self) -> list[Signal]:
        """All ranks' signals, once they are there."""
        if self._signals is None:
            assert self._table is not None, "the exchange failed"
            self._signals = _unpack(self._table.rows(), self._mine, self._row)
        return self._signals

    def weights(self) -> list[float] | None:
        """Every rank's weight; None if the step cannot count. Asked by calls that come after the
        exchange, on the group's thread: it has ended, and if it failed that is raised.
        """
        assert self._weigh is not None
        self.wait()
        return self._weigh(self.signals())

    @property
    def refuses(self) -> bool:
        """The signals show that the step cannot count."""
        return self._weigh is not None and self.weights() is None


def _unpack(rows: list[list[float]], mine: Signal, row: list[float]) -> list[Signal]:
    if rows.count(row) == len(rows):
        return [mine] * len(rows)  # the usual case
    return [Signal.unpack(theirs) for theirs in rows]


class _Carried:
    """Closing signals that travel with a bucket: each rank adds a number of its own to the zeros of
    the others. It is small, so that it is not lost if it is rounded on its way.
    """

    _IS_CLOSING, _FAILED, _UNUSED = 1, 2, 4

    def __init__(self, mine: Signal) -> None:
        self._mine = mine
        self._trailer = torch.empty(0)
        self.factor = 1.0  # of the bucket

    def put(self, bucket: Bucket, rank: int) -> None:
        """Into the bucket that is sent next."""
        trailer = bucket.trailer
        assert trailer is not None, "a bucket that carries signals has room for them"
        mine = self._mine
        trailer.zero_()
        trailer[rank] = self._IS_CLOSING + self._FAILED * mine.failed + self._UNUSED * mine.unused
        self._trailer = trailer

    def read(self) -> list[Signal]:
        """All ranks' signals, when the bucket is back."""
        numbers = [round(number / self.factor) for number in self._trailer.tolist()]
        assert all(number & self._IS_CLOSING for number in numbers), numbers
        return [
            Signal(
                Call.CLOSE,
                failed=bool(number & self._FAILED),
                unused=bool(number & self._UNUSED),
            )
            for number in numbers
        ]
