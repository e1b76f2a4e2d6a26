"""An elastic job whose ranks are Ray actors: the driver decides who belongs to it.

What is to be done is decided in `launch/membership.py`, as for `paceline run --elastic`. A rank's
life is an actor: a replacement is a new one, in the same slot, wherever Ray places it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from paceline.errors import LaunchError
from paceline.launch.generation import Member
from paceline.launch.job_page import JobPage, Word
from paceline.launch.membership import (
    Fail,
    Kill,
    Membership,
    Order,
    Publish,
    Start,
    Tell,
    Terminate,
    Verdict,
)
from paceline.launch.messages import ElasticConfig
from paceline.ray_workers import (
    Change,
    Coordinator,
    ElasticSeat,
    ElasticWorker,
    Outcome,
    Telling,
    Whereabouts,
)
from paceline.telemetry.variables import RUN_ID

__all__ = ["ElasticRun", "NewActor"]

_LONGEST_WAIT_S = 1.0
_SETTLE_S = 30.0  # for the coordinator to answer

# Makes an actor of a class: in the place of a slot, or (None) anywhere.
NewActor: TypeAlias = Callable[[type, int | None], Any]


class ElasticRun:
    """One job, from its start to its end.

    Args:
        ray: the module.
        new_actor: starts actors.
        payload: the user's call, pickled.
        config: of the job.
        variables: further ones for every rank.
    """

    def __init__(
        self,
        ray: Any,
        new_actor: NewActor,
        payload: bytes,
        config: ElasticConfig,
        variables: dict[str, str],
    ) -> None:
        self._ray, self._new_actor, self._payload, self._config = ray, new_actor, payload, config
        self._membership = Membership(config)
        self._actors: dict[int, Any] = {}
        self._members: dict[int, Member] = {}
        self._hosts: dict[str, int] = {}  # those that ranks have run on, numbered as they came
        self._calls: dict[Any, int] = {}  # calls under way -> member
        self._heard = 0  # how much of what workers have told is known here
        self._results: dict[int, Any] = {}  # by slot
        self._coordinator = new_actor(Coordinator, None)
        address, port = ray.get(self._coordinator.serve_store.remote())
        self._page = self._new_page()
        self._variables = {
            **variables,
            "WORLD_SIZE": str(config.max_ranks),
            "LOCAL_WORLD_SIZE": str(config.max_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PACELINE_LAUNCHER": "Ray",
            RUN_ID: self._page.job,
        }

    def _new_page(self) -> JobPage:
        """What `paceline ps` and `paceline scale` find on the driver's host."""
        page = JobPage.create(
            uuid.uuid4().hex, min_ranks=self._config.min_ranks, max_ranks=self._config.max_ranks
        )
        self._requests_read, self._requests_write = os.pipe()
        os.set_blocking(self._requests_read, False)
        page.words[Word.REQUESTS_FD] = self._requests_write
        return page

    def run(self) -> list[Any]:
        """The results of the ranks that were there at the end, in the order of their slots.

        Raises:
            LaunchError: the job could not go on.
            Exception: that of a rank's function.
        """
        heard = self._coordinator.heard.remote(0, waits=True)
        while not self._membership.is_over:
            self._page.words[Word.TARGET] = self._membership.target
            now = time.monotonic()
            self._follow(self._membership.decide(now))
            pause_s = min(max(0.0, self._membership.wake_at(now) - now), _LONGEST_WAIT_S)
            ready, _ = self._ray.wait([heard, *self._calls], num_returns=1, timeout=pause_s)
            if heard in ready:
                self._note_told(self._ray.get(heard))
                heard = self._coordinator.heard.remote(self._heard, waits=True)
            self._read_scale_requests()
            for call in ready:
                if call in self._calls:
                    self._note_call(call)
        return [self._results[slot] for slot in sorted(self._results)]

    def close(self) -> None:
        """End whatever still runs."""
        for actor in (*self._actors.values(), self._coordinator):
            self._ray.kill(actor)
        self._page.close()
        for descriptor in (self._requests_read, self._requests_write):
            os.close(descriptor)

    # -- what is ordered ---------------------------------------------------------------------------

    def _follow(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Start():
                    self._start(order.member)
                case Terminate():
                    self._post({"is": "terminate", "member": order.member_id})
                case Kill():
                    self._ray.kill(self._actors[order.member_id])
                case Publish():
                    self._publish(order)
                case Fail():
                    raise LaunchError(order.reason)
                case Tell():
                    sys.stderr.write(f"paceline: {order.text}\n")

    def _start(self, member: Member) -> None:
        actor = self._new_actor(ElasticWorker, member.slot)
        self._actors[member.id], self._members[member.id] = actor, member
        # When it answers, it is up.
        self._calls[actor.whereabouts.remote()] = member.id

    def _publish(self, order: Publish) -> None:
        # Membership decides without knowing where Ray has placed them.
        members = tuple(self._members[member.id] for member in order.generation.members)
        generation = dataclasses.replace(order.generation, members=members)
        self._page.publish(generation)
        self._post(
            {
                "is": "publish",
                "number": generation.number,
                "members": [dataclasses.astuple(member) for member in members],
                "reason": generation.reason,
            }
        )

    def _post(self, change: Change) -> None:
        # Waits, so that changes come in this order.
        self._ray.get(self._coordinator.post.remote([change]), timeout=_SETTLE_S)

    # -- what happened -----------------------------------------------------------------------------

    def _note_told(self, heard: tuple[int, list[Telling]]) -> None:
        first, tellings = heard
        for told in tellings[max(0, self._heard - first) :]:
            for request in told.requests:
                self._note_request(told.member, request)
            if told.step is not None and told.member in self._members:
                self._page.set_step(self._members[told.member].slot, told.step)
                self._membership.observe_steps({told.member: told.step})
        self._heard = max(self._heard, first + len(tellings))

    def _note_request(self, member: int, request: Change) -> None:
        match request["is"]:
            case "ready":
                self._membership.ready(member)
            case "settled":
                self._membership.settled(request["generation"])
            case "leaving":
                self._membership.leaving(member)
            case "disconnected":
                self._membership.disconnected(request["generation"])

    def _read_scale_requests(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError):
            for line in os.read(self._requests_read, 1 << 16).splitlines():
                request = json.loads(line)
                if request.get("is") == "scale" and isinstance(request.get("ranks"), int):
                    self._membership.scale(request["ranks"])

    def _note_call(self, call: Any) -> None:
        """An actor is up, or the function has ended there, or the actor is lost."""
        import cloudpickle

        member = self._calls.pop(call)
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            slot = self._members[member].slot
            lost = LaunchError(f"rank {slot}, a Ray actor, died: {reason}", rank=slot)
            self._note_end(member, -signal.SIGKILL, Outcome(time.time(), error=lost))
            return
        if isinstance(answer, Whereabouts):
            self._begin(member, answer)
            return
        outcome: Outcome = cloudpickle.loads(answer)
        if outcome.error is not None:
            self._membership.failing(member, has_lost_peer=outcome.has_lost_peer)
        self._note_end(member, 0 if outcome.error is None else 1, outcome)

    def _begin(self, member_id: int, whereabouts: Whereabouts) -> None:
        host = self._hosts.setdefault(whereabouts.host, len(self._hosts))
        member = dataclasses.replace(self._members[member_id], host=host)
        self._members[member_id], pid = member, whereabouts.pid
        self._page.seat(member.slot, member.id, pid)
        self._membership.started(member.id, pid)
        self._post({"is": "seat", "slot": member.slot, "member": member.id, "pid": pid})
        rank = {"RANK": str(member.slot), "LOCAL_RANK": str(member.slot)}
        seat = ElasticSeat(
            self._page.job, member.id, member.slot, self._config.min_ranks, self._config.max_ranks
        )
        variables = {**self._variables, **rank}
        call = self._actors[member.id].run_elastic.remote(
            variables, self._payload, seat, self._coordinator
        )
        self._calls[call] = member.id

    def _note_end(self, member_id: int, exitcode: int, outcome: Outcome) -> None:
        # What it has told before it ended counts before its end.
        heard = self._coordinator.heard.remote(self._heard, waits=False)
        self._note_told(self._ray.get(heard, timeout=_SETTLE_S))
        member = self._members.pop(member_id)
        self._ray.kill(self._actors.pop(member_id))
        self._page.vacate(member.slot)
        self._post({"is": "vacate", "slot": member.slot})
        verdict = self._membership.ended(member_id, exitcode, time.monotonic())
        if verdict is Verdict.FINISHED:
            self._results[member.slot] = outcome.result
        elif verdict is Verdict.FATAL:
            self._follow(self._membership.decide(time.monotonic()))
            raise outcome.error or LaunchError(
                f"rank {member.slot} ended before it took part", rank=member.slot
            )
