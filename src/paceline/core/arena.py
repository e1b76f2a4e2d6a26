"""Buckets: buffers that lie in shared memory and are reduced where they lie. Whoever has time does
the sums.

    arena = BucketArena.open(comm, bytes_per_rank=..., buckets=2)
    arena.define(0, offset=0, count=1000, dtype=FLOAT32, op=SUM)  # the same on all ranks
    ...                                                           # fill arena.buffer[0:4000]
    arena.ready(0)                                                # never blocks
    arena.finish(0)                                               # helps with the sums until done

Between `ready` and `finish` a rank leaves the bucket alone. After `finish` it holds the result, the
same bits on every rank, and may be written again at once.

A bucket that is too large to be worth copying stays in the ranks' own memory, and they wait for
each other:

    # a staging area to carry it across, then the numbers at the address become the result
    arena.define_external(1, offset=4096, staging_bytes=65536, count=10**7, dtype=FLOAT32, op=SUM)
    arena.reduce_external(1, address)

Headers are a few numbers of every rank that ride along with a bucket. What they mean is the
caller's business: the core moves and sums bytes, and gets the weights of an average as numbers.
"""

from __future__ import annotations

import ctypes as C
import os
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from paceline.core import abi
from paceline.core.abi import Kind, Status, TreeAverage
from paceline.core.communicator import Communicator
from paceline.core.rendezvous import agreed_descriptor
from paceline.core.shared_memory import reserve, sums_over
from paceline.errors import ConfigError, NativeError

__all__ = ["HEADER_NUMBERS", "BucketArena"]

HEADER_NUMBERS = 8
_LONG_COPY_BYTES = 1024 * 1024


