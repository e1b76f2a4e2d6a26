"""Pages of real ranks: seen from outside with `paceline ps`, with and without a launcher, for
groups of any kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.diagnostics.page_reader import find_pages, read_page
from paceline.diagnostics.stragglers import attribute_wait, find_straggler
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase
from tests.harness import free_rendezvous, run_ranks
from tests.harness.launched import launched, run_command, wait_for_files, write_script


def join(backend):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    paceline.init_process_group(backend, free_rendezvous(), rank=rank, world_size=world)


def ps(*options):
    command = [sys.executable, "-m", "paceline", "ps", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.slow
def test_ps_shows_a_running_job_from_outside(tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import pathlib, time, torch, torch.distributed as dist, paceline
        paceline.init_process_group()
        if paceline.rank() == 1:
            pathlib.Path({str(tmp_path)!r}, "late").write_text("1")
            time.sleep(100)
        dist.all_reduce(torch.ones(3))
        """,
    )
    script = script.rename(
        tmp_path / f"watched_{os.getpid()}.py"
    )  # other jobs of this user may be running
    with launched(run_command(script, options=("--stall-after", "0", "--grace", "1"))) as job:
        wait_for_files(tmp_path / "late")
        deadline = time.monotonic() + 30
        while not (
            rows := [json.loads(line) for line in ps("--json").splitlines() if script.name in line]
        ) or not any(row["call"] for row in rows):
            assert time.monotonic() < deadline, rows
        first, second = sorted(rows, key=lambda row: row["rank"])
        assert first["call"].startswith("all_reduce (call 1 of the default group)")
        assert (second["state"], second["call"], second["world"]) == ("sleeping", None, 2)
        text = ps(second["job"], "--stacks")
        assert script.name in text
        assert "time.sleep(100)" in text
        job.process.terminate()
        job.wait(30)
        # Nothing was reported: the watch was turned off.
        assert "diagnosis" not in job.stderr


@pytest.mark.slow
def test_ps_keeps_showing_a_job_until_it_is_interrupted(tmp_path):
    """On a terminal of its own, as a user would watch it."""
    script = write_script(
        tmp_path,
        f"""
        import pathlib, time, paceline
        paceline.init_process_group()
        pathlib.Path({str(tmp_path)!r}, f"up-{{paceline.rank()}}").write_text("1")
        time.sleep(600)
        """,
    )
    ours, theirs = pty.openpty()
    with launched(run_command(script, options=("--grace", "1"))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        rows = [json.loads(line) for line in ps("--json").splitlines()]
        name = next(row["job"] for row in rows if row["pid"] in job.processes())
        command = [sys.executable, "-m", "paceline", "ps", name, "--watch"]
        with launched(
            command, {"COLUMNS": "150", "LINES": "40"}, stdin=theirs, stdout=theirs, stderr=theirs
        ) as watch:
            os.close(theirs)
            shown, deadline = "", time.monotonic() + 60
            while shown.count("2 ranks") < 2:  # drawn, and drawn again
                assert time.monotonic() < deadline, shown
                shown += os.read(ours, 4096).decode()
            watch.process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the terminal ends with its last user
                while part := os.read(ours, 4096):
                    shown += part.decode()
            assert watch.process.wait(60) == 0
        os.close(ours)
        job.process.terminate()
        job.wait(60)
    assert "train.py  job" in shown
    assert "sleeping" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_the_progress_line_and_the_report_name_a_straggler_and_its_phase(tmp_path):
    script = write_script(
        tmp_path,
        """
        import time, torch, paceline
        from paceline.diagnostics import Progress
        paceline.init_process_group()
        layer = torch.nn.Linear(4, 2)
        if paceline.rank() == 1:
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        model = paceline.DistributedDataParallel(layer)
        data = torch.utils.data.TensorDataset(torch.ones(320, 4))
        with Progress(80, enabled=paceline.is_main()) as progress:
            for x, in paceline.DataLoader(data, batch_size=4):
                loss = model(x).square().mean()
                loss.backward()
                progress.step(loss.item(), 4, model.last_sync_seconds)
        """,
    )
    with launched(run_command(script, options=("--trace", str(tmp_path / "trace")))) as job:
        assert job.wait() == 0, job.stderr
    last = job.stdout.strip().splitlines()[-1]
    assert last.startswith("[0] step 80/80  loss ")
    assert "rank 1 is slower in forward: the others wait " in last
    summary = subprocess.run(
        [sys.executable, "-m", "paceline", "report", "--words", str(tmp_path / "trace")],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert "Rank 1 is the one the others wait for" in summary
    assert "comes from forward on that rank" in summary


def _calls(rank, world, backend):
    join(backend)
    dist.all_reduce(torch.ones(4))
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    half = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=half)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.ones(1)], torch.ones(2).to_sparse())
    page = read_page(os.getpid())
    before = vars(dist.ProcessGroup)["allreduce"]
    paceline.destroy_process_group()
    after = vars(dist.ProcessGroup)["allreduce"]
    numbers = [sync_point.number for sync_point in page.sync_points]
    return page.calls, numbers, page.call, before is not after, read_page(os.getpid()) is None


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_calls_on_groups_of_any_kind_are_recorded_and_the_classes_restored(backend):
    for rank, (calls, numbers, call, restored, closed) in enumerate(run_ranks(2, _calls, backend)):
        assert calls >= (4 if rank == 0 else 3)
        assert numbers[:2] == [1, 2]
        assert call is None  # also after a call that raised
        assert restored
        assert closed


