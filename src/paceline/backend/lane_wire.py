"""`LaneWire`: a lane as the native core sees it, for reductions that it runs itself.

The core calls back for every message: to get memory for one, to send it, to wait for one. An error
of Gloo cannot pass through it, so it is kept here, and the core ends the call.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline.backend.lane import Lane, LaneMessage, MessageHeader
from paceline.core.abi import Wire

__all__ = ["LaneWire"]

_OK, _FAILED = 0, 1


class LaneWire:
    """One for each lane; its functions are made once, and serve the call that runs.

    Args:
        lane: what carries the messages.
        other_hosts: those that a message for all goes to.
    """

    def __init__(self, lane: Lane, other_hosts: tuple[int, ...]) -> None:
        self._lane, self._other_hosts = lane, other_hosts
        self._header = MessageHeader()
        self._left: Callable[[], timedelta] = timedelta
        self._taken: LaneMessage | None = None
        self._error: BaseException | None = None
        self.table = Wire(
            take=Wire.TAKE(self._guarded(self._take)),
            send=Wire.SEND(self._guarded(self._send)),
            receive=Wire.RECEIVE(self._guarded(self._receive)),
            release=Wire.RELEASE(self._guarded(self._release)),
        )

    def serve(self, header: MessageHeader, left: Callable[[], timedelta]) -> None:
        """Carry messages of a call with this header, each in the time that is `left` then."""
        self._header, self._left = header, left
        self._taken = self._error = None

    def raise_error(self) -> None:
        """Raise what ended the call, if it was an error here."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _guarded(self, serve: Callable[..., None]) -> Callable[..., int]:
        def call(_context: object, *arguments: Any) -> int:
            try:
                serve(*arguments)
            except BaseException as error:
                self._error = error
                return _FAILED
            return _OK

        return call

    def _take(self, address: C.Array[C.c_void_p]) -> None:
        self._taken = self._lane.outgoing(self._header, self._left())
        address[0] = self._taken.address

    def _send(self, host: int, nbytes: int) -> None:
        assert self._taken is not None, "memory is taken before it is sent"
        self._lane.send(self._taken, nbytes, self._other_hosts if host < 0 else (host,))

    def _receive(self, host: int, address: C.Array[C.c_void_p]) -> None:
        address[0] = self._lane.receive(host, self._left()).address

    def _release(self, host: int) -> None:
        self._lane.received(host)