class BucketArena:
    """One region per rank of a host, and the buckets in it."""

    def __init__(self, comm: Communicator, handle: C.c_void_p, nbytes: int, buckets: int) -> None:
        self._comm = comm
        self._number_in_comm = comm.count_arena()
        self._handle = handle
        self.nbytes = nbytes
        self.buckets = buckets
        core = abi.library()
        address = core.plc_arena_region(handle, comm.rank)
        # The buffer, and whatever views it (for example a tensor), keeps the mapping alive.
        self.buffer: Any = _buffer_type(nbytes).from_address(address)
        weakref.finalize(self.buffer, core.plc_arena_close, handle)
        quick = abi.library_holding_gil()
        self._ready = quick.plc_bucket_ready
        self._write_header = quick.plc_arena_write_header
        self._read_headers = quick.plc_arena_read_headers
        self._own_header = (C.c_double * HEADER_NUMBERS)()
        self._all_headers = (C.c_double * (HEADER_NUMBERS * comm.size))()
        self._set_weights = quick.plc_arena_set_weights
        self._weights = (C.c_double * comm.size)()
        self._finish, self._step = quick.plc_bucket_finish, quick.plc_arena_step
        self._reduce_external = quick.plc_bucket_reduce_external
        self._average_tree = quick.plc_arena_average_tree
        self._fill, self._fill_quickly = core.plc_arena_fill, quick.plc_arena_fill
        self._number = C.c_uint32()

    @classmethod
    def open(cls, comm: Communicator, bytes_per_rank: int, buckets: int) -> BucketArena:
        """Make an arena together with all ranks of this host. Fails on all of them if memory is
        short on one.
        """
        if bytes_per_rank <= 0 or buckets <= 0:
            raise ConfigError(
                "bytes_per_rank and buckets must be positive, got "
                f"bytes_per_rank={bytes_per_rank} and buckets={buckets}"
            )
        core = abi.library()
        nbytes = core.plc_arena_bytes(comm.size, bytes_per_rank, buckets)
        handle = C.c_void_p()

        with agreed_descriptor(
            sums_over(comm), comm.rank, comm.size, lambda descriptor: reserve(descriptor, nbytes)
        ) as shared:
            status = core.plc_arena_open(
                comm.handle, shared, None, bytes_per_rank, buckets, C.byref(handle)
            )
            if status != Status.OK:
                raise NativeError(
                    f"could not map {nbytes} bytes of shared memory: {os.strerror(C.get_errno())}"
                )
        return cls(comm, handle, bytes_per_rank, buckets)

    def name_bucket(self, index: int, name: str) -> None:
        """What bucket `index` is called in messages about ranks that wait in it."""
        self._comm.name_bucket(self._number_in_comm, index, name)

    def define(self, index: int, offset: int, count: int, dtype: int, op: int) -> None:
        """Say where bucket `index` lies and what is done to it, before its first use.

        The same on all ranks: if not, the first `finish` raises `MismatchError` on all of them.
        """
        if (
            abi.library().plc_bucket_define(self._handle, index, offset, count, dtype, op)
            != Status.OK
        ):
            raise ConfigError(
                f"bucket {index} of {self.buckets} ({count} elements at byte {offset}) does not "
                f"fit an arena of {self.nbytes} bytes, was used already, or its type cannot be "
                "reduced this way"
            )

    def define_external(
        self, index: int, offset: int, staging_bytes: int, count: int, dtype: int, op: int
    ) -> None:
        """Bucket `index` stays in the ranks' own memory; `staging_bytes` of the arena carry it
        across. See `define`.
        """
        if (
            abi.library().plc_bucket_define_external(
                self._handle, index, offset, staging_bytes, count, dtype, op
            )
            != Status.OK
        ):
            raise ConfigError(
                f"bucket {index} of {self.buckets}: the staging area of {staging_bytes} bytes at "
                f"offset {offset} (arena of {self.nbytes} bytes, {self._comm.size} ranks) is too "
                "small, too large or misaligned, the bucket was used already, or its type cannot "
                "be reduced this way"
            )

    def reduce_external(self, index: int, address: int, timeout_ns: int = -1) -> None:
        """Replace the numbers at `address` by the result over all ranks. Waits for them."""
        self._comm.handle  # noqa: B018 - raises if the group is gone
        status = self._reduce_external(self._handle, index, address, timeout_ns)
        if status:
            raise self._comm.error(status, Kind.ALLREDUCE)

    def average_tree(self, index: int, what: TreeAverage, timeout_ns: int = -1) -> None:
        """The root of a tree whose nodes the ranks hold, through the room of an external bucket.
        All ranks call it, after they have met.
        """
        self._comm.handle  # noqa: B018 - raises if the group is gone
        status = self._average_tree(self._handle, index, what, timeout_ns)
        if status:
            raise self._comm.error(status, Kind.ALLREDUCE)

    def region(self, rank: int) -> memoryview:
        """What a rank has in its region; valid as long as this arena is."""
        address = abi.library().plc_arena_region(self._handle, rank)
        return memoryview((C.c_ubyte * self.nbytes).from_address(address)).cast("B")

    def ready(self, index: int) -> None:
        """This rank's share is in place. Never blocks."""
        if self._ready(self._handle, index):
            raise ConfigError(f"bucket {index} was never defined")

    def write_header(self, numbers: Sequence[float]) -> int:
        """Write this rank's header; peers see it once a bucket that this rank is ready for
        afterwards is complete. Returns its number.
        """
        self._own_header[:] = list(numbers)
        return int(self._write_header(self._handle, self._own_header))

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
        """A header, the bucket `index`, and the empty bucket `signals`, all in one call.

        Returns the header's number and whether that was all: ranks that wrote equal headers weigh
        the same; if they differ, the weights are to be set and the bucket is to be finished.
        """
        self._comm.handle  # noqa: B018 - raises if the group is gone
        self._own_header[:] = list(numbers)
        status = self._step(
            self._handle, self._own_header, signals, index, -1, C.byref(self._number)
        )
        if status not in (Status.OK, Status.PENDING):
            raise self._comm.error(status, Kind.ALLREDUCE)
        return self._number.value, status == Status.OK

    def headers(self, number: int) -> list[list[float]]:
        """Every rank's header with this number: one of the last two that this rank wrote."""
        self._read_headers(self._handle, number, self._all_headers)
        flat = list(self._all_headers)
        return [flat[at : at + HEADER_NUMBERS] for at in range(0, len(flat), HEADER_NUMBERS)]

    def set_weights(self, weights: Sequence[float]) -> None:
        """From now on averages are sums of every rank's numbers times its weight. The same weights
        on all ranks, set before this rank finishes a bucket; a rank of weight 0 brings zeros.
        """
        self._weights[:] = list(weights)
        self._set_weights(self._handle, self._weights)

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
