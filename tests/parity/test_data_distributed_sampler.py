"""DistributedSampler: index for index what torch's gives."""

from __future__ import annotations

import linecache

import numpy as np
import pytest
import torch.utils.data
from hypothesis import example, given
from hypothesis import strategies as st

import paceline
from paceline import ConfigError, DistributedSampler


class Sized(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


@given(
    length=st.integers(0, 200) | st.integers(8100, 17_000),
    world=st.integers(1, 70),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    drop_last=st.booleans(),
    epoch=st.integers(0, 1000),
    data=st.data(),
)
@example(length=1, world=70, shuffle=True, seed=0, drop_last=False, epoch=0, data=None)
@example(length=3, world=5, shuffle=True, seed=0, drop_last=True, epoch=0, data=None)
def test_index_for_index(length, world, shuffle, seed, drop_last, epoch, data):
    rank = world - 1 if data is None else data.draw(st.integers(0, world - 1))
    ours, stock = (
        kind(Sized(length), world, rank, shuffle, seed, drop_last)
        for kind in (DistributedSampler, torch.utils.data.DistributedSampler)
    )
    for sampler in (ours, stock):
        sampler.set_epoch(epoch)
    found, expected = list(ours), list(stock)
    assert found == expected
    assert all(type(index) is int for index in found)
    assert len(ours) == len(stock)
    assert (ours.num_samples, ours.total_size, ours.epoch) == (
        stock.num_samples,
        stock.total_size,
        stock.epoch,
    )


def test_every_small_case():
    for length in range(12):
        for world in range(1, 9):
            for rank in range(world):
                for drop_last in (False, True):
                    arguments = (Sized(length), world, rank, True, 5, drop_last)
                    stock = torch.utils.data.DistributedSampler(*arguments)
                    assert list(DistributedSampler(*arguments)) == list(stock)


def test_it_is_one_of_torch_s():
    assert isinstance(DistributedSampler(Sized(3), 1, 0), torch.utils.data.DistributedSampler)


def loader_over(sampler, workers=0, **options):
    return torch.utils.data.DataLoader(
        sampler.dataset, sampler=sampler, num_workers=workers, **options
    )


def test_a_forgotten_set_epoch_is_warned_about_once():
    sampler = DistributedSampler(Sized(10), 2, 1)
    list(sampler)
    with pytest.warns(
        UserWarning, match=r"Sized of 10 samples, rank 1 of 2\).*set_epoch"
    ) as caught:
        list(sampler)
    assert len(caught) == 1
    list(sampler)  # warnings are errors: a second one would fail here


def two_epochs(loader):
    for _ in range(2):
        for _ in loader:
            pass


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, paceline.DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_warning_points_at_the_loop(kind, workers):
    sampler = DistributedSampler(Sized(30), 2, 0)
    loader = kind(sampler.dataset, batch_size=2, sampler=sampler, num_workers=workers)
    with pytest.warns(UserWarning, match="set_epoch") as caught:
        two_epochs(loader)
    assert [warning.filename for warning in caught] == [__file__]
    assert "for _ in loader" in linecache.getline(__file__, caught[0].lineno)


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, paceline.DataLoader])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("length", [4, 30])
def test_a_look_at_the_first_batch_is_no_pass(kind, workers, length):
    """PyTorch's own tutorials do it. Workers may have fetched all of a small dataset by then."""
    sampler = DistributedSampler(Sized(length), 2, 0)
    loader = kind(
        sampler.dataset, sampler=sampler, num_workers=workers, prefetch_factor=workers * 4 or None
    )
    next(iter(loader))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        next(iter(loader))
        assert len(list(loader)) == length // 2
        next(iter(loader))


def test_evaluation_may_repeat_an_order():
    sampler = DistributedSampler(Sized(10), 2, 0)
    list(loader_over(sampler))  # one epoch of training
    for _ in range(3):
        with torch.no_grad():
            list(loader_over(sampler))


def test_a_program_that_sets_epochs_may_pass_twice_in_one():
    sampler = DistributedSampler(Sized(10), 2, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
    for _ in range(2):
        list(loader_over(sampler))


def test_samplers_do_not_count_for_one_another():
    for _ in range(2):
        list(loader_over(DistributedSampler(Sized(10), 2, 0)))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_warning_without_a_reason(workers):
    sampler = DistributedSampler(Sized(10), 2, 0)
    next(iter(sampler))  # a look at the first sample is no epoch
    loader = loader_over(sampler, workers)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 5
    sampler.set_epoch(1)  # the same one, on purpose
    list(sampler)
    unshuffled = DistributedSampler(Sized(10), 2, 0, shuffle=False)
    assert list(unshuffled) == list(unshuffled)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2), ["rank 2", "world_size=2"]),
        ((2, -1), ["rank -1", "world_size=2"]),
        ((0, 0), ["world_size", "0"]),
        ((2, None), ["num_replicas=2", "rank=None", "init_process_group"]),
        ((None, None), ["num_replicas=None", "init_process_group"]),
        (("2", 1), ["num_replicas must be a whole number, found '2'"]),
        ((2, 1.0), ["rank must be a whole number, found 1.0"]),
        ((2, "1"), ["rank must be a whole number, found '1'"]),
        ((True, 0), ["num_replicas must be a whole number, found True"]),
        ((2, 1, "no"), ["shuffle must be True or False, found 'no'"]),
        ((2, 1, True, 0.5), ["seed must be a whole number, found 0.5"]),
        ((2, 1, True, 0, None), ["drop_last must be True or False, found None"]),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(ConfigError) as caught:
        DistributedSampler(Sized(10), *arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("rank", [-1, 3])
def test_wrong_ranks_are_refused_in_torchs_words(rank):
    for kind in (DistributedSampler, torch.utils.data.DistributedSampler):
        with pytest.raises(ValueError, match=f"Invalid rank {rank}"):
            kind(Sized(10), 3, rank)


def test_sizes_may_be_numbers_of_any_library():
    sampler = DistributedSampler(Sized(10), np.int64(2), torch.tensor(1), seed=np.uint8(3))
    assert (sampler.num_replicas, sampler.rank, sampler.seed) == (2, 1, 3)
    with pytest.raises(ConfigError, match="epoch must be a whole number, found '1'"):
        sampler.set_epoch("1")
    with pytest.raises(ConfigError, match="a dataset with a length, found 10"):
        DistributedSampler(10, 2, 0)
