"""Memory that the ranks of one host share, made together."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Sequence

from paceline.core.communicator import Communicator
from paceline.core.rendezvous import SumOverRanks, agreed_descriptor
from paceline.errors import NativeError

__all__ = ["open_shared_memory", "open_with_private_view", "reserve", "sums_over"]

_INT64, _SUM = 7, 0  # plc_dtype, plc_op


def open_shared_memory(comm: Communicator, nbytes: int) -> mmap.mmap:
    """Zeros that all ranks of this host have mapped. Fails on all of them if memory is short on
    one.
    """
    with agreed_descriptor(
        sums_over(comm), comm.rank, comm.size, lambda descriptor: reserve(descriptor, nbytes)
    ) as shared:
        return mmap.mmap(shared, nbytes)


def open_with_private_view(
    comm: Communicator, nbytes: int, begin: int, end: int
) -> tuple[mmap.mmap, mmap.mmap]:
    """The same, and pages `begin` to `end` of it mapped a second time: reading there shows what is
    in the shared memory, until this process writes to a page and has it to itself from then on.
    """
    with agreed_descriptor(
        sums_over(comm), comm.rank, comm.size, lambda descriptor: reserve(descriptor, nbytes)
    ) as shared:
        return mmap.mmap(shared, nbytes), mmap.mmap(
            shared,
            end - begin,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        )


def sums_over(comm: Communicator) -> SumOverRanks:
    """Adds up integers over the ranks of a communicator."""

    def total(numbers: Sequence[int]) -> Sequence[int]:
        sums = array("q", numbers)
        comm.allreduce(sums.buffer_info()[0], len(sums), _INT64, _SUM)
        return sums

    return total


def reserve(descriptor: int, nbytes: int) -> None:
    """Take the memory now: a shortage becomes an error here, not a SIGBUS amid a step."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise NativeError(
            f"cannot allocate {nbytes / 2**20:.0f} MiB of shared memory: {error.strerror}. Free "
            "memory, raise the memory limit of the container, or use smaller models or fewer ranks "
            "on this host"
        ) from error
