"""`Lane`: this rank's connections to the ranks of its lane, one on each other host, over Gloo.

A lane carries messages: a header, and up to `capacity` bytes. Between two hosts they arrive in the
order in which they were sent. Every receive is posted before its message comes, into a buffer that
any message fits in: Gloo would hold a message back until the receiver has posted its size, a round
trip for each, and would end the process when one is longer than expected.

The header says which call a message belongs to. So the calls of all hosts are compared without an
exchange of their own, and what a call left behind that failed is recognised by the next one.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes as C
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline._torch_internals import PrefixStore, ProcessGroupGloo, Store, Work
from paceline.backend.host_placement import Placement
from paceline.core.abi import CallRecord

__all__ = ["HEADER_BYTES", "Lane", "LaneMessage", "MessageHeader"]

HEADER_BYTES = 64
_TAG = 1
_NEVER_SENT_TAG = 2
# Receives that are posted ahead for each host, and messages that may be on their way.
_POSTED = 4
_MAX_CAPACITY = 1 << 20
_MIN_CAPACITY = 1 << 16
_CLOSE_LIMIT = timedelta(seconds=5)


class MessageHeader(C.Structure):
    """What a message begins with."""

    _fields_ = [
        ("call", CallRecord),
        # 0: the ranks of the sender's host made different calls, and the message lists them.
        ("agreed", C.c_uint32),
    ]


class LaneMessage:
    """Memory for one message: its header, then its data."""

    def __init__(self, capacity: int) -> None:
        self.bytes = torch.empty(HEADER_BYTES + capacity, dtype=torch.uint8)
        self.address = self.bytes.data_ptr() + HEADER_BYTES
        self.header = MessageHeader.from_address(self.bytes.data_ptr())
        self.works: list[Work] = []  # what still reads or writes it

    def data(self, nbytes: int) -> torch.Tensor:
        return self.bytes[HEADER_BYTES : HEADER_BYTES + nbytes]


class Lane:
    """One rank per host: rank h of `gloo` is that of host h."""

    def __init__(self, store: Store, placement: Placement, timeout: timedelta) -> None:
        self._host = placement.host
        self._others = placement.other_hosts
        # Connections of their own for each direction. Gloo's thread cannot read from one that
        # another thread writes to, and polls it without a pause until it can.
        self._upwards, self._downwards = (
            _connect(PrefixStore(f"{direction}/", store), placement, timeout)
            for direction in ("up", "down")
        )
        self.gloo = self._upwards  # for Gloo's own collectives
        self.capacity = min(
            max(2 * _MAX_CAPACITY // len(self._others), _MIN_CAPACITY), _MAX_CAPACITY
        )
        self._incoming = {
            host: collections.deque(self._post(host, self._message()) for _ in range(_POSTED))
            for host in self._others
        }
        # In the order in which they were sent last.
        self._outgoing = collections.deque(self._message() for _ in range(2 * _POSTED))

    def _sends_to(self, host: int) -> Any:
        return self._upwards if host > self._host else self._downwards

    def _receives_from(self, host: int) -> Any:
        return self._downwards if host > self._host else self._upwards

    def _message(self) -> LaneMessage:
        return LaneMessage(self.capacity)

    def _post(self, host: int, message: LaneMessage) -> LaneMessage:
        message.works = [self._receives_from(host).recv([message.bytes], host, _TAG)]
        return message

    def outgoing(self, header: MessageHeader, timeout: timedelta) -> LaneMessage:
        """A message to fill and send, with this header."""
        message = self._outgoing.popleft()
        _await_all(message, timeout)
        C.memmove(message.bytes.data_ptr(), C.addressof(header), C.sizeof(header))
        return message

    def send(self, message: LaneMessage, nbytes: int, hosts: Sequence[int]) -> None:
        """Start sending it. It may not be changed any more."""
        data = [message.bytes[: HEADER_BYTES + nbytes]]
        message.works = [self._sends_to(host).send(data, host, _TAG) for host in hosts]
        self._outgoing.append(message)

    def receive(self, host: int, timeout: timedelta) -> LaneMessage:
        """The next message from a host, to be given back by `received`."""
        message = self._incoming[host][0]
        _await_all(message, timeout)
        return message

    def received(self, host: int) -> None:
        """The memory of the last message from a host may be used for another one."""
        messages = self._incoming[host]
        messages.append(self._post(host, messages.popleft()))

    def flush(self) -> None:
        """Wait until what was sent has left this process, where the other side takes it."""
        try:
            for message in self._outgoing:
                _await_all(message, _CLOSE_LIMIT)
        except RuntimeError:
            return  # the connection is lost, and with it whoever would have received the rest

    def disconnect(self) -> None:
        """Close the connections: waits end with an error, here in any thread and on the other
        hosts.

        There is no call for that. But Gloo gives up all connections of a group when a receive takes
        longer than it may, for example one for which there is no sender.
        """
        never = [torch.empty(1, dtype=torch.uint8)]
        for gloo in (self._upwards, self._downwards):
            with contextlib.suppress(RuntimeError):
                gloo.recv(never, self._others[0], _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))

    def set_timeout(self, timeout: timedelta) -> None:
        for gloo in (self._upwards, self._downwards):
            gloo._set_default_timeout(timeout)


# Any: torch's stubs of this class have none of its calls.
def _connect(store: Store, placement: Placement, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, placement.host, placement.hosts, timeout=timeout)


def _await_all(message: LaneMessage, timeout: timedelta) -> None:
    for work in message.works:
        work.wait(timeout)
    message.works = []
