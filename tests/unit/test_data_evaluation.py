"""Evaluation: the result of a single process, to the last bit, from any number of ranks."""

from __future__ import annotations

import fractions
import math
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from paceline import ConfigError, Evaluation, MismatchError
from paceline.data.changing_ranks import gaps_between, share_of_range, without_overlaps
from paceline.data.evaluation_setting import EvaluationSetting, announce
from paceline.data.exact_sum import ExactSum


def data(length):
    generator = torch.Generator().manual_seed(length)
    return TensorDataset(torch.randn(length, 3, generator=generator), torch.arange(length))


def run(evaluation):
    for features, index in evaluation:
        evaluation.add(loss=(features**2).sum(1), hit=features[:, 0] > 0)
        evaluation.add_sum("weighted", float((features[:, 1] * 3).sum().double()), 2 * len(index))
        evaluation.collect(
            index=index, name=[f"sample {i}" for i in index.tolist()], features=features
        )
    return evaluation


def merged_result(length, world, batch_size):
    parts = [
        run(Evaluation(data(length), batch_size, rank=rank, world_size=world)).part()
        for rank in range(world)
    ]
    random.Random(length).shuffle(parts)
    return Evaluation.merge([pickle.loads(pickle.dumps(part)) for part in parts])


@pytest.mark.timeout(400)  # all 1,600 cases, on a machine that may be busy
@pytest.mark.parametrize(
    "lengths", [(1, 3, 7, 16), pytest.param(range(1, 41), marks=pytest.mark.slow)]
)
def test_equal_to_one_process_for_every_length_world_and_batch(lengths):
    for length in lengths:
        features, index = data(length).tensors
        losses = [fractions.Fraction(value) for value in (features**2).sum(1).double().tolist()]
        expected = float(sum(losses)), length
        for world in range(1, 6):
            for batch_size in range(1, 9):
                result = merged_result(length, world, batch_size)
                assert (
                    result.sum("loss"),
                    result.count("loss"),
                ) == expected  # no rounding but the last
                assert result.mean("hit") == (features[:, 0] > 0).sum().item() / length
                assert result.count("weighted") == 2 * length
                assert torch.equal(result.outputs["index"], index)
                assert torch.equal(result.outputs["features"], features)
                assert result.outputs["name"] == [f"sample {i}" for i in range(length)]


def test_a_single_process_needs_no_group():
    result = run(Evaluation(data(10), 4)).result()
    assert result.names == ["hit", "loss", "weighted"]
    assert result.mean("loss") == (data(10).tensors[0] ** 2).sum(1).double().mean().item()


def test_a_second_evaluation_starts_from_nothing():
    evaluation = Evaluation(data(10), 4)
    assert run(evaluation).result().sum("loss") == run(evaluation).result().sum("loss")


def test_many_batches_and_values_of_several_per_sample():
    evaluation = Evaluation(data(100), 1)
    for features, _ in evaluation:
        evaluation.add(value=features)
    assert evaluation.result().count("value") == 300


def test_an_empty_dataset():
    result = run(Evaluation(data(0), 4)).result()
    assert (result.names, result.outputs) == ([], {})
    with pytest.raises(ConfigError, match="'loss'"):
        result.mean("loss")


@given(st.lists(st.floats(-1e300, 1e300)), st.integers(1, 5))
def test_exact_sums_do_not_depend_on_how_they_are_cut(numbers, pieces):
    sums = [ExactSum(numbers[piece::pieces]) for piece in range(pieces)]
    merged = ExactSum(term for part in sums for term in part.terms)
    assert merged.value == math.fsum(numbers)
    assert sum(map(fractions.Fraction, merged.terms)) == sum(map(fractions.Fraction, numbers))


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_sums_of_what_is_not_finite(special):
    assert str(ExactSum([1.0, special, 2.0]).value) == str(special)
    total = ExactSum([1.0, math.inf])
    total.add([-math.inf])
    assert math.isnan(total.value)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda e: e.add(loss=torch.tensor(1.0)), ["loss", "4 samples", "add_sum"]),
        (lambda e: e.add(loss=torch.ones(3)), ["loss", "3 rows", "4 samples"]),
        (lambda e: e.add(loss=[1.0] * 4), ["loss", "list"]),
        (lambda e: (e.add(loss=torch.ones(4)), e.add(loss=torch.ones(4))), ["loss", "twice"]),
        (lambda e: e.collect(out=torch.ones(2)), ["out", "2 rows", "4 samples"]),
        (lambda e: e.add_sum("loss", torch.ones(4), 4), ["loss", "(4,)"]),
    ],
)
def test_values_that_do_not_fit_the_batch(use, words):
    evaluation = Evaluation(data(4), 4)
    batches = iter(evaluation)
    next(batches)
    with pytest.raises(ConfigError) as caught:
        use(evaluation)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_use_at_the_wrong_time():
    with pytest.raises(ConfigError, match="outside of a batch"):
        Evaluation(data(4), 4).add(loss=torch.ones(4))
    with pytest.raises(ConfigError, match="0 of its 4 samples"):
        Evaluation(data(4), 4).part()
    with pytest.raises(ConfigError, match=r"rank 1 of world_size=2.*merge"):
        run(Evaluation(data(4), 4, rank=1, world_size=2)).result()
    with pytest.raises(ConfigError, match="batch_size"):
        Evaluation(data(4), 0)
    with pytest.raises(ConfigError, match="has no length"):
        Evaluation(iter([1]), 1)
    evaluation = Evaluation(data(4), 2)
    for number, (_, index) in enumerate(evaluation):
        if number == 0:
            evaluation.collect(index=index)
    with pytest.raises(ConfigError, match="2 rows of 'index' for 4 samples"):
        evaluation.part()


