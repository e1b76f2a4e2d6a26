"""A peer that dies, exits or leaves while others wait for it: all of them say so, in time, and
clean up.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

import pytest

from tests.faults import scenes
from tests.faults.scenes import DETECTION_S, strike, survivors
from tests.harness import init_group, run_ranks

FAULTS = {
    "SIGKILL": (scenes.die_by(signal.SIGKILL), -signal.SIGKILL),
    "SIGSEGV": (scenes.die_by(signal.SIGSEGV), -signal.SIGSEGV),
    "exit 0": (scenes.exit_with(0), 0),
    "exit 3": (scenes.exit_with(3), 3),
}


def assert_lost(reports, victim, exitcode):
    for rank, report in reports.items():
        assert report.error == "PeerLost", f"rank {rank}: {report}"
        assert report.took_s < DETECTION_S, f"rank {rank}: {report}"
        assert (report.rank, report.pid, report.exitcode) == (
            victim,
            report.victim_pid,
            exitcode,
        ), report
        assert f"rank {victim} (pid {report.victim_pid})" in report.message


@pytest.mark.parametrize("fault", FAULTS)
def test_every_survivor_names_who_was_lost_and_how(fault):
    strike_now, exitcode = FAULTS[fault]
    reports = survivors(strike(3, 1, strike_now, scenes.all_reduce), 1)
    assert_lost(reports, 1, exitcode)
    word = signal.Signals(-exitcode).name if exitcode < 0 else f"exited with code {exitcode}"
    assert all(word in report.message for report in reports.values())


@pytest.mark.parametrize(
    "call",
    [
        scenes.barrier,
        scenes.broadcast,
        scenes.all_gather,
        scenes.all_to_all,
        scenes.reduce_scatter,
        scenes.recv,
        scenes.send,
        scenes.async_all_reduce,
        scenes.future,
    ],
    ids=lambda call: call.__name__,
)
def test_death_is_noticed_in_every_kind_of_call(call):
    outcomes = strike(2, 0, scenes.die_by(signal.SIGKILL), call)
    assert_lost(survivors(outcomes, 0), 0, -signal.SIGKILL)


@pytest.mark.parametrize("world", [2, 3])
def test_death_in_the_middle_of_a_large_all_reduce(world):
    """Both ways of moving large tensors are used by then: whoever reads the victim's memory finds
    it gone.
    """
    outcomes = strike(
        world, 1, scenes.die_by(signal.SIGKILL), scenes.large_all_reduces, during=True
    )
    assert_lost(survivors(outcomes, 1), 1, -signal.SIGKILL)


def test_death_while_a_bucket_waits():
    def body(rank, world):
        import torch.distributed as dist

        scenes.remember_threads()
        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        group = dist.distributed_c10d._get_default_group()
        arena = group.engine.open_arena(4096, 1)
        arena.define(0, offset=0, count=100, dtype=10, op=0)
        arena.ready(0)
        arena.finish(0)
        if rank == 2:
            time.sleep(0.2)
            scenes.die_by(signal.SIGKILL)()
        arena.ready(0)

        def finish_then_drop():
            nonlocal arena
            try:
                arena.finish(0)
            finally:
                arena = None  # its memory goes with the last that refers to it

        return scenes.report_of(finish_then_drop)

    assert_lost(survivors(run_ranks(3, body, check=False), 2), 2, -signal.SIGKILL)


def test_a_peer_that_destroys_the_group_early_is_distinguished_from_one_that_died():
    def leave():
        import torch.distributed as dist

        scenes.mark_event()
        dist.destroy_process_group()
        time.sleep(0.5)  # alive, and no longer a member

    outcomes = strike(3, 2, leave, scenes.all_reduce)
    for report in survivors(outcomes, 2).values():
        assert report.error == "PeerLost"
        assert report.took_s < DETECTION_S
        assert (report.rank, report.pid, report.exitcode) == (2, report.victim_pid, None)
        assert "left the group" in report.message
        assert "destroy_process_group" in report.message


def test_a_receive_from_anyone_ends_when_everyone_is_gone():
    def anyone(rank, victim):
        import torch
        import torch.distributed as dist

        dist.recv(torch.empty(10))

    (report,) = survivors(strike(2, 1, scenes.die_by(signal.SIGKILL), anyone), 1).values()
    assert report.error == "PeerLost"
    assert report.took_s < DETECTION_S
    assert "every other rank" in report.message


def test_after_a_loss_the_survivors_can_form_a_new_group():
    def body(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        dist.barrier()
        if rank == 2:
            scenes.die_by(signal.SIGKILL)()
        report = scenes.report_of(lambda: dist.all_reduce(torch.ones(1)))
        assert report.error == "PeerLost"
        again = f"file://{os.environ['PACELINE_TEST_RENDEZVOUS']}.again"
        dist.init_process_group("paceline", init_method=again, rank=rank, world_size=2)
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

    outcomes = run_ranks(3, body, check=False)
    assert [outcome.value for outcome in outcomes] == [3.0, 3.0, None]


def test_nothing_is_left_when_all_ranks_are_killed_at_once():
    before = {path.name for path in pathlib.Path("/dev/shm").iterdir()}

    def body(rank, world):
        import torch.distributed as dist

        init_group("paceline")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    outcomes = run_ranks(3, body, check=False)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 3
    assert {path.name for path in pathlib.Path("/dev/shm").iterdir()} <= before


def test_a_rank_that_cannot_join_fails_all_and_leaves_nothing_mapped():
    """One rank cannot open the segment: all raise, and the others unmap what they had joined."""

    def body(rank, world):
        import torch.distributed as dist

        from paceline.core import rendezvous
        from paceline.errors import NativeError

        scenes.remember_threads()
        if rank == 1:

            def refused(pid, number):
                raise NativeError("refused by the test")

            rendezvous.open_peer_descriptor = refused
        with pytest.raises(NativeError, match="refused by the test"):
            init_group("paceline")
        assert not dist.is_initialized()
        return scenes.native_left_over()

    assert run_ranks(3, body) == [()] * 3


def test_a_forked_child_is_no_rank():
    """A call in a child forked after init would count as one of its parent's."""

    def body(rank, world):
        import torch
        import torch.distributed as dist

        from paceline.errors import GroupError

        init_group("paceline")
        dist.all_reduce(torch.ones(1))
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except GroupError as error:
                os._exit(0 if "forked" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.item()

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_death_while_a_group_is_made_is_noticed_long_before_the_time_limit(victim):
    """The victim has told its pid, and no more; the others wait for it to open the memory."""

    def body(rank, world):
        from paceline.core import communicator
        from paceline.errors import PeerLost

        if rank == victim:
            communicator.Communicator.join = lambda *args, **options: scenes.die_by(
                signal.SIGKILL
            )()
        try:
            init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        except PeerLost as error:
            happened, pid = scenes.event_file().read_text().split()
            return error.rank, error.pid == int(pid), time.monotonic() - float(happened)
        raise AssertionError("a group of the living and the dead")

    outcomes = run_ranks(3, body, check=False)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error is None, outcomes[rank].error
        lost, pid_is_right, took_s = outcomes[rank].value
        assert (lost, pid_is_right) == (victim, True)
        assert took_s < scenes.GROUP_TIMEOUT.total_seconds() / 2
