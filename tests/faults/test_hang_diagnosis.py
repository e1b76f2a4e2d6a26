"""Seven ways to hang: each gets one report that names the right rank and the right cause, in time.

A hang lasts until the test has read the diagnosis, so nothing here depends on how fast the machine
is. Ranks of a `paceline` group that wait for each other in different calls of that group do not
hang: an error on every rank names both calls.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
import signal
import sys
import time

import pytest

from tests.harness.launched import launched, run_command, wait_for_files, write_script

pytestmark = pytest.mark.slow

LIMIT_S = 1.0
# The promise is the limit and two seconds; the rest is for machines that are busy with other work.
IN_TIME_S = LIMIT_S + 2.0 + 8.0
PATIENCE_S = 100.0
NEVER_S = 10 * PATIENCE_S
OPTIONS = ("--grace=2", "--preload=torch,torch.distributed,torch._dynamo")

# python train.py FOLDER BACKEND INIT_METHOD LATE HANG...
TRAINING = """
    import os, pathlib, signal, sys, threading, time
    # All that is imported on the way is imported first: ranks that import it while they are watched
    # may differ by more than the limit.
    import torch, torch._dynamo, torch.distributed as dist
    import paceline

    folder, backend, init_method, late, *hangs = sys.argv[1:]
    rank, late = int(os.environ["RANK"]), int(late)
    if backend == "torch":  # nothing of ours in the script
        dist.init_process_group("gloo")
    elif init_method == "env":
        paceline.init_process_group(backend, quiet=True)
    else:
        world_size = int(os.environ["WORLD_SIZE"])
        paceline.init_process_group(backend, init_method, rank=rank, world_size=world_size)
    pathlib.Path(folder, f"pid-{rank}").write_text(str(os.getpid()))

    class Released(BaseException):
        pass

    def release(*_):
        raise Released

    signal.signal(signal.SIGUSR2, release)
    lock = threading.Lock()
    lock.acquire()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    if backend == "torch":
        def step():
            dist.all_reduce(torch.ones(3))
    else:
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()

    def sleep():
        time.sleep(600)

    def loop():
        while True:
            pass

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def lock_held():
        lock.acquire()

    def skip():
        model(torch.ones(4, 8))  # and no backward

    def extra():
        dist.barrier()

    if "extra_in_another_group" in hangs:
        another_group = dist.new_group()

    def extra_in_another_group():
        dist.barrier(another_group)

    for _ in range(3):
        step()
    for name in hangs:
        if rank == late:
            try:
                globals()[name]()
            except Released:
                pass
            if name == "skip":
                continue
        step()
    if "skip" in hangs:
        # The others are a step behind from here on, which shows when there is no further step.
        step()
        step()
        dist.barrier()
    paceline.destroy_process_group()
