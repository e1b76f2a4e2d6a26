"""Who belongs to an elastic job: the rules, tried on hand-made stories and on random ones."""

from __future__ import annotations

import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.launch.generation import Member
from paceline.launch.membership import (
    FIRST_HOST,
    EndJob,
    Fail,
    Host,
    Kill,
    Membership,
    Publish,
    Release,
    Start,
    Tell,
    Terminate,
    Verdict,
)
from paceline.launch.messages import ElasticConfig

KILLED, SEGFAULT = -signal.SIGKILL, -signal.SIGSEGV


class World:
    """Processes that do what they are told, and the rules that must hold whatever happens."""

    def __init__(self, low=1, high=4, start=None, slots=None, **options):
        self.config = ElasticConfig(low, high, high if start is None else start, **options)
        self.membership = Membership(self.config, slots)
        self.hosts = {FIRST_HOST: slots or range(high)}
        self.now = 0.0
        self.alive: dict[int, Member] = {}
        self.generations: list = []
        self.leaving: set[int] = set()
        self.settled: dict[int, int] = {}
        self.told: list[str] = []
        self.orders: list = []
        self.doomed: set[int] = set()  # killed, but its end was not noticed yet
        self.deaths = self.starts = 0
        self.is_over = False
        self.decide()

    # -- events

    def ready(self, *members):
        for member in members:
            self.membership.ready(member)
        self.decide()

    def all_ready(self):
        self.ready(*self.alive)

    def train(self, step):
        """All members of the newest generation complete a step."""
        for member in self.generations[-1].members:
            if member.id in self.alive:
                self.settled[member.id] = step
        self.membership.observe_steps(dict(self.settled))
        self.decide()

    def leave(self, member):
        self.leaving.add(member)
        self.membership.leaving(member)
        self.decide()

    def fail(self, member, **options):
        self.membership.failing(member, has_lost_peer=False, **options)
        self.decide()

    def end(self, *members, code=KILLED):
        verdicts = []
        for member in members:
            del self.alive[member]
            self.settled.pop(member, None)
            verdict = self.membership.ended(member, code, self.now)
            self.deaths += verdict is Verdict.LOST
            self.is_over |= verdict in {Verdict.FINISHED, Verdict.FATAL, Verdict.ENDING}
            verdicts.append(verdict)
        self.decide()
        return verdicts[0] if len(verdicts) == 1 else verdicts

    def wait(self, seconds):
        self.now += seconds
        self.decide()

    def host_joins(self, number, slots):
        self.hosts[number] = slots
        self.membership.host_joined(Host(number, slots), len(slots))
        self.decide()

    def host_leaves(self, number):
        self.membership.host_leaving(number)
        self.decide()

    def lose_host(self, number):
        slots = self.hosts.pop(number)
        gone = [member.id for member in self.alive.values() if member.slot in slots]
        lost = self.membership.host_lost(number, "connection lost")
        assert sorted(member.id for member in lost) == sorted(gone)
        for member in gone:
            del self.alive[member]
            self.settled.pop(member, None)
        self.decide()

    def decide(self):
        self.orders = self.membership.decide(self.now)
        for order in self.orders:
            self.follow(order)
        again = self.membership.decide(self.now)
        assert again == [], "nothing is ordered twice"

    # -- orders, and what must hold for each

    def follow(self, order):
        match order:
            case Start():
                self._check_start(order.member)
                self.alive[order.member.id] = order.member
                self.membership.started(order.member.id, 1000 + order.member.id)
                self.starts += 1
            case Publish():
                self._check_generation(order.generation)
                self.generations.append(order.generation)
            case Terminate():
                self.leaving.add(order.member_id)
            case Kill():
                assert order.member_id in self.alive
                self.doomed.add(order.member_id)
            case EndJob():
                assert order.member_id in self.alive
                self.is_over = True
            case Fail():
                self.is_over = True
            case Release():
                slots = self.hosts.pop(order.host)
                assert not any(member.slot in slots for member in self.alive.values())
            case Tell():
                self.told.append(order.text)

    def _check_start(self, member):
        assert not self.is_over
        assert member.slot not in {each.slot for each in self.alive.values()}
        assert member.slot in self.hosts[member.host]
        assert member.id == self.starts, "ids are never used again"

    def _check_generation(self, generation):
        before = self.generations[-1] if self.generations else None
        assert generation.number == len(self.generations)
        assert generation.members == tuple(sorted(generation.members))
        assert all(self.alive.get(each.id) == each for each in generation.members)
        assert len(generation.members) <= self.config.max_ranks
        assert len(generation.members) >= self.config.min_ranks or self.is_over
        assert generation.number == 0 or generation.reason != "the job begins"
        if before is not None:
            is_regrouped = "connections between hosts were lost" in generation.reason
            assert generation.members != before.members or is_regrouped
            left_out = {each.id for each in before.members} - {
                each.id for each in generation.members
            }
            assert left_out <= self.leaving | self.doomed | (left_out - set(self.alive))
            if any(each in self.alive and each in self.settled for each in left_out):
                assert any(each.id in self.settled for each in generation.members)

    # -- questions

    @property
    def newest(self):
        return [member.slot for member in self.generations[-1].members]


