"""Kernels that need no communicator: digests; many arrays in one native call, as the gradients or
buffers of a model are, each at an address of its own.
"""

from __future__ import annotations

import ctypes
from array import array

from paceline.core import abi
from paceline.core.abi import Status

__all__ = ["add_pieces", "copy_pieces", "differing_pieces", "digest"]


def digest(address: int, nbytes: int) -> int:
    """64 bits that depend on every byte and its place."""
    return int(abi.library().plc_digest(address, nbytes, 0))


def copy_pieces(to: array[int], sources: array[int], nbytes: array[int]) -> None:
    """Copy to each address of `to` as many bytes from the address in `sources`.

    All are arrays of type "Q".
    """
    addresses = [addresses.buffer_info()[0] for addresses in (to, sources, nbytes)]
    abi.library().plc_copy_pieces(len(to), *addresses)


def differing_pieces(one: array[int], other: array[int], nbytes: array[int]) -> list[int]:
    """Indices of the pieces that have other bytes at the address in `one` than in `other`.

    All are arrays of type "Q".
    """
    differs = bytearray(len(one))
    flags = (ctypes.c_char * len(one)).from_buffer(differs)
    addresses = [addresses.buffer_info()[0] for addresses in (one, other, nbytes)]
    if not abi.library().plc_compare_pieces(len(one), *addresses, ctypes.addressof(flags)):
        return []
    return [index for index, is_different in enumerate(differs) if is_different]


def add_pieces(
    to: array[int], owners: int, others: array[int], counts: array[int], dtypes: array[int]
) -> None:
    """Add to the elements at each address of `to` those of other owners.

    The sum is taken in the order of the owners and rounded once.

    `others` has an address for each of `to`, first those of the first owner; `dtypes` are of type
    "I".
    """
    status = abi.library().plc_add_pieces(
        len(to),
        to.buffer_info()[0],
        owners,
        others.buffer_info()[0],
        counts.buffer_info()[0],
        dtypes.buffer_info()[0],
    )
    assert status == Status.OK, f"some of the types {sorted(set(dtypes))} cannot be added"
