"""Checkpoints of several ranks: one writes, all agree, no rank waits forever; a kill leaves the old
or the new file.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import resource
import signal
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.checkpoint import archive
from paceline.errors import CollectiveTimeout, MismatchError, PacelineError
from tests.harness import init_group, run_ranks
from tests.harness.launched import wait_for_files

BACKENDS = pytest.mark.parametrize("backend", ["paceline", "gloo"])


def _train(model, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


@BACKENDS
def test_saved_by_two_ranks_loaded_by_three_and_by_one(tmp_path, backend):
    path = str(tmp_path / "last.pt")

    def wrapped():
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def save(rank, world):
        init_group(backend)
        torch.manual_seed(0)
        model, optimizer = wrapped()
        _train(model, optimizer, rank, 3)
        paceline.save(path, model=model, optimizer=optimizer, step=3)
        # On every rank, as soon as the call returns.
        exists = os.path.exists(path)
        paceline.destroy_process_group()
        return exists, model.module.weight.detach()

    def load(rank, world):
        init_group(backend)
        torch.manual_seed(rank + 1)
        model, optimizer = wrapped()
        rest = paceline.load(path, model=model, optimizer=optimizer)
        paceline.destroy_process_group()
        return (
            rest["step"],
            model.module.weight.detach(),
            optimizer.state_dict()["state"][0]["momentum_buffer"],
        )

    (exists_on_0, weight), (exists_on_1, _) = run_ranks(2, save)
    assert exists_on_0
    assert exists_on_1
    for step, loaded, _ in run_ranks(3, load):
        assert step == 3
        assert torch.equal(loaded, weight)
    single = nn.Linear(3, 2)
    assert paceline.load(path, model=single)["step"] == 3
    assert torch.equal(single.weight, weight)


def test_a_call_on_rank_0_only_is_an_error_not_a_deadlock(tmp_path):
    def save(rank, world):
        init_group("gloo")
        dist.barrier()  # nobody leaves while Gloo still connects others
        missing = None
        if rank == 0:
            with pytest.raises(
                CollectiveTimeout, match=r"ranks \[1, 2\] did not call it.*if rank == 0"
            ) as caught:
                paceline.save(tmp_path / "x.pt", step=1, timeout=datetime.timedelta(seconds=1))
            missing = caught.value.missing
        paceline.destroy_process_group()
        return missing

    assert run_ranks(3, save)[0] == (1, 2)
    assert os.listdir(tmp_path) == []


def test_ranks_that_save_different_things_raise_a_mismatch(tmp_path):
    def save(rank, world):
        init_group("gloo")
        with pytest.raises(MismatchError, match=r"rank 0: .*a\.pt.*\n.*rank 1: .*b\.pt"):
            paceline.save(tmp_path / ("a.pt" if rank == 0 else "b.pt"), step=1)
        paceline.destroy_process_group()

    run_ranks(2, save)
    assert os.listdir(tmp_path) == []


def test_an_error_of_rank_0_is_raised_on_all_ranks(tmp_path):
    def save(rank, world):
        init_group("gloo")
        with pytest.raises((PacelineError, OSError), match="Not a directory"):
            paceline.save("/dev/null/x.pt", step=1)
        paceline.destroy_process_group()

    run_ranks(2, save)


def test_an_error_of_one_rank_in_load_changes_nothing_on_any_rank(tmp_path):
    path = tmp_path / "x.pt"
    paceline.save(path, model=nn.Linear(2, 2), sampler={"position": 3})

    class Sampler:
        def __init__(self, fails):
            self.position, self.fails = 0, fails

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            if self.fails and state["position"]:
                raise KeyError("no such position")
            self.position = state["position"]

    def load(rank, world):
        init_group("gloo")
        model, sampler = nn.Linear(2, 2), Sampler(fails=rank == 1)
        before = model.weight.detach().clone()
        expected = (
            (KeyError, "no such position") if rank == 1 else (PacelineError, r"rank 1: KeyError")
        )
        with pytest.raises(expected[0], match=expected[1]):
            paceline.load(path, model=model, sampler=sampler)
        assert torch.equal(model.weight, before)
        assert sampler.position == 0
        # The group is as good as before.
        paceline.load(path, model=model)
        assert not torch.equal(model.weight, before)
        paceline.destroy_process_group()

    run_ranks(2, load)


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all_ranks(tmp_path):
    paceline.save(tmp_path / "0" / "x.pt", step=1)

    def load(rank, world):
        init_group("gloo")
        # As on hosts with file systems of their own.
        os.chdir(tmp_path / "0" if rank == 0 else tmp_path)
        with pytest.raises(PacelineError, match=r"there is no checkpoint x\.pt"):
            paceline.load("x.pt")
        paceline.destroy_process_group()

    run_ranks(2, load)


def test_what_a_rank_saved_alone_before_the_group_does_not_matter(tmp_path):
    def save(rank, world):
        if rank == 0:
            paceline.save(tmp_path / "start.pt", step=0)
        init_group("gloo")
        paceline.save(tmp_path / "x.pt", step=1, timeout=datetime.timedelta(seconds=20))
        paceline.destroy_process_group()

    run_ranks(2, save)


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_kill_while_writing_leaves_nothing_for_good(tmp_path, unnamed):
    path = tmp_path / "last.pt"
    paceline.save(path, step=1)

    def killed_in_save(rank, world):
        if not unnamed:
            del os.O_TMPFILE
        archive.zlib = types.SimpleNamespace(crc32=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        paceline.save(path, step=2)

    run_ranks(1, killed_in_save, check=False)
    assert len(os.listdir(tmp_path)) == (1 if unnamed else 2)
    assert paceline.load(path) == {"step": 1}
    paceline.save(tmp_path / "other.pt", step=3)
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "other.pt"]


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_full_disk_is_named_and_the_previous_checkpoint_stays(tmp_path, unnamed):
    path = tmp_path / "last.pt"
    paceline.save(path, step=1)

    def save(rank, world):
        if not unnamed:
            del os.O_TMPFILE
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(OSError, match=r"File too large: the checkpoint was not written.*last"):
            paceline.save(path, weights=torch.zeros(1 << 20))

    run_ranks(1, save)
    assert paceline.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Twelve kills, spread over the time one save takes."""

    def write(rank, world):
        for step in itertools.count(1):
            weights = {"w": torch.full((300_000,), float(step))}
            paceline.save(tmp_path / "last.pt", model=weights, step=step)
            (tmp_path / "saved").write_text("saved")

    def kill(moment, pids):
        wait_for_files(tmp_path / "saved")
        time.sleep(moment)
        os.kill(pids[0], signal.SIGKILL)

    last = 0
    for attempt in range(12):
        (tmp_path / "saved").unlink(missing_ok=True)
        run_ranks(1, write, check=False, on_start=functools.partial(kill, 0.003 * attempt))
        state = paceline.load(tmp_path / "last.pt")
        assert torch.equal(state["model"]["w"], torch.full((300_000,), float(state["step"])))
        last = max(last, state["step"])
    assert last > 1