"""

# What the diagnosis has to contain about a late rank, by hang.
LATE = {
    "sleep": (", sleeping at train.py:", "in sleep: time.sleep(600)", "Remove the sleep"),
    "loop": ("running code at train.py:", "in loop: ", "endless loop"),
    "lock_held": ("waiting for a lock", "in lock_held: lock.acquire()", "Find out what holds it"),
    "stop": ("its process is stopped (SIGSTOP", "kill -CONT "),
}


class StandardErrors:
    """What all processes of a job have written to their standard errors so far."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._read: collections.Counter[str] = collections.Counter()

    def __str__(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("stderr-*")))

    @property
    def diagnoses(self) -> list[str]:
        return re.findall(r"^diagnosis: (.*)$", str(self), flags=re.MULTILINE)

    @property
    def seconds(self) -> list[float]:
        return [
            float(text)
            for text in re.findall(
                r"^paceline: no progress for ([\d.]+) s", str(self), re.MULTILINE
            )
        ]

    def wait_for(self, count: int, jobs: list) -> str:
        """The diagnosis that is new since the last call, once there are `count` of them."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.diagnoses) < count:
            assert time.monotonic() < deadline, str(self)
            assert all(job.process.poll() is None for job in jobs), str(self)
            time.sleep(0.05)
        (latest,) = collections.Counter(self.diagnoses) - self._read
        self._read[latest] += 1
        return latest


@contextlib.contextmanager
def hanging(folder, backend, late, *hangs, launcher=True, stall_after=LIMIT_S):
    """A job of two ranks that goes from one hang to the next as the test releases it."""
    script = write_script(folder, TRAINING)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"stderr-{index}").open("w")) for index in range(2)]
        if launcher:
            options = (f"--stall-after={stall_after}", *OPTIONS)
            command = run_command(
                script, str(folder), backend, "env", str(late), *hangs, options=options
            )
            jobs = [stack.enter_context(launched(command, stderr=files[0]))]
        else:
            init_method = (folder / "rendezvous").as_uri()
            command = [
                sys.executable,
                str(script),
                str(folder),
                backend,
                init_method,
                str(late),
                *hangs,
            ]
            env = {"PACELINE_STALL_AFTER": str(stall_after), "WORLD_SIZE": "2"}
            jobs = [
                stack.enter_context(
                    launched(command, {**env, "RANK": str(rank)}, stderr=files[rank])
                )
                for rank in range(2)
            ]
        yield jobs, StandardErrors(folder)
        for job in jobs:
            if job.process.poll() is None:
                job.process.terminate()
        for job in jobs:
            job.wait(PATIENCE_S)


def pid_of(folder, rank):
    path = folder / f"pid-{rank}"
    wait_for_files(path, timeout=PATIENCE_S)
    return int(path.read_text())


def diagnose_each(folder, backend, late, last, **options):
    """The diagnoses, by hang, of four hangs in a row, each released once it is diagnosed, and of a
    last one that cannot be released.
    """
    sentences = {}
    with hanging(folder, backend, late, *LATE, last, **options) as (jobs, stderr):
        for number, hang in enumerate(LATE):
            sentences[hang] = stderr.wait_for(number + 1, jobs)
            os.kill(pid_of(folder, late), signal.SIGCONT if hang == "stop" else signal.SIGUSR2)
        sentences[last] = stderr.wait_for(len(LATE) + 1, jobs)
    return sentences, stderr


def check_late(sentences, stderr, late, where):
    for hang, expected in LATE.items():
        assert sentences[hang].startswith(f"rank {late} has not reached {where}"), (hang, sentences)
        for text in expected:
            assert text in sentences[hang], (hang, sentences)
    assert len(stderr.diagnoses) == len(sentences)  # each was reported once
    assert all(LIMIT_S <= seconds <= IN_TIME_S for seconds in stderr.seconds), stderr
    # The stack of the late rank, from its own first line to the innermost; a line for each rank.
    assert "in lock_held\n    lock.acquire()" in str(stderr)
    assert (
        len(
            re.findall(
                rf"^>\s+{late}\s+\d+\s+(?:sleeping|running|lock|stopped)\s",
                str(stderr),
                re.MULTILINE,
            )
        )
        == 4
    )
    assert str(stderr).count("is making progress again") == 4


def check_skipped(sentence, late, forwards):
    assert sentence.startswith(f"rank {late} has not reached all_reduce of bucket 0 (")
    counts = (
        f"{forwards} forwards, {forwards - 1} backwards; rank {1 - late}: {forwards} and {forwards}"
    )
    assert f"it has skipped a backward ({counts})" in sentence
    assert "Call backward on every rank in every step" in sentence


def check_extra(sentence, stderr, late, line="in extra\n    dist.barrier()"):
    assert sentence.startswith(f"rank {late} has been in barrier (call ")
    assert f"which rank {1 - late} has not called: it is in all_reduce" in sentence
    assert "look for a call inside `if rank == ...`" in sentence
    assert line in str(stderr)  # its stack


def check_extra_in_another_group(sentence, stderr, late):
    line = "in extra_in_another_group\n    dist.barrier(another_group)"
    check_extra(sentence, stderr, late, line)
    assert sentence.startswith(f"rank {late} has been in barrier (call 1 of group ")


@pytest.mark.parametrize(
    ("backend", "last"), [("paceline", "extra_in_another_group"), ("gloo", "extra")]
)
def test_sleep_loop_lock_and_stop_are_distinguished(tmp_path, backend, last):
    sentences, stderr = diagnose_each(tmp_path, backend, 1, last)
    check_late(sentences, stderr, 1, "all_reduce of bucket 0 (")
    assert all("head.bias" in sentences[hang] for hang in LATE)
    if last == "extra":
        check_extra(sentences[last], stderr, 1)
    else:
        check_extra_in_another_group(sentences[last], stderr, 1)


def test_the_same_at_the_level_of_calls_in_a_script_that_uses_torch_alone(tmp_path):
    sentences, stderr = diagnose_each(tmp_path, "torch", 0, "extra")
    check_late(sentences, stderr, 0, "all_reduce (call ")
    check_extra(sentences["extra"], stderr, 0)


@pytest.mark.parametrize(
    ("backend", "late", "last"),
    [("paceline", 1, "extra_in_another_group"), ("gloo", 0, "skip")],
)
def test_the_same_without_a_launcher_whichever_rank_is_late(tmp_path, backend, late, last):
    """The first rank reports; the next one does if that is stopped itself."""
    sentences, stderr = diagnose_each(tmp_path, backend, late, last, launcher=False)
    check_late(sentences, stderr, late, "all_reduce of bucket 0 (")
    if last == "skip":
        check_skipped(sentences[last], late, forwards=10)
    else:
        check_extra_in_another_group(sentences[last], stderr, late)
    # Who reports the others is a matter of speed: the next rank does if the first one, whose main
    # thread may take turns with its watcher, has not looked for two seconds.
    assert sentences["stop"] in (tmp_path / f"stderr-{1 - late}").read_text()


def test_a_rank_that_skips_backward_on_gloo_is_named(tmp_path):
    with hanging(tmp_path, "gloo", 1, "skip") as (jobs, stderr):
        check_skipped(stderr.wait_for(1, jobs), 1, forwards=6)


def test_an_extra_collective_on_gloo_is_named(tmp_path):
    with hanging(tmp_path, "gloo", 1, "extra") as (jobs, stderr):
        check_extra(stderr.wait_for(1, jobs), stderr, 1)


@pytest.mark.parametrize("hang", ["skip", "extra"])
def test_in_a_group_of_ours_an_error_on_every_rank_names_both_calls(tmp_path, hang):
    with hanging(tmp_path, "paceline", 1, hang, launcher=False, stall_after=NEVER_S) as (jobs, _):
        assert [job.wait(PATIENCE_S) for job in jobs] == [1, 1]
    for rank in range(2):
        shown = (tmp_path / f"stderr-{rank}").read_text()
        assert "MismatchError: the ranks wait for each other in different calls" in shown
        assert "  rank 0: forward or backward of a DistributedDataParallel model with the" in shown
        assert "  rank 1: barrier (call " in shown


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_the_diagnosis_comes_before_the_groups_own_timeout(tmp_path, backend):
    """The stall limit is far away here; the group gives up after four seconds."""
    script = write_script(
        tmp_path,
        f"""
        import datetime, time, torch, torch.distributed as dist, paceline
        dist.init_process_group({backend!r}, timeout=datetime.timedelta(seconds=4))
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
        """,
    )
    options = ("--stall-after=300", "--grace=1", "--preload=torch,torch.distributed")
    with launched(run_command(script, options=options)) as job:
        assert job.wait(PATIENCE_S) == 1, job.stderr
    diagnosis = job.stderr.index(
        "diagnosis: rank 1 has not reached all_reduce (call 2 of the default group)"
    )
    assert diagnosis < job.stderr.index("Traceback")
    assert "time.sleep(600)" in job.stderr
    assert "rank 0" in job.last_line


@pytest.mark.parametrize(
    "join", ["paceline.init_process_group()", "torch.distributed.init_process_group('gloo')"]
)
def test_a_rank_that_does_not_join_the_group_is_named(tmp_path, join):
    script = write_script(
        tmp_path,
        f"""
        import os, time, torch, torch.distributed, paceline
        if os.environ["RANK"] == "1":
            time.sleep(600)
        {join}
        """,
    )
    options = (f"--stall-after={LIMIT_S}", *OPTIONS)
    with (
        (tmp_path / "stderr-0").open("w") as file,
        launched(run_command(script, options=options), stderr=file) as job,
    ):
        sentence = StandardErrors(tmp_path).wait_for(1, [job])
        job.process.terminate()
        job.wait(PATIENCE_S)
    assert sentence.startswith(
        "rank 1 has not reached init_process_group: it has been in startup for "
    )
    assert "time.sleep(600)" in sentence
