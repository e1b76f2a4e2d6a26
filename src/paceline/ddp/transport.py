"""How filled buckets become averages over ranks: one protocol; what is below depends on the group.

A step, and any exchange of signals without a step, is a sequence of calls in this order:

    post(signal, weigh)    what this rank is about to do, how many samples it contributes
    signals()              wait for all ranks' posted signals; may be called again
    set_weights(weights)   every rank's factor in the sum, computed from those signals
    launch(bucket)         a bucket is full; in plan order, never waits for the peers' gradients
    close(signal)          this rank's closing signal, before its last bucket is launched
    complete()             wait until every launched bucket holds the average; returns the signals
                           of close(), or those of post() if there was none

A transport that scales before it sums needs the weights before the first `launch`
(`needs_signals_first`), or to be told how they follow from the signals: `weigh`. One that sums at
the end of backward needs them before `complete` only, so that nobody waits while gradients are
still computed. Calls that come in another order are a mistake
in this package and raise `TransportMisuse` before anything is sent: a peer would wait forever for
what was skipped. After an error the operation is over; `abandon()` forgets it.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from paceline.ddp.bucket_telemetry import BucketTelemetry, list_names
from paceline.ddp.buckets import Bucket, Fill
from paceline.ddp.buckets.base import Waitable
from paceline.ddp.group_calls import (
    all_gather_into,
    broadcast_from,
    reduce_scatter_into,
    start_broadcast,
)
from paceline.ddp.plan import BucketLimits, ManagedParameter
from paceline.ddp.signals import Signal

__all__ = ["Transport", "TransportMisuse", "TransportState", "Weigh", "describe_step"]

# Every rank's factor in the sum, from all ranks' signals; None if they show that the step cannot
# count. Pure, and called on any thread.
Weigh: TypeAlias = Callable[[Sequence[Signal]], list[float] | None]


def describe_step(managed: Sequence[ManagedParameter], twin: int = 0) -> str:
    """What ranks wait for each other in, where others wait elsewhere. `twin`: how many models like
    this one were wrapped in its group before it.
    """
    names = list_names([entry.name for entry in managed])
    model = f"a DistributedDataParallel model with the parameters {names}"
    which = f", number {twin + 1} of those that were wrapped" if twin else ""
    return f"forward or backward of {model}{which}"


class TransportMisuse(RuntimeError):
    """An internal error: the calls of a step came in the wrong order."""


class TransportState(enum.Enum):
    """How far the current operation has come."""

    IDLE = "idle"
    POSTED = "posted"  # the signal is under way
    WEIGHTED = "weighted"  # the peers' signals were read and the weights set
    CLOSED = "closed"  # the closing signal is under way; the last bucket may follow
    SEALED = "sealed"  # so is the last bucket

    def __str__(self) -> str:
        return self.value


_IDLE, _POSTED = TransportState.IDLE, TransportState.POSTED
_WEIGHTED, _CLOSED = TransportState.WEIGHTED, TransportState.CLOSED
_SEALED = TransportState.SEALED


class Transport(abc.ABC):
    """The averaging of buckets over the ranks of one group. Subclasses implement the calls with an
    underscore; the public ones refuse wrong order.
    """

    # Whether launch() needs the peers' signals: then a step that fails at its beginning has sent
    # nothing.
    needs_signals_first = True
    # Whether it is enough for that if post() is told how to weigh: no bucket is sent if the signals
    # show that the step cannot count.
    weighs_late = False
    # Whether broadcasts that are under way together are quicker than gathering the same.
    overlaps_broadcasts = False
    # Whether all work is done at the end of backward: then nobody needs to know when a gradient
    # arrives.
    reduces_at_end = False
    # How many numbers, summed with the last bucket, make a message of their own for the closing
    # signals unnecessary; 0: none do.
    closing_numbers = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.world: int = group.size()
        self.members: tuple[int, ...] = _members(group)
        self._state = _IDLE
        self._has_weights = False
        self._weigh: Weigh | None = None
        self._launched = 0

    @property
    def state(self) -> TransportState:
        return self._state

    # ----------------------------------------------------------------------------- the step's calls

    def post(
        self, signal: Signal, *, single_bucket: bool = False, weigh: Weigh | None = None
    ) -> None:
        """Begin an operation. `single_bucket`: exactly one bucket follows, at once. `weigh`: what
        `set_weights` will be given, where the transport `weighs_late`.
        """
        if self._state is not _IDLE:
            self._refuse("post", "the operation before it was neither completed nor abandoned")
        self._state, self._has_weights, self._launched = _POSTED, False, 0
        self._weigh = weigh
        self._post(signal, single_bucket)

    def signals(self) -> list[Signal]:
        """All ranks' posted signals; waits for them."""
        if self._state is _IDLE:
            self._refuse("signals", "nothing was posted")
        try:
            return self._signals()
        except BaseException:
            self.abandon()
            raise

    def set_weights(self, weights: Sequence[float]) -> None:
        """Every rank's factor in the sum over ranks, the same numbers on every rank."""
        if self._state is _IDLE:
            self._refuse("set_weights", "nothing was posted")
        if len(weights) != self.world:
            raise TransportMisuse(f"{len(weights)} weights for {self.world} ranks")
        self._has_weights = True
        if self._state is _POSTED:
            self._state = _WEIGHTED
        self._set_weights(weights)

    def launch(self, bucket: Bucket) -> None:
        """This rank's share of a bucket is there."""
        if self._state is _IDLE:
            self._refuse("launch", "nothing was posted")
        if self.needs_signals_first and not self._has_weights and self._weigh is None:
            self._refuse("launch", "the weights are not set")
        if self._state is _SEALED:
            self._refuse("launch", "the last bucket was launched already")
        if self._state is _CLOSED:
            self._state = _SEALED
        self._launched += 1
        self._launch(bucket)

    def close(self, signal: Signal, carrier: Bucket | None = None) -> None:
        """The closing signal, before the last bucket is launched. `carrier`: that bucket, if it is
        launched on every rank.
        """
        if self._state is not _POSTED and self._state is not _WEIGHTED:
            self._refuse("close", "nothing is open")
        self._state = _CLOSED
        self._close(signal, carrier)

    def complete(self, telemetry: BucketTelemetry | None = None) -> list[Signal]:
        """Wait for all launched buckets, and end the operation."""
        if self._state is _IDLE:
            self._refuse("complete", "nothing was posted")
        if self._launched and not self._has_weights and self._weigh is None:
            self._refuse("complete", "buckets were launched, but the weights are not set")
        try:
            signals = self._complete(telemetry)
        except BaseException:
            self.abandon()
            raise
        self._state = _IDLE
        return signals

    def abandon(self) -> None:
        """An error ended the operation: forget what was under way."""
        if self._state is not _IDLE:
            self._state = _IDLE
            self._abandon()

    def exchange(self, signal: Signal) -> list[Signal]:
        """A signal alone."""
        self.post(signal)
        return self.complete()

    def _refuse(self, call: str, why: str) -> NoReturn:
        raise TransportMisuse(
            f"internal error: {type(self).__name__}.{call}() in state {self._state}: {why}"
        )

    @abc.abstractmethod
    def _post(self, signal: Signal, single_bucket: bool) -> None: ...

    @abc.abstractmethod
    def _signals(self) -> list[Signal]: ...

    @abc.abstractmethod
    def _set_weights(self, weights: Sequence[float]) -> None: ...

    @abc.abstractmethod
    def _launch(self, bucket: Bucket) -> None: ...

    @abc.abstractmethod
    def _close(self, signal: Signal, carrier: Bucket | None) -> None: ...

    @abc.abstractmethod
    def _complete(self, telemetry: BucketTelemetry | None) -> list[Signal]: ...

    @abc.abstractmethod
    def _abandon(self) -> None: ...

    def reduce_single_bucket(self, signal: Signal, bucket: Bucket) -> bool:
        """The whole step of a model with one bucket in one call, where `reduces_at_end`.

        False if the ranks' signals differ: then both are under way, as after `post` and `launch`,
        and the rest of the step is still to be done.
        """
        self.post(signal, single_bucket=True)
        self.launch(bucket)
        return False

    # ----------------------------------------------------------------------------- memory and plan

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for a bucket, as bytes; None if there is no more than it has already."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def reallocate(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for a bucket whose own, at this address, was moved away or freed by a caller."""
        del address
        return self.allocate(nbytes, device)

    def forget_buckets(self) -> None:  # noqa: B027 - most transports keep nothing
        """The buckets so far are replaced by others."""

    def sums_in_place(self, managed: ManagedParameter) -> bool:
        """Whether this parameter's gradient is better not copied into a bucket with others, see
        `InPlaceBucket`.
        """
        del managed
        return False

    def fill_function(self) -> Fill | None:
        """How gradients are copied into memory of `allocate` quickest; None: torch does it."""
        return None

    def bucket_limits(self, chosen: BucketLimits) -> BucketLimits:
        """The sizes of buckets that suit the way to the peers; what a caller gave is kept."""
        return chosen

    def measure_limit(self) -> int:
        """The bucket size that suits this host, measured together with all ranks; 0: keep torch's.

        Only where the bits of a sum do not depend on the bucket it is taken in.
        """
        return 0

    # ----------------------------------------------------------------------------- small exchanges

    @abc.abstractmethod
    def all_reduce_small(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a small tensor in host memory."""

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Every rank's part, one after the other, on the device they are on."""
        self._wait(all_gather_into(self.group, whole, part))

    def reduce_scatter_into(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """The sum over ranks of this rank's slice of what each of them has. There is one slice for
        each rank, one after the other.
        """
        self._wait(reduce_scatter_into(self.group, part, whole))

    def broadcast_all(self, sourced: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Overwrite each tensor with that of the rank it is given with, all at once."""
        works = [start_broadcast(source, self.group, tensor) for source, tensor in sourced]
        for work in works:
            self._wait(work)

    def _wait(self, work: Waitable) -> None:
        work.wait()

    def broadcast_from(self, source: int, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with that of rank `source`, on the device it is on."""
        broadcast_from(source, self.group, tensor)

    def all_gather_small(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row, one below the other."""
        table = torch.zeros(self.world, *row.shape, dtype=row.dtype)
        table[self.rank] = row
        return self.all_reduce_small(table)

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text."""
        data = text.encode()
        longest = int(self.all_gather_small(torch.tensor([len(data)])).max())
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        return [bytes(line.tolist()).rstrip(b"\0").decode() for line in self.all_gather_small(row)]


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group that has not all of them."""
    if not dist.is_initialized() or group.size() == dist.get_world_size():
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # a group of the caller's own making, which torch has no record of
        return ()
