"""One step of an optimizer over many arrays, in one native call.

The core updates parameters and state where they are. This side gives it addresses; that they are
right, and stay right while the call runs, is the caller's business.
"""

from __future__ import annotations

import ctypes as C
from array import array

from paceline.core import abi
from paceline.core.abi import Status

__all__ = ["ArrayUpdate", "KindFlag", "Option", "Rule", "STATE_ARRAYS"]

STATE_ARRAYS = 3
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
        self._run = library.plc_update_arrays

    @property
    def most_threads(self) -> int:
        """More threads than this would not make it faster."""
        return self._most_threads

    def run(self, gradients: array[int]) -> None:
        """Make the step with the gradients at these addresses."""
        self._addresses[self._arrays : 2 * self._arrays] = gradients
        status = self._run(self._reference)
        assert status == Status.OK, f"the core refused to update types {sorted(set(self._kinds))}"

    def forget_first_update(self) -> None:
        """From now on there is momentum to read."""
        for index, kind in enumerate(self._kinds):
            self._kinds[index] = kind & ~KindFlag.FIRST_UPDATE
