"""`Lane`: this rank's connections to the ranks of its lane, one on each other host, over Gloo.

A lane carries messages: a header, and data up to a limit. Between two hosts they arrive in the
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
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline._torch_internals import PrefixStore, ProcessGroupGloo, Store, Work
from paceline.backend.host_placement import Placement
from paceline.core.abi import CallRecord
from paceline.errors import GroupError

__all__ = [
    "FIRST_RESERVED_TAG",
    "HEADER_BYTES",
    "Lane",
    "LaneMessage",
    "MessageHeader",
    "check_connection",
    "connect",
    "disconnect",
    "message_capacity",
    "reserved_tag",
]

HEADER_BYTES = 64
_MARK, _MARK_BYTES = 0x9E3779B97F4A7C15, C.sizeof(C.c_uint64)
# In groups in which programs have tags, too, theirs are below this.
FIRST_RESERVED_TAG = 2**30
_NEVER_SENT_TAG = 2**31 - 1
_TAG = 1
# Receives that are posted ahead for each host, so many at a time. Each is made known to the sender,
# whose Gloo then polls without a pause until the message that is just being written has left: fewer
# occasions mean less of that. Half of what is posted is more than a call has on its way.
_POSTED = 8
_POSTED_TOGETHER = 4
_OUTGOING = 10
_MAX_CAPACITY = 1 << 20
_MIN_CAPACITY = 1 << 16
_CLOSE_LIMIT = timedelta(seconds=5)


def message_capacity(hosts: int) -> int:
    """How many bytes of data a message has at most, between so many hosts."""
    return min(max(2 * _MAX_CAPACITY // (hosts - 1), _MIN_CAPACITY), _MAX_CAPACITY)


class MessageHeader(C.Structure):
    """What a message begins with."""

    _fields_ = [
        ("call", CallRecord),
        # 0: the ranks of the sender's host made different calls, and the message lists them.
        ("agreed", C.c_uint32),
        # What all parts of an exchange have, if messages carry those.
        ("length", C.c_int64),
        # Of the data. Behind it is the end mark.
        ("nbytes", C.c_uint64),
    ]


assert C.sizeof(MessageHeader) <= HEADER_BYTES


class LaneMessage:
    """Memory for one message: its header, its data, and a mark that shows where it ends."""

    def __init__(self, capacity: int) -> None:
        self.bytes = torch.empty(HEADER_BYTES + capacity + _MARK_BYTES, dtype=torch.uint8)
        self.address = self.bytes.data_ptr() + HEADER_BYTES
        self.header = MessageHeader.from_address(self.bytes.data_ptr())
        self.header.call.sequence = self.header.nbytes = 0
        self.works: list[Work] = []  # what still reads or writes it

    def data(self, nbytes: int) -> torch.Tensor:
        return self.bytes[HEADER_BYTES : HEADER_BYTES + nbytes]

    def seal(self, nbytes: int) -> torch.Tensor:
        """Mark its end behind so many bytes of data: what is to be sent."""
        self.header.nbytes = nbytes
        self._mark().value = self.header.call.sequence ^ _MARK
        return self.bytes[: HEADER_BYTES + nbytes + _MARK_BYTES]

    @property
    def is_arriving(self) -> bool:
        """Whether its beginning is here."""
        return bool(self.header.call.sequence)

    @property
    def is_whole(self) -> bool:
        """Whether its end is here, too. Once in ages a part of a message looks like this."""
        return self.is_arriving and self._mark().value == self.header.call.sequence ^ _MARK

    def _mark(self) -> C.c_uint64:
        return C.c_uint64.from_address(self.address + self.header.nbytes)


class Lane:
    """One rank per host: rank h of `gloo` is that of host h."""

    def __init__(self, store: Store, placement: Placement, timeout: timedelta) -> None:
        self._host = placement.host
        self._others = placement.other_hosts
        # Connections of their own for each direction. Gloo's thread cannot read from one that
        # another thread writes to, and polls it without a pause until it can.
        self._upwards, self._downwards = (
            connect(PrefixStore(f"{direction}/", store), placement.host, placement.hosts, timeout)
            for direction in ("up", "down")
        )
        self._capacity = message_capacity(placement.hosts)
        self._incoming = {
            host: collections.deque(self._post(host, self._message()) for _ in range(_POSTED))
            for host in self._others
        }
        # Given back, and not posted again yet.
        self._free: dict[int, list[LaneMessage]] = {host: [] for host in self._others}
        # In the order in which they were sent last.
        self._outgoing = collections.deque(self._message() for _ in range(_OUTGOING))

    def _sends_to(self, host: int) -> Any:
        return self._upwards if host > self._host else self._downwards

    def _receives_from(self, host: int) -> Any:
        return self._downwards if host > self._host else self._upwards

    def _message(self) -> LaneMessage:
        return LaneMessage(self._capacity)

    def _post(self, host: int, message: LaneMessage) -> LaneMessage:
        message.header.call.sequence = 0
        message.works = [self._receives_from(host).recv([message.bytes], host, _TAG)]
        return message

    def outgoing(self, header: MessageHeader, timeout: timedelta) -> LaneMessage:
        """A message to fill and send, with this header. One that is not sent is the next again."""
        message = self._outgoing[0]
        _await_all(message, timeout)
        C.memmove(message.bytes.data_ptr(), C.addressof(header), C.sizeof(header))
        return message

    def send(self, message: LaneMessage, nbytes: int, hosts: Sequence[int]) -> None:
        """Start sending it. It may not be changed any more."""
        assert message is self._outgoing[0], "messages are sent in the order they are taken"
        data = [message.seal(nbytes)]
        message.works = [self._sends_to(host).send(data, host, _TAG) for host in hosts]
        self._outgoing.rotate(-1)

    def next_from(self, host: int) -> LaneMessage:
        """What the next message from a host arrives in."""
        return self._incoming[host][0]

    def receive(self, host: int, timeout: timedelta) -> LaneMessage:
        """The next message from a host, to be given back by `received`."""
        self.await_next(host, timeout)
        return self._incoming[host][0]

    def receive_whole(self, host: int, timeout: timedelta) -> LaneMessage:
        """The same if it is here."""
        message = self._incoming[host][0]
        _await_all(message, timeout)
        return message

    def await_next(self, host: int, timeout: timedelta) -> None:
        """Wait until the next message from a host is here."""
        self.post_free()
        _await_all(self._incoming[host][0], timeout)

    def received(self, host: int) -> None:
        """The memory of the last message from a host may be used for another one."""
        self._free[host].append(self._incoming[host].popleft())

    def post_free(self) -> None:
        """Post receives for messages to come. To post one takes as long as to send a message, so it
        is done by those who wait for another one anyway.
        """
        for host, messages in self._free.items():
            if len(messages) >= _POSTED_TOGETHER:
                self._incoming[host].extend(self._post(host, message) for message in messages)
                messages.clear()

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
        """
        for gloo in (self._upwards, self._downwards):
            disconnect(gloo, self._others[0])

    def check_connections(self) -> None:
        """Raise if one of them is closed."""
        for host in self._others:
            for gloo in (self._upwards, self._downwards):
                check_connection(gloo, host)

    def set_timeout(self, timeout: timedelta) -> None:
        for gloo in (self._upwards, self._downwards):
            gloo._set_default_timeout(timeout)


