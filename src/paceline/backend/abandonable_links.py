"""Connecting to ranks on other hosts, unless the group becomes obsolete before all have come.

Gloo connects in its constructor, which waits for every rank and cannot be interrupted. So it runs
in a thread, which whoever waits for it may leave behind; it meets the others through a store that
stops waiting when the group is obsolete, and gives connections that nobody answers a short time.

Two hosts may be cut from each other while the first host of the job hears both. Nobody else
notices, and the kernel would try for a quarter of an hour: so it is told to give up sooner.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

from paceline._linux import give_up_when_silent, open_sockets
from paceline._torch_internals import Store
from paceline.backend.call_thread import CallTicket
from paceline.backend.host_placement import Placement
from paceline.backend.multi_host_call import Links
from paceline.core import Communicator
from paceline.core.store_exchange import AbandonableStore
from paceline.errors import GroupAborted, PeerLost

__all__ = ["connect_unless_obsolete"]

_LOOK_S = 0.005
# The thread leaves the store at its next look. One that were in there, in Python, when this process
# ends would abort it. From Gloo's own waits it does not return so soon.
_LEAVE_S = 1.0
# All ranks listen when the first of them connects, so that an answer takes no longer than a packet.
_ANSWER_LIMIT = timedelta(seconds=20)
# Longer than a rank may be stopped, whose side of a connection may then take nothing.
_SILENCE_LIMIT_S = 15


class _MeetingStore(Store):
    """What Gloo uses of a store."""

    def __init__(self, store: Store, is_obsolete: Callable[[], bool]) -> None:
        super().__init__()
        self._abandonable = AbandonableStore(store, is_obsolete)

    def set(self, key: str, value: str) -> None:
        self._abandonable.set(key, value)

    def get(self, key: str) -> bytes:
        return self._abandonable.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._abandonable.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _ANSWER_LIMIT) -> None:
        self._abandonable.wait(list(keys), timeout)


def connect_unless_obsolete(
    store: Store,
    placement: Placement,
    comm: Communicator,
    timeout: timedelta,
    is_obsolete: Callable[[], bool],
) -> Links:
    """The connections of a rank.

    Raises:
        GroupAborted: `is_obsolete()` is true.
        PeerLost: a rank did not answer.
    """
    made: list[Links] = []
    limit = min(timeout, _ANSWER_LIMIT)
    meeting = _MeetingStore(store, is_obsolete)

    def connect() -> None:
        before = open_sockets()
        made.append(Links(meeting, placement, comm, limit))
        for name, descriptor in open_sockets().items():
            if name not in before:
                with contextlib.suppress(OSError):  # another thread's, and closed meanwhile
                    give_up_when_silent(descriptor, _SILENCE_LIMIT_S)

    ticket = CallTicket(connect)
    threading.Thread(target=ticket.run, name="paceline-connect", daemon=True).start()
    while not ticket.has_ended(_LOOK_S):
        if is_obsolete():
            ticket.has_ended(_LEAVE_S)
            raise GroupAborted("the ranks of this group have changed before it was complete")
    try:
        ticket.wait()
    except (GroupAborted, PeerLost):
        raise
    except RuntimeError as error:
        # Also where ranks cannot reach each other: a host that was just lost is no reason to end.
        raise PeerLost(
            f"rank {placement.rank} could not connect to the ranks on other hosts: {error}"
        ) from error
    (links,) = made
    links.set_timeout(timeout)
    return links
