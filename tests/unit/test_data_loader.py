"""DataLoader: the same samples and random numbers at every world size and number of workers, and
resuming at the precise batch.
"""

from __future__ import annotations

import collections
import gc
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from paceline import (
    ConfigError,
    DataLoader,
    DistributedSampler,
    GlobalBatchSampler,
    ShardedIterable,
)
from paceline.data.batch_requests import BatchRange
from paceline.data.seeding import seed_all

LENGTH = 23
Pair = collections.namedtuple("Pair", "index noise")


class Noisy(Dataset):
    """Each sample draws from all three generators."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {
            "index": index,
            "noise": torch.rand(()).double() + random.random() + np.random.rand(),
        }


class Blocks(Noisy):
    """Fetches whole batches, as many datasets on disk do, and records them."""

    def __init__(self):
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


class Model:
    def __init__(self):
        self.calls = 0

    def no_more_data(self, *optimizer):
        self.calls += 1
        self.optimizer = optimizer


def rows(batches):
    return [
        pair for b in batches for pair in zip(b["index"].tolist(), b["noise"].tolist(), strict=True)
    ]


def epoch_of(world, workers=0, dataset=None, epochs=1, **options):
    """What all ranks receive in the last of some epochs, in global order."""
    received = []
    for rank in range(world):
        loader = DataLoader(
            dataset or Noisy(), 5, num_workers=workers, rank=rank, world_size=world, **options
        )
        for _ in range(epochs):
            batches = list(loader)
        received.append(batches)
    return rows(batch for step in zip(*received, strict=True) for batch in step)


def test_order_and_random_numbers_do_not_depend_on_ranks_or_workers():
    expected = epoch_of(1, shuffle=True, seed=3)
    assert sorted(index for index, _ in expected) == list(range(LENGTH))
    for world, workers in [(1, 1), (1, 2), (2, 0), (3, 2), (5, 0)]:
        assert epoch_of(world, workers, shuffle=True, seed=3) == expected
    assert epoch_of(2, 2, shuffle=True, seed=3, persistent_workers=True, epochs=2) == epoch_of(
        1, shuffle=True, seed=3, epochs=2
    )


@pytest.mark.slow
def test_workers_that_are_not_forked():
    options = {"shuffle": True, "seed": 3, "multiprocessing_context": "forkserver"}
    assert epoch_of(1, 1, **options) == epoch_of(1, shuffle=True, seed=3)
    stream = ShardedIterable(list(range(LENGTH)), 5)
    batches = DataLoader(
        stream, num_workers=1, multiprocessing_context="forkserver", persistent_workers=True
    )
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in DataLoader(stream)]


def test_noise_belongs_to_the_sample_its_epoch_and_the_seed():
    noise = dict(epoch_of(1, shuffle=True, seed=3))
    assert dict(epoch_of(1, shuffle=False, seed=3)) == noise  # whatever the order
    assert len(set(noise.values())) == LENGTH
    for other in (epoch_of(1, seed=3, epochs=2), epoch_of(1, seed=4)):
        assert not set(dict(other).values()) & set(noise.values())


def test_subsets_and_foreign_samplers_are_seeded_by_index_too():
    noise = dict(epoch_of(1, seed=3))
    inner = dict(enumerate(noise[index] for index in range(LENGTH)))
    sampler = DistributedSampler(Noisy(), 2, 1)
    loader = DataLoader(Noisy(), 4, sampler=sampler, seed=3)
    found = rows(loader)
    assert all(noise[index] == value for index, value in found)
    sampler.set_epoch(0)
    assert [index for index, _ in found] == list(sampler)
    subset = DataLoader(Subset(Noisy(), [5, 6, 7]), 2, seed=3)
    assert [value for _, value in rows(subset)] == [
        inner[0],
        inner[1],
        inner[2],
    ]  # of the subset's own indices
    single = list(DataLoader(Noisy(), batch_size=None, sampler=[4, 2], seed=3))
    assert [(s["index"], s["noise"].item()) for s in single] == [(4, noise[4]), (2, noise[2])]


def test_a_second_epoch_of_a_foreign_sampler_follows_its_epoch():
    sampler = DistributedSampler(Noisy(), 1, 0)
    loader = DataLoader(Noisy(), 4, sampler=sampler, seed=3)
    sampler.set_epoch(7)
    late = rows(loader)
    fresh = DistributedSampler(Noisy(), 1, 0)
    fresh.set_epoch(7)
    assert rows(DataLoader(Noisy(), 4, sampler=fresh, seed=3)) == late


def test_repeated_draws_of_a_sample_get_different_noise_at_every_world_size():
    def drawn(world):
        received = []
        for rank in range(world):
            sampler = GlobalBatchSampler(
                LENGTH,
                8,
                weights=[1.0] * 2 + [0.0] * 21,
                num_samples=40,
                rank=rank,
                world_size=world,
            )
            received.append(list(DataLoader(Noisy(), batch_sampler=sampler)))
        return rows(batch for step in zip(*received, strict=True) for batch in step)

    assert len(set(drawn(1))) == 40
    assert drawn(1) == drawn(3)


def test_datasets_that_fetch_whole_batches_are_asked_once_for_a_batch():
    dataset = Blocks()
    list(DataLoader(dataset, 5))
    list(DataLoader(Subset(dataset, range(3)), 5))
    assert [len(call) for call in dataset.calls] == [5, 5, 5, 5, 3, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_loop_s_own_random_numbers_are_untouched(workers):
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_all(1)
    expected = [draws() for _ in range(5)]
    seed_all(1)
    assert [draws() for _ in DataLoader(Noisy(), 5, num_workers=workers)] == expected


def test_seeding_can_be_switched_off_and_is_off_where_nothing_is_drawn():
    torch.manual_seed(0)
    values = rows(DataLoader(Noisy(), 5, seed_samples=False))
    torch.manual_seed(0)
    assert torch.rand(()).item() <= values[0][1]  # drawn from the process' own generator
    assert rows(DataLoader(Noisy(), 5, seed_samples=False)) != values
    plain = DataLoader(TensorDataset(torch.arange(7)), 3)
    assert [batch[0].tolist() for batch in plain] == [[0, 1, 2], [3, 4, 5], [6]]
    assert plain._requests._seed is None


def test_collate_draws_are_reproducible():
    def noisy(samples):
        return {
            "index": torch.tensor([s["index"] for s in samples]),
            "noise": torch.rand(len(samples)).double(),
        }

    def run(workers):
        return rows(DataLoader(Noisy(), 6, shuffle=True, collate_fn=noisy, num_workers=workers))

    assert run(0) == run(2)
    assert len({value for _, value in run(0)}) == LENGTH


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_state_is_what_was_received_not_what_was_prefetched(workers, persistent):
    options = {"shuffle": True, "seed": 9, "num_workers": workers, "persistent_workers": persistent}
    whole = DataLoader(Noisy(), 4, **options)
    expected = [rows(whole), rows(whole)]
    loader = DataLoader(Noisy(), 4, **options)
    iterator = iter(loader)
    first = rows(itertools.islice(iterator, 2))
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    assert loader.batch_sampler.state_dict() == state
    del iterator
    loader.load_state_dict(state)
    assert first + rows(loader) == expected[0]
    assert (loader.epoch, rows(loader)) == (1, expected[1])
    other = [
        DataLoader(Noisy(), 4, shuffle=True, seed=9, rank=rank, world_size=3) for rank in range(3)
    ]
    for rank in other:
        rank.load_state_dict(state)
    rest = [list(rank) for rank in other]
    assert first + rows(batch for step in zip(*rest, strict=True) for batch in step) == expected[0]


def test_a_state_saved_in_the_last_step_of_an_epoch():
    loader = DataLoader(Noisy(), 5)
    for _ in loader:
        state = loader.state_dict()
    fresh = DataLoader(Noisy(), 5)
    fresh.load_state_dict(state)
    assert (fresh.epoch, list(fresh)) == (0, [])
    assert rows(fresh) == rows(loader)


def test_empty_shares_are_batches_of_zero_samples():
    class Nested(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return (
                torch.ones(2, 3),
                Pair(index, 0.5),
                {"name": str(index), "pair": (torch.zeros(4), "x")},
            )

    for rank, workers in [(2, 0), (3, 1)]:
        image, pair, more = list(
            DataLoader(Nested(), 4, num_workers=workers, rank=rank, world_size=4)
        )[-1]
        assert image.shape == (0, 2, 3)
        assert isinstance(pair, Pair)
        assert (pair.index.shape, pair.index.dtype, pair.noise.dtype) == (
            (0,),
            torch.int64,
            torch.float64,
        )
        assert (more["name"], more["pair"][0].shape) == ([], (0, 4))
        assert torch.nn.Linear(3, 1)(image).sum().item() == 0.0


def test_batches_that_do_not_slice_need_a_function():
    class Graphs:
        def __init__(self, members):
            self.members = members

    options = {"collate_fn": Graphs, "rank": 1, "world_size": 2}
    with pytest.raises(ConfigError, match="empty_batch"):
        list(DataLoader([1, 2, 3], 2, **options))
    batches = list(
        DataLoader([1, 2, 3], 2, **options, empty_batch=lambda batch: Graphs(batch.members[:0]))
    )
    assert [batch.members for batch in batches] == [[2], []]


def test_empty_batches_of_every_kind_of_collating():
    sample = torch.arange(7)
    cases = {
        "list of samples": (list, []),
        "detection": (
            lambda samples: tuple(zip(*[(s, {"boxes": s}) for s in samples], strict=True)),
            ((), ()),
        ),
        "batch in the second dimension": (
            lambda samples: torch.stack(samples, dim=1),
            torch.empty(7, 0),
        ),
        "packed with offsets": (
            lambda samples: {
                "values": torch.cat(samples),
                "offsets": torch.arange(len(samples) + 1) * 7,
            },
            {"values": torch.empty(0), "offsets": torch.tensor([0])},
        ),
        "with a constant": (lambda samples: (torch.stack(samples), torch.tensor(2.5), "v1"), None),
    }
    for name, (collate, expected) in cases.items():
        batch = list(DataLoader([sample] * 3, 2, collate_fn=collate, rank=1, world_size=2))[-1]
        if name == "with a constant":
            assert (batch[0].shape, batch[1].item(), batch[2]) == ((0, 7), 2.5, "v1")
        elif isinstance(expected, torch.Tensor):
            assert batch.shape == expected.shape
        elif isinstance(expected, dict):
            assert {key: value.tolist() for key, value in batch.items()} == {
                "values": [],
                "offsets": [0],
            }
        else:
            assert batch == expected, name
    changing = lambda samples: samples[0] if len(samples) == 1 else torch.stack(samples)  # noqa: E731
    with pytest.raises(ConfigError, match="empty_batch"):
        list(DataLoader([sample] * 3, 2, collate_fn=changing, rank=1, world_size=2))


def test_no_more_data_is_called_at_the_end_of_the_data_and_only_then():
    model = Model()
    loader = DataLoader(Noisy(), 5, model=model)
    for _ in loader:
        assert model.calls == 0
        break
    list(loader)
    assert (model.calls, model.optimizer) == (1, ())
    list(DataLoader(Noisy(), 5, model=model, optimizer="sgd"))
    assert (model.calls, model.optimizer) == (2, ("sgd",))
    with pytest.raises(ConfigError, match="Linear has no method no_more_data"):
        DataLoader(Noisy(), 5, model=torch.nn.Linear(1, 1))


def test_without_a_sampler_the_batch_is_global_and_len_counts_steps():
    loader = DataLoader(Noisy(), 8, rank=0, world_size=4)
    assert len(loader) == 3
    assert [len(batch["index"]) for batch in loader] == [2, 2, 2]
    assert len(DataLoader(Noisy(), 8, drop_last=True, rank=0, world_size=4)) == 2
    assert isinstance(loader, torch.utils.data.DataLoader)
    shares = [loader.share for _ in loader]
    assert [(share.count, share.size) for share in shares] == [(2, 8), (2, 8), (2, 7)]
    with pytest.raises(ConfigError, match="BatchSampler"):
        _ = DataLoader(Noisy(), sampler=[1]).share
    with pytest.raises(ConfigError, match=r"batch_size=1 .*world_size=4"):
        DataLoader(Noisy(), rank=0, world_size=4)


def test_device_is_applied_to_nested_batches():
    class Own:
        def to(self, device):
            self.device = device
            return self

    batches = [(torch.ones(1), {"a": [torch.zeros(2)]}, Pair(torch.ones(1), "text"), Own())]
    loader = DataLoader(batches, 1, collate_fn=lambda samples: samples[0], device="meta")
    tensor, mapping, pair, own = next(iter(loader))
    assert {t.device.type for t in (tensor, mapping["a"][0], pair.index)} == {"meta"}
    assert (pair.noise, own.device.type) == ("text", "meta")
    assert next(iter(DataLoader(Noisy(), 5, device="auto")))["index"].device.type == "cpu"
    with pytest.raises(ConfigError, match="nowhere"):
        DataLoader(Noisy(), 5, device="nowhere")


def test_an_order_that_cannot_be_resumed_is_refused():
    with pytest.raises(ConfigError, match="SequentialSampler"):
        DataLoader(Noisy(), sampler=torch.utils.data.SequentialSampler(Noisy())).state_dict()
    with pytest.raises(ConfigError, match="in_order"):
        DataLoader(Noisy(), 5, in_order=False).state_dict()
    with pytest.raises(ConfigError, match=r"rank=0 and world_size=2"):
        DataLoader(Noisy(), sampler=[1], rank=0, world_size=2)
    with pytest.raises(ConfigError, match="seed"):
        DataLoader(Noisy(), sampler=[1], seed=-1)


def test_other_iterable_datasets_without_batches_pass_through():
    class Own(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2), torch.zeros(2)])

    assert [batch.tolist() for batch in DataLoader(Own(), batch_size=None)] == [[1, 1], [0, 0]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_of_a_dataset_come_through(workers):
    class Broken(Noisy):
        def __getitem__(self, index):
            raise KeyError(f"sample {index}")

    with pytest.raises(KeyError, match="sample 0"):
        list(DataLoader(Broken(), 5, num_workers=workers))
    # torch's traceback refers to itself and holds the worker, which torch then waits 5 s for
    gc.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "8"}, "batch_size must be a whole number, found '8'"),
        ({"batch_size": 8.0}, "batch_size must be a whole number, found 8.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"batch_size": 8, "shuffle": "no"}, "shuffle must be True or False, found 'no'"),
        ({"batch_size": 8, "drop_last": "no"}, "drop_last must be True or False, found 'no'"),
        ({"batch_size": 8, "num_workers": "2"}, "num_workers must be a whole number, found '2'"),
        ({"batch_size": 8, "seed": 0.5}, r"seed must be a whole number, found 0\.5"),
        (
            {"batch_size": 8, "rank": "0", "world_size": 1},
            "rank must be a whole number, found '0'",
        ),
    ],
)
def test_arguments_of_another_type_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        DataLoader(list(range(10)), **options)
    with pytest.raises(ConfigError, match=message):
        DataLoader(ShardedSource(), **options)


class ShardedSource(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_a_position_that_is_none_is_named():
    loader = DataLoader(list(range(10)), batch_size=2)
    with pytest.raises(ConfigError, match="not a saved position but a list"):
        loader.load_state_dict([1, 2])
    with pytest.raises(ConfigError, match="the saved epoch must be a whole number, found 'x'"):
        loader.load_state_dict({**loader.state_dict(), "epoch": "x"})
    with pytest.raises(ConfigError, match="epoch must be a whole number, found '3'"):
        loader.set_epoch("3")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("weights", [None, list(range(1, LENGTH + 1))])
def test_ranges_of_global_batches_have_the_samples_and_seeds_of_the_batches(workers, weights):
    sampler = GlobalBatchSampler(LENGTH, 6, rank=0, world_size=1, weights=weights)
    loader = DataLoader(Noisy(), batch_sampler=sampler, num_workers=workers)
    whole = list(loader)
    ranges = [BatchRange(0, batch, 2, 5) for batch in range(4)]
    before = loader.state_dict()
    for batch, part in zip(whole, loader.range_loader().load_ahead(ranges), strict=True):
        assert part["index"].tolist() == batch["index"][2:5].tolist()
        assert part["noise"].tolist() == batch["noise"][2:5].tolist()
    assert loader.state_dict() == before


def test_ranges_need_global_batches():
    with pytest.raises(ConfigError, match="stream"):
        DataLoader(ShardedIterable(range(5), 2)).range_loader()
    with pytest.raises(ConfigError, match="RandomSampler cannot be resumed"):
        DataLoader(Noisy(), sampler=torch.utils.data.RandomSampler(Noisy())).range_loader()
