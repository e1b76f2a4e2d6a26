"""Peers that live and do not come, groups that are aborted, and ranks that make different calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from tests.faults import scenes
from tests.faults.scenes import DETECTION_S, strike, survivors
from tests.harness import init_group, run_ranks


def be_late():
    from paceline.errors import GroupAborted

    scenes.mark_event()
    time.sleep(2.0)
    with pytest.raises(GroupAborted, match="timed out"):
        scenes.all_reduce(0, 0)


def stand_still():
    """Stopped, not ended; whoever is left makes it go on."""
    scenes.mark_event()
    child = os.fork()
    if child == 0:
        time.sleep(2.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


@pytest.mark.parametrize("fault", [be_late, stand_still], ids=lambda fault: fault.__name__)
def test_a_timeout_names_the_missing_rank_and_that_it_is_alive(fault):
    outcomes = strike(3, 1, fault, scenes.all_reduce, timeout=timedelta(seconds=1))
    assert outcomes[1].error is None, outcomes[1].error
    for report in survivors(outcomes, 1).values():
        assert report.error == "CollectiveTimeout"
        assert report.missing == (1,)
        assert f"rank 1 (pid {report.victim_pid}, alive)" in report.message
        assert "all_reduce (call 2)" in report.message
        assert report.took_s < 1.0 + DETECTION_S


@pytest.mark.parametrize("call", [scenes.recv, scenes.send], ids=lambda call: call.__name__)
def test_a_time_out_of_a_message_names_its_peer(call):
    def be_slow():
        scenes.mark_event()
        time.sleep(2.0)

    (report,) = survivors(strike(2, 1, be_slow, call, timeout=timedelta(seconds=1)), 1).values()
    assert report.error == "CollectiveTimeout"
    assert report.missing == (1,)
    assert f"pid {report.victim_pid}, alive" in report.message


def test_abort_by_one_rank_ends_every_wait():
    def body(rank, world):
        import torch.distributed as dist

        scenes.remember_threads()
        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        dist.barrier()

        if rank == 2:  # never makes the call; the others wait in two kinds of it
            time.sleep(0.2)
            scenes.mark_event()
            dist.distributed_c10d._get_default_group().abort()
            time.sleep(0.5)
            return None
        return scenes.report_of(
            lambda: (scenes.all_reduce if rank == 0 else scenes.async_all_reduce)(rank, 2)
        )

    for report in survivors(run_ranks(3, body, check=False), 2).values():
        assert report.error == "GroupAborted"
        assert report.took_s < DETECTION_S
        assert "rank 2 aborted" in report.message


def test_abort_by_a_thread_of_the_rank_that_waits():
    def body(rank, world):
        import torch.distributed as dist

        scenes.remember_threads()
        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
            return None

        def abort():
            scenes.mark_event()
            dist.distributed_c10d._get_default_group().abort()

        timer = threading.Timer(0.2, abort)
        timer.start()
        report = scenes.report_of(lambda: scenes.all_reduce(rank, 1))
        timer.join()
        return report

    (report,) = survivors(run_ranks(2, body, check=False), 1).values()
    assert report.error == "GroupAborted"
    assert report.took_s < DETECTION_S


def test_destroying_the_group_under_a_waiting_thread_ends_its_wait():
    def body(rank, world):
        import torch.distributed as dist

        from paceline.errors import GroupError

        scenes.remember_threads()
        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)
            return ()
        raised = []

        def wait():
            try:
                scenes.all_reduce(rank, 1)
            except GroupError as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        dist.destroy_process_group()
        thread.join()
        assert len(raised) == 1
        assert time.monotonic() - start < DETECTION_S
        return scenes.native_left_over()

    assert run_ranks(2, body) == [(), ()]


def test_every_field_of_a_call_is_compared_and_the_group_lives_on():
    """All ranks raise, each message has every rank's call, and the next call works."""

    def body(rank, world):
        import torch
        import torch.distributed as dist

        from paceline.errors import MismatchError

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        odd = rank == 1
        ten, out = torch.ones(10), [torch.empty(10) for _ in range(world)]
        cases = {
            "kind": (
                lambda: dist.barrier() if odd else dist.all_reduce(ten),
                "all_reduce of 10 float32",
                "barrier",
            ),
            "dtype": (
                lambda: dist.all_reduce(
                    torch.ones(10, dtype=torch.int32 if odd else torch.float32)
                ),
                "of 10 float32",
                "of 10 int32",
            ),
            "count": (
                lambda: dist.all_reduce(torch.ones(11 if odd else 10)),
                "of 10 float32",
                "of 11 float32",
            ),
            "count, far apart": (
                lambda: dist.all_reduce(torch.ones(1_000_000 if odd else 10)),
                "of 10 float32",
                "of 1000000 float32",
            ),
            "op": (
                lambda: dist.all_reduce(ten, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
                "SUM",
                "MAX",
            ),
            "root": (lambda: dist.broadcast(ten, src=1 if odd else 0), "root 0", "root 1"),
            "element type of moved data": (
                lambda: dist.broadcast(
                    torch.ones(10, dtype=torch.int32 if odd else torch.float32), src=0
                ),
                "(float32)",
                "(int32)",
            ),
            "share of a gather": (
                lambda: dist.all_gather(out, torch.ones(9 if odd else 10)),
                "all_gather of 40 bytes",
                "all_gather of 36 bytes",
            ),
            "blocks": (
                lambda: dist.reduce_scatter(
                    torch.empty(8 if odd else 10), [torch.ones(8 if odd else 10)] * world
                ),
                "reduce_scatter of 30 float32",
                "reduce_scatter of 24 float32",
            ),
            "asynchronous": (
                lambda: dist.all_reduce(torch.ones(11 if odd else 10), async_op=True).wait(),
                "of 10 float32",
                "of 11 float32",
            ),
        }
        for name, (call, theirs, odd_one) in cases.items():
            with pytest.raises(MismatchError) as caught:
                call()
            values = caught.value.values
            assert sorted(values) == [0, 1, 2], name
            assert theirs in values[0], (name, values)
            assert theirs in values[2], (name, values)
            assert odd_one in values[1], (name, values)
            assert all(value in str(caught.value) for value in values.values())
            check = torch.tensor([float(rank)])
            dist.all_reduce(check)
            assert check.item() == 3.0, name
        dist.destroy_process_group()

    run_ranks(3, body)


@pytest.mark.parametrize("length", [10, 1_000_000], ids=["fits the channel", "still being sent"])
def test_a_message_of_another_size_is_a_mismatch_and_the_channel_lives_on(length):
    def body(rank, world):
        import contextlib

        import torch
        import torch.distributed as dist

        from paceline.errors import MismatchError

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        nbytes = 4 * length
        if rank == 0:
            refused = pytest.raises(MismatchError, match=f"sent {nbytes} bytes, rank 1 expected 44")
            with (
                refused if length > 10 else contextlib.nullcontext()
            ):  # a short one is gone before anybody looks
                dist.send(torch.ones(length), dst=1)
            dist.send(torch.full((5,), 7.0), dst=1)
        else:
            with pytest.raises(MismatchError, match=f"expected 44 bytes, rank 0 sent {nbytes}"):
                dist.recv(torch.empty(11), src=0)
            data = torch.empty(5)
            dist.recv(data, src=0)
            assert data.tolist() == [7.0] * 5
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(2, body)


def test_buckets_that_ranks_define_differently_are_a_mismatch_on_all_of_them():
    def body(rank, world):
        import torch.distributed as dist

        from paceline.errors import MismatchError

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        group = dist.group.WORLD
        arena = group.engine.open_arena(4096, 2)
        arena.define(0, 0, 10 + (rank == 1), 10, 0)
        arena.define(1, 64, 10, 10, 0)
        arena.ready(0)
        with pytest.raises(MismatchError, match="defined a bucket differently") as caught:
            arena.finish(0)
        assert caught.value.values == {
            0: "bucket 0: 10 float32 at byte 0, SUM",
            1: "bucket 0: 11 float32 at byte 0, SUM",
            2: "bucket 0: 10 float32 at byte 0, SUM",
        }
        arena.ready(1)
        arena.finish(1)
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(3, body)


def strike_within_a_call(number: int) -> None:
    """Send this process a signal once its group has begun another call."""
    import torch.distributed as dist

    if number == signal.SIGINT:  # a job started in the background ignores it
        signal.signal(number, signal.default_int_handler)
    comm = dist.group.WORLD.engine.comm
    calls = comm._core.plc_comm_sequence
    before = calls(comm.handle)

    def wait_and_strike() -> None:
        while calls(comm.handle) == before:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_strike).start()


