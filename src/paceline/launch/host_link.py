"""The connection between the first host of an elastic job and another one: short messages, and a
lease.

A message is a line of JSON, {"is": what, ...}; no pickles. Both ends are fork servers, which have
no threads and must never wait for each other: what the network does not take yet is kept and sent
later.

A host may run ranks of the job only while it has a *lease*. It sends pings, the first host answers
each, and an answer is good for `length_s` seconds from the moment at which its ping was *sent*. The
first host counts the same length from the moment at which it *received* that ping, which is never
earlier. So when it takes a silent host for lost, that host has ended its ranks already, though no
message passes between them any more: nothing of theirs can reach the generation that follows. If
its fork server is stopped, the ranks look at the lease themselves (`ElasticJob.check_lease`).
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

__all__ = ["HostLink", "Lease", "LinkMessage", "MARGIN", "connect", "listen", "parse_endpoint"]

LinkMessage = dict[str, Any]

_DEFAULT_PORT = 29400  # torchrun's, where an endpoint names none
# By how much longer than a lease the first host waits: clocks, and the time that killing takes.
MARGIN = 1.1
_LONGEST_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class HostLink:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._unfinished, self._unsent = b"", b""
        self._unread: list[LinkMessage] = []
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, what: str, **details: object) -> None:
        """Send a message, at once or by a later `flush`."""
        self._unsent += json.dumps({"is": what, **details}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much as the network takes."""
        try:
            while self.is_open and self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> list[LinkMessage]:
        """The messages that have come. `is_open` is false when there will be no more."""
        self._read()
        messages, self._unread = self._unread, []
        return messages

    def receive_one(self) -> LinkMessage | None:
        """The first of the messages that have come; None if there is none."""
        self._read()
        return self._unread.pop(0) if self._unread else None

    def _read(self) -> None:
        data = self._unfinished
        try:
            while part := self._socket.recv(_READ_BYTES):
                data += part
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._unfinished = data.split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE_BYTES:
            self.is_open = False
        for line in lines:
            message = None
            with contextlib.suppress(ValueError):
                message = json.loads(line)
            if not isinstance(message, dict) or "is" not in message:
                # Another program has found the port.
                self.is_open = False
                break
            self._unread.append(message)

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


class Lease:
    """How long a host may run its ranks without an answer; see the module's description."""

    def __init__(self, length_s: float, now: float) -> None:
        self._length_s, self._margin_s = length_s, (MARGIN - 1) / 2 * length_s
        self._sent: dict[int, float] = {}  # the pings that have no answer yet
        self._pings = 0
        self.ends_at = now + length_s

    @property
    def ranks_end_at(self) -> float:
        """When ranks have to end by themselves: soon after the fork server should have ended them,
        and before the first host goes on.
        """
        return self.ends_at + self._margin_s

    def ping(self, now: float) -> int:
        """The number of a ping that is sent now."""
        self._pings += 1
        self._sent[self._pings] = now
        return self._pings

    def answered(self, number: int) -> None:
        """A ping has been answered."""
        if number in self._sent:
            self.ends_at = max(self.ends_at, self._sent[number] + self._length_s)
            self._sent = {each: sent for each, sent in self._sent.items() if each > number}


# -- where hosts meet ------------------------------------------------------------------------------


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Address and port of HOST:PORT; the port may be left out."""
    host, colon, port = endpoint.rpartition(":") if not endpoint.endswith("]") else ("", "", "")
    if not colon:
        host, port = endpoint, str(_DEFAULT_PORT)
    return host.strip("[]"), int(port)


def listen(endpoint: str) -> socket.socket | None:
    """Listen at an endpoint for other hosts; None if its address is not one of this host's.

    Raises:
        OSError: the name cannot be resolved, or the port is in use.
    """
    host, port = parse_endpoint(endpoint)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0))
        except OSError:
            return None
    # A host may know its own name by a loopback address, where the others would not find it.
    is_loopback = host == "localhost" or host.startswith("127.") or host == "::1"
    where = (str(address[0]) if is_loopback else "", port)
    return socket.create_server(where, family=family, backlog=64)


def connect(endpoint: str, timeout_s: float) -> HostLink:
    """Connect to the first host.

    Raises:
        OSError: it does not listen, or does not answer in time.
    """
    return HostLink(socket.create_connection(parse_endpoint(endpoint), timeout_s))
