"""Flags: how a process and the workers it forked wake each other.

It takes a microsecond when both are awake. A flag lies in memory that both map and counts how often
it was raised. Whoever waits also notices that the other process ended.
"""

from __future__ import annotations

import ctypes as C
import time
from array import array
from collections.abc import Sequence
from mmap import mmap
from typing import Any

from paceline.core import abi
from paceline.core.abi import Status

__all__ = ["FLAG_BYTES", "Flag", "HandOver"]

FLAG_BYTES = 64
# How long to spin with the interpreter's lock held, which costs microseconds to get back.
_SPIN_WITH_GIL_NS = 200_000
# How long a signal, for example Ctrl-C, may have to wait for the interpreter.
_SLICE_NS = 100_000_000
# Copying less than this takes no longer than giving up the interpreter's lock and getting it back.
_COPY_WITH_GIL_BYTES = 1 << 18


class Flag:
    """A word in shared memory, `FLAG_BYTES` long and aligned, zero at first.

    One side raises, the other waits.
    """

    def __init__(self, memory: mmap, offset: int) -> None:
        core, core_with_gil = abi.library(), abi.library_holding_gil()
        assert core.plc_flag_bytes() == FLAG_BYTES
        self._memory = memory  # keeps the mapping
        self.address = C.addressof(C.c_char.from_buffer(memory, offset))
        self._raise = core_with_gil.plc_flag_raise
        self._spin = core_with_gil.plc_flag_wait
        self._wait = core.plc_flag_wait
        self._seen = 0

    @property
    def seen(self) -> int:
        """How many raises this side has waited for, modulo 2^32."""
        return self._seen

    def raise_(self) -> None:
        """Count one up and wake the waiter. Never blocks."""
        self._raise(self.address)

    def is_due(self, pidfd: int) -> bool:
        """Whether `wait` would return at once: raised, or the process behind `pidfd` ended."""
        target = (self._seen + 1) & 0xFFFFFFFF
        return bool(self._wait(self.address, target, pidfd, 0, 0) != Status.PENDING)

    def wait(self, pidfd: int, spin_ns: int, timeout_s: float = float("inf")) -> bool:
        """Wait for the next raise; False if the process behind `pidfd` ended first.

        Raises TimeoutError when the time is up. Signals are handled while waiting: what a handler
        raises ends the wait, which can be taken up again later.
        """
        target = (self._seen + 1) & 0xFFFFFFFF
        if self._spin(self.address, target, -1, min(spin_ns, _SPIN_WITH_GIL_NS), 0) == Status.OK:
            self._seen = target
            return True
        deadline: float | None = None
        while True:
            status = self._wait(self.address, target, pidfd, spin_ns, _SLICE_NS)
            if status == Status.OK:
                self._seen = target
                return True
            if status == Status.PEER_LOST:
                return False
            spin_ns = 0
            now = time.monotonic()
            deadline = now + timeout_s if deadline is None else deadline
            if now > deadline:
                raise TimeoutError


class HandOver:
    """Copies arrays to fixed places, writes two words of a notice and raises a flag, in one call.

    The first word is always `number`. `notice` lies in the memory of the flag.
    """

    def __init__(
        self,
        flag: Flag,
        notice: memoryview,
        number: int,
        targets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        copies_little = sum(sizes) <= _COPY_WITH_GIL_BYTES
        core = abi.library_holding_gil() if copies_little else abi.library()
        self._hand_over = core.plc_hand_over
        self._flag = flag.address
        self._notice = C.addressof(C.c_char.from_buffer(notice))
        self._number = number
        self._count = len(targets)
        self._kept = (flag, array("Q", targets), array("Q", sizes))
        self._targets, self._sizes = (each.buffer_info()[0] for each in self._kept[1:])

    def __call__(self, word: int, sources: Sequence[Any]) -> bool:
        """Hand over the arrays at these addresses; False, and nothing happens, if some are none."""
        for source in sources:
            if type(source) is not int:
                return False
        addresses = array("Q", sources)
        self._hand_over(
            self._flag,
            self._notice,
            self._number,
            word,
            self._count,
            self._targets,
            addresses.buffer_info()[0],
            self._sizes,
        )
        return True