@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_ctrl_c_ends_a_collective_at_once_and_peers_learn_of_it(call):
    def body(rank, world):
        import torch
        import torch.distributed as dist

        from paceline.errors import GroupAborted

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        store = dist.group.WORLD.get_group_store()
        arguments = [torch.ones(4)] if call == "all_reduce" else []
        dist.barrier()
        start = time.monotonic()
        if rank == 0:
            strike_within_a_call(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                getattr(dist, call)(*arguments)
            store.set("stopped", "")
        if rank == 2:  # comes only when it is over
            store.get("stopped")
        with pytest.raises(GroupAborted, match="rank 0 aborted the group"):
            getattr(dist, call)(*arguments)
        assert time.monotonic() - start < scenes.GROUP_TIMEOUT.total_seconds() / 2
        dist.destroy_process_group()

    run_ranks(3, body)


def test_ctrl_c_ends_a_wait_for_something_asynchronous_which_goes_on():
    def body(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        store = dist.group.WORLD.get_group_store()
        data = torch.ones(4)
        dist.barrier()
        if rank == 0:
            strike_within_a_call(signal.SIGINT)
            work = dist.all_reduce(data, async_op=True)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            store.set("stopped", "")
            work.wait()
        else:
            store.get("stopped")
            dist.all_reduce(data)
        assert data.tolist() == [2.0] * 4
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(2, body)


def test_a_signal_handler_runs_while_a_collective_waits_and_may_not_call_the_same_group():
    def body(rank, world):
        import torch
        import torch.distributed as dist

        from paceline.errors import ConfigError

        init_group("paceline", timeout=scenes.GROUP_TIMEOUT)
        store = dist.group.WORLD.get_group_store()
        found = []

        def handle(number, frame):
            try:
                dist.all_reduce(torch.ones(1))
            except ConfigError as error:
                found.append(str(error))
            store.set("handled", "")

        dist.barrier()
        data = torch.ones(4)
        if rank == 0:
            signal.signal(signal.SIGUSR1, handle)
            strike_within_a_call(signal.SIGUSR1)
        else:
            store.get("handled")
        dist.all_reduce(data)
        assert data.tolist() == [2.0] * 4
        assert len(found) == (rank == 0)
        assert all("signal handler" in text for text in found)
        dist.destroy_process_group()

    run_ranks(2, body)
