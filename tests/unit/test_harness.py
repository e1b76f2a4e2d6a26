"""The harness itself: it must report, in time, what goes wrong in a rank - or every other test
lies.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.harness import RankDied, RanksTimedOut, init_group, leaks, run_ranks

ROOT = pathlib.Path(__file__).parents[2]


def test_results_come_back_in_rank_order():
    assert run_ranks(3, lambda rank, world, base: base + rank * world, 100) == [100, 103, 106]


def test_ranks_can_talk():
    def sum_of_ranks(rank, world):
        import torch
        import torch.distributed as dist

        init_group("gloo")
        value = torch.tensor([rank])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

    assert run_ranks(3, sum_of_ranks) == [3, 3, 3]


def test_the_first_error_in_time_is_raised_with_the_others_attached():
    def fail_late(rank, world):
        time.sleep(0.1 if rank == 1 else 0.6)
        raise ValueError(f"from {rank}")

    with pytest.raises(ValueError, match="from 1") as caught:
        run_ranks(2, fail_late)
    notes = "\n".join(caught.value.__notes__)
    assert "fail_late" in notes
    assert "and later rank 0: ValueError('from 0')" in notes


def test_a_killed_rank_is_reported_with_its_signal():
    with pytest.raises(RankDied) as caught:
        run_ranks(1, lambda rank, world: os.kill(os.getpid(), signal.SIGKILL))
    assert caught.value.exitcode == -signal.SIGKILL


def test_a_time_out_prints_the_stack_of_every_late_rank_and_ends_them():
    pids = []

    def stuck_in_here(rank, world):
        time.sleep(60 if rank == 1 else 0)

    with pytest.raises(
        RanksTimedOut, match=r"(?s)1 of 2 ranks.*rank 0 ended.*rank 1.*stuck_in_here"
    ):
        run_ranks(2, stuck_in_here, timeout=2.0, on_start=pids.extend)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_error_that_cannot_be_pickled_still_arrives():
    class Awkward(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    def fail(rank, world):
        raise Awkward(1, 2)

    with pytest.raises(RuntimeError, match="Awkward"):
        run_ranks(1, fail)


def test_leaks_are_seen(monkeypatch):
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)
    before = leaks.snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fd = os.memfd_create("paceline-test")
    monkeypatch.setenv("LEFT_OVER", "1")
    try:
        found = "\n".join(leaks.leaks(before))
    finally:
        stop.set()
        thread.join()
        child.communicate(b"\n")
        os.close(fd)
    assert "thread: left-over" in found
    assert f"child process: {child.pid}" in found
    assert "environment variable: LEFT_OVER=1" in found
    assert "shared memory object: /memfd:paceline-test" in found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_line_of_a_run_lists_what_was_skipped(tmp_path, workers):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_needs(number): pytest.skip('needs a browser')\n"
        "@pytest.mark.skip(reason='not yet')\n"
        "def test_later(): pass\n"
    )
    options = ["-p", "tests.harness.skips", "-n", str(workers), "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("skipped: 4 tests: needs a browser (")
    assert last.endswith("test_some.py: 1)")
    assert "test_some.py: 3); not yet (" in last


def test_a_semaphore_of_another_program_is_known_as_its():
    """The C library makes it under another name first, which is what its maker's maps show."""
    program = (
        "import multiprocessing, sys\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as maker:
        path = f"/dev/shm/sem.{maker.stdout.readline().strip().removeprefix('/')}"
        assert leaks._uses(pathlib.Path("/proc", str(maker.pid)), path)
        assert not leaks._uses(pathlib.Path("/proc/self"), path)
        maker.communicate()
