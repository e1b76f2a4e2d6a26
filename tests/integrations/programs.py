"""Runs the programs of recipes as their readers would, from a shell."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

__all__ = ["PACELINE_RUN", "PYTHON", "TORCHRUN", "figure_of", "run"]

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
PACELINE_RUN = (sys.executable, "-m", "paceline", "run", "-n", "2")
_TIMEOUT_S = 400.0  # only a failing program, or a busy machine, takes so long
_GRACE_S = 10.0
_ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "HF_HUB_OFFLINE": "1",
    # Lightning initialises MPI where mpi4py is installed, to see whether mpirun has started it.
    # Open MPI then leaves shared memory behind, unless it is told that no peer is near.
    "OMPI_MCA_btl": "self",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def run(command: tuple[str, ...], directory: pathlib.Path, *arguments: str) -> str:
    """What a program prints; fails with all of its output if it fails."""
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=directory,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    finally:
        _end_group(process.pid)
        process.communicate()
    assert process.returncode == 0, f"{command} {arguments}\n{output}\n{errors}"
    return output


def _end_group(leader: int) -> None:
    """Ranks that Lightning started may outlive the first one, which did not wait for them."""
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.05)
        os.killpg(leader, signal.SIGKILL)


def figure_of(output: str) -> float:
    """The number at the end of the last line, of whichever rank printed it."""
    return float(re.findall(r": (-?[\d.]+)$", output, flags=re.MULTILINE)[-1])
