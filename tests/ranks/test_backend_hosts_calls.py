"""Calls between hosts that differ, are interrupted or aborted. Hosts are simulated by giving ranks
different host identities: what is between them is Gloo over the loopback device.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import init_group, run_ranks
from tests.harness.launched import write_script
from tests.harness.single_tensor_calls import all_gather_single

PLACEMENTS = {"2x2": [0, 0, 1, 1], "uneven": [0, 0, 1], "3 hosts": [0, 1, 1, 2]}
EVEN_PLACEMENTS = {"interleaved": [0, 1, 0, 1], "3 even hosts": [0, 1, 2]}


def join(rank, host_of):
    """A group of ranks that believe to be on these hosts."""
    from datetime import timedelta

    import torch.distributed as dist

    from paceline.backend import create

    create.host_identity = lambda: f"host{host_of[rank]}"
    init_group("paceline", timeout=timedelta(seconds=60))
    assert type(dist.group.WORLD.engine).__name__ == "MultiHostEngine"


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_calls_that_differ_are_listed_by_every_rank_and_the_group_lives_on(placement):
    host_of = PLACEMENTS[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import MismatchError

        join(rank, host_of)
        lengths = (10, 5_000, 700_000)  # carried whole, in one block, in several
        calls = [
            (odd, length, lambda n: dist.all_reduce(torch.ones(n)))
            for odd in range(world)
            for length in lengths
        ]
        for odd, length, call in calls:
            with pytest.raises(MismatchError) as raised:
                call(length + 1 if rank == odd else length)
            assert sorted(raised.value.values) == list(range(world))
            assert f"rank {odd}: all_reduce of {length + 1} float32" in str(raised.value)
            other = (odd + 1) % world
            assert f"rank {other}: all_reduce of {length} float32" in str(raised.value)
            data = torch.ones(length)
            dist.all_reduce(data)
            assert torch.equal(data, torch.full((length,), float(world)))
        for odd in range(world):
            with pytest.raises(MismatchError, match="barrier"):
                dist.barrier() if rank == odd else dist.all_reduce(torch.ones(700_000))
        for length in [10, 700_000] * 12:  # more often than there is memory for messages
            with pytest.raises(MismatchError):
                dist.all_reduce(torch.ones(length + rank))
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("placement", [*PLACEMENTS, *EVEN_PLACEMENTS])
def test_exchanges_of_any_length_reach_their_ranks(placement):
    """Parts of one length, which messages carry or not, and of several."""
    host_of = (PLACEMENTS | EVEN_PLACEMENTS)[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import MismatchError

        join(rank, host_of)

        def value(source, goal):
            return float(100 * source + goal + 1)

        def part(source, goal, count):
            return torch.full((count,), value(source, goal))

        # The last that messages carry, and the first that go straight: 2x2 has two parts in a
        # message of a scatter and four in one of an all-to-all, each of four bytes a unit.
        for unit in (0, 1, 700, 32_768, 32_769, 65_536, 65_537, 300_000):
            for lengths in (
                [[unit] * world] * world,
                [[unit * (s + g) for g in range(world)] for s in range(world)],
                [[0 if s else unit for _ in range(world)] for s in range(world)],
                # Rank 0 sees parts of one length, sends them, and learns that others do not.
                [[unit + (min(s, g) > 0) for g in range(world)] for s in range(world)],
            ):
                inputs = [part(rank, goal, lengths[rank][goal]) for goal in range(world)]
                outputs = [torch.zeros(lengths[source][rank]) for source in range(world)]
                dist.all_to_all(outputs, inputs)
                for source, output in enumerate(outputs):
                    assert torch.equal(output, part(source, rank, lengths[source][rank]))
            for root in range(world):
                gathered = [torch.zeros(unit) for _ in range(world)] if rank == root else None
                dist.gather(part(rank, root, unit), gathered, root)
                for source, output in enumerate(gathered or ()):
                    assert torch.equal(output, part(source, root, unit))
                output = torch.zeros(unit)
                inputs = [part(root, goal, unit) for goal in range(world)] if rank == root else None
                dist.scatter(output, inputs, root)
                assert torch.equal(output, part(root, rank, unit))
        assert dist.group.WORLD.engine._links._left_behind == []  # everything begun was finished
        for count in (3, 200_000):
            wanted = [torch.zeros(count + (rank == 1 and r == 0)) for r in range(world)]
            expected = f"rank 0 sends {4 * count} bytes to rank 1, which expects {4 * count + 4}"
            with pytest.raises(MismatchError, match=expected):
                dist.all_to_all(wanted, [torch.zeros(count) for _ in range(world)])
            dist.barrier()
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


def test_messages_of_programs_are_not_taken_for_others():
    """Whatever their tags: some belong to what the group sends itself."""

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import ConfigError

        join(rank, [0, 1])
        other = 1 - rank
        for tag in (2**30, 2**31 - 1):
            with pytest.raises(
                ConfigError, match=r"tag \d+ belongs to .*give one below 1073741824"
            ):
                dist.send(torch.ones(1), other, tag=tag)
        # As after a socket of somebody else's was closed.
        assert dist.group.WORLD.engine._links._are_all_connected()
        parts = [torch.full((200_000,), float(rank)) for _ in range(world)]
        received = [torch.zeros(200_000) for _ in range(world)]
        for tag in (0, 1, 2, 2**30 - 1):
            work = dist.isend(torch.full((3,), float(tag)), other, tag=tag)
            dist.all_to_all(received, parts)
            message = torch.zeros(3)
            dist.recv(message, other, tag=tag)
            work.wait()
            assert torch.equal(message, torch.full((3,), float(tag)))
            assert torch.equal(received[other], torch.full((200_000,), float(other)))
        dist.destroy_process_group()

    run_ranks(2, check, timeout=60)


@pytest.mark.parametrize("placement", [*PLACEMENTS, *EVEN_PLACEMENTS])
def test_gathered_tensors_may_differ_in_length(placement):
    """On one host only, on all of them, or in what the root expects: every rank finds out."""
    host_of = (PLACEMENTS | EVEN_PLACEMENTS)[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import ConfigError, MismatchError

        join(rank, host_of)

        def gather(lengths, root, expected=None):
            outputs = [torch.zeros(length) for length in expected or lengths]
            dist.gather(
                torch.full((lengths[rank],), rank + 1.0), outputs if rank == root else None, root
            )
            if rank == root:
                for source, output in enumerate(outputs):
                    assert torch.equal(output, torch.full((lengths[source],), source + 1.0))

        for unit in (4, 400_000):
            even = [unit] * world
            for root in range(world):
                for odd in range(world):
                    uneven = [unit + (r == odd) for r in range(world)]
                    gather(uneven, root)
                    expected = f"rank {odd} sends {4 * unit} bytes to rank {root}, which expects"
                    with pytest.raises(MismatchError, match=expected):
                        gather(even, root, expected=uneven)
                    gather(even, root)
                parts = [torch.zeros(unit + (r == 1)) for r in range(world)]
                with pytest.raises(MismatchError, match=f"rank {root} sends .* to rank 1"):
                    dist.scatter(torch.zeros(unit), parts if rank == root else None, root)
            gather([unit * (host + 1) for host in host_of], 0)
        if rank == 0:
            few = [torch.zeros(1)]
            with pytest.raises(ConfigError, match="gather needs one tensor for each"):
                dist.gather(torch.zeros(1), few, 0)
            with pytest.raises(ConfigError, match="scatter needs one tensor for each"):
                dist.scatter(torch.zeros(1), few, 0)
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("placement", [*PLACEMENTS, *EVEN_PLACEMENTS])
def test_reduce_and_reduce_scatter_have_the_bits_of_an_all_reduce(placement):
    host_of = (PLACEMENTS | EVEN_PLACEMENTS)[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import GroupOptions, MismatchError

        join(rank, host_of)
        rounded = dist.new_group(pg_options=GroupOptions(wire_dtype=torch.bfloat16))
        # Of several hosts an all-reduce rounds pieces twice.
        groups = [dist.group.WORLD, *([rounded] if max(host_of) == 1 else [])]
        generator = torch.Generator().manual_seed(rank)
        cases = [
            (group, dtype, op, counts)
            for group in groups
            for dtype, op in (
                (torch.float32, dist.ReduceOp.SUM),
                (torch.float32, dist.ReduceOp.AVG),
                (torch.float16, dist.ReduceOp.AVG),
                (torch.float64, dist.ReduceOp.MAX),
                (torch.bfloat16, dist.ReduceOp.AVG),
                (torch.int32, dist.ReduceOp.SUM),
                (torch.complex64, dist.ReduceOp.SUM),
            )
            for counts in (
                [3] * world,
                [100_001] * world,
                [400_000 * (r % 2) for r in range(world)],
                [70_000 * (r + 1) for r in range(world)],
            )
            # torch hands complex numbers to an all-reduce as real ones, which are rounded.
            if group is not rounded or not dtype.is_complex
        ]
        for group, dtype, op, counts in cases:
            whole = torch.randn(sum(counts), generator=generator).to(dtype)
            inputs = list(whole.split(counts))
            output = torch.empty(counts[rank], dtype=dtype)
            dist.reduce_scatter(output, inputs, op=op, group=group)
            root = len(counts) - 1
            reduced = whole.clone()
            dist.reduce(reduced, root, op=op, group=group)
            assert rank == root or torch.equal(reduced, whole)
            dist.all_reduce(whole, op=op, group=group)
            assert rank != root or torch.equal(reduced, whole)
            assert torch.equal(output, whole.split(counts)[rank])
        shift = int(rank == 0)  # as much in all, but divided in another way
        counts = [100_000 + shift, 100_000 - shift, *[100_000] * (world - 2)]
        halves = [torch.ones(count) for count in counts]
        with pytest.raises(MismatchError):
            dist.reduce_scatter(torch.empty(halves[rank].numel()), halves)
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("host_of", [[0, 0, 0, 1, 1], [0, 0, 1, 1]])
def test_exchanges_of_many_ranks_gather_their_sizes_on_all_lanes(host_of):
    """As between so many ranks, or hosts, that sizes are long themselves."""

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline.backend import hierarchical_move

        hierarchical_move.is_short = lambda nbytes, hosts: nbytes <= 64
        join(rank, host_of)
        for count in (0, 5, 50_000):
            inputs = [torch.full((count + goal,), 10.0 * rank + goal) for goal in range(world)]
            outputs = [torch.zeros(count + rank) for _ in range(world)]
            dist.all_to_all(outputs, inputs)
            for source, output in enumerate(outputs):
                assert torch.equal(output, torch.full((count + rank,), 10.0 * source + rank))
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("placement", [*PLACEMENTS, *EVEN_PLACEMENTS])
def test_exchanges_and_reductions_that_differ_are_told_on_every_rank(placement):
    """On all ranks, whatever the others do."""
    host_of = (PLACEMENTS | EVEN_PLACEMENTS)[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import MismatchError

        join(rank, host_of)

        def parts(count):
            return [torch.ones(count) for _ in range(world)]

        def all_to_all(count):
            dist.all_to_all(parts(count), parts(count))

        def gather(count):
            dist.gather(torch.ones(count), parts(count) if rank == 0 else None, 0)

        def scatter(count):
            dist.scatter(torch.ones(count), parts(count) if rank == 1 else None, 1)

        def reduce(count):
            dist.reduce(torch.ones(count), world - 1)

        def reduce_scatter(count):
            dist.reduce_scatter(torch.ones(count), parts(count))

        def barrier(count):
            dist.barrier()

        calls = (all_to_all, gather, scatter, reduce, reduce_scatter, barrier)
        for odd in range(world):
            for count in (3, 150_000):  # carried, straight
                for usual, unusual in zip(calls, (*calls[1:], calls[0]), strict=True):
                    with pytest.raises(MismatchError) as raised:
                        (unusual if rank == odd else usual)(count)
                    assert sorted(raised.value.values) == list(range(world))
                    with pytest.raises(MismatchError):
                        (unusual if host_of[rank] == host_of[odd] else usual)(count)
        for count in (3, 150_000):
            for call in calls:
                call(count)
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


def test_ctrl_c_ends_a_wait_for_another_host():
    def check(rank, world):
        import os
        import signal
        import threading
        import time

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        join(rank, [0, 0, 1])
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:  # alone on its host, and late for ever
            store.wait(["interrupted"])
            with pytest.raises(GroupError):
                dist.all_reduce(torch.ones(3))
            return
        start = time.monotonic()
        if rank == 0:
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(3))
            timer.join()
            store.set("interrupted", "")
        else:
            with pytest.raises(GroupError):
                dist.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 10

    run_ranks(3, check, timeout=60)


@pytest.mark.parametrize("length", [3, 30_000])
def test_a_rank_that_ends_after_its_last_call_leaves_the_others_what_they_need(length):
    """It has their message, while its own waits until they are ready for it. Nobody destroys the
    group.
    """

    def check(rank, world, length):
        import time

        import torch
        import torch.distributed as dist

        from paceline.backend import lane

        lane._POSTED = lane._POSTED_TOGETHER = 1
        join(rank, [0, 1])
        if rank == 0:
            post_free = lane.Lane.post_free

            def later(self):
                time.sleep(0.3)
                post_free(self)

            lane.Lane.post_free = later
        for _ in range(2):
            data = torch.ones(length)
            dist.all_reduce(data)
            assert torch.equal(data, torch.full((length,), 2.0))

    run_ranks(2, check, length, timeout=60)


@pytest.mark.parametrize("host_of", [[0, 1], [0, 0, 1, 1]])
def test_messages_of_long_calls_are_waited_for_where_signals_do_not_arrive(host_of):
    """Ctrl-C ends a wait for a thread, not one for Gloo."""

    def check(rank, world):
        import threading

        import torch
        import torch.distributed as dist

        from paceline.backend.lane import Lane

        join(rank, host_of)
        dist.all_reduce(torch.ones(1_000_000))  # and measures the link
        waited = []
        await_next = Lane.await_next

        def noted(self, *args):
            waited.append(threading.current_thread())
            return await_next(self, *args)

        Lane.await_next = noted
        whole, parts = torch.ones(1_000_000 * world), [torch.ones(1_000_000) for _ in range(world)]
        dist.all_reduce(whole)
        dist.reduce(whole, 0)
        dist.reduce_scatter(parts[0], parts)
        dist.all_gather(parts, torch.ones(1_000_000))
        dist.broadcast(whole, 0)
        dist.all_to_all(parts, [torch.ones(1_000_000) for _ in range(world)])
        dist.barrier()
        assert waited
        assert threading.main_thread() not in waited
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=60)


def test_a_rank_that_fails_in_the_middle_of_a_call_ends_with_its_own_error(tmp_path):
    """And is not aborted by the interpreter, if the other rank ends at the same time."""
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        import torch
        import torch.distributed as dist
        import paceline
        from paceline.backend import create

        rank, meeting, length = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        create.host_identity = lambda: f"host{rank}"
        dist.init_process_group(
            "paceline", init_method=f"file://{meeting}", rank=rank, world_size=2
        )
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(torch.ones(length), async_op=True)
            time.sleep(0.2)
            raise ValueError("failed by itself")
        time.sleep(0.2)
        os._exit(3)
        """,
    )
    for attempt, length in enumerate((10, 10, 1_000_000, 1_000_000)):
        command = [sys.executable, script]
        arguments = [str(tmp_path / f"meeting{attempt}"), str(length)]
        first, second = [
            subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        printed = first.communicate(timeout=60)[1]
        assert (first.returncode, second.wait(60)) == (1, 3), printed
        assert "ValueError: failed by itself" in printed
        second.communicate()


def test_abort_ends_the_waits_of_all_hosts():
    def check(rank, world):
        import threading
        import time

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        join(rank, [0, 1, 1])
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        start = time.monotonic()
        if rank == 0:  # alone on its host, and late for ever
            store.wait(["aborted"])
        elif rank == 1:
            timer = threading.Timer(0.5, dist.group.WORLD.abort)
            timer.start()
        with pytest.raises(GroupError):
            dist.all_reduce(torch.ones(100_000))
        assert time.monotonic() - start < 10
        if rank == 1:
            timer.join()
            store.set("aborted", "")

    run_ranks(3, check, timeout=60)


def test_asynchronous_exchanges_and_reductions_keep_what_they_work_on():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        join(rank, PLACEMENTS["2x2"])
        for count in (5, 200_000):
            peer = (rank + 2) % world
            works, exchanged, sums = [], [], []
            for turn in range(6):
                outputs = [torch.zeros(count) for _ in range(world)]
                inputs = [torch.full((count,), float(10 * rank + turn)) for _ in range(world)]
                works.append(dist.all_to_all(outputs, inputs, async_op=True))
                exchanged.append(outputs)
                output = torch.zeros(count)
                works.append(dist.reduce_scatter(output, inputs, async_op=True))
                sums.append(output)
                reduced = inputs[0].clone()
                works.append(dist.reduce(reduced, turn % world, async_op=True))
                sums += [reduced] if rank == turn % world else []
                del inputs, reduced  # only the calls have them from here on
            # A program's own messages go their way meanwhile.
            sent, received = torch.full((count,), float(rank)), torch.zeros(count)
            messages = [dist.isend(sent, peer), dist.irecv(received, peer)]
            for work in (*messages, *reversed(works)):
                work.wait()
            assert torch.equal(received, torch.full((count,), float(peer)))
            for turn, outputs in enumerate(exchanged):
                for source, output in enumerate(outputs):
                    assert torch.equal(output, torch.full((count,), float(10 * source + turn)))
            expected = {float(sum(10 * r + turn for r in range(world))) for turn in range(6)}
            assert {value for each in sums for value in each.unique().tolist()} == expected
        dist.destroy_process_group()

    run_ranks(4, check, timeout=120)


def test_asynchronous_calls_run_in_order_and_are_waited_for_in_any():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        join(rank, [0, 0, 1, 1])
        data = [torch.full((n,), float(n)) for n in (1, 300_000, 7, 90_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in data]
        for work in reversed(works):
            work.wait()
        for tensor in data:
            assert torch.equal(tensor, torch.full_like(tensor, float(world * tensor.numel())))
        dist.destroy_process_group()

    run_ranks(4, check, timeout=60)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_a_wire_dtype_rounds_between_hosts_only_and_all_ranks_alike(placement):
    host_of = PLACEMENTS[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import GroupOptions

        join(rank, host_of)
        group = dist.new_group(pg_options=GroupOptions(wire_dtype=torch.bfloat16))
        parts = [
            torch.randn(300_001, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        found = parts[rank].clone()
        dist.all_reduce(found, group=group)
        hosts = max(host_of) + 1
        sums = []
        for host in range(hosts):
            members = [parts[r] for r in range(world) if host_of[r] == host]
            total = members[0].clone()
            for part in members[1:]:
                total += part
            sums.append(total.bfloat16())
        wanted = sums[0].float()
        for rounded in sums[1:]:
            wanted += rounded
        if hosts > 2:  # a host sends its sum of a piece on, rounded once more
            wanted = wanted.bfloat16().float()
        assert torch.equal(found, wanted)
        short = torch.full((7,), 1.0 + 2.0**-20)
        dist.all_reduce(short, group=group)
        assert torch.equal(short, torch.full((7,), world * (1.0 + 2.0**-20)))
        average = torch.full((300_001,), float(rank))
        dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
        assert torch.equal(average, torch.full_like(average, sum(range(world)) / world).bfloat16())
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=60)


@pytest.mark.parametrize("placement", [*PLACEMENTS, "interleaved"])
def test_long_and_short_data_is_moved_between_hosts(placement):
    host_of = [0, 1, 2, 0, 1, 0] if placement == "interleaved" else PLACEMENTS[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        def of(number, length):
            generator = torch.Generator().manual_seed(number)
            return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)

        join(rank, host_of)
        for root in range(world):
            # In one message, in all lanes or in chunks; between two hosts and between more, these
            # begin elsewhere.
            for length in (0, 1, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 4 << 20, (8 << 20) + 1):
                data = of(root, length) if rank == root else torch.zeros(length, dtype=torch.uint8)
                dist.broadcast(data, root)
                assert torch.equal(data, of(root, length)), (root, length)
        for lengths in ([5] * world, [0, 7, 9_000, 1_500_000, 3, 2][:world]):
            outputs = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
            dist.all_gather(outputs, of(rank, lengths[rank]))
            for source, output in enumerate(outputs):
                assert torch.equal(output, of(source, lengths[source])), (source, lengths)
        for length in (3, 1_200_000):
            whole = torch.zeros(world * length, dtype=torch.uint8)
            all_gather_single(whole, of(rank, length))
            assert torch.equal(whole, torch.cat([of(source, length) for source in range(world)]))
        for length in (1, 40_000):
            sent = [of(rank * world + goal, length + goal) for goal in range(world)]
            received = [torch.zeros(length + rank, dtype=torch.uint8) for _ in range(world)]
            dist.all_to_all(received, sent)
            for source, output in enumerate(received):
                assert torch.equal(output, of(source * world + rank, length + rank))
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_moves_that_differ_are_listed_by_every_rank_and_the_group_lives_on(placement):
    host_of = PLACEMENTS[placement]

    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import MismatchError

        join(rank, host_of)
        for odd in range(world):
            for usual, unusual in ((3, 100_000), (100_000, 3), (100_000, 100_001), (300_000, 3)):
                with pytest.raises(MismatchError) as raised:
                    dist.broadcast(torch.ones(unusual if rank == odd else usual), 0)
                assert sorted(raised.value.values) == list(range(world))
                gathered = torch.ones(world * unusual)
                with pytest.raises(MismatchError, match="all_gather"):
                    (
                        dist.all_reduce(torch.ones(usual))
                        if rank == odd
                        else all_gather_single(gathered, torch.ones(unusual))
                    )
                outputs = [torch.zeros(1) for _ in range(world)]
                with pytest.raises(MismatchError, match="all_to_all"):
                    dist.all_to_all(outputs, [torch.ones(2 if rank == odd else 1)] * world)
                data = torch.ones(usual)
                dist.all_reduce(data)
                assert torch.equal(data, torch.full((usual,), float(world)))
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


def test_ranks_that_give_different_wire_dtypes_are_told():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        from paceline import GroupOptions, MismatchError

        join(rank, [0, 1])
        options = GroupOptions(wire_dtype=torch.bfloat16) if rank else None
        with pytest.raises(MismatchError, match=r"rank 0 None, rank 1 torch\.bfloat16"):
            dist.new_group(pg_options=options)

    run_ranks(2, check, timeout=60)


def test_ddp_trains_the_same_replicas_on_all_hosts():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        join(rank, [0, 0, 1, 1])
        rounded = dist.new_group(pg_options=paceline.GroupOptions(wire_dtype=torch.bfloat16))
        ways = (
            ({}, 1e-6),
            ({"process_group": rounded}, 1e-2),
            ({"wire_dtype": torch.bfloat16}, 1e-2),
        )
        trained = []
        for arguments, tolerance in ways:
            torch.manual_seed(0)
            plain = torch.nn.Sequential(torch.nn.Linear(64, 1000), torch.nn.Linear(1000, 64))
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(64, 1000), torch.nn.Linear(1000, 64))
            model = paceline.DistributedDataParallel(net, **arguments)
            batch = torch.randn(8 * world, 64, generator=torch.Generator().manual_seed(1))
            for _ in range(3):
                for module, data in ((plain, batch), (model, batch[rank * 8 :][:8])):
                    module.zero_grad()
                    module(data).square().mean().backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter.sub_(parameter.grad, alpha=0.1)
            for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
                replicas = [torch.empty_like(mine) for _ in range(world)]
                dist.all_gather(replicas, mine.detach())
                assert all(torch.equal(replica, replicas[0]) for replica in replicas)
            trained.append(
                torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
            )
        exact, by_group, by_argument = trained
        assert torch.equal(by_group, by_argument)  # large gradients are rounded
        assert not torch.equal(exact, by_argument)
        dist.destroy_process_group()

    run_ranks(4, check, timeout=60)


def test_ddp_between_hosts_weighs_ranks_and_plans_smaller_buckets():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        join(rank, [0, 0, 1, 1])
        torch.manual_seed(0)
        net = torch.nn.Linear(64, 100)
        model = paceline.DistributedDataParallel(net)
        batches = torch.randn(world, 8, 64, generator=torch.Generator().manual_seed(1))
        for counts in ([2, 2, 2, 2], [1, 2, 3, 4], [0, 5, 3, 8]):
            model.zero_grad()
            whole = torch.cat([batch[:n] for batch, n in zip(batches, counts, strict=True)])
            wanted = torch.autograd.grad(net(whole).square().mean(), list(net.parameters()))
            part = batches[rank][: counts[rank]]
            with model.count(counts[rank]):
                loss = model(part).square()
            (loss.mean() if counts[rank] else loss.sum()).backward()
            for parameter, gradient in zip(net.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
        assert model.reducer.limits.bytes == (1 << 20, 8 << 20)
        chosen = paceline.DistributedDataParallel(net, bucket_cap_mb=3)
        assert chosen.reducer.limits.bytes == (3 << 20,)
        dist.destroy_process_group()

    run_ranks(4, check, timeout=60)


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 0, 1]])
def test_closing_signals_travel_with_the_last_bucket(host_of, wire_dtype):
    """A step makes one call for the opening signals and one for each bucket; what closing signals
    say arrives: failures, unused parameters.
    """

    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(300, 300)
                self.second = torch.nn.Linear(300, 300)
                self.third = torch.nn.Linear(300, 300)

            def forward(self, x, uses_third=True):
                x = self.second(self.first(x))
                return self.third(x) if uses_third else x

        join(rank, host_of)
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(
            Branches(),
            bucket_cap_mb=0.3,
            find_unused_parameters=True,
            check_finite=True,
            wire_dtype=wire_dtype and getattr(torch, wire_dtype),
        )
        engine = dist.group.WORLD.engine

        def step(*arguments):
            before = engine._sequence
            model.zero_grad()
            batch = torch.full((4, 300), 1.0 + rank)
            model(batch, *arguments).square().mean().backward()
            return engine._sequence - before

        for _ in range(2):
            step()  # the first plan is made anew after a step
        buckets = len(model.reducer.buckets)
        assert buckets > 2
        assert step() == 1 + buckets
        for odd in range(world):  # one more agrees on what was used, where something was not
            assert step(rank != odd) == 1 + buckets + 1
            assert model.module.third.weight.grad.abs().sum() > 0
        assert step(False) == 1 + buckets + 1
        assert model.module.third.weight.grad is None
        # The opening signals went before this one was known.
        latest = model.reducer.buckets[-1].parameters[0]
        for odd in range(world):
            spoil = latest.register_hook(lambda gradient: gradient * float("nan"))
            if rank != odd:
                spoil.remove()
            with pytest.raises(paceline.StepError, match="non-finite gradient of first"):
                step()
            spoil.remove()
        assert step() == 1 + buckets
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_signals_with_the_last_bucket_leave_the_average_as_it_is(dtype):
    """With weights that differ or are zero, and ranks that have run out of data."""

    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        join(rank, [0, 0, 1, 1])
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(kind)
        batches = torch.randn(world, 8, 64, generator=torch.Generator().manual_seed(1)).to(kind)

        def compare(model, counts):
            model.zero_grad()
            whole = torch.cat([batch[:n] for batch, n in zip(batches, counts, strict=True)])
            wanted = torch.autograd.grad(net(whole).square().mean(), list(net.parameters()))
            with model.count(counts[rank]):
                loss = model(batches[rank][: counts[rank]]).square()
            (loss.mean() if counts[rank] else loss.sum()).backward()
            for parameter, gradient in zip(net.parameters(), wanted, strict=True):
                error = (parameter.grad - gradient).abs().max()
                assert error <= 4 * torch.finfo(kind).eps * gradient.abs().max() + 1e-7

        model = paceline.DistributedDataParallel(net, bucket_cap_mb=0.02)
        for counts in ([2, 2, 2, 2], [1, 2, 3, 4], [0, 5, 3, 8], [2, 2, 2, 2]):
            compare(model, counts)
        assert model.reducer.buckets[-1].trailer is not None
        if rank in (1, 2):
            model.no_more_data()
        else:
            for _ in range(2):
                compare(model, [2, 0, 0, 2])
            model.no_more_data()
        dist.destroy_process_group()

    run_ranks(4, check, timeout=60)


def test_ddp_refuses_a_wire_dtype_that_would_mean_nothing():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        join(rank, [0, 1])
        rounds = {"wire_dtype": torch.bfloat16}
        net = torch.nn.Linear(4, 4)
        gloo = dist.new_group(backend="gloo")
        with pytest.raises(
            paceline.ConfigError, match="group of backend paceline, got one of gloo"
        ):
            paceline.DistributedDataParallel(net, process_group=gloo, **rounds)
        with pytest.raises(paceline.ConfigError, match="the model is on meta"):
            paceline.DistributedDataParallel(net.to("meta"), init_sync=False, **rounds)
        net = torch.nn.Linear(4, 4)
        with pytest.raises(paceline.MismatchError, match=r"wire_dtype"):
            paceline.DistributedDataParallel(net, **(rounds if rank else {}))
        model = paceline.DistributedDataParallel(net, **rounds)
        with pytest.raises(paceline.ConfigError, match="give one of the two"):
            model.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(paceline.ConfigError, match="got one of gloo"):
            model._update_process_group(gloo)
        dist.destroy_process_group()

    run_ranks(2, check, timeout=60)


def test_on_one_host_a_wire_dtype_changes_nothing():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        import paceline

        init_group("paceline")
        gradients = []
        for arguments in ({}, {"wire_dtype": torch.bfloat16}):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 1))
            model = paceline.DistributedDataParallel(net, **arguments)
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
            model(batch).square().mean().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        assert torch.equal(*gradients)
        dist.destroy_process_group()

    run_ranks(2, check, timeout=60)
