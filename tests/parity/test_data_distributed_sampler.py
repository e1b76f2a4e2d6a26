"""DistributedSampler: index for index what torch's gives."""

from __future__ import annotations

import warnings

import pytest
import torch.utils.data
from hypothesis import example, given
from hypothesis import strategies as st

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


def test_a_forgotten_set_epoch_is_warned_about_once():
    sampler = DistributedSampler(Sized(10), 2, 0)
    list(sampler)
    with pytest.warns(UserWarning, match="set_epoch"):
        list(sampler)
    list(sampler)  # warnings are errors: a second one would fail here


@pytest.mark.parametrize("workers", [0, 1])
def test_no_warning_without_a_reason(workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = DistributedSampler(Sized(10), 2, 0)
        next(iter(sampler))  # a look at the first sample is no epoch
        loader = torch.utils.data.DataLoader(Sized(10), sampler=sampler, num_workers=workers)
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
