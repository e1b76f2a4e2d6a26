"""Six ways to hang: each gets one page that names the right rank and the right cause, in time."""

from __future__ import annotations

import re

import pytest

from tests.harness.launched import launched, run_command, write_script

LIMIT_S = 1.0
# The promise is the limit and two seconds; the rest is for machines that run much else beside these tests.
IN_TIME_S = LIMIT_S + 2.0 + 4.0
OPTIONS = ("--stall-after", str(LIMIT_S), "--grace", "2", "--preload=torch,torch.distributed,torch._dynamo")

TRAINING = """
    import os, signal, sys, threading, time
    import torch, torch.distributed as dist
    import paceline

    backend = sys.argv[1]
    paceline.init_process_group(backend)
    rank = paceline.rank()
    lock = threading.Lock()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)

    def endless(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
"""


def verdicts(stderr):
    return re.findall(r"^verdict: (.*)$", stderr, flags=re.MULTILINE)


def seconds_until_told(stderr):
    return [float(text) for text in re.findall(r"^paceline: no progress for ([\d.]+) s", stderr, flags=re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_sleep_loop_stop_and_lock_are_told_apart_and_each_is_told_once(tmp_path, backend):
    script = write_script(
        tmp_path,
        TRAINING
        + """
    STALL = 5.0
    def wait_for_the_lock():
        lock.acquire()
        threading.Timer(STALL, lock.release).start()
        lock.acquire()

    hangs = [lambda: time.sleep(STALL), lambda: endless(STALL), wait_for_the_lock]
    for _ in range(3):
        step()
    for hang in hangs:
        if rank == 1:
            hang()
        step()
    if rank == 0:
        threading.Timer(STALL, lambda: os.kill(int(pids[1]), signal.SIGCONT)).start()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()
    dist.barrier()
    """,
    )
    with launched(run_command(script, backend, options=OPTIONS)) as job:
        assert job.wait(110) == 0, job.stderr
    told = verdicts(job.stderr)
    assert len(told) == 4, job.stderr
    assert all(text.startswith("rank 1 has not reached all_reduce of bucket 0 (") for text in told)
    assert all("head.bias" in text for text in told)
    assert ", sleeping at train.py:" in told[0]
    assert "time.sleep(STALL)" in told[0]
    assert "running code at train.py:" in told[1]
    assert "endless loop" in told[1]
    assert "waiting for a lock" in told[2]
    assert "lock.acquire()" in told[2]
    assert "its process is stopped" in told[3]
    assert "kill -CONT" in told[3]
    assert all(LIMIT_S <= seconds <= IN_TIME_S for seconds in seconds_until_told(job.stderr)), job.stderr
    assert job.stderr.count("makes progress again") == 4
    # The stack of the late rank, from its own first line to the innermost.
    assert "in wait_for_the_lock\n    lock.acquire()" in job.stderr


def stopped_after_verdict(job):
    """What a hanging job has said by the time of its first verdict."""
    said = []
    for line in job.process.stderr:
        said.append(line)
        if line.startswith("verdict: "):
            break
    job.process.terminate()
    job.wait(60)
    return "".join(said)


@pytest.mark.slow
def test_a_rank_that_skips_backward_is_named(tmp_path):
    script = write_script(
        tmp_path,
        TRAINING
        + """
    for number in range(6):
        if rank == 1 and number == 3:
            model(torch.ones(4, 8))
            continue
        step()
    dist.barrier()
    """,
    )
    with launched(run_command(script, "paceline", options=OPTIONS)) as job:
        stderr = stopped_after_verdict(job)
    (told,) = verdicts(stderr)
    assert told.startswith("rank 1 has not reached all_reduce of bucket 0 (")
    assert "it has skipped a backward (6 forwards, 5 backwards; rank 0: 6 and 6)" in told
    assert "is in barrier" in told
    assert max(seconds_until_told(stderr)) <= IN_TIME_S


@pytest.mark.slow
def test_an_extra_collective_on_one_rank_is_named(tmp_path):
    script = write_script(
        tmp_path,
        TRAINING
        + """
    for number in range(6):
        if rank == 1 and number == 3:
            dist.all_reduce(torch.ones(3))
        step()
    """,
    )
    with launched(run_command(script, "paceline", options=OPTIONS)) as job:
        stderr = stopped_after_verdict(job)
    (told,) = verdicts(stderr)
    assert told.startswith("rank 1 is in all_reduce (call ")
    assert "which rank 0 did not call: it is in all_reduce of bucket 0 (" in told
    assert "dist.all_reduce(torch.ones(3))" in stderr  # its stack
    assert max(seconds_until_told(stderr)) <= IN_TIME_S
