"""A rank's view of the elastic job it belongs to: `paceline run --elastic MIN:MAX`.

Which processes train together is decided by the fork server alone. It publishes generations on the
job page, which every rank has mapped; a rank reads the newest one and tells the fork server, in a
line on a pipe that all ranks write to, that it is ready to be counted in, trains together with the
others, is about to leave, or is failing.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping

from paceline.errors import CollectiveTimeout, GroupError
from paceline.launch.generation import Generation
from paceline.launch.job_page import JobPage, Word
from paceline.launch.messages import ELASTIC

__all__ = ["ElasticJob", "current_elastic_job", "elastic_variable", "request_line"]

_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005


class ElasticJob:
    """The elastic job of this process. `member` is its id, which no other process will ever have;
    `slot` is its place on the host, which a replacement inherits.
    """

    def __init__(self, page: JobPage, requests_fd: int, member: int, slot: int) -> None:
        self._page = page
        self._requests_fd = requests_fd
        self.member = member
        self.slot = slot
        self.min_ranks = int(page.words[Word.MIN_RANKS])
        self.max_ranks = page.max_ranks

    def latest(self) -> int:
        """The number of the newest generation, -1 before the first. A memory read."""
        return int(self._page.words[Word.LATEST])

    def is_ending(self) -> bool:
        """Whether the whole job was asked to end, and not this rank alone to leave it."""
        return bool(self._page.words[Word.IS_ENDING])

    def has_lost(self, generation: Generation) -> bool:
        """Whether a member of a generation has ended, also while there is no next one yet."""
        return any(self._page.member_in(member.slot) != member.id for member in generation.members)

    def has_broken(self, generation: Generation) -> bool:
        """Whether a generation has lost a member, or its members each other: then the next one is
        of the same. Not if others only join or leave, which they do at the end of a batch.
        """
        if self.has_lost(generation):
            return True
        if self.latest() <= generation.number:
            return False
        following = self._page.published(generation.number + 1)
        return following is None or following.generation.members == generation.members

    def check_lease(self) -> None:
        """Make sure that the job does not go on without the host of this process.

        The fork server of a host ends its ranks when it has lost the first host. One that is
        stopped cannot, so that they look themselves.

        Raises:
            GroupError: it may.
        """
        ends_ns = self._page.words[Word.LEASE_ENDS]
        if ends_ns and time.monotonic_ns() >= ends_ns:
            server = int(self._page.words[Word.SERVER_PID])
            raise GroupError(
                f"the rank in slot {self.slot} ends, because the job may have gone on without this "
                "host: the first host of the job has not been heard for too long by the launcher's "
                f"fork server here (pid {server}; stopped? then: kill -CONT {server}). Start the "
                "same command here again to join the job"
            )

    def wait_beyond(self, number: int, timeout_s: float) -> Generation:
        """The newest generation, once there is one newer than `number`.

        Raises:
            CollectiveTimeout: there was none in time.
            GroupError: the job may have gone on without this host.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _SHORTEST_PAUSE_S
        while True:
            # First: a fork server that is stopped leaves on the page what is no longer so.
            self.check_lease()
            if self.latest() > number:
                break
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"the rank in slot {self.slot} has waited {timeout_s:g} s for a generation "
                    f"after {number}: the job needs {self.min_ranks} ranks that are ready; see "
                    "`paceline ps` for those it has"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        published = self._page.newest()
        assert published is not None, "generations are never withdrawn"
        return published.generation

    def ready(self) -> None:
        """This process can be counted in from now on."""
        self._request("ready")

    def settled(self, generation: Generation) -> None:
        """This process trains together with all others of a generation: each has the state."""
        self._request("settled", generation=generation.number)

    def leaving(self) -> None:
        """This process is to be left out of the next generation, and ends when it begins."""
        self._request("leaving")

    def failing(self, *, has_lost_peer: bool = False) -> None:
        """An error that nobody handled is ending this process. `has_lost_peer`: the error is that
        another rank ended, which is no fault of the script.
        """
        self._request("failing", has_lost_peer=has_lost_peer)

    def disconnected(self, generation: Generation) -> None:
        """The members of a generation have lost each other, though none of them has ended."""
        self._request("disconnected", generation=generation.number)

    def report_step(self, step: int) -> None:
        """This process has the state of training after so many steps."""
        self._page.set_step(self.slot, step)

    def _request(self, what: str, **details: object) -> None:
        os.write(self._requests_fd, request_line(what, member=self.member, **details))


def request_line(what: str, **details: object) -> bytes:
    """One request to the fork server. Short enough for the kernel to write it as a whole."""
    return json.dumps({"is": what, **details}).encode() + b"\n"


def current_elastic_job() -> ElasticJob | None:
    """The elastic job that this process is a rank of; None in any other process."""
    text = os.environ.get(ELASTIC)
    return None if text is None else _open_job(text, os.getpid())


@functools.cache
def _open_job(text: str, pid: int) -> ElasticJob | None:
    variable: Mapping[str, int] = json.loads(text)
    # What a rank starts - loader workers, programs - inherits the variable, but is not the rank.
    if variable["pid"] != pid:
        return None
    for descriptor in (variable["page_fd"], variable["requests_fd"]):
        os.set_inheritable(descriptor, False)
    page = JobPage(variable["page_fd"])
    return ElasticJob(page, variable["requests_fd"], variable["member"], variable["slot"])


def elastic_variable(*, pid: int, page_fd: int, requests_fd: int, member: int, slot: int) -> str:
    """The value of PACELINE_ELASTIC for one rank; the descriptors are open in it."""
    return json.dumps(
        {"pid": pid, "page_fd": page_fd, "requests_fd": requests_fd, "member": member, "slot": slot}
    )
