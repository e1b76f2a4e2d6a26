"""How a filled bucket becomes the average over ranks. One interface; what is below it depends on
the group.

begin(signal)    a backward has started: tell the peers how many samples this rank brings
launch(bucket)   a bucket is full; called in plan order, never blocks for the peers' gradients
finish(signal)   wait until every launched bucket holds the average; returns all ranks' signals
exchange(signal) a signal alone
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from paceline.backend import PacelineGroup
from paceline.backend.store_failure_channel import failure_channel_of
from paceline.ddp.buckets import Bucket, Fill
from paceline.ddp.group_calls import all_reduce
from paceline.ddp.signals import Signal
from paceline.ddp.weighting import weight_of
from paceline.errors import PacelineError, PeerLost
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import WaitLabel

__all__ = ["GroupTransport", "Transport"]

_SLICE = timedelta(
    seconds=0.5
)  # after which a rank that waits looks whether a peer has said why it does not come
_PATIENCE_S = 0.5  # the connection to a rank that fails may end before that rank has said why


class Transport(abc.ABC):
    """The averaging of buckets over the ranks of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.world: int = group.size()
        self.by_samples = True
        self.divide_by_world = False  # torch's rule for ranks without data, see samples.weight_of
        self.members: tuple[int, ...] = _members(group)
        self.wait_labels: list[WaitLabel] = []  # of the buckets, for the status page
        self.averaged_at: dict[int, int] = {}  # bucket -> when, in the last step

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for a bucket, as bytes; None if there is no more than it has already."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def forget(self) -> None:  # noqa: B027 - most transports keep nothing
        """The buckets so far are replaced by others."""

    def exchange(self, signal: Signal) -> list[Signal]:
        self.begin(signal)
        return self.began()

    @abc.abstractmethod
    def begin(self, signal: Signal, *, alone: bool = False) -> None:
        """`alone`: exactly one bucket will follow, at once."""

    @abc.abstractmethod
    def began(self) -> list[Signal]:
        """All ranks' signals of `begin`; waits for them."""

    @abc.abstractmethod
    def launch(self, bucket: Bucket) -> None: ...

    @abc.abstractmethod
    def close(self, signal: Signal) -> None: ...

    @abc.abstractmethod
    def finish(self) -> list[Signal]: ...

    def sums_in_place(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter's gradient is better not copied into a bucket with others, see
        `InPlaceBucket`.
        """
        del parameter
        return False

    def filler(self) -> Fill | None:
        """How gradients are copied into memory of `allocate` quickest; None: torch does it."""
        return None

    def measure_limit(self) -> int:
        """The bucket size that suits this host, measured together with all ranks; 0: keep torch's.

        Only where the bits of a sum do not depend on the bucket it is taken in.
        """
        return 0

    # Whether all work is done at the end of backward: then nobody needs to know when a gradient
    # arrives.
    reduces_at_end = False

    def reduce_single_bucket(self, row: Sequence[float], bucket: Bucket) -> bool:
        """`begin`, `launch` and `finish` of the only bucket in one go, if the transport has one.

        False: the signal, a packed one, and the bucket are under way; began() and finish() are
        still to be called.
        """
        self.begin(Signal.unpack(row), alone=True)
        self.launch(bucket)
        return False

    # Whether launch() needs the peers' signals: then a step that fails at its beginning has sent
    # nothing.
    needs_signals_first = True

    @abc.abstractmethod
    def all_reduce_small(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a small tensor in host memory."""

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

    def weight(self) -> float:
        """This rank's factor in the average of the step that has begun."""
        return weight_of(
            self.rank,
            [signal.contribution for signal in self.began()],
            by_samples=self.by_samples,
            divide_by_world=self.divide_by_world,
        )


class GroupTransport(Transport):
    """Any torch process group: one asynchronous all-reduce per bucket, the gradient scaled before
    the sum.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device  # signals travel in host memory wherever the group can do that
        self._signals: torch.Tensor | None = None
        self._begin_work: Any = None
        self._began: list[Signal] = []
        self._weight: float | None = None
        self._closing: tuple[torch.Tensor, Any] | None = None
        self._in_flight: list[tuple[Any, Bucket]] = []
        self._failure_channel = failure_channel_of(group)
        # Our own group looks after its ranks itself; a wait for an accelerator's call is none of
        # the host's.
        self._looks_around = device.type == "cpu" and not isinstance(group, PacelineGroup)

    def begin(self, signal: Signal, *, alone: bool = False) -> None:
        del alone
        self._weight = None
        self._signals, self._begin_work = self._send(signal)

    def began(self) -> list[Signal]:
        if self._begin_work is not None:
            assert self._signals is not None
            self._wait(self._begin_work)
            self._begin_work = None
            self._began = _read(self._signals)
        return self._began

    def launch(self, bucket: Bucket) -> None:
        if self._weight is None:
            self._weight = self.weight()
        bucket.scale(self._weight)
        work = bucket.all_reduce(self.group)
        self._in_flight.append((work, bucket))

    def close(self, signal: Signal) -> None:
        self._closing = self._send(signal)

    def finish(self) -> list[Signal]:
        in_flight, self._in_flight = self._in_flight, []
        for work, bucket in in_flight:
            if bucket.index > 0:  # the wait began as the first bucket's
                recorder.at_bucket(self.wait_labels[bucket.index], bucket.index)
            self._wait(work)
            bucket.received()
            self.averaged_at[bucket.index] = time.monotonic_ns()
        closing, self._closing = self._closing, None
        if closing is None:
            return self.began()
        table, closing_work = closing
        self._wait(closing_work)
        return _read(table)

    def all_reduce_small(self, numbers: torch.Tensor) -> torch.Tensor:
        moved = numbers.to(self._device)
        self._wait(all_reduce(self.group, moved))
        return moved.cpu()

    def _wait(self, work: Any) -> None:
        """Wait for a call; if a peer has failed meanwhile, raise what it said."""
        sliced = self._looks_around and isinstance(work, Work)
        try:
            while True:
                try:
                    work.wait(_SLICE) if sliced else work.wait()
                    return
                except RuntimeError:
                    if not sliced or work.is_completed():
                        raise
                if self._failure_channel is not None and (
                    lost := self._failure_channel.lost_peer()
                ):
                    raise lost
        except RuntimeError as error:
            if self._failure_channel is None or (
                isinstance(error, PacelineError) and not _is_unexplained(error)
            ):
                raise
            lost = self._failure_channel.lost_peer(_PATIENCE_S)
            if lost is None and not isinstance(error, PacelineError) and _is_lost_connection(error):
                lost = PeerLost(
                    f"a peer ended, or its connection was lost, while rank {self.rank} waited for it; it said nothing. "
                    "Its own output tells more; if it ended well it had fewer steps than this rank: a rank that runs "
                    f"out of data calls no_more_data(). {type(error).__name__}: {error}"
                )
            if lost is None:
                raise
            raise lost from error

    def _send(self, signal: Signal) -> tuple[torch.Tensor, Any]:
        # A sum in which every rank fills its own row: a gather that every backend has.
        table = torch.zeros(self.world, Signal.WIDTH, dtype=torch.float64)
        table[self.rank] = torch.tensor(signal.pack(), dtype=torch.float64)
        table = table.to(self._device)
        return table, all_reduce(self.group, table)


def _is_unexplained(error: PacelineError) -> bool:
    return isinstance(error, PeerLost) and not error.traceback


def _is_lost_connection(error: RuntimeError) -> bool:
    """In Gloo's words; others have a type for it."""
    said = str(error)
    return any(
        one in said
        for one in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    )


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group that has not all of them."""
    if not dist.is_initialized() or group.size() == dist.get_world_size():
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # a group of the caller's own making, which torch has no record of
        return ()


def _read(table: torch.Tensor) -> list[Signal]:
    rows: Sequence[Sequence[float]] = table.tolist()
    return [Signal.unpack(row) for row in rows]
