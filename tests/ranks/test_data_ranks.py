"""Samplers, loader and evaluation in real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from paceline import DataLoader, DistributedSampler, Evaluation, GlobalBatchSampler, Training
from tests.harness import init_group, run_ranks

LENGTH = 23


def dataset():
    return TensorDataset(
        torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(0)), torch.arange(LENGTH)
    )


def use_everything(rank, world):
    init_group("gloo")
    evaluation = Evaluation(dataset(), 3)
    for features, index in evaluation:
        evaluation.add(loss=(features**2).sum(1))
        evaluation.collect(index=index)
    result = evaluation.result()
    batches = [index.tolist() for _, index in DataLoader(dataset(), 7, shuffle=True)]
    sampler = GlobalBatchSampler(LENGTH, 7)
    stock = torch.utils.data.DistributedSampler(dataset())
    ours = DistributedSampler(dataset())
    dist.destroy_process_group()
    return {
        "sum": result.sum("loss"),
        "count": result.count("loss"),
        "index": result.outputs["index"].tolist(),
        "batches": batches,
        "rank and world": (sampler.rank, sampler.world_size),
        "same as stock": list(stock) == list(ours),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_rank_and_world_size_come_from_the_group(world):
    results = run_ranks(world, use_everything, timeout=100)
    expected = list(GlobalBatchSampler(LENGTH, 7, rank=0, world_size=1))
    steps = [
        [index for share in step for index in share]
        for step in zip(*[result["batches"] for result in results], strict=True)
    ]
    assert steps == expected
    losses = (dataset().tensors[0] ** 2).sum(1).double()
    for rank, result in enumerate(results):
        assert result["rank and world"] == (rank, world)
        assert result["same as stock"]
        assert result["index"] == list(range(LENGTH))
        assert result["count"] == LENGTH
        assert result["sum"] == pytest.approx(losses.sum().item(), rel=1e-14)
        assert result["sum"] == results[0]["sum"]


def evaluate_made_before_init(rank, world):
    evaluation = Evaluation(dataset(), 5)
    init_group("gloo")
    for _, index in evaluation:
        evaluation.collect(index=index)
    indices = evaluation.result().outputs["index"].tolist()
    dist.destroy_process_group()
    return indices


def test_an_evaluation_made_before_init_exchanges_through_the_group():
    assert run_ranks(2, evaluate_made_before_init, timeout=100) == [list(range(LENGTH))] * 2


def evaluate_in_a_subgroup(rank, world):
    init_group("gloo")
    group = dist.new_group([1, 2])
    indices = None
    if rank in (1, 2):
        evaluation = Evaluation(dataset(), 5, group=group)
        for _, index in evaluation:
            evaluation.collect(index=index)
        indices = evaluation.result().outputs["index"].tolist()
    dist.destroy_process_group()
    return indices


def test_evaluation_in_a_subgroup():
    assert run_ranks(3, evaluate_in_a_subgroup, timeout=100) == [
        None,
        list(range(LENGTH)),
        list(range(LENGTH)),
    ]


def train(rank, world, state, steps):
    """A few exact steps: the gradient of the mean over the global batch, from means weighted by
    the shares.
    """
    init_group("gloo")
    loader = DataLoader(dataset(), 5, shuffle=True, seed=4)
    model = torch.nn.Linear(4, 1).double()
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.constant_(model.bias, 0.0)
    if state is not None:
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = 0
    while done < steps:
        for features, index in loader:
            share = loader.share
            assert share.count == len(index)
            loss = (
                ((model(features.double()) - 1) ** 2).mean() * share.weight
                if share.count
                else 0.0 * model.weight.sum()
            )
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()
            done += 1
            if done == steps:
                break
    state = {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "data": loader.state_dict(),
    }
    dist.destroy_process_group()
    return state


@pytest.mark.slow
@pytest.mark.timeout(400)  # four groups one after the other, on a machine that may be busy
def test_training_goes_on_with_another_number_of_ranks_in_mid_epoch():
    """Weights after 9 steps (an epoch has 5) on 3, 1 and 2 ranks are those of a single process."""
    single = run_ranks(1, train, None, 9, timeout=100)[0]
    state = run_ranks(3, train, None, 3, timeout=100)[0]
    state = run_ranks(1, train, state, 4, timeout=100)[0]
    state = run_ranks(2, train, state, 2, timeout=100)[0]
    assert state["data"] == single["data"]
    for name, value in single["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-12, atol=1e-12)


def evaluate_during_training(rank, world):
    """The values of rows depend on how many rows a batch has, and on the threads."""
    if world > 1:
        init_group()
    torch.manual_seed(0)
    inputs = TensorDataset(torch.randn(150, 256))
    model = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    early = Evaluation(inputs, batch_size=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, optimizer, DataLoader(inputs, batch_size=16))
    results = []
    for evaluation in (early, Evaluation(inputs, batch_size=16)):
        for (rows,) in evaluation:
            with torch.no_grad():
                evaluation.collect(output=model(rows)[:, 0])
        results.append(evaluation.result().outputs["output"].tolist())
    return training.step, results


def test_an_evaluation_during_training_has_the_same_bits_on_any_number_of_ranks():
    alone = run_ranks(1, evaluate_during_training, timeout=100)
    for world in (2, 3):
        assert run_ranks(world, evaluate_during_training, timeout=100) == alone * world