def reserved_tag(number: int) -> int:
    """A tag for each of about a billion numbers."""
    return FIRST_RESERVED_TAG + number % (_NEVER_SENT_TAG - FIRST_RESERVED_TAG)


# Any: torch's stubs of this class have none of its calls.
def connect(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo group of ranks on several hosts.

    Raises:
        GroupError: its ranks cannot reach each other; or what the store raises.
    """
    try:
        return ProcessGroupGloo(store, rank, size, timeout=timeout)
    except GroupError:
        raise
    except RuntimeError as error:
        raise GroupError(
            f"no connection between hosts: {error}. {_address_in_use()} Set GLOO_SOCKET_IFNAME on "
            "every host to its interface that the others reach; this host has "
            f"{', '.join(name for _, name in socket.if_nameindex())}."
        ) from error


def _address_in_use() -> str:
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return f"Gloo was told to use {interface} here (GLOO_SOCKET_IFNAME)."
    name = socket.gethostname()
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return f"Gloo uses the address of this host's name, but {name} has none."
    return f"Gloo uses the address of this host's name here: {name} is {', '.join(addresses)}."


def check_connection(gloo: Any, peer: int) -> None:
    """Raise if it is closed: nothing can be posted on it then."""
    gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT_TAG)


def disconnect(gloo: Any, peer: int) -> None:
    """Close all connections of a Gloo group, which has this other rank.

    There is no call for that. But Gloo gives them up when a receive takes longer than it may, for
    example one for which there is no sender.
    """
    never = [torch.empty(1, dtype=torch.uint8)]
    with contextlib.suppress(RuntimeError):
        gloo.recv(never, peer, _NEVER_SENT_TAG).wait(timedelta(milliseconds=1))


def _await_all(message: LaneMessage, timeout: timedelta) -> None:
    for work in message.works:
        work.wait(timeout)
    message.works = []