@pytest.fixture
def world():
    """Four ranks that train."""
    world = World()
    world.all_ready()
    world.train(5)
    return world


def test_the_first_generation_waits_for_all_that_were_started():
    world = World(start=3)
    assert sorted(world.alive) == [0, 1, 2]
    world.ready(0)
    world.ready(2)
    assert world.generations == []
    world.ready(1)
    assert world.newest == [0, 1, 2]
    assert (world.generations[0].reason, world.told) == ("the job begins", [])


def test_the_first_generation_does_not_wait_for_one_that_has_died():
    world = World(start=3)
    world.ready(0, 1)
    world.end(2)
    assert world.newest == [0, 1]
    world.wait(1.0)
    world.all_ready()
    assert world.newest == [0, 1, 2]


def test_a_dead_rank_is_left_out_at_once_and_replaced(world):
    assert world.end(2) is Verdict.LOST
    assert world.newest == [0, 1, 3]
    assert world.told == [
        "rank 2 (pid 1002) was killed by SIGKILL at step 5: 3 ranks go on (generation 1)"
    ]
    world.ready(4)
    assert world.newest == [0, 1, 2, 3]
    assert world.told[-1] == "rank 2 (pid 1004) joins: 4 ranks go on (generation 2)"


def test_one_that_dies_before_it_joins_is_told_at_once(world):
    world.end(2)
    world.end(4)
    assert world.told[-1] == "rank 2 (pid 1004) was killed by SIGKILL before it had joined"
    assert len(world.generations) == 2


def test_newcomers_that_are_ready_together_join_together(world):
    world.end(1, 2)
    assert len(world.generations) == 2
    world.ready(4, 5)
    assert len(world.generations) == 3
    assert world.newest == [0, 1, 2, 3]


def test_too_few_ranks_wait_for_replacements():
    world = World(low=3)
    world.all_ready()
    world.train(1)
    world.end(0, 1)
    assert len(world.generations) == 1
    assert "2 of at least 3 ranks left; they wait for new ones" in world.told[-1]
    world.ready(4)
    assert world.newest == [0, 2, 3]
    world.ready(5)
    assert world.newest == [0, 1, 2, 3]


def test_all_may_die_and_begin_again(world):
    world.end(0, 1, 2, 3)
    assert sorted(world.alive) == [4, 5, 6, 7]
    assert world.told[-1].endswith(
        "no rank is left; new ones begin, from a checkpoint if there is one"
    )
    world.ready(6)
    assert world.newest == [2], "nobody waits for slow ones: they join later"
    assert world.told[-1] == "rank 2 (pid 1006) joins: 1 rank goes on (generation 1)"


def test_one_that_leaves_is_left_out_and_replaced_while_the_target_stays(world):
    world.leave(1)
    assert world.newest == [0, 2, 3]
    assert world.end(1, code=0) is Verdict.LEFT
    world.ready(4)
    assert world.newest == [0, 1, 2, 3]


