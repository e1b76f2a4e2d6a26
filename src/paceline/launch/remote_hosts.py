"""The other hosts of an elastic job, seen from the first one: who has come, what they say, and who
has not been heard for too long.
"""

from __future__ import annotations

import dataclasses
import math
import selectors
import socket
import time
from collections.abc import Iterator

from paceline.launch.host_link import MARGIN, HostLink, LinkMessage
from paceline.launch.membership import Host

__all__ = ["Arrival", "RemoteHost", "RemoteHosts"]

_INTRODUCE_S = 30.0  # what a connection may take to say who it is


@dataclasses.dataclass
class Arrival:
    """A connection whose other end has not been admitted yet."""

    link: HostLink
    deadline: float


@dataclasses.dataclass
class RemoteHost:
    """A host that takes part."""

    host: Host
    link: HostLink
    heard_at: float
    is_released: bool = False  # it leaves, and its connection may end


class RemoteHosts:
    """All there are. Without a `listener` there are none, and none will come."""

    def __init__(self, listener: socket.socket | None, silence_s: float) -> None:
        self.listener = listener
        self._silence_s = silence_s
        self._arrivals: list[Arrival] = []
        self._hosts: dict[int, RemoteHost] = {}
        self._selector: selectors.BaseSelector | None = None

    def __getitem__(self, number: int) -> RemoteHost:
        return self._hosts[number]

    def __iter__(self) -> Iterator[RemoteHost]:
        return iter([*self._hosts.values()])

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Let `selector` wake up when a host has come or says something."""
        self._selector = selector
        if self.listener is not None:
            self.listener.setblocking(False)
            selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """In a child, which has nothing to do with them."""
        for each in (*self._arrivals, *self):
            each.link.close()
        if self.listener is not None:
            self.listener.close()

    def wake_at(self) -> float:
        """When to look again at the latest."""
        moments = [arrival.deadline for arrival in self._arrivals]
        moments += [remote.heard_at + self._silence_s * MARGIN for remote in self]
        return min(moments, default=math.inf)

    # -- what they say -----------------------------------------------------------------------------

    def accept(self) -> None:
        """Let in whoever has knocked."""
        assert self._selector is not None
        while self.listener is not None:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # nobody any more, or somebody who has gone again
            link = HostLink(connection)
            self._selector.register(link, selectors.EVENT_READ)
            self._arrivals.append(Arrival(link, time.monotonic() + _INTRODUCE_S))

    def introductions(self, now: float) -> Iterator[tuple[Arrival, LinkMessage]]:
        """The first message of each that has said who it is. Those that do not are dropped."""
        for arrival in [*self._arrivals]:
            messages = arrival.link.receive()
            if messages:
                self._arrivals.remove(arrival)
                yield arrival, messages[0]
            elif not arrival.link.is_open or now > arrival.deadline:
                self._arrivals.remove(arrival)
                self._close(arrival.link)

    def admit(self, host: Host, arrival: Arrival, now: float) -> RemoteHost:
        remote = self._hosts[host.number] = RemoteHost(host, arrival.link, now)
        return remote

    def refuse(self, arrival: Arrival, reason: str) -> None:
        arrival.link.send("refused", reason=reason)
        self._close(arrival.link)

    def messages(self, now: float) -> Iterator[tuple[RemoteHost, LinkMessage]]:
        """What all have said."""
        for remote in self:
            remote.link.flush()
            for message in remote.link.receive():
                remote.heard_at = now
                yield remote, message

    def take_lost(self, now: float) -> Iterator[tuple[RemoteHost, str]]:
        """Those that are gone, and how that was noticed. A connection ends with its fork server,
        and the ranks of a host do the same.
        """
        for remote in self:
            is_silent = now > remote.heard_at + self._silence_s * MARGIN
            if remote.link.is_open and not is_silent:
                continue
            self.drop(remote)
            if not remote.is_released:
                how = f"not heard for {self._silence_s:g} s" if is_silent else "connection lost"
                yield remote, how

    def drop(self, remote: RemoteHost) -> None:
        del self._hosts[remote.host.number]
        self._close(remote.link)

    def _close(self, link: HostLink) -> None:
        assert self._selector is not None
        self._selector.unregister(link)
        link.close()

    # -- what they are told ------------------------------------------------------------------------

    def tell(self, what: str, skip: int | None = None, /, **details: object) -> None:
        """Tell all hosts, or all but one."""
        for remote in self:
            if remote.host.number != skip:
                remote.link.send(what, **details)

    # -- slots -------------------------------------------------------------------------------------

    def free_slots(self, count: int, taken: range, total: int) -> range | None:
        """The first `count` slots in a row that no host has. `taken` are the first host's."""
        used = sorted([taken, *(remote.host.slots for remote in self)], key=lambda each: each.start)
        start = 0
        for slots in used:
            if slots.start - start >= count:
                break
            start = slots.stop
        return range(start, start + count) if start + count <= total else None
