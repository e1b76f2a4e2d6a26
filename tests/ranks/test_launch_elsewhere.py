"""Under the real launchers of others: torchrun, Open MPI, MPICH."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.harness.launched import launched, write_script

SCRIPT = """
    import torch, torch.distributed as dist, paceline
    paceline.init_process_group()
    value = torch.tensor([paceline.rank() + 1.0])
    dist.all_reduce(value)
    import sys
    source = paceline.launch.init.placement().source
    facts = (source, paceline.rank(), paceline.local_rank(), value.item())
    sys.stdout.write("|".join(map(str, facts)) + "\\n")
"""


def _mpi(kind):
    # MPICH comes with the test dependencies in a prefix of its own.
    own_prefix = str(pathlib.Path(sys.prefix, kind, "bin", "mpirun"))
    names = (own_prefix, f"mpirun.{kind}", "mpirun")
    for program in filter(None, map(shutil.which, names)):
        version = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False
        ).stdout
        if {"openmpi": "Open MPI", "mpich": "HYDRA"}[kind] in version:
            return program
    pytest.skip(f"mpirun of {kind} is not installed here")


def _lines(command, env=None):
    with launched(command, env={"PYTHONWARNINGS": "default", **(env or {})}) as job:
        assert job.wait() == 0, job.stderr
        assert job.left_after(5.0) == []
    return sorted(line for line in job.stdout.splitlines() if "|" in line), job.stderr


@pytest.mark.slow
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    lines, stderr = _lines([*command, str(write_script(tmp_path, SCRIPT))])
    assert lines == ["torchrun|0|0|3.0", "torchrun|1|1|3.0"]
    assert "paceline: 2 ranks (torchrun), paceline, 1 thread per rank" in stderr


@pytest.mark.slow
def test_torchrun_s_single_thread_is_not_taken_for_a_wish(tmp_path):
    """One rank on all cores: torchrun leaves the variable alone; set by it for several ranks, it is
    overruled.
    """
    script = write_script(
        tmp_path,
        """
        import os, torch, paceline
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0)))
        paceline.init_process_group("gloo", threads=3 if paceline.rank() else None)
        import sys
        sys.stdout.write(f"|{os.environ['OMP_NUM_THREADS']}|{torch.get_num_threads()}\\n")
        """,
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    lines, _ = _lines(command)
    shared = max(1, len(os.sched_getaffinity(0)) // 2)
    assert lines == sorted([f"|1|{shared}", "|1|3"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun(tmp_path, kind):
    program = _mpi(kind)
    options = ["--allow-run-as-root", "--oversubscribe"] if kind == "openmpi" else []
    lines, _ = _lines(
        [program, *options, "-n", "2", sys.executable, str(write_script(tmp_path, SCRIPT))]
    )
    name = {"openmpi": "Open MPI", "mpich": "MPICH"}[kind]
    assert lines == [f"{name}|0|0|3.0", f"{name}|1|1|3.0"]


@pytest.mark.slow
def test_paceline_run_under_mpirun_is_a_job_of_its_own(tmp_path):
    program = _mpi("openmpi")
    command = [program, "--allow-run-as-root", "--oversubscribe", "-n", "1"]
    inner = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n2",
        "--preload=torch",
        str(write_script(tmp_path, SCRIPT)),
    ]
    lines, _ = _lines([*command, *inner])
    assert lines == ["[0] paceline run|0|0|3.0", "[1] paceline run|1|1|3.0"]
