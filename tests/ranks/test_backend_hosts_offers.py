"""An exchange of numbers between hosts, and the sum of what all ranks offer with them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline import MismatchError
from paceline.backend.hierarchical_offer import Offer
from tests.harness import init_group, run_ranks

PLACEMENTS = [[0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2]]
LENGTH = 1000


def join(rank, host_of):
    from datetime import timedelta

    from paceline.backend import create

    create.host_identity = lambda: f"host{host_of[rank]}"
    init_group("paceline", timeout=timedelta(seconds=60))
    return dist.group.WORLD.engine


def offers(rank, world, host_of):
    engine = join(rank, host_of)
    everybody = [[rank / 3, -0.0, 1e300] for rank in range(world)]
    numbers = torch.randn(world, LENGTH, generator=torch.Generator().manual_seed(1))
    wanted = numbers[rank].clone()
    dist.group.WORLD.allreduce_scaled(wanted, 0.3).wait()

    def exchange(length, accepts, wait):
        """Whether the offer was taken; the rows are everybody's in any case."""
        mine = numbers[rank, :length].clone()
        seen = []

        def ask(rows):
            seen.append(rows)
            return accepts

        offer = Offer(mine, 0.3, ask) if length else None
        table, ticket = engine.exchange_numbers(everybody[rank], offer, wait=wait, timeout_ns=-1)
        assert (ticket is None) == wait
        if ticket is not None:
            ticket.wait()
        assert table.rows() == everybody
        assert all(rows == everybody for rows in seen)
        if offer is None:
            return False
        assert torch.equal(mine, wanted[:length] if offer.is_taken else numbers[rank, :length])
        return offer.is_taken

    for wait in (True, False):
        assert exchange(LENGTH, True, wait)
        assert not exchange(LENGTH, False, wait)
        assert not exchange(0, True, wait)
        for odd in range(world):
            for length in (0, LENGTH - 1):
                assert not exchange(length if rank == odd else LENGTH, True, wait)
            # Ranks of one host only, or of all but one.
            host = host_of[odd]
            assert not exchange(LENGTH if host_of[rank] == host else 0, True, wait)
            assert not exchange(0 if host_of[rank] == host else LENGTH, True, wait)
        assert exchange(LENGTH, True, wait)
    for odd in range(world):
        for other in (dist.barrier, lambda: dist.all_reduce(torch.zeros(3 * world).double())):
            with pytest.raises(MismatchError, match=f"rank {odd}: "):
                other() if rank == odd else exchange(LENGTH, True, True)
        assert exchange(LENGTH, True, True)
    dist.destroy_process_group()


@pytest.mark.parametrize("host_of", PLACEMENTS, ids=str)
def test_what_all_ranks_offer_is_summed_if_their_numbers_allow_it(host_of):
    run_ranks(len(host_of), offers, host_of, timeout=90)


def skipped_calls(rank, world):
    """A call that turns out not to be made is none on any rank, whether others have queued it or
    not.
    """
    from paceline.backend.engine import SUM

    engine = join(rank, [0, 0, 1])
    tensor = torch.ones(10)
    first = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    tickets = [
        engine.allreduce_when_known(tensor, lambda: None, timeout_ns=-1) for _ in range(rank)
    ]
    last = engine.allreduce_when_known(tensor, lambda: SUM, timeout_ns=-1)
    for ticket in (*tickets, last):
        ticket.wait()
    first.wait()
    assert torch.equal(tensor, torch.full((10,), float(world)))

    def fail():
        raise ValueError("the needle")

    with pytest.raises(ValueError, match="the needle"):
        engine.allreduce_when_known(tensor, fail, timeout_ns=-1).wait()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10,), float(world) ** 2))
    dist.destroy_process_group()


def test_a_call_that_is_not_made_after_all_is_none():
    run_ranks(3, skipped_calls)
