"""Every launcher's variables reach samplers, loader and evaluation, before there is a process group
and after.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import paceline
from paceline import (
    ConfigError,
    DataLoader,
    DistributedSampler,
    Evaluation,
    GlobalBatchSampler,
    ShardedIterable,
)
from paceline.rank_env import current_rank_and_world

# Each of them describes rank 1 of 4.
LAUNCHERS = {
    "paceline run": {"RANK": "1", "WORLD_SIZE": "4", "PACELINE_LAUNCHER": "paceline run"},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "4"},
    "Slurm": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    },
    "indexed Kubernetes job": {
        "JOB_COMPLETION_INDEX": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "train-0",
        "MASTER_PORT": "23456",
    },
}


def data():
    return TensorDataset(torch.arange(64))


def rank_of_distributed_sampler():
    sampler = DistributedSampler(data())
    return sampler.rank, sampler.num_replicas


def rank_of(source):
    return source.rank, source.world_size


USERS = {
    "DistributedSampler": rank_of_distributed_sampler,
    "GlobalBatchSampler": lambda: rank_of(GlobalBatchSampler(64, 8)),
    "ShardedIterable": lambda: rank_of(ShardedIterable(range(64), 8)),
    "DataLoader": lambda: rank_of(DataLoader(data(), 8).batch_sampler),
    "Evaluation": lambda: rank_of(Evaluation(data(), 8)),
    "current_rank_and_world": current_rank_and_world,
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for environment in LAUNCHERS.values():
        for name in environment:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def single_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def launch(monkeypatch, launcher):
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_before_init_the_launchers_variables_count(monkeypatch, launcher, user):
    launch(monkeypatch, launcher)
    assert USERS[user]() == (1, 4)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_after_init_the_default_group_counts(monkeypatch, single_process_group, launcher):
    launch(monkeypatch, launcher)
    assert {user: make() for user, make in USERS.items()} == dict.fromkeys(USERS, (0, 1))


def test_a_single_process_has_rank_0_of_1():
    found = {user: make() for user, make in USERS.items() if user != "DistributedSampler"}
    assert set(found.values()) == {(0, 1)}
    with pytest.raises(ConfigError, match="init_process_group"):
        rank_of_distributed_sampler()  # as torch's does


@pytest.mark.parametrize("user", USERS)
def test_a_half_set_environment_is_refused(monkeypatch, user):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE not set"):
        USERS[user]()


def test_the_samplers_missing_argument_comes_from_the_launcher(monkeypatch):
    launch(monkeypatch, "Slurm")
    assert DistributedSampler(data(), num_replicas=8).rank == 1
    assert DistributedSampler(data(), rank=3).num_replicas == 4


def test_a_loader_made_under_slurm_before_init_loads_its_own_share(monkeypatch):
    launch(monkeypatch, "Slurm")
    assert sum(len(batch) for (batch,) in paceline.DataLoader(data(), 8)) == 16
    evaluation = paceline.Evaluation(data(), 8)
    assert (evaluation.start, evaluation.stop) == (16, 32)


def test_an_evaluation_of_other_ranks_than_the_groups_is_refused(monkeypatch, request):
    launch(monkeypatch, "Slurm")
    evaluation = paceline.Evaluation(data(), 8)
    for _ in evaluation:
        pass
    request.getfixturevalue("single_process_group")
    with pytest.raises(ConfigError, match=r"made as rank 1 of 4, but this is rank 0 of 1"):
        evaluation.result()


MADE_BEFORE_THE_GROUP = {
    "DistributedSampler": lambda: DistributedSampler(data()),
    "GlobalBatchSampler": lambda: GlobalBatchSampler(64, 8),
    "ShardedIterable": lambda: ShardedIterable(range(64), 8),
    "DataLoader": lambda: DataLoader(data(), 8),
    "DataLoader of a stream": lambda: DataLoader(ShardedIterable(range(64), 8)),
}


@pytest.mark.parametrize("kind", MADE_BEFORE_THE_GROUP)
def test_data_divided_for_other_ranks_than_the_groups_is_refused(monkeypatch, request, kind):
    """As where a program makes its loader first and starts processes of its own afterwards."""
    launch(monkeypatch, "torchrun")
    source = MADE_BEFORE_THE_GROUP[kind]()
    next(iter(source))
    request.getfixturevalue("single_process_group")
    with pytest.raises(ConfigError, match=r"made as rank 1 of 4, but is used as rank 0 of 1\."):
        next(iter(source))


@pytest.mark.parametrize("kind", sorted(set(MADE_BEFORE_THE_GROUP) - {"DistributedSampler"}))
def test_data_made_before_ranks_were_started_is_refused(monkeypatch, kind):
    source = MADE_BEFORE_THE_GROUP[kind]()
    next(iter(source))
    launch(monkeypatch, "torchrun")
    with pytest.raises(ConfigError, match=r"made as rank 0 of 1, but is used as rank 1 of 4\."):
        next(iter(source))


def test_data_may_be_used_after_the_group_is_gone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loader = DataLoader(data(), 8)
    dist.destroy_process_group()
    assert len(list(loader)) == 8


@pytest.mark.usefixtures("single_process_group")
def test_ranks_that_were_given_may_differ_from_the_groups():
    assert len(list(GlobalBatchSampler(64, 8, rank=1, world_size=4))) == 8
    assert len(list(DistributedSampler(data(), 4, 1))) == 16
    assert len(list(DataLoader(data(), 8, rank=1, world_size=4))) == 8
