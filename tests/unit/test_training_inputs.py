"""The inputs of shards: the same bytes, whoever asks for them, when and in which order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, get_worker_info

import paceline
from paceline.training.shard_inputs import EpochInputs
from paceline.training.shard_plan import ShardPlan
from tests.harness.exact_models import Augmented

SAMPLES, BATCH, SHARDS = 75, 32, 5
PLAN = ShardPlan(BATCH, SHARDS)
SIZES = [32, 32, 11]


class Counted(Dataset):
    """Counts how many samples this process has loaded."""

    def __init__(self):
        self.inner, self.loaded = Augmented(), 0

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.loaded += 1
        return self.inner[index]


class AtHomeInWorkers(Augmented):
    """Cannot be used in the process of the rank."""

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return super().__getitem__(index)


def shards_of(number):
    return PLAN.cut(SIZES[number]).shards


def inputs_of(dataset, dealt, workers=0):
    loader = paceline.DataLoader(dataset, BATCH, shuffle=True, seed=3, num_workers=workers)
    return EpochInputs(loader.range_loader(), 0, range(len(SIZES)), dealt)


def everything():
    """The inputs of all shards when they are loaded in order."""
    inputs = inputs_of(Augmented(), shards_of)
    return {
        (number, shard.number): batch.of(shard)
        for number in range(len(SIZES))
        for batch in [inputs.begin(number)]
        for shard in shards_of(number)
    }


EXPECTED = everything()


def assert_same(found, number, shard):
    for one, other in zip(found, EXPECTED[number, shard.number], strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() % 64 == 0


@given(st.data())
def test_any_shard_at_any_time(data):
    numbers = st.sets(st.integers(0, SHARDS - 1))
    # The deal may change between loading ahead and use.
    inputs = inputs_of(
        Augmented(), lambda number: [s for s in shards_of(number) if s.number in data.draw(numbers)]
    )
    for number in range(len(SIZES)):
        batch = inputs.begin(number)
        if data.draw(st.booleans()):
            for shard in data.draw(st.lists(st.sampled_from(shards_of(number)), max_size=6)):
                assert_same(batch.of(shard), number, shard)
        batch.release()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_load_what_was_not_dealt_to_this_rank(persistent):
    loader = paceline.DataLoader(
        AtHomeInWorkers(),
        BATCH,
        shuffle=True,
        seed=3,
        num_workers=2,
        persistent_workers=persistent,
    )
    ranges = loader.range_loader()
    for _ in range(2):
        inputs = EpochInputs(ranges, 0, range(3), lambda number: shards_of(number)[1:3])
        for number in range(3):
            batch = inputs.begin(number)
            # Shard 1 is taken over by another rank; shards 0 and 3 are taken from others.
            for shard in [s for s in shards_of(number) if s.number in (0, 2, 3)]:
                assert_same(batch.of(shard), number, shard)
            batch.release()
        inputs.release()


def test_loading_draws_nothing_of_the_training():
    batch = inputs_of(Augmented(), lambda number: ()).begin(0)
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), torch.rand(1)
    random.seed(5)
    torch.manual_seed(5)
    batch.of(shards_of(0)[2])
    assert (random.random(), torch.rand(1)) == expected


def test_what_is_not_wanted_is_not_loaded():
    dataset = Counted()
    inputs = inputs_of(dataset, shards_of)
    batch = inputs.begin(0)
    batch.of(shards_of(0)[0])
    inputs.begin(2).of(shards_of(2)[0])
    assert dataset.loaded == shards_of(0)[0].samples + shards_of(2)[0].samples


def test_inputs_that_were_changed_are_loaded_anew():
    dataset = Counted()
    batch = inputs_of(dataset, shards_of).begin(0)
    first, second = shards_of(0)[:2]
    batch.of(first)[0].mul_(2)
    kept = batch.of(second)
    assert_same(batch.of(first), 0, first)
    loaded = dataset.loaded
    assert batch.of(second) is kept
    assert dataset.loaded == loaded
