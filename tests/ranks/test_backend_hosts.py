"""Groups that span several hosts: real network namespaces, shared memory inside each, Gloo between
them.
"""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.harness import init_group, run_ranks
from tests.harness.hosts import enter, simulated_hosts
from tests.ranks.test_backend_collectives import KINDS, cases, perform, reference

pytestmark = pytest.mark.netns

PLACEMENTS = {
    "2x2": [0, 0, 1, 1],
    "2x2 interleaved": [0, 1, 0, 1],
    "3 hosts, uneven": [0, 1, 1, 2, 0, 1],
}


def some_cases(world, of_each_kind, seed):
    """Every collective a few times, the same cases in every run: these runs are slow."""
    drawn = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=of_each_kind, phases=[hypothesis.Phase.generate], database=None
    )
    @hypothesis.given(st.tuples(*(cases(world, [kind]) for kind in KINDS)))
    def draw(one_of_each):
        drawn.extend(one_of_each)

    draw()
    return drawn


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_every_collective_across_hosts(placement):
    host_of = PLACEMENTS[placement]

    def check(rank, world, hosts, batch):
        import torch
        import torch.distributed as dist

        enter(hosts[host_of[rank]])
        init_group("paceline")
        assert type(dist.group.WORLD.engine).__name__ == "MultiHostEngine"
        for case in batch:
            found = perform(case, dist.group.WORLD, rank, world)
            wanted = reference(case, rank, world)
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b), (
                    f"{case}\nfound {a.flatten()[:8]}\nwanted {b.flatten()[:8]}"
                )
        shares = [torch.zeros(r + 1) for r in range(world)]
        dist.all_gather(shares, torch.full((rank + 1,), float(rank)))
        assert all(
            torch.equal(share, torch.full((r + 1,), float(r))) for r, share in enumerate(shares)
        )
        objects = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(world)]
        average = torch.full((5,), float(rank))
        dist.all_reduce(average, dist.ReduceOp.AVG)
        assert torch.equal(average, torch.full((5,), sum(range(world)) / world))
        if rank == 0:
            token = torch.zeros(1)
            assert sorted(dist.recv(token) for _ in range(world - 1)) == list(range(1, world))
        else:
            dist.send(torch.ones(1), 0)
        large = torch.ones(5_000_000)  # more than one chunk
        dist.all_reduce(large)
        assert large[0].item() == large[-1].item() == world
        dist.barrier()
        dist.destroy_process_group()

    with simulated_hosts(max(host_of) + 1) as hosts:
        run_ranks(len(host_of), check, hosts, some_cases(len(host_of), 4, placement), timeout=90)


def test_sums_are_the_same_bits_on_every_rank_and_in_every_run():
    host_of = PLACEMENTS["3 hosts, uneven"]

    def digest(rank, world, hosts):
        import hashlib

        import torch
        import torch.distributed as dist

        enter(hosts[host_of[rank]])
        init_group("paceline")
        torch.manual_seed(rank)
        text = hashlib.sha256()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for n in (1, 1001, 70_000):
                data = torch.randn(n).to(dtype)
                dist.all_reduce(data)
                text.update(data.view(torch.uint8).numpy().tobytes())
        dist.destroy_process_group()
        return text.hexdigest()

    with simulated_hosts(3) as hosts:
        found = {*run_ranks(6, digest, hosts), *run_ranks(6, digest, hosts)}
    assert len(found) == 1


def test_a_mismatch_is_raised_on_all_hosts():
    def check(rank, world, hosts):
        import pytest
        import torch
        import torch.distributed as dist

        from paceline import MismatchError

        enter(hosts[rank // 2])
        init_group("paceline")
        with pytest.raises(
            MismatchError,
            match=r"(?s)rank 0: all_reduce of 10 float32.*rank 3: all_reduce of 11 float32",
        ):
            dist.all_reduce(torch.ones(11 if rank == 3 else 10))
        data = torch.ones(10)
        dist.all_reduce(data)
        assert data[0].item() == world
        dist.destroy_process_group()

    with simulated_hosts(2) as hosts:
        run_ranks(4, check, hosts)


def test_a_rank_lost_on_another_host_is_noticed():
    def check(rank, world, hosts):
        import os
        import signal
        import time

        import pytest
        import torch
        import torch.distributed as dist

        from paceline import GroupError

        enter(hosts[rank // 2])
        init_group("paceline")
        dist.all_reduce(torch.ones(3))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(GroupError):
            dist.all_reduce(torch.ones(3))
        return time.monotonic() - start

    with simulated_hosts(2) as hosts:
        outcomes = run_ranks(4, check, hosts, check=False, timeout=60)
    assert [type(o.error).__name__ for o in outcomes] == [
        "NoneType",
        "NoneType",
        "NoneType",
        "RankDied",
    ]
    assert all(o.value < 5 for o in outcomes[:3]), [o.value for o in outcomes]
