"""One step of an optimizer over many arrays, in one native call.

The core updates parameters and state where they are. This side gives it addresses; that they are
right, and stay right while the call runs, is the caller's business.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
from array import array
from collections.abc import Sequence

from paceline.core import abi
from paceline.core.abi import Kind, Status
from paceline.core.communicator import Communicator
from paceline.errors import NativeError

__all__ = [
    "NORM_BLOCK_BYTES",
    "STATE_ARRAYS",
    "ArrayUpdate",
    "KindFlag",
    "Option",
    "PrivateGradients",
    "Rule",
    "TreeGradients",
]

STATE_ARRAYS = 3
NORM_BLOCK_BYTES = 16384  # PLC_NORM_BLOCK_BYTES
# Below this many bytes of parameters a call is over before another Python thread could run.
_SHORT_CALL_BYTES = 256 * 1024
# A thread is started for as much work as is long against starting it.
_BYTES_PER_THREAD = 1024 * 1024


class Rule:
    """`plc_rule`."""

    SGD, ADAM, ADAGRAD = range(3)


class Option:
    """Options of an update."""

    MAXIMIZE, NESTEROV, AMSGRAD, DECOUPLED_DECAY = 1, 2, 4, 8


class KindFlag:
    """What is said of an array beside its type."""

    FIRST_UPDATE, WIDE_STEP = 0x100, 0x200


@dataclasses.dataclass(frozen=True)
class PrivateGradients:
    """Gradients that stay in their ranks' own memory, and are read from there to be summed.

    `addresses` is that of a table in shared memory, with `stride` numbers for each rank of the
    communicator: where it has each array, 0 if that is mapped by all.
    """

    comm: Communicator
    ranks: tuple[int, ...]  # those whose gradients are summed, in this order
    addresses: int
    stride: int


@dataclasses.dataclass(frozen=True)
class TreeGradients:
    """Gradients of which ranks hold sums over the nodes of a tree, in their own memory.

    `owners` and `adds` say how the root is made of the nodes (`plc_tree_sum`); it is divided.
    `addresses` is that of a table in shared memory, with `stride` numbers for each node: where its
    owner has each array.
    """

    comm: Communicator
    owners: array[int]
    adds: array[int]
    divisor: int
    addresses: int
    stride: int


class ArrayUpdate:
    """An update of the same arrays, made again and again.

    `numbers` has the hyperparameters; gradients may be elsewhere each time.
    """

    def __init__(
        self,
        parameters: array[int],
        states: array[int],
        counts: array[int],
        kinds: array[int],
        nbytes: int,
    ) -> None:
        """Addresses of parameters; of `STATE_ARRAYS` arrays of state and the numbers of steps, one
        kind after the other; elements; types with flags; bytes of all parameters.
        """
        arrays = len(parameters)
        self._arrays = arrays
        self._kinds = kinds
        self._counts = counts
        self._addresses = parameters + array("Q", bytes(8 * arrays)) + states
        assert len(self._addresses) == (2 + STATE_ARRAYS + 1) * arrays
        self._most_threads = max(1, nbytes // _BYTES_PER_THREAD)
        self.numbers = abi.Update(
            grad_scale=1.0,
            clip=1.0,
            parts=1,
            threads=1,
            arrays=arrays,
            addresses=self._addresses.buffer_info()[0],
            counts=counts.buffer_info()[0],
            kinds=kinds.buffer_info()[0],
        )
        self._reference = C.byref(self.numbers)
        short = nbytes <= _SHORT_CALL_BYTES
        library = abi.library_holding_gil() if short else abi.library()
        self._run, self._square_sums = library.plc_update_arrays, library.plc_square_sums
        self._distances, self._weights = array("q"), array("d")
        self._members = array("I")
        # Where gradients in other ranks' own memory are, if any are read.
        self._read: PrivateGradients | TreeGradients | None = None
        self._tree = abi.TreeSum()

    @property
    def most_threads(self) -> int:
        """More threads than this would not make it faster."""
        return self._most_threads

    def sum_over_ranks(
        self,
        distances: Sequence[int],
        weights: Sequence[float],
        private: PrivateGradients | None = None,
    ) -> None:
        """From now on gradients are summed first: those of some ranks, in their order, each so many
        bytes from where this rank's are, times its weight. None: they are used as they are.
        """
        self._distances, self._weights = array("q", distances), array("d", weights)
        self.numbers.ranks = len(self._distances)
        self.numbers.distances = self._distances.buffer_info()[0]
        self.numbers.weights = self._weights.buffer_info()[0]
        self._read = private
        self.numbers.comm, self.numbers.tree = None, None
        if private is not None:
            self._members = array("I", private.ranks)
            self.numbers.comm = private.comm.handle
            self.numbers.members = self._members.buffer_info()[0]
            self.numbers.private_addresses = private.addresses
            self.numbers.private_stride = private.stride

    def sum_over_tree(self, gradients: TreeGradients) -> None:
        """From now on the gradient is the root of a tree, made of the nodes that ranks hold."""
        self.sum_over_ranks((), ())
        self._read = gradients
        self.numbers.comm = gradients.comm.handle
        self._tree = abi.TreeSum(
            len(gradients.owners),
            gradients.owners.buffer_info()[0],
            gradients.adds.buffer_info()[0],
            gradients.divisor,
            gradients.addresses,
            gradients.stride,
        )
        self.numbers.tree = C.addressof(self._tree)

    def make_part(self, part: int, parts: int, journal: int) -> None:
        """From now on a step is one part of the update, of so many; others make the rest in the
        same memory. `journal`: the address of this process's.
        """
        self.numbers.part, self.numbers.parts, self.numbers.journal = part, parts, journal

    def repair(self, journal: int) -> None:
        """Finish the block of this update that the owner of a journal was writing when it ended."""
        abi.library().plc_journal_repair(self._reference, journal)

    def run(self, gradients: array[int]) -> None:
        """Make the step with the gradients at these addresses."""
        self._addresses[self._arrays : 2 * self._arrays] = gradients
        self._check(self._run(self._reference))

    @property
    def norm_blocks(self) -> int:
        """How many numbers `square_sums` is about."""
        blocks: int = abi.library().plc_norm_blocks(self._reference)
        return blocks

    def square_sums(self, gradients: array[int], out: int) -> None:
        """Write the sums of squares of this process's part of the gradients, block by block, to
        their places in an array of doubles at `out`. The scale is left in.
        """
        self._addresses[self._arrays : 2 * self._arrays] = gradients
        self._check(self._square_sums(self._reference, out))

    def _check(self, status: int) -> None:
        if self._read is not None and status not in (Status.OK, Status.INVALID):
            raise self._read.comm.error(status, Kind.ALLREDUCE)
        if status == Status.SYSTEM:
            raise NativeError("no memory for the sums of an optimizer's step")
        assert status == Status.OK, f"the core refused to update types {sorted(set(self._kinds))}"

    def content(self) -> bytes:
        """What is done, as bytes: rule, hyperparameters, types. Neither where nor by whom."""
        return bytes(self.numbers)[: abi.Update.part.offset] + self._kinds.tobytes()

    def forget_first_update(self) -> None:
        """From now on there is momentum to read."""
        for index, kind in enumerate(self._kinds):
            self._kinds[index] = kind & ~KindFlag.FIRST_UPDATE
