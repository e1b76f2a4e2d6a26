"""A switch between simulated hosts that holds each packet for a while: what the kernel's sch_netem
does where there is one.

    python -m paceline.bench.delayed_switch NANOSECONDS PORT...

runs in the network namespace of the ports, says "ready" and ends when its input is closed. Between
interfaces of one machine the kernel passes packets of up to 64 KB, without checksums. They pass
here as they are, each with the header that says what is left to do (PACKET_VNET_HDR), so a link of
1 Gbit/s is only some thousand packets a second.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["DelayLine", "ForwardingTable", "main"]

_Item = TypeVar("_Item")

# linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h: what Python has no names for.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_TIMESPEC = struct.Struct("@ll")
_NOTES_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)

_VNET_HEADER_BYTES = 10
_RECEIVER = slice(_VNET_HEADER_BYTES, _VNET_HEADER_BYTES + 6)
_SENDER = slice(_VNET_HEADER_BYTES + 6, _VNET_HEADER_BYTES + 12)
_LONGEST_FRAME_BYTES = 128 << 10
# Half a second at 1 Gbit/s: more than this process waits for a core.
_BUFFER_BYTES = 64 << 20
# However long the delay: what that buffer holds at 50 Gbit/s.
_LONGEST_UNREAD_NS = 10_000_000
# Of one port, before others have their turn and frames that are due leave.
_FRAMES_AT_ONCE = 4
# What a full port or one without a cable does: the frame is lost, and whoever sent it is not told.
_LOSSES = (errno.EAGAIN, errno.ENOBUFS, errno.ENETDOWN, errno.ENXIO)


class ForwardingTable:
    """Which ports a frame leaves by; learns from senders where they are."""

    def __init__(self, ports: int) -> None:
        self._others = [
            tuple(port for port in range(ports) if port != source) for source in range(ports)
        ]
        self._port_of: dict[bytes, int] = {}

    def ports_for(self, source: int, receiver: bytes, sender: bytes) -> tuple[int, ...]:
        """Where a frame goes that came in by port `source`."""
        self._port_of[sender] = source
        to_many = receiver[0] & 1
        port = None if to_many else self._port_of.get(receiver)
        if port is None:
            return self._others[source]
        return (port,) if port != source else ()


class DelayLine(Generic[_Item]):
    """Lets out what is put in after a delay, in the same order."""

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns = delay_ns
        self._items: collections.deque[tuple[int, _Item]] = collections.deque()

    @property
    def due_ns(self) -> int | None:
        """When the next one is due; None if there is none."""
        return self._items[0][0] if self._items else None

    def put(self, item: _Item, arrived_ns: int) -> None:
        due_ns = arrived_ns + self._delay_ns
        if self._items:
            due_ns = max(due_ns, self._items[-1][0])
        self._items.append((due_ns, item))

    def take(self, now_ns: int) -> Iterator[_Item]:
        """All that are due."""
        while self._items and self._items[0][0] <= now_ns:
            yield self._items.popleft()[1]


class _Buffers:
    """Memory for frames, used again and again: to get it anew costs more than all else."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def take(self) -> memoryview:
        return self._spare.pop() if self._spare else memoryview(bytearray(_LONGEST_FRAME_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        self._spare.append(buffer)


class _Frame(NamedTuple):
    buffer: memoryview
    length: int

    @property
    def receiver(self) -> bytes:
        return bytes(self.buffer[_RECEIVER])

    @property
    def sender(self) -> bytes:
        return bytes(self.buffer[_SENDER])


class _Port:
    """One interface of the switch, and what came in by it and waits."""

    def __init__(self, name: str, delay_ns: int) -> None:
        self._delay_ns = delay_ns
        self.line = DelayLine[_Frame](delay_ns)
        # It hears nothing until it is bound: no frame comes without a header.
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setblocking(False)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.bind((name, _ETH_P_ALL))

    def fileno(self) -> int:
        return self.socket.fileno()

    def receive(self, buffers: _Buffers) -> bool:
        """Put into the line what has come in; returns whether that was all."""
        for _ in range(_FRAMES_AT_ONCE):
            buffer = buffers.take()
            try:
                length, notes, *_ = self.socket.recvmsg_into([buffer], _NOTES_BYTES)
            except OSError as error:
                buffers.give_back(buffer)
                if error.errno not in _LOSSES:
                    raise
                return True
            self.line.put(_Frame(buffer, length), time.monotonic_ns() - self._age_ns(notes))
        return False

    def send(self, frame: _Frame) -> None:
        try:
            self.socket.send(frame.buffer[: frame.length])
        except OSError as error:
            if error.errno not in _LOSSES:
                raise

    def _age_ns(self, notes: Sequence[tuple[int, int, bytes]]) -> int:
        """How long ago the kernel got a frame: what this process was late is part of the delay.

        The kernel tells the time of day, which may be set meanwhile.
        """
        seconds, nanoseconds = _TIMESPEC.unpack(notes[0][2])
        age_ns: int = time.time_ns() - seconds * 10**9 - nanoseconds
        return min(max(age_ns, 0), self._delay_ns)


def _relay(ports: Sequence[_Port], held: int, delay_ns: int) -> None:
    """Pass frames on until nobody has the other end of `held` open.

    Frames that wait are due before all that have come since the ports were last read. So this need
    not wake for each of those: it reads them when the delay has passed, or a little more often.
    """
    table, buffers = ForwardingTable(len(ports)), _Buffers()
    watched = [held, *(port.fileno() for port in ports)]
    read_ns = 0
    while True:
        due_ns = _first_due_ns(ports)
        # Not epoll, whose time limits are whole milliseconds.
        if due_ns is None:
            ready, _, _ = select.select(watched, [], [])
        else:
            ready, _, _ = select.select([held], [], [], _seconds_until(min(due_ns, read_ns)))
        if held in ready and not os.read(held, 1024):
            return
        _send_due(ports, table, buffers)
        now_ns = time.monotonic_ns()
        if due_ns is None or now_ns >= read_ns:
            emptied = [port.receive(buffers) for port in ports]
            if all(emptied):
                read_ns = now_ns + min(delay_ns, _LONGEST_UNREAD_NS)


def _first_due_ns(ports: Sequence[_Port]) -> int | None:
    return min((due for port in ports if (due := port.line.due_ns) is not None), default=None)


def _seconds_until(time_ns: int) -> float:
    return max(0, time_ns - time.monotonic_ns()) / 1e9


def _send_due(ports: Sequence[_Port], table: ForwardingTable, buffers: _Buffers) -> None:
    now_ns = time.monotonic_ns()
    for source, port in enumerate(ports):
        for frame in port.line.take(now_ns):
            for target in table.ports_for(source, frame.receiver, frame.sender):
                ports[target].send(frame)
            buffers.give_back(frame.buffer)


def _come_first() -> None:
    """Before all ranks: a switch is no program that competes with them for cores. The kernel also
    wakes such a process on time instead of 50 us later.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main(delay_ns: int, names: Sequence[str]) -> None:
    """Be the switch of these interfaces until the input is closed."""
    # Ctrl-C is for who started this, and closes the input when its ranks have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ports = [_Port(name, delay_ns) for name in names]
    _come_first()
    print("ready", flush=True)
    _relay(ports, sys.stdin.fileno(), delay_ns)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
