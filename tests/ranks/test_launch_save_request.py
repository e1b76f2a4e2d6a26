"""`save_requested()`: a signal anywhere, one answer everywhere, at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import paceline
from paceline.errors import ConfigError
from tests.harness import free_rendezvous, init_group, run_ranks
from tests.harness.launched import launched, run_command, wait_for_files, write_script


def _loop(rank, steps, pause, signal_at):
    """Calls per step without any collective, so ranks drift apart freely. Returns (step, stop) of
    each request.
    """
    found = []
    for step in range(steps):
        number = signal_at.get((rank, step))
        if number is not None:
            os.kill(os.getpid(), number)
        if request := paceline.save_requested():
            found.append((step, request.stop))
            if request.stop:
                break
        time.sleep(pause * (1 + rank))
    return found


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_save_at_the_same_step(backend, number, who):
    def train(rank, world):
        init_group(backend)
        found = _loop(rank, 400, 0.003, {(who, 30): number})
        paceline.destroy_process_group()
        return found

    outcomes = run_ranks(3, train)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0]) == 1
    step, stop = outcomes[0][0]
    assert step >= 30
    assert stop == (number == signal.SIGTERM)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("makes_group", ["torch", "paceline"])
def test_a_loop_that_synchronises_goes_on_until_all_ranks_save(backend, makes_group):
    """A rank that sees the signal must not wait in its call: its peer may be in the next step,
    where it waits for that rank.
    """

    def train(rank, world):
        import torch
        import torch.distributed as dist

        if makes_group == "torch":
            init_group(backend)
        else:
            paceline.init_process_group(backend, free_rendezvous(), rank=rank, world_size=world)
        found = []
        for step in range(600):
            value = torch.ones(1)
            dist.all_reduce(value)
            if step in (20, 60, 150) and rank == (step // 20) % world:
                os.kill(os.getpid(), signal.SIGUSR1)
            if step == 300 and rank == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            if request := paceline.save_requested():
                found.append((step, request.stop))
                if request.stop:
                    break
        paceline.destroy_process_group()
        return found

    outcomes = run_ranks(3, train)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [stop for _, stop in outcomes[0]] == [False] * (len(outcomes[0]) - 1) + [True]
    assert len(outcomes[0]) in {3, 4}  # the first two may have become one
    assert outcomes[0][-1][0] >= 300


def test_requests_follow_the_default_group_that_torch_makes():
    """The first calls are made without a group, the next with one, the last with another one. Ranks
    count their calls anew in each.
    """

    def train(rank, world):
        import torch.distributed as dist

        found = [_loop(0, 3 + rank, 0.0, {(0, 2): signal.SIGUSR1})]
        for name in ("first", "second"):
            store = dist.FileStore(free_rendezvous().removeprefix("file://") + name, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            found.append(_loop(rank, 200, 0.001, {(1, 20): signal.SIGUSR1}))
            dist.barrier()
            dist.destroy_process_group()
        paceline.destroy_process_group()
        return found

    first, second = run_ranks(2, train)
    assert first == second
    assert [len(found) for found in first] == [1, 1, 1]


def test_a_rank_that_never_calls_holds_nobody_up():
    def train(rank, world):
        init_group("gloo")
        found = _loop(rank, 200, 0.001, {(1, 20): signal.SIGUSR1}) if rank == 1 else []
        paceline.destroy_process_group()
        return found

    assert [len(found) for found in run_ranks(2, train)] == [0, 1]


def test_several_requests_and_several_senders():
    def train(rank, world):
        init_group("gloo")
        usr1 = signal.SIGUSR1
        found = _loop(rank, 500, 0.003, {(0, 20): usr1, (1, 20): usr1, (1, 180): usr1})
        paceline.destroy_process_group()
        return found

    first, second = run_ranks(2, train)
    assert first == second
    assert len(first) in {
        2,
        3,
    }  # the two at step 20 are one request or two, the late one is its own


def test_a_request_when_a_rank_has_finished_already_is_dropped():
    """SIGTERM in the last step: rank 0 left the loop, rank 1 must not wait for it."""

    def train(rank, world):
        init_group("gloo")
        began = time.monotonic()
        found = _loop(rank, 10 + 150 * rank, 0.003, {(1, 120): signal.SIGTERM})
        paceline.destroy_process_group()
        return found, time.monotonic() - began

    (first, _), (second, seconds) = run_ranks(2, train)
    assert (first, second) == ([], [])
    assert seconds < 30


def test_alone_no_group_is_needed_and_the_handlers_are_given_back():
    def train(rank, world):
        os.environ.pop("RANK")
        os.environ.pop("WORLD_SIZE")
        before = signal.getsignal(signal.SIGTERM)
        assert _loop(0, 5, 0.0, {(0, 3): signal.SIGTERM}) == [(3, True)]
        paceline.destroy_process_group()
        assert signal.getsignal(signal.SIGTERM) == before

    run_ranks(1, train)


def test_a_listener_made_before_the_group_is_replaced_by_one_that_agrees_with_all_ranks():
    def train(rank, world):
        assert not paceline.save_requested()
        paceline.init_process_group("gloo", free_rendezvous(), rank=rank, world_size=world)
        found = _loop(rank, 300, 0.003, {(1, 30): signal.SIGUSR1})
        paceline.destroy_process_group()
        return found

    first, second = run_ranks(2, train)
    assert first == second
    assert len(first) == 1


def test_children_of_a_listening_rank_still_end_by_sigterm():
    def train(rank, world):
        assert not paceline.save_requested()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
        paceline.destroy_process_group()
        return os.waitstatus_to_exitcode(status)

    assert run_ranks(1, train) == [-signal.SIGTERM]


def test_only_the_main_thread_may_listen():
    def train(rank, world):
        errors = []

        def ask():
            try:
                paceline.save_requested()
            except ConfigError as error:
                errors.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return errors

    assert "main thread" in run_ranks(1, train)[0][0]


TRAIN = """
    import os, pathlib, sys, time, torch, paceline
    paceline.init_process_group()
    folder = pathlib.Path(sys.argv[1])
    model = paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(100_000):
        model(torch.ones(1, 2)).sum().backward()
        if request := paceline.save_requested():
            paceline.save(folder / "last.pt", model=model, step=step)
            sys.stdout.write(f"saved {step}\\n")
            if request.stop:
                break
        (folder / f"up-{paceline.rank()}").write_text("up")
        time.sleep(0.005)
"""


@pytest.mark.slow
def test_sigterm_of_the_launcher_saves_once_on_all_ranks(tmp_path):
    """Preemption: the scheduler sends SIGTERM to the one process it knows."""
    script = write_script(tmp_path, TRAIN)
    with launched(run_command(script, str(tmp_path), options=("--preload=torch",))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGUSR1)
        wait_for_files(tmp_path / "last.pt")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 0, job.stderr
        assert job.left_after(0.0) == []
    lines = sorted(job.stdout.splitlines())
    steps = [
        [int(line.split()[-1]) for line in lines if line.startswith(f"[{rank}]")] for rank in (0, 1)
    ]
    assert sorted(steps[0]) == sorted(steps[1])
    # Each rank gets both signals; one that comes to it after the save is one more request.
    assert len(steps[0]) >= 2
    assert paceline.load(tmp_path / "last.pt")["step"] == max(steps[0])
