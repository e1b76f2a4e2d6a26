"""Ranks of one host: buckets lie in shared memory and are averaged where they lie, by whoever has
time.

A rank writes its signal into shared memory, marks its arrival and goes on; nobody waits before the
end of backward. There every rank reads the signals and computes the weights from them, all the same
numbers, before it helps with the sums.

Large gradients are the exception: to copy one into shared memory costs as much as to sum it. They
stay where they are, and at the end of backward the ranks sum them together, through a little shared
memory that stays in the cache.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.backend import PacelineGroup
from paceline.backend.host_engine import HostEngine, core_dtype
from paceline.core import BucketArena
from paceline.ddp.bucket_telemetry import BucketTelemetry, list_names
from paceline.ddp.buckets import Bucket, DenseBucket, Fill, InPlaceBucket
from paceline.ddp.plan import ManagedParameter, limit_for
from paceline.ddp.signals import Call, Signal
from paceline.ddp.transport import Transport, TransportState, describe_step

__all__ = ["ShmTransport"]

_ALIGNMENT = 64
_SIGNALS = 0  # the bucket that carries no data: all have written their signal
_SUM, _AVERAGE = 0, 1
_TRIALS, _SAMPLE_NUMBERS = 5, 256 * 1024
_IN_PLACE_FROM_BYTES = 2 * 1024 * 1024
_IN_PLACE_UP_TO_RANKS = 16  # beyond, a rank's part of what travels at once becomes short
_RING_BYTES = 1024 * 1024  # of every rank; what travels at once stays in a second-level cache


class ShmTransport(Transport):
    """Dense CPU gradients of a `paceline` group whose ranks are all on one host."""

    needs_signals_first = False
    reduces_at_end = True

    def __init__(
        self, group: PacelineGroup, managed: Sequence[ManagedParameter], twin: int = 0
    ) -> None:
        super().__init__(group)
        assert isinstance(group.engine, HostEngine)
        self.comm = group.engine.comm
        self._reads_directly = self.comm.reads_directly
        copied = [entry.parameter for entry in managed if not self.sums_in_place(entry)]
        self._ring_bytes = _RING_BYTES if len(copied) < len(managed) else 0
        # The arena cannot grow, so it is opened with room for any plan. Averages may be wider than
        # the parameters (a float32 `reduce_dtype`), and every bucket may lose an alignment.
        sizes = [parameter.numel() * max(parameter.element_size(), 4) for parameter in copied]
        room = _ALIGNMENT + self._ring_bytes + sum(sizes) + _ALIGNMENT * (len(sizes) + 2)
        # Two plans: the first, and the one made from the order in which gradients arrive.
        self._arena = BucketArena.open(
            self.comm, bytes_per_rank=room, buckets=1 + 2 * len(managed) + 2
        )
        self._start = torch.frombuffer(self._arena.buffer, dtype=torch.uint8, count=1).data_ptr()
        self._arena.define(_SIGNALS, 0, 1, core_dtype(torch.empty(0)), _SUM)
        self._names = [entry.name for entry in managed]
        self._arena.name_bucket(_SIGNALS, describe_step(managed, twin))
        self._defined = 1
        self.forget_buckets()
        self._weights: list[float] = []  # what the arena has
        self._equal_weights = [1.0 / self.world] * self.world
        # The signals of the operation: this rank's row and header, and everybody's once read.
        self._own = Signal(Call.ANSWER)
        self._own_row: list[float] = []
        self._posted = self._last = 0
        self._arrived = True
        self._read_signals: list[Signal] | None = None
        self._in_flight: list[tuple[int, int]] = []  # bucket of the plan, bucket of the arena
        # Bucket of the arena that is summed in its own memory -> address.
        self._in_place: dict[int, int] = {}

    @classmethod
    def serves(cls, group: dist.ProcessGroup, managed: Sequence[ManagedParameter]) -> bool:
        """Whether these gradients can be averaged this way in this group."""
        return (
            isinstance(group, PacelineGroup)
            and isinstance(group.engine, HostEngine)
            and all(entry.parameter.is_cpu and not entry.sparse for entry in managed)
        )

    # ----------------------------------------------------------------------------- the step's calls

    def _post(self, signal: Signal, single_bucket: bool) -> None:
        self._read_signals = None
        self._posted = self._last = self._write(signal)
        self._arrived = not single_bucket
        if self._arrived:
            self._arena.ready(_SIGNALS)

    def _signals(self) -> list[Signal]:
        if self._read_signals is None:
            if not self._arrived:
                # Counted in after the only bucket: who has waited for this signal finds the bucket
                # complete too.
                self._arrived = True
                self._arena.ready(_SIGNALS)
            self._arena.finish(_SIGNALS)
            self._read_signals = self._read(self._posted)
        return self._read_signals

    def _set_weights(self, weights: Sequence[float]) -> None:
        # Most steps repeat the weights of the one before: the arena hears of changes only.
        if weights != self._weights:
            self._weights = list(weights)
            self._arena.set_weights(self._weights)

    def _launch(self, bucket: Bucket) -> None:
        number = self._number_of(bucket)
        # A gradient that stays in private memory is out of the peers' reach: it cannot be announced
        # as ready, only summed while all ranks are at it. That is done in `_complete`.
        if isinstance(bucket, InPlaceBucket):
            self._in_place[number] = bucket.flat.data_ptr()
        else:
            self._arena.ready(number)
        self._in_flight.append((bucket.index, number))

    def _close(self, signal: Signal, carrier: Bucket | None) -> None:
        del carrier  # all signals are read at the end, with or without a bucket
        self._last = self._write(signal)

    def _complete(self, telemetry: BucketTelemetry | None) -> list[Signal]:
        in_flight, self._in_flight = self._in_flight, []
        for index, number in in_flight:
            if telemetry is not None:
                telemetry.waiting_for(index)
            if number in self._in_place:
                self._arena.reduce_external(number, self._in_place.pop(number))
            else:
                self._arena.finish(number)
            if telemetry is not None:
                telemetry.averaged(index)
        # Closing signals are read without a wait of their own: a rank writes its own before it
        # launches its last bucket, and the launched buckets are complete.
        return self._signals() if self._last == self._posted else self._read(self._last)

    def _abandon(self) -> None:
        self._in_flight = []
        self._in_place.clear()

    def reduce_single_bucket(self, signal: Signal, bucket: Bucket) -> bool:
        if self._state is not TransportState.IDLE:
            self._refuse("reduce_single_bucket", "another operation is open")
        number = self._number_of(bucket)
        row = signal.pack()
        # Equal signals of ranks with samples weigh 1 / world: the core compares them as bytes.
        self._posted, done = self._arena.exchange(row, _SIGNALS, number)
        self._last, self._arrived = self._posted, True
        if done:
            self._weights = self._equal_weights
            return True
        self._own, self._own_row = signal, row
        self._read_signals = self._read(self._posted)
        self._in_flight.append((bucket.index, number))
        self._state, self._has_weights, self._launched = TransportState.POSTED, False, 1
        return False

    def _write(self, signal: Signal) -> int:
        self._own, self._own_row = signal, signal.pack()
        return self._arena.write_header(self._own_row)

    def _read(self, number: int) -> list[Signal]:
        rows = self._arena.headers(number)
        if number == self._last and rows.count(self._own_row) == self.world:
            return [self._own] * self.world  # the usual case: all signals are equal
        return [Signal.unpack(row) for row in rows]

    # ----------------------------------------------------------------------------- memory and plan

    def forget_buckets(self) -> None:
        self._next_byte = _ALIGNMENT + self._ring_bytes
        self._numbers: dict[int, int] = {}  # bucket of the plan -> bucket of the arena

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        del device
        start, end = self._next_byte, self._next_byte + nbytes
        if end > self._arena.nbytes:
            return None
        self._next_byte = -(-end // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._arena.buffer, dtype=torch.uint8, count=nbytes, offset=start)

    def reallocate(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        # The tensor over it is gone, the arena's memory is where it was.
        del device
        offset = address - self._start
        return torch.frombuffer(self._arena.buffer, dtype=torch.uint8, count=nbytes, offset=offset)

    def fill_function(self) -> Fill:
        return self._fill

    def _fill(
        self,
        flat: torch.Tensor,
        offset: int,
        addresses: array[int],
        lengths: array[int],
        nbytes: int,
    ) -> None:
        start = flat.data_ptr() - self._start + offset * flat.element_size()
        self._arena.fill(start, addresses, lengths, nbytes)

    def sums_in_place(self, managed: ManagedParameter) -> bool:
        # What an optimizer sums is read by its peers, from here or from memory they have mapped.
        return (
            managed.parameter.nbytes >= _IN_PLACE_FROM_BYTES
            and self.world <= _IN_PLACE_UP_TO_RANKS
            and (self._reads_directly or not managed.deferred)
        )

    def distance_to(self, rank: int) -> int:
        """Bytes from a place in this rank's buckets to the same place in those of another."""
        return self._arena.region_address(rank) - self._start

    @property
    def bucket_addresses(self) -> range:
        """Where this rank's buckets are."""
        return range(self._start, self._start + self._arena.nbytes)

    def _number_of(self, bucket: Bucket) -> int:
        number = self._numbers.get(bucket.index)
        return self._define(bucket) if number is None else number

    def _define(self, bucket: Bucket) -> int:
        assert isinstance(bucket, DenseBucket)
        number = self._numbers[bucket.index] = self._defined
        self._defined += 1
        names = list_names([self._names[member] for member in bucket.members])
        self._arena.name_bucket(
            number, f"backward of a DistributedDataParallel model, averaging {names}"
        )
        flat = bucket.wire()
        if isinstance(bucket, InPlaceBucket):
            arguments = (_ALIGNMENT, self._ring_bytes, flat.numel(), core_dtype(flat), _AVERAGE)
            self._arena.define_external(number, *arguments)
            return number
        offset = flat.data_ptr() - self._start
        self._arena.define(number, offset, flat.numel(), core_dtype(flat), _AVERAGE)
        return number

    def measure_limit(self) -> int:
        # The fastest of several trials: what disturbs a measurement only makes it longer.
        exchange = min(_seconds(lambda: self.exchange(Signal(Call.ANSWER))) for _ in range(_TRIALS))
        target, source = torch.zeros(_SAMPLE_NUMBERS), torch.zeros(_SAMPLE_NUMBERS)
        summing = min(_seconds(lambda: target.add_(source)) for _ in range(_TRIALS))
        return limit_for(exchange, target.nbytes / summing)

    def all_reduce_small(self, numbers: torch.Tensor) -> torch.Tensor:
        result = numbers.clone()
        self.group.allreduce([result]).wait()
        return result


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
