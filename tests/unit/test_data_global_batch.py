"""GlobalBatchSampler: the same global batches at every world size, resumed anywhere, on any number
of ranks.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline import ConfigError, GlobalBatchSampler
from paceline.data import share_of


def samplers(world, length, batch_size, **options):
    return [
        GlobalBatchSampler(length, batch_size, rank=rank, world_size=world, **options)
        for rank in range(world)
    ]


def joined(shares):
    return [index for share in shares for index in share]


def global_batches(world, length, batch_size, **options):
    """The batches of a whole epoch, put together from every rank's shares."""
    return [
        joined(shares)
        for shares in zip(*samplers(world, length, batch_size, **options), strict=True)
    ]


lengths = st.integers(0, 300) | st.integers(16_380, 17_000)
seeds = st.integers(0, 2**64 - 1)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_shares_are_disjoint_complete_and_equal(size, world):
    """Checked at the ends, in the middle and at random ranks; the reason is in `split.py`."""
    ranks = {0, world // 2, world - 1, *random.Random(size).sample(range(world), min(world, 20))}
    for rank in ranks:
        share = share_of(size, rank, world)
        assert share.start == (share_of(size, rank - 1, world).stop if rank else 0)
        assert size // world <= share.count <= -(-size // world)
    assert share_of(size, world - 1, world).stop == size


@given(st.integers(1, 200), st.integers(1, 40))
def test_weights_make_the_average_over_ranks_the_mean_over_samples(size, world):
    losses = np.random.default_rng(size).normal(size=size)
    shares = [share_of(size, rank, world) for rank in range(world)]
    means = [losses[s.start : s.stop].mean() * s.weight if s.count else 0.0 for s in shares]
    assert np.mean(means) == pytest.approx(losses.mean(), rel=1e-12)


@given(lengths, st.integers(1, 64), st.integers(1, 7), st.booleans(), seeds)
def test_an_epoch_is_a_permutation_and_the_same_at_every_world_size(
    length, batch_size, world, shuffle, seed
):
    assume(batch_size >= world)
    batches = global_batches(world, length, batch_size, shuffle=shuffle, seed=seed)
    assert sorted(joined(batches)) == list(range(length))
    assert batches == global_batches(1, length, batch_size, shuffle=shuffle, seed=seed)
    if not shuffle:
        assert joined(batches) == list(range(length))


@given(st.integers(0, 300), st.integers(1, 64), st.booleans(), seeds, st.data())
def test_world_size_changes_in_mid_epoch(length, batch_size, large, seed, data):
    """Stop anywhere, any number of times, go on with another number of ranks: the order is that of
    one rank.
    """
    if large:  # beyond what is sorted: the network
        length, batch_size = 17_000 + length, 1000 + batch_size
    expected = [
        b
        for epoch in range(2)
        for b in GlobalBatchSampler(length, batch_size, seed=seed).batches(epoch)
    ]
    state, found = None, []
    while len(found) < len(expected):
        world = data.draw(st.integers(1, min(6, batch_size)), label="world")
        steps = data.draw(st.integers(1, 1 + len(expected) // 3), label="steps")
        ranks = samplers(world, length, batch_size, seed=seed)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(pickle.loads(pickle.dumps(state)))
        endless = [itertools.chain.from_iterable(itertools.repeat(sampler)) for sampler in ranks]
        wanted = min(steps, len(expected) - len(found))
        found += [joined(next(shares) for shares in endless) for _ in range(wanted)]
        states = [sampler.state_dict() for sampler in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert found == expected


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 5))
def test_drop_last_leaves_out_the_ragged_batch_only(length, batch_size, world):
    assume(batch_size >= world)
    kept = global_batches(world, length, batch_size, drop_last=True)
    assert kept == global_batches(world, length, batch_size)[: length // batch_size]
    sampler = GlobalBatchSampler(length, batch_size, drop_last=True)
    assert len(sampler) == length // batch_size
    assert sampler.num_samples == len(joined(kept))


def test_the_batch_size_counts_all_ranks():
    assert [len(next(iter(s))) for s in samplers(4, 1000, 64)] == [16, 16, 16, 16]
    assert [len(next(iter(s))) for s in samplers(4, 1000, 65)] == [17, 16, 16, 16]
    assert [s.share(0).weight for s in samplers(4, 1000, 65)] == [
        17 * 4 / 65,
        16 * 4 / 65,
        16 * 4 / 65,
        16 * 4 / 65,
    ]


def test_all_ranks_make_the_same_number_of_steps_and_rank_0_is_never_idle():
    last = [list(sampler)[-1] for sampler in samplers(4, 10, 4)]
    assert [len(share) for share in last] == [1, 1, 0, 0]
    assert {len(sampler) for sampler in samplers(4, 10, 4)} == {3}


def test_epochs_advance_by_themselves_and_differ():
    sampler = GlobalBatchSampler(100, 10)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert first != second
    assert sorted(joined(second)) == list(range(100))
    assert first == list(sampler.batches(0))
    assert second == list(sampler.batches(1))


def test_a_pass_left_early_is_followed_by_the_next_epoch():
    sampler = GlobalBatchSampler(100, 10)
    for _ in sampler:
        break
    assert sampler.state_dict()["batch"] == 1
    assert list(sampler) == list(sampler.batches(1))


def test_passes_side_by_side_and_changes_in_mid_pass():
    sampler = GlobalBatchSampler(np.int64(100), 10)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [first for first, _ in pairs] == list(sampler.batches(0))
    assert [second for _, second in pairs] == list(sampler.batches(1))
    assert list(sampler) == list(sampler.batches(2))
    for number, _ in enumerate(sampler):
        if number == 4:
            sampler.set_epoch(9)
    assert (sampler.epoch, list(sampler)) == (9, list(sampler.batches(9)))


def test_asking_for_an_iterator_alone_changes_nothing():
    """torch's loader makes one iterator too many in its constructor."""
    sampler = GlobalBatchSampler(100, 10)
    iter(sampler)
    assert list(sampler) == list(sampler.batches(0))


def test_set_epoch_chooses_the_epoch_but_keeps_a_loaded_position():
    sampler = GlobalBatchSampler(100, 10)
    sampler.set_epoch(5)
    assert list(sampler) == list(sampler.batches(5))
    sampler.load_state_dict(sampler.state_at(3, 4))
    sampler.set_epoch(3)
    assert list(sampler) == list(sampler.batches(3, 4))


def test_a_state_saved_at_the_last_batch_of_an_epoch():
    sampler, other = GlobalBatchSampler(100, 10), GlobalBatchSampler(100, 10)
    for _ in itertools.islice(sampler, 10):
        pass
    other.load_state_dict(sampler.state_dict())
    assert (other.epoch, list(other)) == (0, [])
    assert list(other) == list(other.batches(1))


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_subset(length, batch_size, data):
    indices = data.draw(st.lists(st.integers(0, length - 1), max_size=80))
    world = data.draw(st.integers(1, min(4, batch_size)))
    batches = global_batches(world, length, batch_size, indices=indices)
    assert sorted(joined(batches)) == sorted(indices)
    assert batches == global_batches(
        1, length, batch_size, indices=torch.tensor(indices, dtype=torch.int64)
    )
    assert (
        joined(global_batches(world, length, batch_size, indices=indices, shuffle=False)) == indices
    )


def test_weighted_draws_follow_the_weights_and_not_the_world_size():
    weights = [0.0, 1.0, 2.0, 0.0, 5.0, 0.0]
    drawn = global_batches(1, 6, 16, weights=weights, num_samples=80_000)
    assert drawn == global_batches(3, 6, 16, weights=torch.tensor(weights), num_samples=80_000)
    counts = np.bincount(joined(drawn), minlength=6)
    assert counts[[0, 3, 5]].sum() == 0
    expected = np.array([10_000, 20_000, 50_000])
    assert ((counts[[1, 2, 4]] - expected) ** 2 / expected).sum() < 25
    sampler = GlobalBatchSampler(6, 16, weights=weights, num_samples=100)
    assert (len(sampler), sampler.num_samples) == (7, 100)
    assert list(sampler) != list(sampler)


def test_weights_of_a_subset_belong_to_its_samples():
    batches = global_batches(2, 100, 8, weights=[1.0, 3.0], indices=[70, 90], num_samples=4000)
    counts = np.bincount(joined(batches), minlength=100)
    assert counts[70] + counts[90] == 4000
    assert 900 < counts[70] < 1100


def test_a_hundred_thousand_ranks():
    world, length, batch_size = 100_000, 10**9 + 7, 250_000
    chosen = [0, 1, 49_999, 50_000, 50_001, 99_999]
    whole = GlobalBatchSampler(length, batch_size).global_batch(0, 17)
    ragged = GlobalBatchSampler(length, batch_size).global_batch(0, length // batch_size)
    for rank in chosen:
        sampler = GlobalBatchSampler(length, batch_size, rank=rank, world_size=world)
        share = sampler.share(17)
        assert next(sampler.batches(0, 17)) == whole[share.start : share.stop]
        assert list(sampler.batches(0, length // batch_size)) == [
            ragged[rank : rank + 1]
        ]  # 7 samples are left


def test_a_trillion_samples_in_constant_memory():
    GlobalBatchSampler(10**5, 1024)  # whatever numpy sets up on first use
    tracemalloc.start()
    sampler = GlobalBatchSampler(10**12, 1024, rank=7, world_size=8)
    found = joined(itertools.islice(sampler, 200))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found)) == 200 * 128
    assert peak < 10_000_000
    sampler.load_state_dict(sampler.state_at(3, 900_000_000))
    assert len(next(iter(sampler))) == 128


def test_it_pickles_with_its_position():
    sampler = GlobalBatchSampler(1000, 10, seed=3, rank=1, world_size=2)
    for _ in itertools.islice(sampler, 7):
        pass
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict()
    assert list(copy.batches(0, 7)) == list(sampler.batches(0, 7))


def test_with_torch_s_own_loader():
    from torch.utils.data import DataLoader

    sampler = GlobalBatchSampler(100, 9, rank=0, world_size=3)
    for workers in (0, 2):
        epoch = sampler.epoch
        loader = DataLoader(list(range(100)), batch_sampler=sampler, num_workers=workers)
        assert [batch.tolist() for batch in loader] == list(sampler.batches(epoch))
    assert sampler.epoch == 2


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((-1, 4), {}, ["-1"]),
        ((10, 0), {}, ["batch_size", "0"]),
        ((10, -3), {}, ["batch_size", "-3"]),
        ((10, 4), {"rank": 4, "world_size": 4}, ["rank 4", "world_size=4"]),
        ((10, 4), {"rank": -1, "world_size": 4}, ["rank -1", "world_size=4"]),
        ((10, 4), {"rank": 0, "world_size": 0}, ["world_size", "0"]),
        ((10, 4), {"rank": 1}, ["rank=1", "world_size=None"]),
        ((10, 4), {"rank": 0, "world_size": 5}, ["batch_size=4", "world_size=5"]),
        ((10, 4), {"seed": -1}, ["seed", "-1"]),
        ((10, 4), {"weights": [1.0]}, ["1 weights", "10 samples"]),
        ((2, 2), {"weights": [1.0, -1.0]}, ["-1.0"]),
        ((2, 2), {"weights": [0.0, 0.0]}, ["zero"]),
        ((2, 2), {"weights": [1.0, float("nan")]}, ["nan"]),
        ((2, 2), {"weights": [1.0, 1.0], "shuffle": False}, ["shuffle"]),
        ((2, 2), {"weights": [1.0, 1.0], "num_samples": -5}, ["-5"]),
        ((2, 2), {"num_samples": 5}, ["num_samples=5", "weights"]),
        ((5, 2), {"indices": [0, 5]}, ["5", "0 to 4"]),
        ((5, 2), {"indices": [[0], [1]]}, ["(2, 1)"]),
        ((5, 2), {"indices": [[0], [1, 2]]}, ["indices[0] must be a whole number, found [0]"]),
        ((5, 2), {"indices": [1.7, 2.2]}, ["whole numbers", "1.7"]),
        ((5, 2), {"indices": torch.tensor([1.7])}, ["whole numbers", "1.7"]),
        ((5, 2), {"indices": np.array([1.0, 2.0])}, ["whole numbers", "1.0"]),
        ((5, 2), {"indices": ["0", "1"]}, ["indices[0] must be a whole number, found '0'"]),
        ((5, 2), {"indices": [2, True]}, ["indices[1] must be a whole number, found True"]),
        ((5, 2), {"indices": [0, 2**70]}, [str(2**70), "0 to 4"]),
        ((5, 2), {"indices": np.array([0, 2**64 - 1], dtype=np.uint64)}, [str(2**64 - 1)]),
        ((5, 2), {"indices": [-1]}, ["-1", "0 to 4"]),
        ((5, 2), {"indices": {1, 2}}, ["a list, an array or a tensor", "{1, 2}"]),
        ((5, 2), {"indices": "01"}, ["a list, an array or a tensor", "'01'"]),
        ((5, 2), {"indices": 3}, ["a list, an array or a tensor", "3"]),
        ((5, 2), {"indices": torch.tensor(3)}, ["one-dimensional", "()"]),
        ((5, 2), {"indices": [True, False]}, ["a mask of 2 values", "5 samples"]),
        ((5, 2), {"indices": torch.ones(5, 1, dtype=torch.bool)}, ["(5, 1)"]),
        ((2, 2), {"weights": [1.0, float("inf")]}, ["inf"]),
        ((2, 2), {"weights": ["a", "b"]}, ["weights must be numbers", "'a'"]),
        ((2, 2), {"weights": torch.ones(2, dtype=torch.complex64)}, ["complex"]),
        ((2, 2), {"weights": 5}, ["a list, an array or a tensor", "5"]),
        ((2, 2), {"weights": [[1.0], [2.0]]}, ["(2, 1)"]),
        ((2, 2), {"weights": [1, 2], "num_samples": 2.5}, ["num_samples must be a whole number"]),
        ((10, "8"), {}, ["batch_size must be a whole number, found '8'"]),
        ((10, 8.0), {}, ["batch_size must be a whole number, found 8.0"]),
        ((10, True), {}, ["batch_size must be a whole number, found True"]),
        ((10, None), {}, ["batch_size must be a whole number, found None"]),
        ((10.0, 8), {}, ["the dataset's length must be a whole number, found 10.0"]),
        ((10, 8, "no"), {}, ["shuffle must be True or False, found 'no'"]),
        ((10, 8), {"drop_last": "yes"}, ["drop_last must be True or False, found 'yes'"]),
        ((10, 8), {"seed": "x"}, ["seed must be a whole number, found 'x'"]),
        ((10, 8), {"rank": "0", "world_size": 2}, ["rank must be a whole number, found '0'"]),
        ((10, 8), {"rank": 0, "world_size": 2.0}, ["world_size must be a whole number, found 2.0"]),
    ],
)
def test_errors_name_the_bad_value(arguments, options, words):
    with pytest.raises(ConfigError) as caught:
        GlobalBatchSampler(*arguments, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "mask",
    [
        [True, False, True, False],
        (np.bool_(True), False, True, False),
        np.array([True, False, True, False]),
        torch.tensor([True, False, True, False]),
    ],
)
def test_a_mask_chooses_the_samples_where_it_is_true(mask):
    assert list(GlobalBatchSampler(4, 4, shuffle=False, indices=mask)) == [[0, 2]]


@pytest.mark.parametrize(
    "indices",
    [
        [3, 1],
        (np.int32(3), 1),
        np.array([3, 1], dtype=np.uint8),
        np.array([3, 1], dtype=np.uint64),
        torch.tensor([3, 1], dtype=torch.int16),
        [torch.tensor(3), torch.tensor(1)],
        range(3, 0, -2),
    ],
)
def test_indices_of_any_whole_type(indices):
    assert list(GlobalBatchSampler(4, 4, shuffle=False, indices=indices)) == [[3, 1]]


@pytest.mark.parametrize("indices", [[], (), np.array([]), torch.tensor([]), [False] * 4])
def test_no_samples_are_no_batches(indices):
    assert list(GlobalBatchSampler(4, 4, indices=indices)) == []


def test_indices_are_copied():
    indices = np.array([3, 1])
    sampler = GlobalBatchSampler(4, 4, shuffle=False, indices=indices)
    indices[:] = 0
    assert list(sampler) == [[3, 1]]


@pytest.mark.parametrize("scale", [1e308, 1e300, 1.0, 1e-300, 5e-324])
@pytest.mark.parametrize("kind", [list, np.array, torch.DoubleTensor])
def test_weights_of_any_size_are_drawn_in_proportion(scale, kind):
    weights = kind([scale, 0.0, scale, scale])
    sampler = GlobalBatchSampler(4, 4, weights=weights, num_samples=3000)
    drawn = collections.Counter(index for batch in sampler for index in batch)
    assert set(drawn) == {0, 2, 3}
    assert min(drawn.values()) > 850


def test_weights_of_torchs_own_types():
    weights = torch.tensor([0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert list(GlobalBatchSampler(2, 2, weights=weights)) == [[1, 1]]


def test_ordinary_weights_draw_as_ever():
    """A saved position in the middle of an epoch promises the order."""
    sampler = GlobalBatchSampler(4, 8, weights=[0.1, 0.2, 0.3, 0.4], num_samples=16, seed=3)
    assert list(sampler) == [[1, 0, 2, 2, 3, 2, 1, 3], [0, 2, 3, 3, 3, 2, 3, 3]]


def test_a_dataset_without_a_length_is_pointed_to_the_wrapper():
    with pytest.raises(ConfigError, match="ShardedIterable"):
        GlobalBatchSampler(iter([1]), 2)


def test_batches_outside_of_the_epoch():
    with pytest.raises(ConfigError, match=r"batch 3 .*0\.\.2"):
        GlobalBatchSampler(10, 4).share(3)


@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        (101, {}, ["length was 100 and is now 101"]),
        (100, {"seed": 4}, ["seed was 3 and is now 4"]),
        (100, {"seed": 3, "shuffle": False}, ["paceline-permutation/1", "sequential"]),
        (100, {"seed": 3, "drop_last": True}, ["drop_last was False and is now True"]),
        (100, {"seed": 3, "weights": range(100)}, ["weighted"]),
        (100, {"seed": 3, "indices": range(99)}, ["subset"]),
    ],
)
def test_a_state_of_other_data_is_refused_with_both_values(length, options, words):
    state = GlobalBatchSampler(100, 10, seed=3).state_dict()
    with pytest.raises(ConfigError) as caught:
        GlobalBatchSampler(length, 10, **options).load_state_dict(state)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 20}, ["20", "10"]),
        ({"batch": 11}, ["11", "10"]),
        ({"epoch": -1}, ["-1"]),
        ({"version": 9}, ["9"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, words):
    sampler = GlobalBatchSampler(100, 10)
    with pytest.raises(ConfigError) as caught:
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(ConfigError, match="missing"):
        sampler.load_state_dict({"epoch": 1})