def test_one_that_leaves_and_does_not_end_is_killed(world):
    world.leave(1)
    world.wait(29.0)
    assert world.orders == []
    world.wait(2.0)
    assert world.orders == [Kill(1)]


def test_the_state_of_training_is_not_left_behind():
    world = World(high=2)
    world.all_ready()
    world.train(3)
    world.membership.leaving(0)
    world.leaving.add(0)
    world.end(1)
    assert world.newest == [0], "it has the state, and nobody else"
    world.ready(2)
    assert world.newest == [0, 1]
    world.train(4)
    assert world.newest == [1]
    assert world.told[-1] == "rank 0 (pid 1000) leaves: 1 rank goes on (generation 3)"


def test_scaling_starts_ranks_in_free_slots_and_asks_the_highest_to_leave():
    world = World(start=2)
    world.all_ready()
    world.train(1)
    world.membership.scale(4)
    world.decide()
    assert {each.slot for each in world.alive.values()} == {0, 1, 2, 3}
    world.all_ready()
    world.train(2)
    assert world.newest == [0, 1, 2, 3]
    world.membership.scale(1)
    world.decide()
    asked = [order.member_id for order in world.orders if isinstance(order, Terminate)]
    assert asked == [3, 2, 1]
    assert world.newest == [0]
    assert world.end(1, 2, 3, code=0) == [Verdict.LEFT] * 3
    assert sorted(world.alive) == [0]
    assert "scaled from 4 to 1 ranks" in world.told
    leave = "; ".join(f"rank {slot} (pid 100{slot}) leaves" for slot in (1, 2, 3))
    assert world.told[-1] == f"{leave}: 1 rank goes on (generation 2)"


def test_one_that_starts_is_given_up_before_one_that_trains(world):
    world.end(0)
    world.membership.scale(3)
    world.decide()
    assert world.orders[-1] == Terminate(4)
    world.wait(4.0)
    assert world.orders == []
    world.wait(2.0)
    assert world.orders == [Kill(4)]
    assert world.end(4, code=-signal.SIGTERM) is Verdict.LEFT
    assert sorted(world.alive) == [1, 2, 3]


def test_a_stopped_rank_is_killed_after_a_while_unless_it_goes_on(world):
    world.membership.stopped(1, world.now)
    world.wait(9.0)
    world.membership.continued(1)
    world.wait(9.0)
    assert world.orders == []
    world.membership.stopped(1, world.now)
    world.wait(10.5)
    assert world.orders == [Kill(1)]
    assert len(world.generations) == 1, "not before it is dead"
    world.end(1)
    assert world.generations[-1].reason.startswith("rank 1 (pid 1001) was stopped for 10 s")


def test_one_that_was_stopped_and_is_then_left_out_is_killed_as_soon(world):
    """Those that it has left wait for it until it is dead."""
    world.membership.stopped(1, world.now)
    world.leave(1)
    world.wait(10.5)
    assert world.orders == [Kill(1)]


def test_an_error_of_the_script_ends_the_job(world):
    world.fail(2)
    assert world.orders == [EndJob(2)]
    assert world.end(0, code=-signal.SIGTERM) is Verdict.ENDING
    assert world.end(2, code=1) is Verdict.ENDING
    assert world.starts == 4


def test_an_error_that_is_over_before_it_was_heard_of_ends_the_job(world):
    world.membership.failing(2, has_lost_peer=False)
    assert world.end(2, code=1) is Verdict.FATAL


def test_an_error_about_a_lost_peer_is_nobodys_fault(world):
    world.membership.failing(2, has_lost_peer=True)
    assert world.end(2, code=1) is Verdict.LOST


def test_errors_are_survived_if_asked_for_but_not_the_same_over_and_over():
    world = World(high=2, restart_on_error=True)
    world.all_ready()
    world.train(7)
    verdicts = []
    for _ in range(3):
        world.wait(60.0)
        world.all_ready()
        latest = max(world.alive)
        world.fail(latest)
        verdicts.append(world.end(latest, code=1))
    assert verdicts == [Verdict.LOST, Verdict.LOST, Verdict.FATAL]
    assert "3 errors in a row" in world.told[-1]


