"""Ranks that end while others wait for them in `paceline.save`."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import paceline
from paceline.errors import PeerLost
from tests.harness import init_group, run_ranks


def saved_by_one(rank, world, folder, how):
    init_group("paceline")
    if rank == 1:
        how()
    words = r"rank 0 called paceline\.save\(.*rank 1 \(pid \d+\) ended \(.*\) and did not call it"
    with pytest.raises(PeerLost, match=words) as caught:
        paceline.save(f"{folder}/state.pt", model=torch.nn.Linear(1, 1))
    assert "is_main()" in str(caught.value)
    assert caught.value.rank == 1


def is_through():
    os._exit(0)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", [is_through, is_killed])
def test_a_rank_that_ended_without_the_call_is_named_at_once(tmp_path, how):
    waiting, ended = run_ranks(2, saved_by_one, str(tmp_path), how, check=False)
    assert waiting.error is None, waiting.error
    assert ended.exitcode == (0 if how is is_through else -signal.SIGKILL)
    assert not list(tmp_path.iterdir())
