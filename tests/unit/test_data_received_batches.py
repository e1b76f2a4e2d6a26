"""What a forward is told about the batch it gets."""

from __future__ import annotations

import contextlib

import pytest
import torch

from paceline.data import DataLoader, GlobalBatchSampler
from paceline.data import received_batches as received
from paceline.data.received_batches import BatchSource, ReceivedBatch, weight_of_input
from paceline.data.shares import share_of

EVEN, LARGE, SMALL = ReceivedBatch(4, 1.0), ReceivedBatch(2, 1.5), ReceivedBatch(1, 0.75)


@pytest.fixture(autouse=True)
def _nothing_received():
    """Loaders of other tests may still be there."""
    received._received.clear()
    yield
    received._received.clear()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(11))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]
)
@pytest.mark.parametrize("dataset", [list(range(11)), Stream()], ids=["map", "stream"])
def test_every_batch_weighs_its_share(dataset, options, rank):
    loader = DataLoader(dataset, 4, rank=rank, world_size=3, **options)
    for _ in range(2):
        sizes = []
        for size, batch in zip((4, 4, 3), loader, strict=True):
            share = share_of(size, rank, 3)
            assert len(batch) == share.count
            assert weight_of_input(17) == share.weight
            sizes.append(size)
        assert sizes == [4, 4, 3]
        assert weight_of_input(17) is None  # the pass is over


def test_any_order_of_batches():
    loader = DataLoader(list(range(11)), 4, rank=0, world_size=3, num_workers=2, in_order=False)
    found = set()
    for batch in loader:
        found.add((len(batch), weight_of_input(0)))
    assert found == {(2, 1.5), (1, 1.0)}


def test_a_sampler_of_torchs_loader_that_runs_ahead():
    sampler = GlobalBatchSampler(11, 4, rank=0, world_size=3)
    loader = torch.utils.data.DataLoader(range(11), batch_sampler=sampler, num_workers=1)
    assert [(len(batch), weight_of_input(len(batch))) for batch in loader] == [
        (2, 1.5),
        (2, 1.5),
        (1, 1.0),
    ]
    assert weight_of_input(7) is None


def test_the_leading_dimension_decides_between_batches_that_weigh_differently():
    first, second = BatchSource(), BatchSource()
    first.hand_out(LARGE)
    assert weight_of_input(99) == 1.5
    second.hand_out(SMALL)
    assert (weight_of_input(2), weight_of_input(1), weight_of_input(3)) == (1.5, 0.75, None)
    second.hand_out(LARGE)
    assert weight_of_input(99) == 1.5


def test_a_batch_is_done_with_when_the_loop_comes_back():
    source = BatchSource()
    source.hand_out(LARGE)
    assert weight_of_input(2) == weight_of_input(1) == 1.5
    source.hand_out(SMALL)
    assert weight_of_input(2) == 0.75
    source.finish()
    assert weight_of_input(1) is None


def test_a_loop_that_fetches_ahead_is_one_batch_behind():
    source = BatchSource()
    source.hand_out(LARGE)
    source.hand_out(LARGE)
    assert weight_of_input(2) == 1.5
    source.hand_out(SMALL)
    assert (weight_of_input(2), weight_of_input(5)) == (1.5, None)
    source.finish()
    del source  # the loader is gone, its last batch is not
    assert weight_of_input(5) == 0.75


def test_an_evaluation_leaves_nothing_behind():
    training, evaluation = BatchSource(), BatchSource()
    training.hand_out(LARGE)
    for _ in range(3):
        evaluation.hand_out(SMALL)
    evaluation.finish()
    assert weight_of_input(5) == 1.5


def test_a_loop_left_early_keeps_its_batch():
    loader = DataLoader(list(range(10)), 4, rank=0, world_size=3)
    with contextlib.closing(iter(loader)) as batches:
        next(batches)
    assert weight_of_input(5) == 1.5
    del loader
    assert weight_of_input(5) is None


def test_nothing_is_known_without_a_loader():
    assert weight_of_input(4) is None