def test_errors_with_progress_in_between_are_not_in_a_row():
    world = World(high=2, restart_on_error=True)
    world.all_ready()
    for step in range(10):
        world.train(step)
        latest = max(world.alive)
        world.fail(latest)
        assert world.end(latest, code=1) is Verdict.LOST
        world.wait(60.0)
        world.all_ready()


def test_ranks_that_fall_together_are_one_error(world):
    assert world.end(0, 1, 2, 3, code=SEGFAULT) == [Verdict.LOST] * 4
    world.all_ready()
    assert world.newest == [0, 1, 2, 3]


def test_a_script_that_cannot_start_is_not_tried_for_ever():
    world = World(high=1)
    starts = []
    while world.alive:
        starts.append(world.now)
        (member,) = world.alive
        world.end(member, code=SEGFAULT)
        world.wait(0.1)
        if not world.is_over:
            world.wait(60.0)
    assert len(starts) == 3


def test_the_pause_before_a_replacement_grows_while_they_die_early():
    world = World(high=1)
    pauses = []
    for _ in range(8):
        (member,) = world.alive
        world.end(member)
        began = world.now
        while not world.alive:
            world.now = world.membership.wake_at(world.now)
            world.decide()
        pauses.append(world.now - began)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_without_restarts_left_the_job_goes_on_down_to_its_least_number():
    world = World(low=2, high=4, max_restarts=1)
    world.all_ready()
    world.train(1)
    world.end(0)
    world.all_ready()
    world.train(2)
    assert world.end(1) is Verdict.LOST
    assert world.end(2) is Verdict.LOST
    assert world.starts == 5
    assert world.newest == [0, 3]
    assert world.end(3) is Verdict.FATAL
    assert "--max-restarts" in world.told[-1]


def test_when_a_rank_is_done_nobody_joins_and_late_ones_are_not_needed(world):
    world.end(3)
    assert sorted(world.alive) == [0, 1, 2, 4]
    assert world.end(0, code=0) is Verdict.FINISHED
    assert Kill(4) in world.orders
    assert world.newest == [1, 2]
    assert world.end(4) is Verdict.LEFT
    assert world.end(1, code=0) is Verdict.FINISHED
    assert world.newest == [2]
    assert world.end(2, code=0) is Verdict.FINISHED
    assert world.membership.is_over
    assert len(world.told) == 1, "the end needs no words"


def test_one_whose_steps_were_not_heard_is_needed_if_another_has_told_that_it_trains(world):
    world.end(3)
    world.ready(4)
    assert world.newest == [0, 1, 2, 3]
    world.membership.settled(0)
    world.membership.settled(2)
    assert world.end(0, code=0) is Verdict.FINISHED
    assert not any(isinstance(order, Kill) for order in world.orders)
    assert world.newest == [1, 2, 3]
    assert world.end(4, code=0) is Verdict.FINISHED


def test_what_is_told_of_an_older_generation_says_nothing_of_one_that_has_joined_since(world):
    world.end(3)
    world.ready(4)
    world.membership.settled(1)
    assert world.end(0, code=0) is Verdict.FINISHED
    assert Kill(4) in world.orders
    assert world.end(4) is Verdict.LEFT


def test_the_first_ranks_train_although_one_of_them_does_not():
    world = World(low=3, high=3)
    assert world.end(1, code=0) is Verdict.FINISHED
    world.ready(0)
    world.ready(2)
    assert world.newest == [0, 2]


def test_a_rank_killed_when_others_are_done_fails_the_job(world):
    world.end(0, code=0)
    assert world.end(1) is Verdict.FATAL
    assert "rank 1 (pid 1001) was killed by SIGKILL when training was over" in world.told[-1]


def test_a_replacement_that_ends_before_it_takes_part_does_not_end_training(world):
    world.end(3)
    assert world.end(4, code=0) is Verdict.LOST
    world.wait(1.0)
    world.all_ready()
    assert world.newest == [0, 1, 2, 3]


