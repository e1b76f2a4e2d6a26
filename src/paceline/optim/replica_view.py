"""What one rank sees of arrays that lie once, in memory that all ranks of a host share.

What ranks write together, a step of an optimizer, they write to the shared memory, and all see it.
What a rank writes where its program sees the arrays stays its own, as it does with a replica, until
the ranks publish it together. An array is seen in one of two ways:

    mapped   its pages are mapped a second time, copied on write: nothing is copied as long as
             nothing is written, and the kernel knows what was
    copied   the rank has a copy. It is compared before a step and copied again afterwards: arrays
             that are small against pages, and those whose memory something else in the process
             refers to, so that they cannot be moved
"""

from __future__ import annotations

import bisect
import dataclasses
import mmap
from array import array
from collections.abc import Iterable, Sequence

import torch

from paceline._linux import written_pages
from paceline._torch_internals import storage_users
from paceline.core.kernels import copy_pieces, differing_pieces, digest
from paceline.dp.shared_parameters import view_like

__all__ = ["ArrayPlace", "Layout", "ReplicaView", "can_be_moved", "lay_out"]

# Smaller arrays are sooner copied than mapped, and would leave much of their pages empty.
_MAPPED_BYTES = 64 * 1024
_CACHE_LINE = 64


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """Where an array lies in the shared memory, the same on all ranks."""

    name: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where all arrays lie: those from `mapped_begin` to `mapped_end` have pages of their own."""

    places: tuple[ArrayPlace, ...]
    mapped_begin: int
    mapped_end: int
    nbytes: int

    def is_mapped(self, index: int) -> bool:
        return self.mapped_begin <= self.places[index].offset < self.mapped_end


def lay_out(arrays: Sequence[tuple[str, int]], begin: int) -> Layout:
    """Give each array, by name and number of bytes, a place in shared memory after `begin`."""
    begin = _up_to(begin, mmap.PAGESIZE)
    offsets: dict[int, int] = {}
    at = begin
    for index, (_, nbytes) in enumerate(arrays):
        if nbytes >= _MAPPED_BYTES:
            offsets[index], at = at, _up_to(at + nbytes, mmap.PAGESIZE)
    at = mapped_end = max(at, begin + mmap.PAGESIZE)  # no mapping is empty
    for index, (_, nbytes) in enumerate(arrays):
        if index not in offsets:
            offsets[index], at = at, _up_to(at + nbytes, _CACHE_LINE)
    places = (ArrayPlace(name, offsets[i], nbytes) for i, (name, nbytes) in enumerate(arrays))
    return Layout(tuple(places), begin, mapped_end, at)


def _up_to(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def can_be_moved(tensor: torch.Tensor) -> bool:
    """Whether nobody would notice if this tensor had other memory: no tensor, array or process
    refers to what it has.
    """
    storage = tensor.untyped_storage()
    return (
        storage.resizable()  # torch's own allocation, not somebody's buffer
        and not storage.is_shared()
        and storage.filename is None
        and not tensor.is_pinned()
        and storage_users(tensor) == storage_users(torch.empty(1))
    )


class ReplicaView:
    """One rank's view of the arrays of a layout."""

    def __init__(self, layout: Layout, shared: mmap.mmap, private: mmap.mmap) -> None:
        self._layout = layout
        self._shared, self._private = shared, private
        self._shared_at = _address_of(shared)
        self._private_at = _address_of(private)
        count = len(layout.places)
        # Where each array is on this rank: 0 where it is not yet, and for copies the tensor, too.
        self._addresses = array("Q", bytes(8 * count))
        self._copies: dict[int, torch.Tensor] = {}
        self._copied: tuple[array[int], array[int], array[int]] | None = None  # pieces; None: anew
        self._mapped = [i for i in range(count) if layout.is_mapped(i)]
        self._mapped.sort(key=lambda index: layout.places[index].offset)
        self._mapped_ends = [
            self._private_at + _end(layout.places[i]) - layout.mapped_begin for i in self._mapped
        ]

    # ----------------------------------------------------------------------------- what is where

    def shared_tensor(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """An array in the shared memory itself, laid out as `like` is."""
        return view_like(like, self._shared, self._layout.places[index].offset)

    def shared_address(self, index: int) -> int:
        return self._shared_at + self._layout.places[index].offset

    def address(self, index: int) -> int:
        """Where this rank sees an array; 0: nowhere yet."""
        return self._addresses[index]

    def map(self, index: int, like: torch.Tensor) -> torch.Tensor | None:
        """See an array by its pages from now on: a tensor, laid out as `like` is. None if it has
        no pages of its own.
        """
        if not self._layout.is_mapped(index):
            return None
        offset = self._layout.places[index].offset - self._layout.mapped_begin
        tensor = view_like(like, self._private, offset)
        self._copies.pop(index, None)
        self._addresses[index], self._copied = tensor.data_ptr(), None
        return tensor

    def copy(self, index: int, tensor: torch.Tensor) -> None:
        """See an array as a copy in this tensor's memory from now on."""
        self._copies[index] = tensor.detach()
        self._addresses[index], self._copied = tensor.data_ptr(), None

    def shared_addresses(self) -> dict[int, int]:
        """From where this rank sees an array to where it is in the shared memory."""
        return {
            address: self.shared_address(index)
            for index, address in enumerate(self._addresses)
            if address
        }

    def is_moved(self) -> bool:
        """Whether a copy is no longer where it was, so that its address must not be used."""
        return any(
            copy.data_ptr() != self._addresses[index] for index, copy in self._copies.items()
        )

    # ----------------------------------------------------------------------------- own writes

    def written(self) -> list[int]:
        """The arrays that have been written to on this rank, through whatever reference."""
        end = self._private_at + self._layout.mapped_end - self._layout.mapped_begin
        found = set()
        for begin, stop in written_pages(self._private_at, end):
            first = bisect.bisect_right(self._mapped_ends, begin)
            for index, ends in zip(self._mapped[first:], self._mapped_ends[first:], strict=True):
                found.add(index)
                if ends >= stop:
                    break
        indices = list(self._copies)
        found.update(indices[i] for i in differing_pieces(*self._copied_pieces()))
        return sorted(found)

    def digest(self, index: int) -> int:
        """Of an array as this rank sees it."""
        return digest(self._addresses[index], self._layout.places[index].nbytes)

    def publish(self, indices: Iterable[int]) -> None:
        """Write arrays as this rank sees them to the shared memory."""
        own, shared, nbytes = self._pieces(indices)
        copy_pieces(shared, own, nbytes)

    def discard(self, indices: Iterable[int]) -> None:
        """See what is in the shared memory, whatever was written here."""
        copied = []
        for index in indices:
            if index in self._copies:
                copied.append(index)
            elif self._addresses[index]:
                place = self._layout.places[index]
                self._private.madvise(
                    mmap.MADV_DONTNEED,
                    place.offset - self._layout.mapped_begin,
                    _up_to(place.nbytes, mmap.PAGESIZE),
                )
        copy_pieces(*self._pieces(copied))

    def discard_all(self) -> None:
        self._private.madvise(mmap.MADV_DONTNEED)
        self.refresh()

    def refresh(self) -> None:
        """Bring copies to what is in the shared memory."""
        copy_pieces(*self._copied_pieces())

    def keep(self) -> None:
        """Have every array to oneself, where it is: nothing that others write is seen any more."""
        pages = torch.frombuffer(self._private, dtype=torch.uint8)
        pages[:: mmap.PAGESIZE].add_(0)

    def drop_shared(self) -> None:
        """Return the shared pages to the system, when all ranks have theirs to themselves."""
        layout = self._layout
        self._shared.madvise(
            mmap.MADV_REMOVE, layout.mapped_begin, layout.mapped_end - layout.mapped_begin
        )

    def _copied_pieces(self) -> tuple[array[int], array[int], array[int]]:
        if self._copied is None:
            self._copied = self._pieces(self._copies)
        return self._copied

    def _pieces(self, indices: Iterable[int]) -> tuple[array[int], array[int], array[int]]:
        """Addresses here, in the shared memory, and numbers of bytes."""
        placed = [index for index in indices if self._addresses[index]]
        return (
            array("Q", [self._addresses[index] for index in placed]),
            array("Q", [self.shared_address(index) for index in placed]),
            array("Q", [self._layout.places[index].nbytes for index in placed]),
        )


def _address_of(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _end(place: ArrayPlace) -> int:
    return _up_to(place.offset + place.nbytes, mmap.PAGESIZE)
