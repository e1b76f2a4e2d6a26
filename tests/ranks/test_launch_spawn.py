"""`paceline.spawn`: results and errors of every rank, from a script without a guard."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

import paceline
from paceline.errors import ConfigError, LaunchError
from tests.harness.launched import launched, wait_for_files, write_script


def _average(base, scale=1.0):
    import torch
    import torch.distributed as dist

    paceline.init_process_group()
    value = torch.tensor([base + paceline.rank()])
    dist.all_reduce(value)
    sys.stdout.write(f"rank {paceline.rank()} has {value.item()}\n")
    return paceline.rank(), scale * value.item()


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_results_come_back_in_rank_order(backend, capfd):
    results = paceline.spawn(
        _average,
        (10.0,),
        3,
        kwargs={"scale": 2.0},
        preload=("torch",),
        env={"PACELINE_BACKEND": backend},
    )
    assert results == [(0, 66.0), (1, 66.0), (2, 66.0)]
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == [f"[{rank}] rank {rank} has 33.0" for rank in range(3)]
    assert f"3 ranks (paceline.spawn), {backend}" in shown.err


class Odd(Exception):
    """One whose constructor does not take what it stores."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_the_first_error_is_raised_here_and_the_others_are_stopped():
    def fail():
        if paceline.rank() == 1:
            raise FileNotFoundError(2, "no such sample", "x.png")
        time.sleep(300)

    with pytest.raises(FileNotFoundError, match="no such sample") as caught:
        paceline.spawn(fail, nprocs=2, preload=())
    notes = "\n".join(caught.value.__notes__)
    assert "raised by rank 1" in notes
    assert "in fail" in notes


@pytest.mark.parametrize(
    ("action", "exitcode", "message"),
    [
        (lambda: os._exit(3), 3, "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "killed by SIGKILL"),
        (lambda: sys.exit(5), 5, r"sys\.exit\(5\)"),
        (lambda: sys.exit(0), 0, "before the function returned"),
    ],
)
def test_a_rank_that_ends_without_a_result(action, exitcode, message):
    def end():
        if paceline.rank() == 1:
            action()
        time.sleep(0 if exitcode == 0 else 300)

    with pytest.raises(LaunchError, match=message) as caught:
        paceline.spawn(end, nprocs=2, quiet=True, preload=())
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)


def test_an_error_that_does_not_pickle_still_tells_its_story():
    def fail():
        raise Odd("one", "two")

    with pytest.raises(LaunchError, match="Odd: one and two"):
        paceline.spawn(fail, nprocs=1, preload=())


def test_spawn_inside_a_rank_is_refused():
    with pytest.raises(ConfigError, match=r"calls paceline\.spawn again"):
        paceline.spawn(lambda: paceline.spawn(print, nprocs=1), nprocs=1, preload=())


SCRIPT = """
    import paceline, sys, time, pathlib
    def work(folder):
        pathlib.Path(folder, f"up-{paceline.rank()}").write_text("up")
        time.sleep(300)
    paceline.spawn(work, (sys.argv[1],), 2, preload=())      # no `if __name__ == "__main__"`
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -2), (signal.SIGKILL, -9), (signal.SIGTERM, -15)]
)
def test_ranks_end_with_the_process_that_spawned_them(tmp_path, number, code):
    with launched([sys.executable, str(write_script(tmp_path, SCRIPT)), str(tmp_path)]) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, number)
        assert job.wait() == code
        assert job.left_after(10.0) == []
