"""An error that nobody catches reaches the peers with its rank and traceback, before the process is
gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from tests.harness import init_group, run_ranks
from tests.harness.launched import launched, write_script

# Generous: the machine may be loaded; a bare loss of the connection would take no longer.
WITHIN_S = 20.0
CULPRIT = 1


@pytest.fixture(params=["gloo", "paceline"])
def backend(request):
    return request.param


@pytest.fixture
def ranks(backend):
    return functools.partial(
        run_ranks, env={"BACKEND": backend}, timeout=60, check=False, uncaught=True
    )


def batches(rank, where):
    for step in range(4):
        if where == "loader" and step == 2 and rank == CULPRIT:
            raise ValueError("the needle")
        yield torch.full((2, 4), float(step + rank))


def train(rank, world, where):
    """One rank fails in the third step; nobody catches it. What the others see is returned."""
    init_group(os.environ["BACKEND"])
    net = torch.nn.Linear(4, 4)
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, started = [], 0.0
    try:
        for step, x in enumerate(batches(rank, where)):
            before, started = [p.detach().clone() for p in net.parameters()], time.monotonic()
            loss = model(x).square().mean()
            if step == 2 and rank == CULPRIT:
                fail_in(where)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except paceline.PeerLost as error:
        same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        return step, time.monotonic() - started, same, error.rank, error.traceback, str(error)
    return None


def fail_in(where):
    if where == "loss":
        raise ValueError("the needle")
    if where == "sys.exit":
        sys.exit("the needle")
    if where == "Ctrl-C":
        raise KeyboardInterrupt("the needle")
    if where == "finally":
        try:
            raise ValueError("the needle")
        finally:
            dist.destroy_process_group()
    if where == "mp.spawn":  # torch's own way to start ranks catches the error and exits
        try:
            raise ValueError("the needle")
        except ValueError:
            sys.exit(1)


@pytest.mark.parametrize("where", ["loader", "loss", "sys.exit", "Ctrl-C", "finally", "mp.spawn"])
def test_the_peers_raise_in_that_step_with_the_traceback(ranks, where):
    outcomes = ranks(3, train, where)
    for outcome in (outcomes[0], outcomes[2]):
        step, took_s, same, rank, traceback, message = outcome.value
        assert (step, rank, same) == (2, CULPRIT, True)
        assert took_s < WITHIN_S
        assert "the needle" in traceback
        assert ("in batches" if where == "loader" else "in fail_in") in traceback
        assert traceback.strip() in message


def wait_in(rank, world, call):
    init_group("paceline")
    dist.barrier()
    if rank == CULPRIT:
        raise ValueError("the needle")
    try:
        if call == "barrier":
            dist.barrier()
        elif call == "recv":
            dist.recv(torch.empty(3), CULPRIT)
        elif call == "new_group":
            dist.new_group([0, 1])
        elif call == "async":
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        else:
            paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    except paceline.PeerLost as error:
        return error.rank, error.traceback
    return None


@pytest.mark.parametrize("call", ["barrier", "recv", "async", "construction"])
def test_ranks_that_wait_in_another_call_of_our_group_raise_it_too(call):
    outcomes = run_ranks(2, wait_in, call, timeout=60, check=False, uncaught=True)
    rank, traceback = outcomes[0].value
    assert rank == CULPRIT
    assert "ValueError: the needle" in traceback


def end_well(rank, world):
    init_group(os.environ["BACKEND"])
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    if rank == CULPRIT:
        sys.exit(0)
    time.sleep(0.2)
    return True


def test_a_successful_exit_publishes_nothing(ranks):
    outcomes = ranks(2, end_well)
    assert outcomes[0].value is True
    assert outcomes[CULPRIT].exitcode == 0


def go_on(rank, world, norm):
    """One rank drops a batch of which its loader or loss failed, and goes on: it will have one step
    less.
    """
    init_group(os.environ["BACKEND"])
    layers = [torch.nn.Linear(4, 4), *([torch.nn.BatchNorm1d(4)] if norm else [])]
    model = paceline.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            with contextlib.suppress(ValueError):
                optimizer.zero_grad()
                loss = model(torch.full((2, 4), float(step))).sum()
                if rank == CULPRIT and step == 2:
                    raise ValueError("a bad batch")
                loss.backward()
                optimizer.step()
    except paceline.PacelineError as error:
        return type(error).__name__, str(error)
    return "done", ""


@pytest.mark.parametrize("norm", [False, True])
def test_going_on_after_an_error_ends_in_a_clear_one(ranks, norm):
    outcomes = ranks(2, go_on, norm)
    kind, text = outcomes[0].value
    if norm:  # buffers are synchronised before forward: seen at once, by both
        assert kind == "MismatchError"
        assert outcomes[CULPRIT].value[0] == "MismatchError"
        assert "rank 0 is at backward, rank 1 is at forward" in text
    else:
        assert outcomes[CULPRIT].value == ("done", "")
        assert kind == "PeerLost"
        assert "ended" in text or "exited with code 0" in text


SCRIPT = """
    import os, sys, threading, time, traceback
    import torch, torch.distributed as dist
    import paceline

    backend, mode, rendezvous = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        threading.Thread(target=time.sleep, args=(60.0 if mode == "held" else 0.0,)).start()
        raise ValueError("the needle")
    if mode == "barrier":
        dist.barrier()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except paceline.PeerLost:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # Gloo waits at exit for the call that rank 1 will never make
"""


def run_script(tmp_path: pathlib.Path, backend: str, mode: str) -> str:
    """What rank 0 prints while rank 1's program ends with an error."""
    script = write_script(tmp_path, SCRIPT)
    command = [sys.executable, str(script), backend, mode, str(tmp_path / "rendezvous")]
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "PYTHONWARNINGS": "default"}
    with (
        launched(command, env={**env, "RANK": "0"}) as peer,
        launched(command, env={**env, "RANK": "1"}),
    ):
        assert peer.wait(50.0) == 1  # long before rank 1, which a thread holds, is gone
        return peer.stderr


@pytest.mark.slow
def test_a_program_that_a_thread_holds_back_does_not_hold_its_peers(tmp_path, backend):
    printed = run_script(tmp_path, backend, "held")
    assert "PeerLost: rank 1" in printed
    assert "ValueError: the needle" in printed


@pytest.mark.slow
def test_an_error_of_another_kind_of_group_carries_the_error_of_the_peer(tmp_path):
    printed = run_script(tmp_path, "gloo", "barrier")
    assert "by peer" in printed  # closed or reset, whichever comes first
    assert "rank 1 (pid" in printed
    assert "ValueError: the needle" in printed
