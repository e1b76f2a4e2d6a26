"""ShardedIterable: the promises of global batches for datasets that can only be iterated."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from paceline import ConfigError, DataLoader, ShardedIterable


class Stream(IterableDataset):
    """A source that divides itself among workers if it finds itself in one, as many do, and
    shuffles a little.
    """

    def __init__(self, length, shuffles=False):
        self.length, self.shuffles, self.epoch = length, shuffles, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        pool = []
        for number in range(offset, self.length, step):
            pool.append(number)
            if not self.shuffles:
                yield pool.pop()
            elif len(pool) > 4:
                yield pool.pop(random.randrange(len(pool)))
        yield from pool


class Skipping(Stream):
    def __init__(self, length, start=0):
        super().__init__(length)
        self.start, self.read = start, []

    def skip(self, count):
        copy = Skipping(self.length, count)
        copy.read = self.read
        return copy

    def __iter__(self):
        for number in range(self.start, self.length):
            self.read.append(number)
            yield number


def noisy(record):
    return record, torch.rand(()).item() + random.random()


def received(world, batch_size, workers=0, state=None, epochs=1, source=None, **options):
    """What all ranks receive in the last of some epochs, one list for each global batch."""
    ranks = []
    for rank in range(world):
        stream = ShardedIterable(
            source or Stream(23), batch_size, rank=rank, world_size=world, **options
        )
        loader = DataLoader(
            stream, num_workers=workers, collate_fn=list, persistent_workers=workers > 0
        )
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(epochs):
            batches = list(loader)
        ranks.append(batches)
    return [[sample for share in step for sample in share] for step in zip(*ranks, strict=True)]


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.data())
def test_batches_are_the_stream_at_every_world_size(length, batch_size, world, drop_last, data):
    world = min(world, batch_size)
    source = list(range(length))
    expected = [source[at : at + batch_size] for at in range(0, length, batch_size)]
    if drop_last and length % batch_size:
        expected.pop()
    assert received(world, batch_size, source=Stream(length), drop_last=drop_last) == expected
    first = data.draw(st.integers(0, len(expected)))
    state = ShardedIterable(source, batch_size, drop_last=drop_last).state_at(0, first)
    assert (
        received(world, batch_size, state=state, source=Stream(length), drop_last=drop_last)
        == expected[first:]
    )


@pytest.mark.parametrize("shuffles", [False, True])
def test_workers_and_ranks_change_neither_order_nor_random_numbers(shuffles):
    source = Stream(23, shuffles)
    expected = received(1, 5, source=source, transform=noisy)
    assert sorted(record for batch in expected for record, _ in batch) == list(range(23))
    assert len({noise for batch in expected for _, noise in batch}) == 23
    for world, workers in [(1, 1), (1, 2), (2, 0), (3, 2), (5, 1)]:
        assert received(world, 5, workers, source=source, transform=noisy) == expected
    second = received(1, 5, source=source, transform=noisy, epochs=2)
    assert received(2, 5, 2, source=source, transform=noisy, epochs=2) == second
    assert second != expected


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_in_mid_epoch_with_what_was_received(workers):
    source = Stream(40, shuffles=True)
    expected = received(1, 4, source=source, transform=noisy)
    loader = DataLoader(
        ShardedIterable(source, 4, transform=noisy), num_workers=workers, collate_fn=list
    )
    first = list(itertools.islice(loader, 3))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert (state["epoch"], state["batch"]) == (0, 3)
    assert first + received(2, 4, 2 - workers, state, source=source, transform=noisy) == expected
    loader.load_state_dict(state)
    assert first + list(loader) == expected
    assert list(loader) == received(1, 4, source=source, transform=noisy, epochs=2)


def test_persistent_workers_learn_a_loaded_position():
    stream = ShardedIterable(Stream(40), 4)
    loader = DataLoader(stream, num_workers=2, persistent_workers=True, collate_fn=list)
    whole = list(loader)
    loader.load_state_dict(stream.state_at(0, 6))
    assert list(loader) == whole[6:]


def test_a_plain_iterable_dataset_is_divided_too():
    shares = [list(DataLoader(Stream(10), 4, rank=rank, world_size=3)) for rank in range(3)]
    assert [[batch.tolist() for batch in rank] for rank in shares] == [
        [[0, 1], [4, 5], [8]],
        [[2], [6], [9]],
        [[3], [7], []],
    ]
    assert shares[2][-1].dtype == torch.int64


def test_only_the_own_samples_are_transformed_and_sources_may_skip():
    seen = []
    source = Skipping(20)
    stream = ShardedIterable(
        source, 5, transform=lambda record: seen.append(record) or record, rank=1, world_size=2
    )
    assert [list(batch) for batch in stream.batches(0, 2)] == [[13, 14], [18, 19]]
    assert seen == [13, 14, 18, 19]
    assert source.read == list(range(10, 20))


def test_the_source_learns_the_epoch():
    source = Stream(3)
    stream = ShardedIterable(source, 2)
    assert [list(batch) for batch in stream] == [[0, 1], [2]]
    assert (source.epoch, stream.epoch) == (0, 1)
    stream.set_epoch(4)
    list(stream)
    assert source.epoch == 4


def test_random_numbers_of_the_training_loop_are_untouched():
    random.seed(5)
    expected = [random.random() for _ in range(5)]
    random.seed(5)
    stream = ShardedIterable(Stream(25, shuffles=True), 5, transform=noisy)
    assert [random.random() for _ in stream] == expected


def test_bad_input():
    with pytest.raises(ConfigError, match="once only"):
        ShardedIterable((number for number in range(3)), 2)
    with pytest.raises(ConfigError, match=r"batch_size=2 .*world_size=3"):
        ShardedIterable([1], 2, rank=0, world_size=3)
    stream = ShardedIterable([1, 2, 3], 2, seed=1)
    with pytest.raises(ConfigError, match="seed was 1 and is now 2"):
        ShardedIterable([1, 2, 3], 2, seed=2).load_state_dict(stream.state_dict())
    with pytest.raises(ConfigError, match=r"paceline\.DataLoader"):
        stream.announced_batches()  # what a worker of torch's own loader does
    with pytest.raises(ConfigError, match="rank=0"):
        DataLoader(stream, rank=0, world_size=1)