def test_parts_that_do_not_belong_together():
    parts = [run(Evaluation(data(9), 2, rank=rank, world_size=3)).part() for rank in range(3)]
    for wrong in ([parts[0], parts[2]], [parts[0], *parts], parts[:2], []):
        with pytest.raises(MismatchError, match="once"):
            Evaluation.merge(wrong)
    other = Evaluation(data(9), 2, rank=2, world_size=3)
    for _ in other:
        other.add_sum("else", 1.0, 1)
    with pytest.raises(MismatchError, match="different names") as caught:
        Evaluation.merge([*parts[:2], other.part()])
    assert set(caught.value.values) == {0, 1, 2}


def test_parts_without_overlaps_and_the_gaps_between_them_cover_a_dataset_once():
    parts = [range(5), range(3), range(4, 8), range(9, 9), range(10, 12)]
    chosen = without_overlaps(parts)
    assert chosen == [range(5), range(10, 12)]
    assert gaps_between(chosen, 14) == [range(5, 10), range(12, 14)]
    assert gaps_between([], 0) == []


class LosesARank:
    """Two ranks, of which the other one is lost in the first exchange."""

    def __init__(self):
        self.size, self.counted = 2, 0

    def own_share(self, batches):
        return share_of_range(batches, 0, self.size)

    def gather_parts(self, parts):
        if self.size == 2:
            self.size = 1
            return None
        return parts

    def count_evaluation(self):
        self.counted += 1


def setting_of(ranks):
    return EvaluationSetting(threads=1, prepare=lambda batch: batch, ranks=ranks)


def test_what_a_lost_rank_has_not_evaluated_is_evaluated_by_the_others():
    dataset = [torch.tensor(float(number)) for number in range(11)]
    evaluation = Evaluation(dataset, batch_size=3)
    ranks = LosesARank()
    setting = setting_of(ranks)
    announce(setting)
    sizes = []
    for values in evaluation:
        evaluation.add(value=values)
        evaluation.collect(value=values)
        sizes.append(len(values))
    result = evaluation.result()
    assert result.sum("value") == sum(range(11))
    assert result.count("value") == 11
    assert result.outputs["value"].tolist() == list(range(11))
    assert ranks.counted == 1
    assert sizes == [3, 3, 3, 2], "batches are those of a single rank"


def test_nothing_to_evaluate_among_ranks_that_change():
    setting = setting_of(LosesARank())
    announce(setting)
    evaluation = Evaluation([], batch_size=3)
    assert list(evaluation) == []
    assert evaluation.result().names == []


def test_no_result_before_the_ranks_have_met():
    evaluation = Evaluation([torch.tensor(1.0)])
    setting = setting_of(LosesARank())
    announce(setting)
    with pytest.raises(ConfigError, match="iterate over it to its end first"):
        evaluation.result()


def test_a_setting_ends_with_its_training():
    setting = EvaluationSetting(threads=3, prepare=lambda batch: batch + 1, ranks=None)
    announce(setting)
    evaluation = Evaluation([torch.tensor(1.0)])
    threads = torch.get_num_threads()
    for batch in evaluation:
        assert (batch.item(), torch.get_num_threads()) == (2.0, 3)
    assert torch.get_num_threads() == threads
    del setting
    assert [batch.item() for batch in evaluation] == [1.0]