class _Slow(torch.nn.Module):
    """Sleeps in one phase."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.body, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        if self.where == "forward":
            time.sleep(0.05)
        hidden = self.body(x)
        if self.where == "backward":
            hidden.register_hook(lambda gradient: time.sleep(0.05))
        return self.head(hidden)


class _SlowData(torch.utils.data.Dataset):
    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.slow:
            time.sleep(0.05)
        return torch.ones(16)


def _train_with_one_slow_rank(rank, world, backend, where):
    join(backend)
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(_Slow(where if rank == 1 else ""))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = paceline.DataLoader(_SlowData(where == "loader" and rank == 1), batch_size=2)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    dist.barrier()
    pages = find_pages(recorder.job)
    dist.barrier()
    paceline.destroy_process_group()
    # The first steps include what happens only once.
    records = {page.rank: page.sync_points[-30:] for page in pages}
    return records, find_straggler(attribute_wait(records), len(pages))


def _share_of_a_usual_step(records, phase):
    """Of the waiting at each sync point where anybody waited notably, the part attributed to rank
    1's phase: the median.
    """
    common = set.intersection(
        *({(point.group, point.number) for point in points} for points in records.values())
    )
    shares = []
    for key in common:
        waits = attribute_wait(
            {
                rank: [point for point in points if (point.group, point.number) == key]
                for rank, points in records.items()
            }
        )
        if waits.total_ns > 25e6:
            shares.append(waits.share(1, phase))
    assert len(shares) >= 10
    return statistics.median(shares)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("where", ["loader", "forward", "backward"])
def test_waiting_is_attributed_to_the_slow_rank_and_phase(backend, where):
    for records, straggler in run_ranks(2, _train_with_one_slow_rank, backend, where):
        # Most steps: other processes of the machine may hold anybody up in some.
        assert _share_of_a_usual_step(records, Phase[where.upper()]) >= 0.9
        assert (straggler.rank, straggler.phase) == (1, Phase[where.upper()])


@pytest.mark.slow
def test_a_traced_run_ends_with_a_page(tmp_path):
    script = write_script(
        tmp_path,
        """
        import torch, paceline
        from paceline.diagnostics import Progress
        paceline.init_process_group()
        model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Progress(5, enabled=False) as progress:
            data = torch.utils.data.TensorDataset(torch.ones(20, 4))
            for x, in paceline.DataLoader(data, batch_size=4):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                progress.step(loss.item(), 4, 0.0)
        """,
    )
    with launched(run_command(script, options=("--trace", str(tmp_path / "trace")))) as job:
        assert job.wait() == 0, job.stderr
    page = tmp_path / "trace" / "timeline.html"
    assert f"  timeline   {page}\n" in job.stderr or f"  timeline  {page}\n" in job.stderr
    events = json.loads(page.with_suffix(".json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = [event["name"] for event in events if event["pid"] == rank and event["ph"] == "X"]
        assert {"loader", "forward", "backward", "synchronise", "optimizer", "bucket 0"} <= set(
            names
        )
        assert names.count("optimizer") == 5
    assert sum(event["name"] == "loss" for event in events) == 10  # each rank reports its own
