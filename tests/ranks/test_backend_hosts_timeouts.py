"""Time limits of single calls hold between hosts too. Hosts are simulated by giving ranks different
host identities: what is between them is Gloo over the loopback device.
"""

from __future__ import annotations

from tests.harness import init_group, run_ranks

LATE = 2  # alone on the second host


def pretend_host(rank):
    """Ranks 0 and 1 are on one host, the late one is on another."""
    from paceline.backend import create

    create.host_identity = lambda: f"host{rank // LATE}"


def test_the_time_limit_of_a_call_holds_between_hosts():
    def check(rank, world):
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from paceline import CollectiveTimeout, GroupError

        limit = timedelta(seconds=1)

        def options(kind, **fields):
            made = kind()
            made.timeout, made.asyncOp = limit, False
            for name, value in fields.items():
                setattr(made, name, value)
            return made

        def small(group):
            group.allreduce([torch.ones(3)], options(dist.AllreduceOptions)).wait()

        def large(group):
            group.allreduce([torch.ones(100_000)], options(dist.AllreduceOptions)).wait()

        def asynchronous(group):
            group.allreduce([torch.ones(3)], options(dist.AllreduceOptions, asyncOp=True)).wait()

        def broadcast(group):
            options_ = options(dist.BroadcastOptions, rootRank=LATE)
            group.broadcast([torch.ones(3)], options_).wait()

        def all_to_all(group):
            tensors = [torch.ones(1) for _ in range(world)]
            group.alltoall(tensors, tensors, options(dist.AllToAllOptions)).wait()

        def large_all_to_all(group):
            outputs, inputs = ([torch.ones(200_000) for _ in range(world)] for _ in range(2))
            group.alltoall(outputs, inputs, options(dist.AllToAllOptions)).wait()

        def large_reduce(group):
            options_ = options(dist.ReduceOptions, rootRank=0)
            group.reduce([torch.ones(100_000)], options_).wait()

        def large_reduce_scatter(group):
            inputs = [torch.ones(100_000) for _ in range(world)]
            options_ = options(dist.ReduceScatterOptions)
            group.reduce_scatter([torch.ones(100_000)], [inputs], options_).wait()

        def barrier(group):
            group.barrier(timeout=limit).wait()

        pretend_host(rank)
        init_group("paceline", timeout=timedelta(seconds=60))
        assert type(dist.group.WORLD.engine).__name__ == "MultiHostEngine"
        seen = {}
        for call in (
            small,
            large,
            asynchronous,
            broadcast,
            all_to_all,
            large_all_to_all,
            large_reduce,
            large_reduce_scatter,
            barrier,
        ):
            group = dist.new_group(range(world))
            dist.barrier()
            if rank != LATE:
                start = time.monotonic()
                try:
                    call(group)
                except GroupError as error:
                    elapsed = time.monotonic() - start
                    seen[call.__name__] = (
                        elapsed,
                        isinstance(error, CollectiveTimeout),
                        str(error),
                    )
                else:
                    seen[call.__name__] = (0.0, False, "it ended without an error")
            dist.barrier()  # the late rank is alive, and the default group unharmed
        dist.destroy_process_group()
        return seen

    found = run_ranks(3, check, timeout=120)
    for name, (elapsed, is_timeout, message) in found[0].items():
        assert is_timeout, (name, message)
        assert 0.5 < elapsed < 10, (name, elapsed, message)
        assert "1 s" in message, (name, message)
    assert all(elapsed < 10 for elapsed, _, _ in found[1].values()), found[1]


def test_monitored_barrier_and_messages_have_time_limits_between_hosts():
    def check(rank, world):
        import time
        from datetime import timedelta

        import pytest
        import torch
        import torch.distributed as dist

        from paceline import CollectiveTimeout

        pretend_host(rank)
        init_group("paceline", timeout=timedelta(seconds=60))
        group = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=30))
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"Rank 2 failed to pass") as raised:
                group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
            assert raised.value.missing == (LATE,) or list(raised.value.missing) == [LATE]
        elif rank == 1:
            with pytest.raises(CollectiveTimeout, match="Rank 1 successfully reached"):
                group.monitored_barrier(timedelta(seconds=2))
        assert time.monotonic() - start < 10
        # Nobody counted the late rank's barrier: it takes part in the next one.
        if rank == LATE:
            group._monitored_barriers += 1
        group.monitored_barrier(timedelta(seconds=30))
        data = torch.ones(3)
        dist.all_reduce(data)  # the group can be used afterwards
        assert data[0].item() == world
        waiting = dist.new_group(range(world))
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(CollectiveTimeout):
                waiting.recv([torch.zeros(1)], LATE, 0).wait(timedelta(seconds=1))
            assert time.monotonic() - start < 10
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(3, check, timeout=90)
