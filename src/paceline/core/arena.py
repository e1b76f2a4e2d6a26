"""Buckets: buffers that lie in shared memory and are reduced where they lie. Whoever has time does
the sums.

    arena = BucketArena.open(comm, bytes_per_rank=..., buckets=2)
    arena.define(0, offset=0, count=1000, dtype=FLOAT32, op=SUM)      # the same on all ranks
    ...                                                               # fill arena.buffer[0:4000]
    arena.ready(0)                                                    # never blocks
    arena.finish(0)                                                   # helps with the sums, then it is done

Between `ready` and `finish` a rank leaves the bucket alone. After `finish` it holds the result, the
same bits on every rank, and may be written again at once.

A bucket that is too large to be worth copying stays in the ranks' own memory, and they wait for
each other:

    arena.define_own(1, offset=4096, room=65536, count=10**7, dtype=FLOAT32, op=SUM)    # room to carry it across
    arena.reduce_own(1, address)                                      # the numbers there become the result
"""

from __future__ import annotations

import ctypes as C
import os
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from paceline.core import abi
from paceline.core.abi import Kind, Status
from paceline.core.communicator import Communicator
from paceline.core.rendezvous import agreed_descriptor
from paceline.errors import ConfigError, NativeError

__all__ = ["NOTE_NUMBERS", "BucketArena"]

NOTE_NUMBERS = 8
_LONG_COPY_BYTES = 1024 * 1024
_INT64, _SUM = 7, 0  # plc_dtype, plc_op


