"""`init_process_group()` in simulated environments: it finds the rank, or names who or what is
wrong.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time

import pytest

import paceline
from paceline.errors import CollectiveTimeout, ConfigError
from paceline.launch import init
from tests.harness import init_group, run_ranks
from tests.harness.launched import reserved_port, wait_for_files

BACKENDS = pytest.mark.parametrize("backend", ["paceline", "gloo"])


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


def _become(variables):
    """Replace the harness's rank variables by others."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in variables.items()})


def _start_together(folder, rank, ranks):
    """Short time limits are fair only to ranks that begin at the same time, busy machine or not."""
    (folder / f"here-{rank}").write_text("here")
    wait_for_files(*(folder / f"here-{other}" for other in ranks))


def _sum_of_ranks():
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def _placement():
    here = paceline.launch.init.placement()
    return (here.source, here.rank, here.world_size, here.local_rank, here.local_world_size)


@BACKENDS
def test_master_address_without_local_rank(port, backend):
    """Kubernetes' PyTorchJob, or variables set by hand."""

    def join(rank, world):
        _become(
            {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        paceline.init_process_group(backend)
        total, placement = _sum_of_ranks(), _placement()
        paceline.destroy_process_group()
        return total, placement

    expected = [(3.0, ("RANK and WORLD_SIZE", rank, 3, rank, 3)) for rank in range(3)]
    assert run_ranks(3, join) == expected


def _slurm(rank, world, job):
    return {
        "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": world, "SLURM_LOCALID": rank,
        "SLURM_STEP_NUM_NODES": 1, "SLURM_JOB_ID": job, "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": "node7",
    }  # fmt: skip


def test_slurm_on_one_node_meets_without_a_port():
    def join(rank, world, job):
        _become(_slurm(rank, world, job))
        paceline.init_process_group("gloo")
        total, placement = _sum_of_ranks(), _placement()
        paceline.destroy_process_group()
        return total, placement

    job = os.getpid()
    assert run_ranks(2, join, job) == [(1.0, ("Slurm", rank, 2, rank, 2)) for rank in range(2)]
    assert run_ranks(2, join, job)[0][0] == 1.0, "the next step of the same job meets anew"


def test_slurm_across_nodes_uses_the_job_s_host_list():
    """`localhost` stands for the first of two nodes."""

    def join(rank, world, job):
        _become(
            {
                **_slurm(rank, world, job),
                "SLURM_STEP_NUM_NODES": 2,
                "SLURM_STEP_NODELIST": "localhost,node8",
            }
        )
        os.environ["SLURM_LOCALID"] = "0"
        paceline.init_process_group("gloo")
        total = _sum_of_ranks()
        paceline.destroy_process_group()
        return total

    assert run_ranks(2, join, os.getpid()) == [1.0, 1.0]


def test_a_missing_rank_is_named_by_all_that_came(port, tmp_path):
    def join(rank, world):
        if rank == 1:
            return None
        _start_together(tmp_path, rank, [0, 2])
        _become(
            {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        os.environ["PACELINE_JOIN_TIMEOUT"] = "3"
        with pytest.raises(
            CollectiveTimeout, match=r"world of 3.*but rank 1 did not join"
        ) as caught:
            paceline.init_process_group("gloo")
        return caught.value.missing

    assert run_ranks(3, join) == [(1,), None, (1,)]


def test_a_long_wait_for_other_ranks_is_told(port):
    def join(rank, world):
        _become({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        os.environ["PACELINE_JOIN_TIMEOUT"] = "3"
        lines, handler = [], logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("paceline").addHandler(handler)
        init._LONG_WAIT_S = 0.2
        with pytest.raises(CollectiveTimeout):
            paceline.init_process_group("gloo")
        return [line for line in lines if "waited" in line]

    ((line,),) = run_ranks(1, join)
    assert line.startswith("rank 0 of 2 (")
    assert "to run alone, remove the variables" in line


def test_a_missing_rank_0_is_named(port):
    def join(rank, world):
        if rank == 0:
            return None
        _become(
            {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        os.environ["PACELINE_JOIN_TIMEOUT"] = "2"
        with pytest.raises(
            CollectiveTimeout, match=f"rank 1 could not reach 127.0.0.1:{port}.*Rank 0 is missing"
        ) as caught:
            paceline.init_process_group("gloo")
        return caught.value.missing

    assert run_ranks(2, join)[1] == (0,)


def test_a_taken_port_is_named():
    def join(rank, world):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            _become({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
            with pytest.raises(
                ConfigError, match=f"rank 0 cannot listen on port {port}.*MASTER_PORT"
            ):
                paceline.init_process_group("gloo")

    run_ranks(1, join)


def test_two_processes_with_one_rank_are_noticed(port, tmp_path):
    def join(rank, world):
        claimed = min(rank, 1)
        _start_together(tmp_path, rank, [0, 1, 2])
        if rank == 2:
            time.sleep(1.0)
        _become({"RANK": claimed, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        os.environ["PACELINE_JOIN_TIMEOUT"] = "6"
        try:
            paceline.init_process_group("gloo")
        except ConfigError as error:
            return str(error)
        except CollectiveTimeout as error:
            return error.missing
        return None

    outcomes = run_ranks(3, join)
    assert outcomes[:2] == [(2,), (2,)]
    assert "two processes claim to be rank 1 of 3" in str(outcomes[2])


def test_the_error_of_a_multi_host_mpirun_without_an_address_says_what_to_set():
    def join(rank, world):
        _become({
            "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 4,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        })  # fmt: skip
        with pytest.raises(ConfigError, match=r"rank 0 of 4 \(Open MPI\).*mpirun -x MASTER_ADDR"):
            paceline.init_process_group("gloo")

    run_ranks(1, join)


@BACKENDS
def test_alone_is_a_single_process_that_can_join_again(backend):
    def join(rank, world):
        import io

        import torch
        import torch.distributed as dist

        _become({})
        sys.stderr = io.StringIO()
        for _ in range(2):
            paceline.init_process_group(backend)
            assert (paceline.rank(), paceline.world_size(), paceline.local_rank()) == (0, 1, 0)
            assert paceline.is_main()
            assert torch.get_num_threads() == len(os.sched_getaffinity(0))
            with pytest.raises(ConfigError, match="already joined"):
                paceline.init_process_group(backend)
            paceline.destroy_process_group()
            assert not dist.is_initialized()
        paceline.destroy_process_group()  # when there is none: nothing
        return sys.stderr.getvalue()

    lines = run_ranks(1, join)[0].splitlines()
    assert len(lines) == 2
    assert f"single process (alone), {backend}," in lines[0]


def test_leaving_and_joining_again_with_others(port):
    def join(rank, world):
        _become(
            {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        totals = []
        for _ in range(3):
            paceline.init_process_group("gloo", quiet=True)
            totals.append(_sum_of_ranks())
            paceline.destroy_process_group()
        return totals

    assert run_ranks(2, join) == [[1.0] * 3] * 2


def test_arguments_of_torch_s_function_are_passed_on():
    def join(rank, world):
        import datetime

        import torch.distributed as dist

        store = dist.FileStore(os.environ["PACELINE_TEST_RENDEZVOUS"], world)
        paceline.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
            group_name="mine",
        )
        total = _sum_of_ranks()
        paceline.destroy_process_group()
        return total

    assert run_ranks(2, join) == [1.0, 1.0]


def test_arguments_that_contradict_the_environment():
    def join(rank, world):
        with pytest.raises(ConfigError, match=r"rank=7\) contradicts .* which gives rank 0 of 1"):
            paceline.init_process_group(world_size=9, rank=7)
        _become({})
        with pytest.raises(ConfigError, match="needs both numbers and an address to meet at"):
            paceline.init_process_group(world_size=2, rank=0)

    run_ranks(1, join)


def test_questions_work_with_a_group_torch_made():
    def ask(rank, world):
        init_group("gloo")
        answer = (paceline.rank(), paceline.world_size(), paceline.is_main())
        paceline.destroy_process_group()
        return answer

    assert run_ranks(2, ask) == [(0, 2, True), (1, 2, False)]


@BACKENDS
def test_bound_ranks_keep_their_cores(port, backend):
    """As under `mpirun --bind-to core`: ranks on cores of their own do not divide them again."""

    def join(rank, world):
        import torch

        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        _become(
            {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        paceline.init_process_group(backend, quiet=True)
        threads = torch.get_num_threads()
        paceline.destroy_process_group()
        return threads

    assert run_ranks(2, join) == [1, 1]
