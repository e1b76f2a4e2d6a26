"""`LinkSpeed`: how fast messages travel between the hosts of a group, measured once, when a call
first needs to know.

The first rank of every host exchanges some messages with those of all others, all at the same time,
as a collective does. The slowest figures of all hosts count, and all ranks have the same: what is
chosen by them is the same everywhere.
"""

from __future__ import annotations

import ctypes as C
import dataclasses
import logging
import time

from paceline.backend.lane import message_capacity
from paceline.backend.multi_host_call import MultiHostCall
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES

__all__ = ["LinkSpeed", "measure_link"]

_ROUND_TRIPS = 3
_MESSAGES = 6
_MAX_MESSAGE_BYTES = 256 << 10
_AHEAD = 3  # messages on their way
_logger = logging.getLogger("paceline")


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """`latency_s`: from one host to another, with all it takes to send and to notice a message.
    `bytes_per_s`: what one host receives from all others.
    """

    latency_s: float
    bytes_per_s: float


def measure_link(call: MultiHostCall) -> LinkSpeed:
    """Called by all ranks, in a call that all of them make."""
    figures = (C.c_double * 2)()
    if call.placement.local_index == 0:
        latency_s = min(_exchange(call, 1, 0)[0] for _ in range(_ROUND_TRIPS))
        message_bytes = min(_MAX_MESSAGE_BYTES, message_capacity(call.placement.hosts))
        arrivals = _exchange(call, _MESSAGES, message_bytes)
        # Links that are limited let the first bytes pass.
        half = _MESSAGES // 2
        nbytes = half * message_bytes * len(call.placement.other_hosts)
        figures[0], figures[1] = _largest(
            call, latency_s, max(arrivals[-1] - arrivals[half - 1], 1e-6) / nbytes
        )
    request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=0, count=C.sizeof(figures))
    request.input = request.output = C.addressof(figures)
    call.run_local(request)
    speed = LinkSpeed(figures[0], 1.0 / figures[1])
    if call.placement.rank == 0:
        _logger.debug(
            "%d hosts, %d lanes: a message takes %.3f ms, a host receives %.1f MB/s",
            call.placement.hosts,
            call.placement.lanes,
            speed.latency_s * 1e3,
            speed.bytes_per_s / 1e6,
        )
    return speed


def _exchange(call: MultiHostCall, messages: int, nbytes: int) -> list[float]:
    """After how many seconds this host has had one, two, ... messages of every other one."""
    lane, others = call.links.lane, call.placement.other_hosts
    start = time.perf_counter()
    arrivals = []
    ahead = min(_AHEAD, messages)
    for sent in range(messages + ahead):
        if sent < messages:
            lane.send(lane.outgoing(call.header, call.left()), nbytes, others)
        if sent >= ahead:
            for host in others:
                lane.receive(host, call.left())
                lane.received(host)
            arrivals.append(time.perf_counter() - start)
    return arrivals


def _largest(call: MultiHostCall, *mine: float) -> list[float]:
    """The largest of all hosts, number by number."""
    lane, others = call.links.lane, call.placement.other_hosts
    message = lane.outgoing(call.header, call.left())
    numbers = C.c_double * len(mine)
    C.memmove(message.address, numbers(*mine), C.sizeof(numbers))
    lane.send(message, C.sizeof(numbers), others)
    largest = list(mine)
    for host in others:
        theirs = numbers.from_address(lane.receive(host, call.left()).address)
        largest = [max(pair) for pair in zip(largest, theirs, strict=True)]
        lane.received(host)
    return largest