class BucketArena:
    """One region per rank of a host, and the buckets in it."""

    def __init__(self, comm: Communicator, handle: C.c_void_p, nbytes: int, buckets: int) -> None:
        self._comm = comm
        self._handle = handle
        self.nbytes = nbytes
        self.buckets = buckets
        core = abi.library()
        address = core.plc_arena_region(handle, comm.rank)
        # The buffer, and whatever views it (a tensor, say), keeps the mapping alive.
        self.buffer: Any = _buffer_type(nbytes).from_address(address)
        weakref.finalize(self.buffer, core.plc_arena_close, handle)
        quick = abi.library_holding_gil()
        self._ready, self._note, self._read_notes = (
            quick.plc_bucket_ready,
            quick.plc_arena_note,
            quick.plc_arena_read_notes,
        )
        self._own_note = (C.c_double * NOTE_NUMBERS)()
        self._all_notes = (C.c_double * (NOTE_NUMBERS * comm.size))()
        self._finish, self._step = quick.plc_bucket_finish, quick.plc_arena_step
        self._reduce_own = quick.plc_bucket_reduce_own
        self._fill, self._fill_quickly = core.plc_arena_fill, quick.plc_arena_fill
        self._number = C.c_uint32()

    @classmethod
    def open(cls, comm: Communicator, bytes_per_rank: int, buckets: int) -> BucketArena:
        """Make an arena together with all ranks of this host. Fails on all of them if memory is
        short on one.
        """
        if bytes_per_rank <= 0 or buckets <= 0:
            raise ConfigError(
                f"an arena needs room and buckets, got {bytes_per_rank} bytes and {buckets} buckets"
            )
        core = abi.library()
        nbytes = core.plc_arena_bytes(comm.size, bytes_per_rank, buckets)
        handle = C.c_void_p()

        def total(numbers: Sequence[int]) -> Sequence[int]:
            found = array("q", numbers)
            comm.allreduce(found.buffer_info()[0], len(found), _INT64, _SUM)
            return found

        with agreed_descriptor(
            total, comm.rank, comm.size, lambda descriptor: _reserve(descriptor, nbytes)
        ) as shared:
            status = core.plc_arena_open(
                comm.handle, shared, None, bytes_per_rank, buckets, C.byref(handle)
            )
            if status != Status.OK:
                raise NativeError(
                    f"could not map {nbytes} bytes of shared memory: {os.strerror(C.get_errno())}"
                )
        return cls(comm, handle, bytes_per_rank, buckets)

    def define(self, index: int, offset: int, count: int, dtype: int, op: int) -> None:
        """Say where bucket `index` lies and what is done to it, before its first use.

        The same on all ranks: if not, the first `finish` raises `MismatchError` on all of them.
        """
        if (
            abi.library().plc_bucket_define(self._handle, index, offset, count, dtype, op)
            != Status.OK
        ):
            raise ConfigError(
                f"bucket {index} of {self.buckets} ({count} elements at byte {offset}) does not fit an arena of "
                f"{self.nbytes} bytes, was used already, or its type cannot be reduced this way"
            )

    def define_own(
        self, index: int, offset: int, room: int, count: int, dtype: int, op: int
    ) -> None:
        """Bucket `index` stays in the ranks' own memory; `room` bytes of the arena carry it across.
        See `define`.
        """
        if (
            abi.library().plc_bucket_define_own(self._handle, index, offset, room, count, dtype, op)
            != Status.OK
        ):
            raise ConfigError(
                f"bucket {index} of {self.buckets} cannot be carried across by {room} bytes at byte {offset} of an "
                f"arena of {self.nbytes} bytes for {self._comm.size} ranks, was used already, or its type cannot be "
                "reduced this way"
            )

    def reduce_own(self, index: int, address: int, timeout_ns: int = -1) -> None:
        """Replace the numbers at `address` by the result over all ranks. Waits for them."""
        self._comm.handle  # noqa: B018 - raises if the group is gone
        status = self._reduce_own(self._handle, index, address, timeout_ns)
        if status:
            raise self._comm.error(status, Kind.ALLREDUCE)

    def ready(self, index: int) -> None:
        """This rank's share is in place. Never blocks."""
        if self._ready(self._handle, index):
            raise ConfigError(f"bucket {index} was never defined")

    def note(self, numbers: Sequence[float], *, weighs: bool = False) -> int:
        """Write this rank's note; peers see it once a bucket that this rank is ready for afterwards
        is complete.
        """
        self._own_note[:] = list(numbers)
        return int(self._note(self._handle, self._own_note, weighs))

    def fill(self, offset: int, addresses: array[int], lengths: array[int], nbytes: int) -> None:
        """Copy pieces of memory, `lengths` bytes each and `nbytes` in all, one after the other to
        this offset.
        """
        # A long copy lets other threads run; a short one is over before they could.
        copy = self._fill if nbytes > _LONG_COPY_BYTES else self._fill_quickly
        pieces = len(addresses)
        if copy(self._handle, offset, pieces, addresses.buffer_info()[0], lengths.buffer_info()[0]):
            raise ConfigError(
                f"{pieces} pieces at byte {offset} do not fit an arena of {self.nbytes} bytes"
            )

    def exchange(self, numbers: Sequence[float], signals: int, index: int) -> tuple[int, bool]:
        """A note that weighs, the bucket `index`, and the empty bucket `signals`, all in one call.

        Returns the note's number and whether that was all: if ranks wrote different notes, the
        bucket is still to be finished.
        """
        self._comm.handle  # noqa: B018 - raises if the group is gone
        self._own_note[:] = list(numbers)
        status = self._step(self._handle, self._own_note, signals, index, -1, C.byref(self._number))
        if status not in (Status.OK, Status.PENDING):
            raise self._comm.error(status, Kind.ALLREDUCE)
        return self._number.value, status == Status.OK

    def notes(self, number: int) -> list[list[float]]:
        """Every rank's note with this number, one of the last two."""
        self._read_notes(self._handle, number, self._all_notes)
        flat = list(self._all_notes)
        return [flat[at : at + NOTE_NUMBERS] for at in range(0, len(flat), NOTE_NUMBERS)]

    def weigh(self, *, by_samples: bool, divide_by_ranks: bool) -> None:
        """From now on averages are weighted by the samples in the notes, or by the ranks that have
        any.
        """
        abi.library().plc_arena_weigh(self._handle, by_samples, divide_by_ranks)

    def finish(self, index: int, timeout_ns: int = -1) -> None:
        """Wait for the result of a bucket that is ready here, helping with the sums meanwhile."""
        self._comm.handle  # noqa: B018 - raises if the group is gone
        status = self._finish(self._handle, index, timeout_ns)
        if status:
            raise self._comm.error(status, Kind.ALLREDUCE)


def _buffer_type(nbytes: int) -> Any:
    return type(
        "SharedBuffer", (C.c_ubyte * nbytes,), {}
    )  # a subclass: plain arrays cannot be watched for their end


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take the memory now: a shortage becomes an error here, not a SIGBUS in the middle of a step."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise NativeError(
            f"no room for {nbytes / 2**20:.0f} MiB of shared memory: {error.strerror}. Free memory, raise the memory "
            "limit of the container, or use smaller models or fewer ranks on this host"
        ) from error
