"""`paceline bench launch`: from the command to the first training step, `paceline run` beside
torchrun, on the same script.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from paceline.errors import LaunchError

__all__ = ["add_arguments", "run"]

_SCRIPT = """\
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 64)).sum().backward()
optimizer.step()
with open(os.path.join(os.environ["FIRST_STEP"], os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each, the best counts (default: 5)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    print(
        "seconds from the command to the end of the first step on all ranks; the same script, "
        "stock DDP on Gloo"
    )
    print(f"best of {options.repeats}, interleaved, {os.cpu_count()} cores\n")
    print(f"{'ranks':>5}  {'torchrun':>9}  {'paceline run':>12}  {'ratio':>6}")
    figures: dict[str, Any] = {}
    for ranks in options.ranks:
        best = figures[f"{ranks} ranks"] = _measure(ranks, options.repeats)
        ratio = best["paceline"] / best["torchrun"]
        print(f"{ranks:>5}  {best['torchrun']:>9.2f}  {best['paceline']:>12.2f}  {ratio:>6.2f}")
    return figures


def _measure(ranks: int, repeats: int) -> dict[str, float]:
    commands = {
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ],
        "paceline": [sys.executable, "-m", "paceline", "run", f"-n{ranks}"],
    }
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(repeats):
        # In turn, so that a busy moment of the machine hits both alike.
        for name, command in commands.items():
            best[name] = min(best[name], _time_to_first_step(command, ranks))
    return best


def _time_to_first_step(command: list[str], ranks: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        script = pathlib.Path(directory, "first_step.py")
        script.write_text(_SCRIPT)
        start = time.time()
        environ = {**os.environ, "FIRST_STEP": directory, "OMP_NUM_THREADS": "1"}
        completed = subprocess.run(
            [*command, str(script)], check=False, capture_output=True, text=True, env=environ
        )
        if completed.returncode != 0:
            raise LaunchError(
                f"{' '.join(command)} exited with status {completed.returncode}:\n"
                f"{completed.stderr}"
            )
        # Each rank has written the time of its first step.
        ends = [pathlib.Path(directory, str(rank)).read_text() for rank in range(ranks)]
        return max(map(float, ends)) - start
