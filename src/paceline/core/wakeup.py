"""Flags: how a process and the workers it forked wake each other, in a microsecond when both are
awake.

A flag lies in memory that both map, counts how often it was raised, and tells the waiter when the
other process ended.
"""

from __future__ import annotations

import ctypes as C
import time
from typing import Any

from paceline.core import abi
from paceline.core.abi import Status

__all__ = ["FLAG_BYTES", "Flag", "sum_in_order"]

FLAG_BYTES = 64
_HELD_NS = 200_000  # to spin with the interpreter's lock, which costs microseconds to get back
_SLICE_NS = 100_000_000  # how long a signal, Ctrl-C say, may have to wait for the interpreter


class Flag:
    """A word in shared memory, `FLAG_BYTES` long and aligned, zero at first. One side raises, the
    other waits.
    """

    def __init__(self, memory: Any, offset: int) -> None:
        core = abi.library()
        assert core.plc_flag_bytes() == FLAG_BYTES
        self._memory = memory  # keeps the mapping
        self._address = C.addressof(C.c_char.from_buffer(memory, offset))
        self._raise = abi.library_holding_gil().plc_flag_raise
        self._look = abi.library_holding_gil().plc_flag_wait
        self._wait = core.plc_flag_wait
        self._seen = 0

    @property
    def seen(self) -> int:
        """How many raises this side has waited for, modulo 2^32."""
        return self._seen

    def raise_(self) -> None:
        """Count one up and wake the waiter. Never blocks."""
        self._raise(self._address)

    def is_raised(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._wait(self._address, (self._seen + 1) & 0xFFFFFFFF, -1, 0, 0) == Status.OK)

    def wait(self, pidfd: int, spin_ns: int, timeout_s: float = float("inf")) -> bool:
        """Wait until it was raised once more than last time; False if the process behind `pidfd`
        ended first.

        Raises TimeoutError when the time is up. Signals are handled while waiting: what a handler
        raises ends the wait, which can be taken up again later.
        """
        target = (self._seen + 1) & 0xFFFFFFFF
        if self._look(self._address, target, -1, min(spin_ns, _HELD_NS), 0) == Status.OK:
            self._seen = target
            return True
        deadline: float | None = None
        while True:
            status = self._wait(self._address, target, pidfd, spin_ns, _SLICE_NS)
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


def sum_in_order(out: int, inputs: list[int], count: int, dtype: int) -> None:
    """Write to `out` the sum of arrays at addresses, added in the order given; 16-bit floats are
    rounded once.
    """
    pointers = (C.c_void_p * len(inputs))(*inputs)
    status = abi.library().plc_reduce_local(out, pointers, len(inputs), count, dtype, 0, 1.0)
    assert status == Status.OK, f"dtype {dtype} cannot be summed"
