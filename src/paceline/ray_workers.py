"""What Ray runs for `paceline.ray.launch`: an actor for each rank, and the coordinator of an
elastic job.

    driver  <--post, heard-->  coordinator  <--changes, tell-->  worker: main thread runs the script
                               (serves the store)                        threads keep its job page

A worker of an elastic job has a job page of its own, on which it shows what the driver has decided:
so a rank need not know that there is no fork server above it. Ray carries the messages. A worker
runs the user's function in its main thread, where signals are handled, and therefore takes no calls
meanwhile: it asks the coordinator, which is asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline._linux import host_identity
from paceline.errors import LaunchError, PeerLost
from paceline.launch.elastic_job import elastic_variable
from paceline.launch.generation import Generation, Member
from paceline.launch.job_page import JobPage, Word
from paceline.launch.messages import ELASTIC

__all__ = [
    "Change",
    "Coordinator",
    "ElasticSeat",
    "ElasticWorker",
    "Outcome",
    "Telling",
    "Whereabouts",
    "Worker",
]

_LONGEST_POLL_S = 30.0
_LOOK_S = 0.05  # how often a worker looks whether it has something to tell
_READ_BYTES = 1 << 16

Change = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Telling:
    """What a worker tells: requests of its rank, and the step that has reached."""

    member: int
    requests: list[Change]
    step: int | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of the user's function ended, and when."""

    when: float
    result: Any = None
    error: BaseException | None = None
    has_lost_peer: bool = False  # the error is that another rank ended: no fault of the function


class Worker:
    """One rank. `address` is called on all workers before `run` is called on any."""

    def address(self) -> tuple[str, str, int]:
        """This node's identity and address, and a free port for rank 0 to serve the store."""
        import ray

        # Bound as long as this actor lives, so that the system gives the port to nobody else.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("", 0))
        port: int = self._reservation.getsockname()[1]
        ray_api: Any = ray  # Ray's annotations are partial
        return ray_api.get_runtime_context().get_node_id(), ray_api.util.get_node_ip_address(), port

    def run(self, variables: dict[str, str], payload: bytes) -> bytes:
        """Runs in the actor's main thread, so that the function may handle signals. Returns an
        `Outcome`, pickled.
        """
        import cloudpickle

        from paceline.launch.init import destroy_process_group

        os.environ.update(variables)
        fn, args, kwargs = cloudpickle.loads(payload)
        try:
            outcome = Outcome(time.time(), fn(*args, **kwargs))
        except BaseException as error:
            error.add_note(f"raised by rank {variables['RANK']}:\n{traceback.format_exc()}")
            has_lost_peer = isinstance(error, PeerLost)
            outcome = Outcome(time.time(), None, _portable(error), has_lost_peer)
        finally:
            destroy_process_group()
        return bytes(cloudpickle.dumps(outcome))


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else one with the same message."""
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        replacement = LaunchError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            replacement.add_note(note)
        return replacement
    return error


# -- elastic jobs ----------------------------------------------------------------------------------


class Coordinator:
    """Serves the store of an elastic job and passes on what driver and workers tell each other.

    What the driver posts is a growing list of changes of the job page, which every worker follows
    from its beginning. Calls that wait for something to come return after a while without it.
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._tellings: list[Telling] = []
        self._heard = 0  # how many the driver has, which are kept no longer
        self._news = asyncio.Condition()

    async def serve_store(self) -> tuple[str, int]:
        """Address and port at which the ranks meet, as long as this actor lives."""
        import ray

        from paceline._torch_internals import TCPStore

        ray_api: Any = ray
        address = ray_api.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    async def post(self, changes: list[Change]) -> None:
        """From the driver: these are next."""
        async with self._news:
            self._changes += changes
            self._news.notify_all()

    async def changes(self, known: int) -> list[Change]:
        """To a worker: those after the first `known`."""
        await self._wait_for_news(lambda: len(self._changes) > known)
        return self._changes[known:]

    async def tell(self, telling: Telling) -> None:
        """From a worker."""
        async with self._news:
            self._tellings.append(telling)
            self._news.notify_all()

    async def heard(self, known: int, *, waits: bool) -> tuple[int, list[Telling]]:
        """To the driver: what workers have told after the first `known`; and how many that were."""
        if waits:
            await self._wait_for_news(lambda: self._heard + len(self._tellings) > known)
        # Calls may overtake each other.
        if known > self._heard:
            del self._tellings[: known - self._heard]
            self._heard = known
        return self._heard, list(self._tellings)

    async def _wait_for_news(self, is_there: Callable[[], bool]) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._news:
                await asyncio.wait_for(self._news.wait_for(is_there), _LONGEST_POLL_S)


