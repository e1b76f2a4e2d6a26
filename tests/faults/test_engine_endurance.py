"""Long runs: kills at random moments of random calls, and many small all-reduces with pauses."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import signal
import threading
import time
from datetime import timedelta

import pytest

from tests.faults import scenes
from tests.faults.scenes import DETECTION_S, remember_threads, report_of
from tests.harness import run_ranks
from tests.harness.ranks import RENDEZVOUS

RANKS, RUNS = 6, 10  # five kills a run: after each, the survivors form a new group


def _random_call(rank, world, choice):
    """One call that all ranks make; `choice` is the same on all."""
    import torch
    import torch.distributed as dist

    kind = choice.randrange(7)
    count = choice.choice([1, 100, 5_000, 300_000])
    data = torch.ones(count)
    if kind == 0:
        dist.all_reduce(data)
    elif kind == 1:
        dist.broadcast(data, src=choice.randrange(world))
    elif kind == 2:
        dist.all_gather([torch.empty(count) for _ in range(world)], data)
    elif kind == 3:
        works = [dist.all_reduce(torch.ones(count), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
    elif kind == 4:
        dist.all_to_all([torch.empty(count) for _ in range(world)], [data] * world)
    elif kind == 5:
        sent = dist.isend(data, dst=(rank + 1) % world)
        dist.recv(torch.empty(count), src=(rank - 1) % world)
        sent.wait()
    else:
        dist.reduce_scatter(torch.empty(count), [data] * world)


def _calls_without_end(rank, world, choice):
    while True:
        _random_call(rank, world, choice)


def _lose_one_after_the_other(rank, world, seed, log):
    import torch.distributed as dist

    remember_threads()
    plan = random.Random(seed)
    members = list(range(world))
    rendezvous = os.environ[RENDEZVOUS]
    while len(members) > 1:
        victim, delay = plan.choice(members), plan.uniform(0.0, 0.05)
        os.environ[RENDEZVOUS] = f"{rendezvous}.{len(members)}"  # also where the event is noted
        dist.init_process_group(
            "paceline",
            init_method=f"file://{os.environ[RENDEZVOUS]}",
            rank=members.index(rank),
            world_size=len(members),
            timeout=timedelta(seconds=60),
        )
        dist.barrier()
        if rank == victim:
            threading.Timer(delay, scenes.die_by(signal.SIGKILL)).start()
        choice = random.Random(plan.random())

        report = report_of(
            functools.partial(_calls_without_end, members.index(rank), len(members), choice)
        )
        with open(f"{log}.{rank}", "ab") as file:  # a later victim takes nothing back with it
            pickle.dump((members.index(victim), report), file)
        members.remove(victim)


def _reports(log):
    for rank in range(RANKS):
        with contextlib.suppress(FileNotFoundError, EOFError), open(f"{log}.{rank}", "rb") as file:
            while True:
                yield pickle.load(file)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifty_kills_at_random_moments(tmp_path):
    kills = named = 0
    for run in range(RUNS):
        seed, log = random.randrange(2**32), tmp_path / str(run)
        outcomes = run_ranks(
            RANKS, _lose_one_after_the_other, seed, str(log), check=False, timeout=120
        )
        killed = [outcome for outcome in outcomes if outcome.exitcode == -signal.SIGKILL]
        (last,) = [outcome for outcome in outcomes if outcome not in killed]
        assert last.error is None, (
            f"run {run}, seed {seed}: {last.error!r} {getattr(last.error, '__notes__', '')}"
        )
        kills += len(killed)
        reports = list(_reports(log))
        assert len(reports) == sum(
            range(RANKS)
        )  # five survivors of the first kill, four of the second, ...
        for victim, report in reports:
            assert report.error == "PeerLost", f"seed {seed}: {report}"
            assert report.took_s < DETECTION_S, f"seed {seed}: {report}"
            assert report.left_over == (), f"seed {seed}: {report}"
            # A rank that waits for a message of a neighbour who has given up already names that
            # neighbour.
            if report.rank == victim:
                assert (report.pid, report.exitcode) == (report.victim_pid, -signal.SIGKILL), (
                    f"seed {seed}: {report}"
                )
                named += 1
            else:
                assert "left the group" in report.message, f"seed {seed}: {report}"
    assert kills == 50
    assert named > 75  # of 150


def _many_small_allreduces(rank, world, calls):
    """Every result is checked; ranks pause at random, so that each way of waiting and waking is
    used.
    """
    import ctypes as C

    from torch.distributed import FileStore

    from paceline.core.communicator import Communicator

    store = FileStore(os.environ[RENDEZVOUS], world)
    comm = Communicator.join(store, rank, range(world), timedelta(seconds=60))
    data = (C.c_int64 * 8)()
    address, mine, allreduce, int64, total = (
        C.addressof(data),
        random.Random(rank),
        comm.allreduce,
        7,
        0,
    )
    start = time.monotonic()
    for i in range(calls):
        data[0], data[7] = i + rank, -rank * i
        allreduce(address, 1 if i % 5 else 8, int64, total)
        expected = world * i + world * (world - 1) // 2
        if data[0] != expected or (i % 5 == 0 and data[7] != -i * world * (world - 1) // 2):
            raise AssertionError(f"call {i}: {list(data)}, expected {expected}")
        if mine.random() < 0.002:
            time.sleep(mine.random() * 0.001)
    took = time.monotonic() - start
    comm.leave()
    return took


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_small_all_reduces_by_the_hundred_thousand():
    """PACELINE_TEST_CALLS=1000000 runs the million."""
    calls = int(os.environ.get("PACELINE_TEST_CALLS", "100000"))
    took = run_ranks(2, _many_small_allreduces, calls, timeout=60 + calls / 2000)
    print(f"{calls} all-reduces in {max(took):.1f} s, {max(took) / calls * 1e6:.1f} us each")


@pytest.mark.slow
def test_small_all_reduces_with_more_ranks_than_cores():
    run_ranks(5, _many_small_allreduces, 5_000, timeout=100)
