"""Every launcher's variables lead to the right rank; half-set and contradictory ones to an error
that names them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.rank_env import RankEnv, current_rank_and_world, expand_hostlist, find_rank_env

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1931739137", "PMIX_RANK": "1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "7",
}  # fmt: skip
PYTORCH_JOB = {
    "RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "23456",
}


def test_torchrun():
    assert find_rank_env(TORCHRUN) == RankEnv("torchrun", 5, 8, 1, 4, "10.0.0.1", 29400)


def test_open_mpi():
    found = find_rank_env(OPEN_MPI)
    assert found == RankEnv("Open MPI", 1, 2, 1, 2, job_key="ompi-1931739137")
    assert found.one_host


def test_mpich():
    assert find_rank_env(MPICH) == RankEnv("MPICH", 1, 2, 1, 2)


def test_slurm_on_two_nodes_takes_the_first_host_and_a_port_of_the_job():
    found = find_rank_env(SLURM)
    assert (found.source, found.rank, found.world_size) == ("Slurm", 5, 7)
    assert (found.local_rank, found.local_world_size) == (1, 3)
    assert found.master_addr == "gpu07"
    assert (
        found.master_port
        == find_rank_env({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port
    )
    assert found.master_port != find_rank_env({**SLURM, "SLURM_JOB_ID": "4243"}).master_port


def test_slurm_on_one_node_needs_no_port():
    one = {
        **SLURM,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "gpu07",
        "SLURM_LOCALID": "5",
    }
    found = find_rank_env(one)
    assert found.one_host
    assert found.master_addr is None
    assert found.job_key == "slurm-4242-0"


def test_the_batch_script_of_a_slurm_job_is_no_rank():
    """sbatch sets SLURM_PROCID and SLURM_NTASKS for the script itself; only srun makes tasks."""
    assert (
        find_rank_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "1"}).source
        == "alone"
    )


def test_kubernetes():
    assert find_rank_env(PYTORCH_JOB) == RankEnv(
        "Kubernetes", 2, 4, None, None, "train-master-0", 23456
    )
    assert find_rank_env(INDEXED_JOB) == RankEnv(
        "Kubernetes", 3, 4, None, None, "train-0.train", 23456
    )


def test_alone():
    assert find_rank_env({"PATH": "/bin"}) == RankEnv("alone", 0, 1, 0, 1)


def test_a_launcher_inside_a_scheduler_is_believed():
    assert find_rank_env({**SLURM, **TORCHRUN}).source == "torchrun"
    # A wrapper script that sets the same.
    assert find_rank_env({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"}).rank == 1


@pytest.mark.parametrize("kept", ["RANK", "WORLD_SIZE"])
def test_half_an_environment_is_an_error_that_names_both_halves(kept):
    with pytest.raises(ConfigError, match="only one of RANK and WORLD_SIZE is set") as caught:
        find_rank_env({kept: "3", "MASTER_PORT": "1234"})
    assert f"{kept}=3" in str(caught.value)
    assert "not set" in str(caught.value)
    assert "MASTER_PORT=1234" in str(caught.value)


def test_left_over_variables_under_mpirun_are_noticed():
    with pytest.raises(
        ConfigError, match=r"rank 0 of 1, Open MPI gives rank 1 of 2.*RANK=0, WORLD_SIZE=1"
    ):
        find_rank_env({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 is not in a world of 8.*RANK=8"),
        ({"RANK": "-1"}, "rank -1 is not"),
        ({"LOCAL_RANK": "4"}, "local rank 4 is not among 4 on this host.*LOCAL_RANK=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 ranks on this host are more than the world of 8"),
        ({"MASTER_PORT": "70000"}, "70000 is not a port"),
        ({"RANK": "five"}, "RANK should be a whole number but is 'five'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT should be a whole number"),
    ],
)
def test_contradictions_name_the_variable_and_its_value(change, message):
    with pytest.raises(ConfigError, match=message):
        find_rank_env({**TORCHRUN, **change})


@given(world=st.integers(1, 64), data=st.data())
def test_any_consistent_rank_is_found(world, data):
    rank = data.draw(st.integers(0, world - 1))
    found = find_rank_env({"RANK": str(rank), "WORLD_SIZE": str(world)})
    assert (found.rank, found.world_size, found.local_rank) == (rank, world, None)


@given(
    st.dictionaries(st.sampled_from([*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM]), st.text(max_size=4))
)
def test_whatever_the_variables_hold_it_is_a_place_or_a_config_error(environ):
    try:
        found = find_rank_env(environ)
    except ConfigError:
        return
    assert 0 <= found.rank < found.world_size


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[07-09]", ["gpu07", "gpu08", "gpu09"]),
        ("gpu[1,3-4],login", ["gpu1", "gpu3", "gpu4", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("node[099-101]-ib", ["node099-ib", "node100-ib", "node101-ib"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "gpu[a-b]"])
def test_no_host_list(text):
    with pytest.raises(ConfigError, match="not a list of hosts"):
        expand_hostlist(text)


# -- the rank before and after a group exists ------------------------------------------------------


@pytest.fixture
def environ(monkeypatch):
    """An environment without any launcher's variables."""
    variables = {*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM, *PYTORCH_JOB, *INDEXED_JOB}
    for name in (*variables, "PACELINE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return lambda added: [monkeypatch.setenv(name, value) for name, value in added.items()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        (TORCHRUN, (5, 8)),
        (OPEN_MPI, (1, 2)),
        (MPICH, (1, 2)),
        (SLURM, (5, 7)),
        (PYTORCH_JOB, (2, 4)),
        (INDEXED_JOB, (3, 4)),
    ],
)
def test_before_a_group_exists_the_environment_tells_the_rank(environ, variables, expected):
    environ(variables)
    assert current_rank_and_world() == expected


def test_half_an_environment_is_not_taken_for_a_single_process(environ):
    environ({"RANK": "1"})
    with pytest.raises(ConfigError, match="only one of RANK and WORLD_SIZE"):
        current_rank_and_world()


@pytest.mark.parametrize("initialized", [False, True])
def test_the_default_group_comes_before_the_environment(environ, monkeypatch, initialized):
    environ(SLURM)
    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        get_rank=lambda: 2,
        get_world_size=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert current_rank_and_world() == ((2, 3) if initialized else (5, 7))


def test_asking_for_the_rank_does_not_import_torch():
    code = (
        "import sys; from paceline.rank_env import current_rank_and_world\n"
        "assert current_rank_and_world() == (1, 2)\n"
        "sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "PACELINE_LAUNCHER": "test"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