@dataclasses.dataclass(frozen=True)
class ElasticSeat:
    """Which member of which job a worker is."""

    job: str
    member: int
    slot: int
    min_ranks: int
    max_ranks: int


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Where a worker runs: a host, as `host_identity` names it, and a process."""

    host: str
    pid: int


class ElasticWorker(Worker):
    """One life of a rank in an elastic job."""

    def whereabouts(self) -> Whereabouts:
        """Of this worker, which is up."""
        return Whereabouts(host_identity(), os.getpid())

    def run_elastic(
        self, variables: dict[str, str], payload: bytes, seat: ElasticSeat, coordinator: Any
    ) -> bytes:
        """As `run`, with a job page that follows the driver."""
        page = _Page(seat, coordinator)
        threading.Thread(target=page.follow, daemon=True).start()
        threading.Thread(target=page.tell, daemon=True).start()
        outcome = self.run({**variables, **page.variable()}, payload)
        page.tell_what_is_left()
        return outcome


class _Page:
    """The job page of this process, kept by two threads."""

    def __init__(self, seat: ElasticSeat, coordinator: Any) -> None:
        self._seat, self._coordinator = seat, coordinator
        self._page = JobPage.create(seat.job, min_ranks=seat.min_ranks, max_ranks=seat.max_ranks)
        # `paceline ps` and `paceline scale` are to find that of the driver.
        self._page.words[Word.SERVER_PID] = 0
        self._requests_read, self._requests_write = os.pipe()
        self._step: int | None = None
        self._telling = threading.Lock()

    def variable(self) -> dict[str, str]:
        """What makes this process a rank of an elastic job."""
        text = elastic_variable(
            pid=os.getpid(),
            page_fd=self._page.descriptor,
            requests_fd=self._requests_write,
            member=self._seat.member,
            slot=self._seat.slot,
        )
        return {ELASTIC: text}

    def follow(self) -> None:
        """Do what the driver posts, until the process ends."""
        import ray

        known = 0
        while True:
            changes = ray.get(self._coordinator.changes.remote(known))
            for change in changes:
                self._apply(change)
            known += len(changes)

    def _apply(self, change: Change) -> None:
        match change["is"]:
            case "seat":
                self._page.seat(change["slot"], change["member"], change["pid"])
            case "vacate":
                self._page.vacate(change["slot"])
            case "publish":
                members = tuple(Member(*each) for each in change["members"])
                self._page.publish(Generation(change["number"], members, change["reason"]))
            case "terminate" if change["member"] == self._seat.member:
                os.kill(os.getpid(), signal.SIGTERM)

    def tell(self) -> None:
        """Pass on what the rank asks for, until the process ends."""
        while True:
            select.select([self._requests_read], [], [], _LOOK_S)
            self.tell_what_is_left()

    def tell_what_is_left(self) -> None:
        import ray

        with self._telling:
            requests = self._read_requests()
            step = self._page.step_in(self._seat.slot)
            if requests or step != self._step:
                self._step = step
                ray.get(self._coordinator.tell.remote(Telling(self._seat.member, requests, step)))

    def _read_requests(self) -> list[Change]:
        if not select.select([self._requests_read], [], [], 0)[0]:
            return []
        # A rank writes whole lines, each in one piece.
        return [json.loads(line) for line in os.read(self._requests_read, _READ_BYTES).splitlines()]
