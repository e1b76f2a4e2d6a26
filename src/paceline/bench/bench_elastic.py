"""`paceline bench elastic`: what an elastic job costs while nothing happens, and how long it takes
to recover when a rank is killed.

The same script trains in a plain job and in an elastic one, in turn; the time of a step is that
which nine tenths of them exceed. Then ranks of an elastic job are killed, one at a time, at random
moments: how long until the next step is complete, and until a replacement trains with the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.bench.bench_tools import print_table
from paceline.errors import LaunchError
from paceline.launch.job_page import JobPage, find_job_page_below

__all__ = ["add_arguments", "run"]

_MODELS = ("cnn-batchnorm", "lstm")
_POLL_S = 0.001
_LIMIT_S = 120.0
_WARM_UP_STEPS = 10

# Trains for so many steps, or until the file exists; rank 0 writes the times of its steps.
_SCRIPT = """\
import json, os, pathlib, statistics, sys, time
import torch
import paceline
from paceline.bench.models import cases

name, steps, result, end = sys.argv[1], int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
paceline.init_process_group(quiet=True)
torch.manual_seed(0)
case = cases()[name]
model, batch = case.build(), case.batch()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
rows = torch.utils.data.TensorDataset(torch.cat([batch] * 32))
training = paceline.Training(
    model, optimizer, paceline.DataLoader(rows, batch_size=2 * len(batch)), shards=4
)
times, since = [], time.perf_counter()
for epoch in training.epochs(10**9):
    for batch in training.batches():
        for (x,) in batch.shards():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        times.append(now - since)
        since = now
        if training.step == steps or (training.step % 16 == 0 and end.exists()):
            if paceline.is_main():
                pathlib.Path(result).write_text(json.dumps(times))
            sys.stdout.flush()
            os._exit(0)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="one thread each (default: 2)")
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"comma-separated (default: {_MODELS})"
    )
    parser.add_argument("--steps", type=int, default=200, help="of each run (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, or 0 (default: 3)")
    parser.add_argument("--kills", type=int, default=20, help="for each model, or 0 (default: 20)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in options.models.split(","):
        figures[name] = {
            **_measure_cost(name, options.ranks, options.steps, options.rounds),
            **_measure_recovery(name, options.ranks, options.kills),
        }
    _print(figures, options)
    return figures


# --- without faults -------------------------------------------------------------------------------


def _measure_cost(name: str, ranks: int, steps: int, rounds: int) -> dict[str, float]:
    """Seconds per step in a plain and an elastic job, and their ratio."""
    if rounds == 0:
        return {}
    kinds = {"plain": [f"-n{ranks}"], "elastic": [f"--elastic={ranks}:{ranks}"]}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        # In turn, so that a busy moment of the machine hits both alike.
        for kind, options in kinds.items():
            with _job(options, name, steps) as (process, folder):
                if process.wait() != 0:
                    raise LaunchError(f"the {kind} run of {name} failed with {process.returncode}")
                times[kind] += json.loads((folder / "times").read_text())[_WARM_UP_STEPS:]
    usual = {kind: statistics.quantiles(each, n=10)[0] for kind, each in times.items()}
    return {**usual, "ratio": usual["elastic"] / usual["plain"]}


@contextlib.contextmanager
def _job(
    options: Sequence[str], name: str, steps: int
) -> Iterator[tuple[subprocess.Popen[bytes], pathlib.Path]]:
    """A run of the script, which leaves nothing behind, and the folder of its files."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        folder = pathlib.Path(directory)
        script = folder / "train.py"
        script.write_text(_SCRIPT)
        arguments = [name, str(steps), str(folder / "times"), str(folder / "end")]
        command = [sys.executable, "-m", "paceline", "run", *options, "--", str(script), *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
        try:
            yield process, folder
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


# --- kills ----------------------------------------------------------------------------------------


def _measure_recovery(name: str, ranks: int, kills: int) -> dict[str, float]:
    """Seconds until the next step, and until a replacement has the state."""
    if kills == 0:
        return {}
    options = [f"--elastic=1:{ranks}", f"--max-restarts={kills + 10}"]
    rng = random.Random(0)
    with _job(options, name, -1) as (process, folder):
        page = _page_below(process)
        try:
            _wait_until_whole(page, ranks)
            recoveries = [_kill_one(page, ranks, rng) for _ in range(kills)]
        finally:
            page.close()
        (folder / "end").touch()
        process.wait()
    steps, joins = zip(*recoveries, strict=True)
    return {
        "next step": statistics.median(steps),
        "next step, longest": max(steps),
        "whole again": statistics.median(joins),
        "whole again, longest": max(joins),
    }


def _page_below(process: subprocess.Popen[bytes]) -> JobPage:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if (page := find_job_page_below(process.pid)) is not None:
            return page
        time.sleep(0.05)
    raise LaunchError("the elastic run did not start")


def _wait_until_whole(page: JobPage, ranks: int) -> float:
    """Until so many ranks train together; returns when."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        newest = page.newest()
        members = newest.generation.members if newest is not None else ()
        taking_part = [
            page.member_in(each.slot) == each.id and page.step_in(each.slot) is not None
            for each in members
        ]
        if len(members) == ranks and all(taking_part):
            return time.monotonic()
        time.sleep(_POLL_S)
    raise LaunchError(f"no {ranks} ranks trained together within {_LIMIT_S:g} s")


def _kill_one(page: JobPage, ranks: int, rng: random.Random) -> tuple[float, float]:
    time.sleep(rng.uniform(0.2, 0.5))
    slot = rng.randrange(ranks)
    others = [each for each in range(ranks) if each != slot]
    pid = page.pid_in(slot)
    assert pid is not None
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    # A rank reports a step when it is complete; the one under way counts.
    before = max(page.step_in(each) or 0 for each in others)
    while max(page.step_in(each) or 0 for each in others) <= before:
        if time.monotonic() - killed > _LIMIT_S:
            raise LaunchError(f"no step was completed within {_LIMIT_S:g} s after a kill")
        time.sleep(_POLL_S)
    stepped = time.monotonic()
    while page.pid_in(slot) in {pid, None}:
        if time.monotonic() - killed > _LIMIT_S:
            raise LaunchError(f"no rank replaced the killed one within {_LIMIT_S:g} s")
        time.sleep(_POLL_S)
    return stepped - killed, _wait_until_whole(page, ranks) - killed


# --- the report -----------------------------------------------------------------------------------


def _print(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    columns = {
        "plain": ("plain", 1e3, "ms"),
        "elastic": ("elastic", 1e3, "ms"),
        "ratio": ("ratio", 1, ""),
        "next step: median": ("next step", 1, "s"),
        "longest": ("next step, longest", 1, "s"),
        "replaced: median": ("whole again", 1, "s"),
        "longest ": ("whole again, longest", 1, "s"),
    }
    rows = [
        (
            name,
            *(
                f"{found[key] * scale:.3f} {unit}" if key in found else "-"
                for key, scale, unit in columns.values()
            ),
        )
        for name, found in figures.items()
    ]
    print_table(
        f"{options.ranks} ranks x 1 thread; {options.kills} kills of a rank",
        ("model", *columns),
        rows,
        text_columns=("model",),
    )
