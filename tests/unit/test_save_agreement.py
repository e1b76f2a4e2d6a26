"""All interleavings of a small world: ranks answer a request in the same call, and nobody waits."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from paceline.errors import PeerLost
from paceline.launch import save_listener
from paceline.launch.save_agreement import NO_REQUEST, Pace, SaveAgreement, SaveRequest
from paceline.launch.save_listener import SharedAnswers

SAVE, STOP = SaveRequest(due=True), SaveRequest(due=True, stop=True)


@dataclasses.dataclass
class Rank:
    """One rank of the model: between two calls, or before its next look in a call."""

    agreement: SaveAgreement = dataclasses.field(default_factory=SaveAgreement)
    wanted: SaveRequest = NO_REQUEST
    in_call: bool = False
    answers: tuple[tuple[int, bool], ...] = ()  # calls that were answered with a request, and stop
    signalled_in: int | None = None  # the call before which its last signal came

    def calls_done(self) -> int:
        return self.agreement.calls - self.in_call

    def copy(self) -> Rank:
        return dataclasses.replace(self, agreement=copy.copy(self.agreement))


@dataclasses.dataclass
class World:
    """The ranks, the store, and the signals still to come."""

    ranks: list[Rank]
    signals: list[SaveRequest]
    registers: dict[int, str] = dataclasses.field(default_factory=dict)

    def key(self) -> tuple:
        ranks = [
            (*vars(r.agreement).values(), r.wanted, r.in_call, r.answers, r.signalled_in)
            for r in self.ranks
        ]
        return (*ranks, len(self.signals), tuple(sorted(self.registers.items())))

    def copy(self) -> World:
        return World([rank.copy() for rank in self.ranks], [*self.signals], dict(self.registers))

    def compare_and_set(self, rank: Rank, proposal: str) -> None:
        number, agreement = rank.agreement.number, rank.agreement
        if self.registers.get(number, "") == agreement.known:
            self.registers[number] = proposal
        agreement.learn(self.registers[number])

    def advance(self, index: int, ahead: int) -> None:
        """The next step of a rank: it begins a call, looks once, or answers."""
        rank = self.ranks[index]
        if not rank.in_call:
            rank.in_call = True
            rank.agreement.begin_call()
        elif (proposal := rank.agreement.proposal(rank.wanted, ahead)) is not None:
            self.compare_and_set(rank, proposal)
        else:
            rank.in_call = False
            answer = rank.agreement.answer()
            if answer.due:
                rank.answers += ((rank.agreement.calls, answer.stop),)
                if answer.stop or not rank.wanted.stop:
                    rank.wanted = NO_REQUEST

    def signal(self, index: int) -> None:
        rank, request = self.ranks[index], self.signals.pop()
        rank.wanted = SaveRequest(True, rank.wanted.stop or request.stop)
        rank.signalled_in = rank.agreement.calls + (not rank.in_call)


def _explore(ranks, calls, ahead, signals, *, in_step):
    """Every state that can be reached. `in_step`: a loop that synchronises, in which no rank begins
    a call before all have made the one before.
    """
    first = World([Rank() for _ in range(ranks)], signals)
    seen, waiting = {first.key()}, [first]
    while waiting:
        world = waiting.pop()
        yield world
        slowest = min(rank.calls_done() for rank in world.ranks)
        for index, rank in enumerate(world.ranks):
            may_begin = rank.agreement.calls < (slowest + 1 if in_step else calls)
            actions = []
            if rank.in_call or (may_begin and rank.agreement.calls < calls):
                actions.append(lambda w, i=index: w.advance(i, ahead))
            if world.signals:
                actions.append(lambda w, i=index: w.signal(i))
            for act in actions:
                following = world.copy()
                act(following)
                if (key := following.key()) not in seen:
                    seen.add(key)
                    waiting.append(following)


def _answers_up_to(rank, call):
    return [answer for answer in rank.answers if answer[0] <= call]


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize(
    ("ranks", "calls", "ahead", "signals"),
    [
        (2, 3, 1, [SAVE, SAVE]),
        (2, 3, 2, [STOP, SAVE]),
        (2, 3, 2, [SAVE, STOP]),
        (2, 4, 2, [SAVE]),
        (3, 2, 1, [STOP]),
    ],
)
def test_all_ranks_answer_in_the_same_call_whatever_the_order(
    ranks, calls, ahead, signals, in_step
):
    states = served = 0
    for world in _explore(ranks, calls, ahead, list(signals), in_step=in_step):
        states += 1
        common = min(rank.calls_done() for rank in world.ranks)
        answers = [_answers_up_to(rank, common) for rank in world.ranks]
        assert all(answer == answers[0] for answer in answers), world
        served += bool(answers[0])
        if common < calls:
            continue
        # A loop that synchronises serves a signal in the next call, or `ahead` calls later.
        for rank in world.ranks:
            late = rank.signalled_in is not None and rank.signalled_in + ahead + 1 > calls
            if in_step and len(signals) == 1 and rank.signalled_in is not None and not late:
                assert answers[0] == [(answers[0][0][0], signals[0].stop)], world
                assert rank.signalled_in <= answers[0][0][0] <= rank.signalled_in + ahead, world
    assert states > 100
    assert served > 0


def test_a_stop_after_an_agreed_save_is_a_request_of_its_own():
    world = World([Rank(), Rank()], [STOP, SAVE])
    world.signal(0)
    for index in (0, 0, 0, 1):  # rank 0 makes call 1; rank 1 begins it
        world.advance(index, 1)
    world.signal(1)
    for _ in range(12):
        for index in (0, 1):
            world.advance(index, 1)
    first, second = (rank.answers[:2] for rank in world.ranks)
    assert first == second
    assert [stop for _, stop in first] == [False, True]


def test_after_a_rank_has_left_there_is_no_request():
    world = World([Rank(), Rank()], [])
    for index in (0, 0, 0):
        world.advance(index, 1)
    world.compare_and_set(world.ranks[0], world.ranks[0].agreement.proposal_to_leave())
    world.ranks[1].wanted = STOP
    for _ in range(9):
        world.advance(1, 1)
    assert world.ranks[1].answers == ()
    assert world.ranks[1].agreement.is_over
    assert world.ranks[1].agreement.proposal_to_leave() is None


@pytest.mark.parametrize(
    ("calls", "seconds", "ahead"), [(1, 10.0, 1), (10, 0.1, 25), (1000, 0.1, 64), (5, 0.0, 1)]
)
def test_fast_loops_seldom_look_and_slow_ones_look_in_every_call(calls, seconds, ahead):
    pace = Pace()
    assert pace.calls_ahead(1, 100.0) == 1
    assert pace.calls_ahead(1 + calls, 100.0 + seconds) == ahead


# -- with a store ----------------------------------------------------------------------------------


class Store:
    """As torch's: compare-and-set makes a key that is missing if nothing is expected of it."""

    def __init__(self):
        self.values, self.questions, self.is_gone = {}, 0, False

    def compare_set(self, key, expected, desired):
        self.questions += 1
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\nmuch more")
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(save_listener, "_open_store", lambda: store)
    return store


def test_a_fast_loop_seldom_asks_the_store(store):
    answers = SharedAnswers(0)
    for _ in range(5000):
        assert answers.next_call(NO_REQUEST) is NO_REQUEST
    assert store.questions < 500


def test_two_ranks_answer_in_the_same_call(store):
    ranks = [SharedAnswers(0), SharedAnswers(1)]
    found = []
    for call in range(200):
        wanted = [NO_REQUEST, SAVE if call == 70 else NO_REQUEST]
        found.append([rank.next_call(w).due for rank, w in zip(ranks, wanted, strict=True)])
    assert [True, True] in found
    assert all(first == second for first, second in found)


def test_without_the_store_only_a_request_is_an_error(store):
    answers = SharedAnswers(3)
    answers.next_call(NO_REQUEST)
    store.is_gone = True
    for _ in range(5):
        assert not answers.next_call(NO_REQUEST)
    with pytest.raises(
        PeerLost, match=r"rank 3 was sent .* has ended \(Connection reset by peer\)"
    ):
        answers.next_call(STOP)
    answers.leave()
