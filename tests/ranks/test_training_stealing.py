"""Ranks that take shards over from each other, or are dealt more and fewer of them: the same bits,
and the right ranks do the work.
"""

from __future__ import annotations

import pathlib
import random
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.training import shard_queue, work_sharing
from paceline.training.shard_queue import ShardQueue, TaskKind
from tests.harness import init_group, run_ranks
from tests.harness.exact_models import CASES, train

STEPS = 4


def take_any(seed):
    """Take any shard that nobody has begun, whether it pays or not."""
    choice = random.Random(seed)

    def shard_to_take(backlogs, cost_s):
        shards = [shard for backlog in backlogs for shard in backlog.shards]
        return choice.choice(shards) if shards else None

    shard_queue.shard_to_take = shard_to_take


class Recorded(ShardQueue):
    """Remembers what was computed, and takes its time now and then."""

    tasks: list = None
    choice = random.Random(0)

    def next(self):
        task = super().next()
        if task is not None:
            self.tasks.append((task.kind, task.shard, self._audit))
            time.sleep(self.choice.choice([0, 0, 0.004]))
        return task


def stolen_freely(rank, world, options):
    take_any(rank)
    Recorded.tasks, Recorded.choice = [], random.Random(rank)
    work_sharing.ShardQueue = Recorded
    if world > 1:
        init_group("paceline")
    hashes = {name: train(name, STEPS, **options) for name in CASES}
    for kind, shard, audit in Recorded.tasks:
        is_own_audit = audit is not None and audit.auditor == rank and audit.shard == shard
        assert world == 1 or (kind is TaskKind.AUDIT) is is_own_audit
    return hashes, sum(kind is TaskKind.TAKEN_OVER for kind, _, _ in Recorded.tasks)


@pytest.fixture(scope="module")
def alone():
    ((hashes, taken),) = run_ranks(1, stolen_freely, {}, timeout=120)
    assert taken == 0
    return hashes


@pytest.mark.parametrize(
    ("world", "options"), [(2, {}), (3, {"audit_every": 1}), (4, {"shards": 8})]
)
def test_who_takes_which_shard_has_no_influence_on_bits(world, options, alone):
    results = run_ranks(world, stolen_freely, options, timeout=180)
    assert [hashes for hashes, _ in results] == [alone] * world
    assert sum(taken for _, taken in results) > 0


# --- who computes what ------------------------------------------------------------------------

SHARDS = 8


def numbered(**options):
    """Sample n is in shard n of its batch."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = paceline.DataLoader(TensorDataset(torch.arange(80.0)[:, None]), SHARDS)
    return model, optimizer, paceline.Training(model, optimizer, loader, shards=SHARDS, **options)


def computed(model, optimizer, training, before_shard):
    """The numbers of this rank's shards, step by step."""
    steps = []
    for batch in training.batches():
        numbers = []
        for (x,) in batch.shards():
            numbers.append(int(x[0, 0]) % SHARDS)
            before_shard(batch.step, len(numbers))
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(numbers)
    return steps


def one_is_held_up(rank, world, directory, steal):
    """In step 3 rank 1 waits in its first shard until rank 0 has begun its seventh."""
    init_group("paceline")
    began, took_over = pathlib.Path(directory, "began"), pathlib.Path(directory, "took-over")

    def before_shard(step, count):
        if step != 3 or not steal:
            return
        if rank == 1 and count == 1:
            began.touch()
            wait_for(took_over)
        if rank == 0 and count == 1:
            wait_for(began)
        if rank == 0 and count == 7:
            took_over.touch()

    if steal:
        take_last()
    return computed(*numbered(steal=steal), before_shard)


def wait_for(path):
    while not path.exists():
        time.sleep(0.001)


def take_last():
    """As it is done, but for the question whether it pays."""
    original = shard_queue.shard_to_take
    shard_queue.shard_to_take = lambda backlogs, cost_s: original(backlogs, 0.0)


def test_a_rank_that_is_held_up_gives_its_last_shards_away(tmp_path):
    steps = run_ranks(2, one_is_held_up, str(tmp_path), True)
    assert steps[0][3] == [0, 1, 2, 3, 7, 6, 5]
    assert steps[1][3] == [4]
    for one, other in zip(*steps, strict=True):
        assert sorted(one + other) == list(range(SHARDS))


def test_without_stealing_every_rank_computes_its_own(tmp_path):
    first, second = run_ranks(2, one_is_held_up, str(tmp_path), False)
    assert first == [[0, 1, 2, 3]] * 10
    assert second == [[4, 5, 6, 7]] * 10


def one_is_slow(rank, world, backend):
    init_group(backend)
    return computed(*numbered(), lambda step, count: time.sleep(0.05 * rank))


def test_a_slow_rank_is_dealt_fewer_shards_on_any_group():
    first, second = run_ranks(2, one_is_slow, "gloo")
    assert first[0] == [0, 1, 2, 3]
    assert second[0] == [4, 5, 6, 7]
    assert first[-1] + second[-1] == list(range(SHARDS))
    assert 1 <= len(second[-1]) <= 2


def differs(rank, world):
    init_group("paceline")
    numbered(steal=bool(rank))


def test_ranks_that_disagree_about_stealing():
    for outcome in run_ranks(2, differs, check=False):
        assert isinstance(outcome.error, paceline.MismatchError)
        assert "'steal': True" in str(outcome.error)
