"""`paceline.Training` under the launchers people use: one hash under all of them. (Ray: in
`test_launch_ray.py`, which has a cluster.)
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

import paceline
from tests.harness.exact_models import train
from tests.harness.launched import launched, write_script

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3


def hash_on_this_rank() -> str:
    paceline.init_process_group()
    return f"{paceline.world_size()} {train('cnn', STEPS)}"


PROGRAM = """
    import sys
    from tests.ranks.test_training_launchers import hash_on_this_rank

    sys.stdout.write(hash_on_this_rank() + "\\n")  # in one piece
"""


def lines_of(command, folder):
    script = str(write_script(folder, PROGRAM))
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    with launched([*command, script], env=environment) as job:
        assert job.wait() == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("2 ")]


def expected() -> list[str]:
    return [f"2 {train('cnn', STEPS)}"] * 2


@pytest.mark.slow
def test_spawn():
    assert paceline.spawn(hash_on_this_rank, (), 2, preload=("torch",)) == expected()


@pytest.mark.slow
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert lines_of(command, tmp_path) == expected()


@pytest.mark.slow
def test_mpi(tmp_path):
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed here")
    about = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    is_open_mpi = "Open MPI" in about.stdout
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    assert lines_of([program, *options, "-n", "2", sys.executable], tmp_path) == expected()