def test_a_script_without_training_ends_as_it_would_elsewhere():
    world = World(high=2)
    assert world.end(0, code=0) is Verdict.FINISHED
    assert world.orders == []
    assert world.end(1, code=0) is Verdict.FINISHED
    assert world.membership.is_over


def test_a_job_that_was_asked_to_end_starts_nothing_and_does_not_keep_the_rest_waiting():
    world = World(low=3)
    world.all_ready()
    world.train(1)
    world.membership.stop()
    world.is_over = True
    assert world.end(0, 1) == [Verdict.ENDING] * 2
    assert world.newest == [2, 3]
    assert world.starts == 4


KINDS = ("ready", "train", "kill", "crash", "error", "leave", "stop", "continue", "scale", "wait")
KINDS = (*KINDS, "exit", "ready", "train")
EVENTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 100))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3), st.integers(0, 2), st.integers(0, 20), st.booleans(),
    st.lists(EVENTS, max_size=40),
)  # fmt: skip
def test_whatever_happens_the_rules_hold(low, more, restarts, restart_on_error, events):
    """`World` checks every order. Afterwards the job comes to rest with as many members as it is
    meant to have, or is over.
    """
    world = World(low, low + more, low, max_restarts=restarts, restart_on_error=restart_on_error)
    step = 0
    for kind, number in events:
        members = sorted(world.alive)
        one = members[number % len(members)] if members else None
        if kind == "wait":
            world.wait(number / 5)
        elif kind == "scale":
            world.membership.scale(number % (low + more + 2))
            world.decide()
        elif kind == "train" and world.generations:
            step += 1
            world.train(step)
        elif one is not None:
            _let_happen(world, kind, one)
    _let_settle(world, step)
    assert world.deaths <= restarts + more, "replacements and shrinking are bounded"
    if not world.is_over:
        assert len(world.newest) == world.membership.target
        assert world.config.min_ranks <= world.membership.target <= world.config.max_ranks


def _let_happen(world, kind, member):
    if kind == "ready":
        world.ready(member)
    elif kind in ("kill", "crash", "exit"):
        is_trained = member in world.settled
        code = {"kill": KILLED, "crash": SEGFAULT, "exit": 0 if is_trained else KILLED}[kind]
        world.end(member, code=code)
    elif kind == "error":
        world.fail(member)
        world.end(member, code=1)
    elif kind == "leave":
        world.leave(member)
    elif kind == "stop":
        world.membership.stopped(member, world.now)
        world.decide()
    elif kind == "continue":
        world.membership.continued(member)
        world.decide()


def _let_settle(world, step):
    """Everybody does what it should: gets ready, trains, leaves when asked, dies when killed."""
    for _ in range(60):
        is_complete = world.generations and len(world.newest) == world.membership.target
        if world.is_over or (is_complete and len(world.alive) == world.membership.target):
            return
        for member in world.doomed & set(world.alive):
            world.end(member)
        world.all_ready()
        if world.generations:
            step += 1
            world.train(step)
            current = {each.id for each in world.generations[-1].members}
            for member in world.leaving & set(world.alive) - current:
                world.end(member, code=0)
        world.wait(10.0)


# -- several hosts ---------------------------------------------------------------------------------


@pytest.fixture
def two_hosts():
    """Two hosts with two ranks each, which train; there may be five in all."""
    world = World(1, 5, 2, slots=range(2), hosts=2)
    assert world.membership.missing_hosts == 1
    world.all_ready()
    assert world.generations == [], "the other host has not come"
    world.host_joins(1, range(2, 4))
    assert world.generations == []
    world.all_ready()
    world.train(5)
    assert (world.newest, world.membership.target) == ([0, 1, 2, 3], 4)
    return world


