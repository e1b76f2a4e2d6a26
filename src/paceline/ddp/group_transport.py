"""Any torch process group: one asynchronous all-reduce per bucket, the gradient scaled before the
sum, as torch's class does it.

Signals travel as a sum in which every rank fills its own row. Waits poll for a peer's published
error, which is raised instead of a lost connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline._torch_internals import Work
from paceline.backend import PacelineGroup
from paceline.backend.store_failure_channel import failure_channel_of
from paceline.ddp.bucket_telemetry import BucketTelemetry
from paceline.ddp.buckets import Bucket
from paceline.ddp.buckets.base import Waitable
from paceline.ddp.group_calls import all_reduce, all_to_all_into
from paceline.ddp.signals import SIGNAL_WIDTH, Signal
from paceline.ddp.transport import Transport
from paceline.errors import CollectiveTimeout, PacelineError, PeerLost

__all__ = ["GroupTransport"]

# How often a waiting rank polls for a peer's published error.
_SLICE = timedelta(seconds=0.5)
# The connection to a rank that fails may end before that rank has published why.
_FAILURE_GRACE_S = 0.5


class GroupTransport(Transport):
    """Averages buckets with the all-reduce of any torch process group, on any device."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self._wire_dtype = wire_dtype
        self._device = device  # signals travel in host memory wherever the group can do that
        self._posted: _Table | list[Signal] = []
        self._closing: _Table | None = None
        self._weights: Sequence[float] = ()
        self._in_flight: list[tuple[Waitable, Bucket]] = []
        self._received: torch.Tensor | None = None  # by the last all-to-all
        self._failure_channel = failure_channel_of(group)
        # A `paceline` group watches its ranks itself, and the host does not wait for the calls of
        # an accelerator.
        self._polls_failures = device.type == "cpu" and not isinstance(group, PacelineGroup)
        # Those of accelerators and of `paceline` groups run one after the other.
        self.overlaps_broadcasts = self._polls_failures

    def _post(self, signal: Signal, single_bucket: bool) -> None:
        del single_bucket
        self._posted = self._send(signal)

    def _signals(self) -> list[Signal]:
        if isinstance(self._posted, _Table):
            self._wait(self._posted.work)
            self._posted = self._posted.read()
        return self._posted

    def _set_weights(self, weights: Sequence[float]) -> None:
        self._weights = weights

    def _launch(self, bucket: Bucket) -> None:
        factor = self._scale(bucket, self._weights)
        self._in_flight.append((bucket.all_reduce(self.group, factor, self._wire_dtype), bucket))

    def _scale(self, bucket: Bucket, weights: Sequence[float]) -> float:
        """Scale it by this rank's weight, unless that is left to the sum: by which factor it is."""
        factor = weights[self.rank]
        # Signals that travel with a bucket are divided by the factor at the end: not by zero.
        if factor != 0.0 and len(set(weights)) == 1:
            return factor
        bucket.scale(factor)
        return 1.0

    def _close(self, signal: Signal, carrier: Bucket | None) -> None:
        del carrier  # a message of their own does
        self._closing = self._send(signal)

    def _complete(self, telemetry: BucketTelemetry | None) -> list[Signal]:
        in_flight, self._in_flight = self._in_flight, []
        closing, self._closing = self._closing, None
        for work, bucket in in_flight:
            if telemetry is not None:
                telemetry.waiting_for(bucket.index)
            self._wait(work)
            bucket.received()
            if telemetry is not None:
                telemetry.averaged(bucket.index)
        if closing is None:
            return self._signals()
        self._wait(closing.work)
        return closing.read()

    def _abandon(self) -> None:
        self._in_flight, self._closing = [], None

    def all_reduce_small(self, numbers: torch.Tensor) -> torch.Tensor:
        moved = numbers.to(self._device)
        self._wait(all_reduce(self.group, moved))
        return moved.cpu()

    def reduce_scatter_into(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        if not self._polls_failures:
            super().reduce_scatter_into(part, whole)
            return
        # That of Gloo sums everything on every rank: it took four times as long as sending each
        # rank its slice.
        received = self._received
        if received is None or received.dtype != whole.dtype or received.numel() < whole.numel():
            received = self._received = torch.empty_like(whole)
        received = received[: whole.numel()]
        self._wait(all_to_all_into(self.group, received, whole))
        first, *others = received.chunk(self.world)
        torch.add(first, others[0], out=part)
        for slice_ in others[1:]:
            part.add_(slice_)

    def _wait(self, work: Waitable) -> None:
        """Wait for a call; if a peer has failed meanwhile, raise what it published."""
        sliced = work if self._polls_failures and isinstance(work, Work) else None
        try:
            while True:
                try:
                    work.wait() if sliced is None else sliced.wait(_SLICE)
                    return
                except RuntimeError:
                    if sliced is None:
                        raise
                    if sliced.is_completed():
                        # The slice ended in the moment of completion: only a second look tells a
                        # call that failed from one that succeeded just too late for the first.
                        sliced.wait()
                        return
                if self._failure_channel is not None and (
                    lost := self._failure_channel.lost_peer()
                ):
                    raise lost
        except RuntimeError as error:
            if self._failure_channel is None or (
                isinstance(error, PacelineError) and not _is_unexplained(error)
            ):
                raise
            lost = self._failure_channel.lost_peer(_FAILURE_GRACE_S)
            if lost is None and not isinstance(error, PacelineError) and _is_lost_connection(error):
                lost = PeerLost(
                    f"a peer ended, or its connection was lost, while rank {self.rank} waited for "
                    "it; it published no error. See the peer's own output; if it exited with "
                    "status 0 it had fewer steps than this rank: a rank that runs out of data "
                    f"calls no_more_data(). {type(error).__name__}: {error}"
                )
            if lost is None and not isinstance(error, PacelineError) and _is_timeout(error):
                raise CollectiveTimeout(
                    f"rank {self.rank} reached the timeout of its group while it waited for the "
                    "other ranks. Give a late rank more time (`timeout=` of init_process_group) or "
                    "see where it is stuck: all ranks must make the same calls in the same order. "
                    f"{type(error).__name__}: {error}"
                ) from error
            if lost is None:
                raise
            raise lost from error

    def _send(self, signal: Signal) -> _Table:
        table = torch.zeros(self.world, SIGNAL_WIDTH, dtype=torch.float64)
        table[self.rank] = torch.tensor(signal.pack(), dtype=torch.float64)
        table = table.to(self._device)
        return _Table(table, self._sum_table(table))

    def _sum_table(self, table: torch.Tensor) -> Waitable:
        return all_reduce(self.group, table)


class _Table:
    """All ranks' signals, on their way."""

    def __init__(self, rows: torch.Tensor, work: Waitable) -> None:
        self._rows, self.work = rows, work

    def read(self) -> list[Signal]:
        rows: Sequence[Sequence[float]] = self._rows.tolist()
        return [Signal.unpack(row) for row in rows]


def _is_unexplained(error: PacelineError) -> bool:
    return isinstance(error, PeerLost) and not error.traceback


def _is_lost_connection(error: RuntimeError) -> bool:
    """In Gloo's words; others have a type for it."""
    message = str(error)
    return any(
        phrase in message
        for phrase in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )


def _is_timeout(error: RuntimeError) -> bool:
    """In Gloo's words."""
    return "Timed out waiting" in str(error)
