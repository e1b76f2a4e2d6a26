"""The rule by which ranks of an elastic job find together again, explored exhaustively.

A model of the ranks runs through every order of events: each rank may be killed at every point,
the launcher may notice it late, replacements join at any time, and in a call that a dead rank took
part in, some of the others may succeed and some fail. The rule itself is the real one.

Ranks may be on two hosts. The second one may be killed as a whole, or cut off: then its ranks go on
as if nothing had happened, but nothing passes between the hosts any more, and they hear of no
further generation. They end when their lease does, of which the launcher waits for the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from paceline.training.rounds import Standing, Turn, decide, giver
from paceline.training.shard_cover import counted_nodes, missing_shards
from paceline.training.shard_plan import deal
from paceline.training.tree_sum import TreeSum, subtrees

SHARDS = 3


class Member(NamedTuple):
    """One process. `stage` is what it does, or the call it waits in."""

    stage: str = "enter"
    generation: int = -1
    calls: int = 0
    progress: int | None = None
    between: bool = False
    computed: frozenset[int] = frozenset()
    settled: bool = False
    target: int = -1
    host: int = 0
    cut_at: int | None = None  # the newest generation when its host was cut off


class Post(NamedTuple):
    """What a member has brought to a call of a generation."""

    generation: int
    call: int
    member: int
    kind: str
    value: object
    is_after_cut: bool = False


class World(NamedTuple):
    members: tuple[Member, ...]
    generations: tuple[tuple[int, ...], ...]
    posts: frozenset[Post]
    kills: int
    is_cut: bool = False  # whether the second host was cut off


class Violation(Exception):
    pass


class Rule:
    """How a member behaves. Mutations override parts of it."""

    def __init__(self, program: str) -> None:
        self.program = program  # a letter for each event: p(ass), b(etween two batches)

    decide = staticmethod(decide)
    counted = staticmethod(counted_nodes)
    keeps_spent_sums = False
    waits_for_leases = True

    # Each returns the member after a step, and what it posts.
    def work(self, me: Member, world: World, rank: int, size: int) -> Member:
        if me.progress == len(self.program):
            if not me.settled:
                raise Violation("a rank is through before it has met the others")
            return me._replace(stage="done")
        if me.progress is None:
            raise Violation("a newcomer trains without a state")
        if self.program[me.progress] == "b":
            me = me._replace(progress=me.progress + 1, between=True)
            if not me.settled:
                return self.call(me, "round")
            return me._replace(stage="enter") if me.target > me.generation else me
        me = me._replace(between=False)
        if me.settled:
            own = deal(range(SHARDS), size)[rank]
            return self.call(me._replace(computed=me.computed | {*own}), "gather")
        return self.completed(me)

    def completed(self, me: Member) -> Member:
        assert me.progress is not None
        return me._replace(progress=me.progress + 1, computed=frozenset(), stage="work")

    def call(self, me: Member, kind: str) -> Member:
        return me._replace(stage=kind, calls=me.calls + 1)

    def value(self, me: Member, world: World) -> object:
        if me.stage == "gather":
            return me.progress, me.computed, len(world.generations) - 1
        if me.stage in ("round", "hand over"):
            return Standing(me.progress, me.between)
        return None

    def received(self, me: Member, kind: str, values: Sequence[object], rank: int) -> Member:
        if kind == "form":
            return self.call(me, "round")
        if kind == "start":
            return me._replace(progress=0, settled=True, stage="work")
        if kind == "round":
            turn = self.decide(values, rank)
            me = me._replace(settled=turn is Turn.SETTLED)
            if turn is Turn.START:
                return self.call(me, "start")
            if turn is Turn.HAND_OVER:
                return self.call(me, "hand over")
            return self.call(me, "round") if turn is Turn.WAIT else me._replace(stage="work")
        if kind == "hand over":
            return self.handed_over(me, values)
        if kind == "gather":
            return self.gathered(me, values, rank)
        return self.completed(me)

    def handed_over(self, me: Member, standings: Sequence[Standing]) -> Member:
        given = standings[giver(standings)]
        if not given.between_batches or me.progress not in (None, given.progress):
            raise Violation("a state of the middle of a batch, or of another place, is handed over")
        return me._replace(progress=given.progress, between=True, settled=True, stage="work")

    def gathered(self, me: Member, values: Sequence[tuple], rank: int) -> Member:
        if len({progress for progress, _, _ in values}) > 1:
            raise Violation("ranks of different passes exchange")
        computed = [numbers for _, numbers, _ in values]
        missing = missing_shards(computed, range(SHARDS))
        if missing:
            own = deal(missing, len(values))[rank]
            return self.call(me._replace(computed=me.computed | {*own}), "gather")
        held = [subtrees(tuple(sorted(numbers)), SHARDS) for numbers in computed]
        covered = sorted(
            shard
            for nodes in self.counted(held)
            for level, index in nodes
            for shard in range(index << level, min((index + 1) << level, SHARDS))
        )
        if covered != list(range(SHARDS)):
            raise Violation(f"shards {covered} are added")
        return self.call(me._replace(target=max(latest for *_, latest in values)), "average")

    def failed(self, me: Member) -> Member:
        if me.stage == "average":
            if self.keeps_spent_sums and me.computed:
                raise Violation("sums are used that an exchange has used up")
            me = me._replace(computed=frozenset())
        return me._replace(stage="enter", settled=False)


GONE = ("dead", "done")
CALLS = ("form", "round", "start", "hand over", "gather", "average")


def successors(world: World, rule: Rule) -> Iterator[World]:
    yield from launcher_steps(world, rule)
    yield from host_steps(world)
    for number, me in enumerate(world.members):
        if me.stage in GONE:
            continue
        if me.cut_at is not None:
            yield put(world, number, me._replace(stage="dead"))  # its lease is over
        if world.kills and me.stage != "ready":
            # A replacement is started at once, and is ready at some time.
            dead = put(world, number, me._replace(stage="dead"))
            yield dead._replace(
                members=(*dead.members, Member(stage="ready")), kills=world.kills - 1
            )
        for after in member_steps(world, number, me, rule):
            is_left_out = number not in world.generations[-1]
            if is_left_out and after.progress != me.progress:
                raise Violation("two generations apply a batch at the same time")
            changed = put(world, number, after)
            if after.stage in CALLS and (after.stage, after.calls) != (me.stage, me.calls):
                value = rule.value(after, world)
                post = Post(after.generation, after.calls, number, after.stage, value, world.is_cut)
                changed = changed._replace(posts=changed.posts | {post})
            yield changed


def host_steps(world: World) -> Iterator[World]:
    """The second host is killed or cut off, and a rank is started elsewhere in its place."""
    there = [
        number
        for number, me in enumerate(world.members)
        if me.host == 1 and me.stage not in GONE and me.cut_at is None
    ]
    if not world.kills or not there:
        return
    killed = world
    for number in there:
        killed = put(killed, number, world.members[number]._replace(stage="dead"))
    latest = len(world.generations) - 1
    cut = world._replace(
        is_cut=True,
        members=tuple(
            me._replace(cut_at=latest) if number in there else me
            for number, me in enumerate(world.members)
        ),
    )
    for after in (killed, cut):
        yield after._replace(members=(*after.members, Member(stage="ready")), kills=world.kills - 1)


def launcher_steps(world: World, rule: Rule) -> Iterator[World]:
    latest = world.generations[-1]

    def is_there(me: Member) -> bool:
        return me.stage not in GONE and (rule.waits_for_leases or me.cut_at is None)

    running = tuple(n for n in latest if is_there(world.members[n]))
    if running and running != latest:
        yield world._replace(generations=(*world.generations, running))
    if any(me.stage == "done" for me in world.members):
        return
    for number, me in enumerate(world.members):
        if me.stage == "ready":
            joined = put(world, number, me._replace(stage="enter"))
            yield joined._replace(generations=(*world.generations, (*running, number)))


def member_steps(world: World, number: int, me: Member, rule: Rule) -> Iterator[Member]:
    latest = len(world.generations) - 1 if me.cut_at is None else me.cut_at
    if me.stage == "enter":
        if latest > me.generation:
            yield me._replace(stage="form", generation=latest, calls=0)
        return
    if me.stage == "ready":
        return
    members = world.generations[me.generation]
    rank = members.index(number)
    if me.stage == "work":
        yield rule.work(me, world, rank, len(members))
        return
    posts = {
        post.member: post
        for post in world.posts
        if (post.generation, post.call) == (me.generation, me.calls)
        and arrives(post, me, world.members[post.member])
    }
    if len(posts) == len(members):
        if len({post.kind for post in posts.values()}) > 1:
            raise Violation(f"different calls meet: {posts}")
        yield rule.received(me, me.stage, [posts[each].value for each in members], rank)
    if any(has_left(world.members[each], me.generation) for each in members):
        yield rule.failed(me)
    if me.stage == "form" and latest > me.generation:
        yield rule.failed(me)


def arrives(post: Post, at: Member, sender: Member) -> bool:
    """Not if it was sent to another host after the link was cut."""
    return not post.is_after_cut or (at.cut_at is None) == (sender.cut_at is None)


def has_left(peer: Member, generation: int) -> bool:
    return (
        peer.stage in GONE
        or peer.generation > generation
        or (peer.generation == generation and peer.stage == "enter")
    )


def put(world: World, number: int, member: Member) -> World:
    """The world with one member changed, without all that makes no difference any more."""
    if member.stage in GONE:
        member = Member(stage=member.stage, progress=member.progress and 0)
    elif member.stage == "enter":
        member = member._replace(calls=0, target=-1)
    members = list(world.members)
    members[number] = member
    calls = {(me.generation, me.calls) for me in members if me.stage in (*CALLS, "work")}
    posts = frozenset(
        post
        for post in world.posts
        if any(gen == post.generation and call <= post.call for gen, call in calls)
    )
    entered = {gen for gen, _ in calls} | {me.cut_at for me in members}
    *old, latest = world.generations
    generations = (*(each if n in entered else () for n, each in enumerate(old)), latest)
    return World(tuple(members), generations, posts, world.kills, world.is_cut)


def explore(ranks: int, kills: int, rule: Rule, hosts: Sequence[int] | None = None) -> int:
    """Visit every state that can be reached; returns how many there are. `hosts`: those of the
    ranks, if there are two.
    """
    members = tuple(Member(host=host) for host in hosts or (0,) * ranks)
    first = World(members, (tuple(range(ranks)),), frozenset(), kills)
    seen, to_visit = {first}, [first]
    while to_visit:
        world = to_visit.pop()
        following = list(successors(world, rule))
        if not following:
            check_end(world, rule)
        for each in following:
            if each not in seen:
                seen.add(each)
                to_visit.append(each)
    return len(seen)


def check_end(world: World, rule: Rule) -> None:
    """Nobody can do anything: all must be through, or wait in vain for ranks that are through."""
    over = any(me.stage == "done" for me in world.members)
    for me in world.members:
        is_late = over and me.progress is None
        if me.stage not in GONE and not is_late:
            raise Violation(f"stuck: {world.members}, generations {world.generations}")


@pytest.mark.parametrize(
    ("ranks", "kills", "program"),
    [(2, 1, "pbppb"), (2, 2, "pbpb"), (3, 1, "pbpb")],
)
def test_ranks_find_together_after_every_order_of_kills(
    ranks: int, kills: int, program: str
) -> None:
    assert explore(ranks, kills, Rule(program)) > 1000


@pytest.mark.parametrize(
    ("hosts", "kills", "program"),
    [
        ((0, 1), 1, "pbppb"),
        pytest.param((1, 0), 2, "pb", marks=pytest.mark.slow),
        pytest.param((0, 1, 1), 1, "pb", marks=pytest.mark.slow),
    ],
)
def test_ranks_find_together_when_a_host_is_killed_or_cut_off(
    hosts: tuple[int, ...], kills: int, program: str
) -> None:
    assert explore(len(hosts), kills, Rule(program), hosts) > 1000


class NeedsNoLease(Rule):
    """The launcher goes on while ranks of a host that was cut off may still run."""

    waits_for_leases = False


def test_without_leases_two_generations_could_apply_a_batch() -> None:
    with pytest.raises(Violation, match="two generations"):
        explore(2, 1, NeedsNoLease("pbpb"), (0, 1))


class HandsOverAnywhere(Rule):
    """A newcomer is counted in although others are inside a batch."""

    @staticmethod
    def decide(standings: Sequence[Standing], rank: int) -> Turn:
        return decide([Standing(each.progress, True) for each in standings], rank)


class IgnoresDistance(Rule):
    """Ranks that are a pass apart go on together."""

    @staticmethod
    def decide(standings: Sequence[Standing], rank: int) -> Turn:
        turn = decide(standings, rank)
        return Turn.SETTLED if turn in (Turn.ALONE, Turn.WAIT) else turn


class AheadDoNotWait(Rule):
    """Ranks that are ahead go on alone, too."""

    @staticmethod
    def decide(standings: Sequence[Standing], rank: int) -> Turn:
        turn = decide(standings, rank)
        is_new = standings[rank].progress is None
        return Turn.ALONE if turn is Turn.WAIT and not is_new else turn


class CountsNewcomersAsLevel(Rule):
    """A newcomer takes part without a state."""

    @staticmethod
    def decide(standings: Sequence[Standing], rank: int) -> Turn:
        level = [Standing(each.progress or 0, each.between_batches) for each in standings]
        return decide(level, rank)


class AddsSharedNodesTwice(Rule):
    """Every node that a rank holds is added."""

    counted = staticmethod(lambda held: held)


class KeepsSpentSums(Rule):
    """Sums are kept after an exchange that may have used them up."""

    keeps_spent_sums = True


@pytest.mark.parametrize(
    "mutation",
    [
        HandsOverAnywhere,
        IgnoresDistance,
        AheadDoNotWait,
        CountsNewcomersAsLevel,
        AddsSharedNodesTwice,
        KeepsSpentSums,
    ],
)
def test_a_broken_rule_is_found(mutation: type[Rule]) -> None:
    with pytest.raises(Violation):
        explore(3, 1, mutation("pbpb"))


def test_largest_nodes_count_once_and_cover_all_that_was_computed() -> None:
    numbers = range(5)
    for one, other in itertools.product(every_set(numbers), repeat=2):
        held = [subtrees(one, 5), subtrees(other, 5)]
        tree = TreeSum[frozenset[int]](5, lambda left, right: left | right)
        for nodes in counted_nodes(held):
            for level, index in nodes:
                leaves = range(index << level, min((index + 1) << level, 5))
                assert not any(tree_has(tree, leaf) for leaf in leaves)
                tree.add_node((level, index), frozenset(leaves))
        covered = frozenset().union(*tree.nodes.values())
        assert covered == {*one, *other}
        assert missing_shards([one, other], numbers) == sorted({*numbers} - covered)


def every_set(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [
        each for size in range(len(numbers) + 1) for each in itertools.combinations(numbers, size)
    ]


def tree_has(tree: TreeSum[frozenset[int]], leaf: int) -> bool:
    return any(leaf in leaves for leaves in tree.nodes.values())