def test_a_lost_host_is_the_death_of_its_ranks_in_one_generation(two_hosts):
    two_hosts.lose_host(1)
    assert two_hosts.newest == [0, 1]
    assert two_hosts.told == [
        "host 1 with ranks 2, 3 was lost (connection lost) at step 5: 2 ranks go on (generation 1)"
    ]
    assert two_hosts.deaths == 0, "no fault of the script"
    two_hosts.host_joins(2, range(2, 4))
    two_hosts.all_ready()
    assert two_hosts.newest == [0, 1, 2, 3]
    assert two_hosts.membership.target == 4
    assert [member.host for member in two_hosts.generations[-1].members] == [0, 0, 2, 2]


def test_a_host_that_joins_brings_its_ranks_as_far_as_there_may_be(two_hosts):
    two_hosts.host_joins(2, range(4, 6))
    assert "host 2 joins the job" in two_hosts.told
    two_hosts.all_ready()
    assert two_hosts.newest == [0, 1, 2, 3, 4]
    two_hosts.end(4)
    two_hosts.wait(1.0)
    two_hosts.all_ready()
    assert len(two_hosts.newest) == 5


def test_a_host_leaves_when_its_ranks_have(two_hosts):
    two_hosts.host_leaves(1)
    assert two_hosts.leaving == {2, 3}
    assert two_hosts.newest == [0, 1]
    two_hosts.end(2, 3, code=0)
    assert Release(1) in two_hosts.orders
    assert two_hosts.told[0] == "host 1 leaves the job"
    two_hosts.wait(100.0)
    assert two_hosts.newest == [0, 1]


def test_a_dead_rank_is_replaced_on_the_host_with_the_fewest():
    world = World(1, 4, 2, slots=range(3), hosts=2)
    world.host_joins(1, range(3, 6))
    world.all_ready()
    assert world.newest == [0, 1, 3, 4]
    world.lose_host(1)
    world.all_ready()
    assert world.newest == [0, 1, 2], "the first host has one more slot"


def test_a_host_that_is_lost_when_training_is_over_fails_the_job(two_hosts):
    two_hosts.end(0, code=0)
    two_hosts.lose_host(1)
    assert any(isinstance(order, Fail) for order in two_hosts.orders)


def test_ranks_that_lost_each_other_get_another_generation(two_hosts):
    two_hosts.membership.disconnected(0)
    two_hosts.membership.disconnected(0)
    two_hosts.decide()
    assert [len(each.members) for each in two_hosts.generations] == [4, 4]
    two_hosts.membership.disconnected(0)
    two_hosts.decide()
    assert len(two_hosts.generations) == 2, "it was about one that is over"
    for number in range(1, 6):
        assert not two_hosts.is_over
        two_hosts.membership.disconnected(number)
        two_hosts.decide()
    assert two_hosts.is_over


HOST_EVENTS = st.tuples(
    st.sampled_from(
        ["ready", "kill", "leave", "train", "train", "wait", "join", "lose", "host leaves"]
    ),
    st.integers(0, 50),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(HOST_EVENTS, max_size=40))
# A rank that a host was to begin with has been started on another one instead.
@example(1, [("join", 0), ("join", 0), ("kill", 0), ("wait", 3), ("kill", 0)])
def test_whatever_happens_to_hosts_the_rules_hold(low, events):
    world = World(low, low + 3, 2, slots=range(2), hosts=1)
    step, hosts = 0, 1
    for kind, number in events:
        others = sorted(set(world.hosts) - {FIRST_HOST})
        if kind == "join":
            world.host_joins(hosts, range(2 * hosts, 2 * hosts + 2))
            hosts += 1
        elif kind in {"lose", "host leaves"}:
            if others:
                act = world.lose_host if kind == "lose" else world.host_leaves
                act(others[number % len(others)])
        elif kind == "wait":
            world.wait(number / 5)
        elif kind == "train":
            if world.generations:
                step += 1
                world.train(step)
        elif world.alive:
            _let_happen(world, kind, sorted(world.alive)[number % len(world.alive)])
    # Room for as many as there may be.
    world.host_joins(hosts, range(2 * hosts, 2 * hosts + low + 3))
    _let_settle(world, step)
    assert len(world.newest) == world.membership.target
