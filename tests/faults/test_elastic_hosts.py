"""Elastic jobs over several hosts: hosts are killed, cut off, asked to leave and join, and the
bytes are those of a run in which nothing happened.

Hosts are network namespaces; a link is cut by dropping its packets, so that nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from paceline._linux import is_running, read_stat
from tests.harness.hosts import SimulatedHosts, simulated_hosts
from tests.harness.launched import Launched, launched, run_command, wait_for_files, write_script

pytestmark = pytest.mark.netns

# At steps 20 and 25 all wait until the job has as many ranks as a file says.
SCRIPT = """
    import hashlib, os, pathlib, signal, sys, time
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    import paceline
    from paceline.backend import abandonable_links
    from paceline.launch.elastic_job import ElasticJob, current_elastic_job
    from paceline.training.generations import Generations

    folder, checkpoint = pathlib.Path(sys.argv[1]), sys.argv[2:]
    job = current_elastic_job()
    me = "alone" if job is None else job.slot

    def before(owner, name, happens):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            happens()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def host_dies():
        os.kill(os.getppid(), signal.SIGKILL)  # the fork server: all of this host end with it

    def host_is_cut_off():
        (folder / f"connecting-{me}").write_text("yes")
        while not (folder / "cut").exists():
            time.sleep(0.01)

    fault = os.environ.get("FAULT")
    if fault == "dies connecting":
        before(abandonable_links, "Links", host_dies)
    elif fault == "dies in hand over":
        before(Generations, "_hand_over", host_dies)
    elif fault == "cut off connecting":
        before(abandonable_links, "Links", host_is_cut_off)
    elif fault == "not heard":
        ElasticJob.settled = ElasticJob.report_step = lambda *_: None
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(72, 6, generator=generator), torch.randint(0, 4, (72,), generator=generator)
    )
    paceline.init_process_group(quiet=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = paceline.Training(
        model,
        optimizer,
        paceline.DataLoader(data, batch_size=24, shuffle=True, seed=5),
        shards=6,
        seed=3,
        checkpoint=checkpoint[0] if checkpoint else None,
        save_every=5 if checkpoint else None,
    )
    (folder / f"began-{me}").write_text(str(training.step))
    while job is not None and not (folder / "go").exists():
        time.sleep(0.01)

    def wait_for_ranks():
        wanted = folder / f"wanted-{training.step}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            members = job.wait_beyond(job.latest() - 1, 1.0).members
            if wanted.exists() and len(members) == int(wanted.read_text() or 0):
                return
            time.sleep(0.01)

    def wait_until_first_host_is_done():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            members = job.wait_beyond(job.latest() - 1, 1.0).members
            if all(member.host != 0 for member in members):
                return
            time.sleep(0.01)

    for epoch in training.epochs(10):
        for batch in training.batches():
            for inputs, labels in batch.shards():
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                batch.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            (folder / f"step-{me}").write_text(f"{training.step} {os.getpid()}")
            if job is not None and training.step in (20, 25):
                wait_for_ranks()
    if not training.stopping:
        digest = hashlib.sha256(training.digest().encode()).hexdigest()
        if fault == "not heard":
            wait_until_first_host_is_done()
            time.sleep(0.5)  # for an order to come that this rank is not needed
        (folder / f"digest-{me}").write_text(digest)
"""
FIRST = "10.77.0.1:29400"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    script = write_script(folder, SCRIPT)
    subprocess.run([sys.executable, script, str(folder)], check=True, timeout=90)
    return (folder / "digest-alone").read_text()


class Job:
    """A job of as many ranks on each host, by default two."""

    def __init__(self, folder: pathlib.Path, hosts: SimulatedHosts, ranks: int = 2) -> None:
        self.folder, self.hosts, self._ranks = folder, hosts, ranks
        self._script = write_script(folder, SCRIPT)

    def start(
        self,
        host: int,
        *arguments: str,
        hosts: int = 2,
        fault: str = "",
        silence_s: int = 60,
        **streams: object,
    ) -> contextlib.AbstractContextManager[Launched]:
        """Its launcher on one host; the job begins with so many."""
        options = ("--elastic=1:4", f"--nnodes={hosts}", f"--rdzv-endpoint={FIRST}")
        command = run_command(
            self._script, str(self.folder), *arguments, ranks=self._ranks, options=options
        )
        command.remove("--preload=")  # torch, so that ranks start quickly
        inside = ["nsenter", "--target", str(self.hosts[host]), "--net", "--ipc", "--", *command]
        env = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "PACELINE_HOST_SILENCE_S": str(silence_s),
            "FAULT": fault,
        }
        return launched(inside, env=env, **streams)

    def begin(self, *slots: int) -> None:
        """Let the ranks in these slots train, once they are there."""
        wait_for_files(*(self.folder / f"began-{slot}" for slot in slots), timeout=120)
        (self.folder / "go").write_text("yes")

    def wait_for_step(self, slot: int, step: int) -> int:
        """Until a rank has come so far; returns its pid."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                found, pid = (self.folder / f"step-{slot}").read_text().split()
                if int(found) >= step:
                    return int(pid)
            time.sleep(0.005)
        raise AssertionError(f"rank {slot} has not come to step {step}")

    def want(self, ranks: int, steps: tuple[int, ...] = (20, 25)) -> None:
        """Let all go on at these steps when there are so many ranks."""
        for step in steps:
            (self.folder / f"wanted-{step}").write_text(str(ranks))

    def digests(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("digest-*")}


@pytest.fixture
def job(tmp_path: pathlib.Path):
    with simulated_hosts(2) as hosts:
        yield Job(tmp_path, hosts)


def end(host: Launched, code: int = 0) -> str:
    assert host.wait(timeout=120) == code, host.stderr
    assert host.left_after(10.0) == []
    return host.stderr


def kill(host: Launched) -> None:
    """All processes of a host at once."""
    for pid in host.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    host.process.wait()


def test_a_host_that_is_killed_costs_neither_a_sample_nor_a_bit(job, undisturbed):
    with job.start(0) as first, job.start(1) as other:
        job.begin(0, 1, 2, 3)
        os.kill(job.wait_for_step(3, 3), signal.SIGKILL)  # a rank alone, which is replaced
        job.wait_for_step(0, 8)
        kill(other)
        job.want(2)
        said = end(first)
    assert re.search(
        r"host 1 \(.*\) with ranks .* was lost \(connection lost\).*: 2 ranks go", said
    )
    assert job.digests() == {"digest-0": undisturbed, "digest-1": undisturbed}


def test_a_host_that_is_cut_off_ends_its_ranks_and_the_others_go_on(job, undisturbed):
    with job.start(0, silence_s=6) as first, job.start(1, silence_s=6) as other:
        job.begin(0, 1, 2, 3)
        job.wait_for_step(0, 6)
        job.hosts.cut(1)
        job.want(2)
        told = end(other, 1)
        said = end(first)
    assert re.search(r"host 1 .* was lost \(not heard for 6 s\) at step \d+: 2 ranks go on", said)
    assert f"the first host of the job ({FIRST}) was not heard for 6 s" in told
    assert job.digests() == {"digest-0": undisturbed, "digest-1": undisturbed}


def test_a_host_that_is_cut_off_while_a_group_forms_is_not_waited_for(job, undisturbed):
    with job.start(0, hosts=1, silence_s=6) as first:
        job.begin(0, 1)
        with job.start(1, hosts=1, fault="cut off connecting", silence_s=6) as other:
            job.want(4, (20,))
            wait_for_files(*(job.folder / f"connecting-{slot}" for slot in (2, 3)), timeout=120)
            job.hosts.cut(1)
            (job.folder / "cut").touch()
            job.want(2, (25,))
            told = end(other, 1)
        said = end(first)
    assert re.search(r"host 1 .* was lost \(not heard for 6 s\) at step \d+: 2 ranks go on", said)
    assert f"the first host of the job ({FIRST}) was not heard for 6 s" in told
    assert job.digests() == {"digest-0": undisturbed, "digest-1": undisturbed}


def test_ranks_whose_fork_server_is_stopped_end_by_themselves(job, undisturbed):
    with job.start(0, silence_s=6) as first, job.start(1, silence_s=6) as other:
        job.begin(0, 1, 2, 3)
        ranks = [job.wait_for_step(slot, 6) for slot in (2, 3)]
        server = read_stat(ranks[0]).parent
        os.kill(server, signal.SIGSTOP)
        job.want(2)
        said = end(first)
        deadline = time.monotonic() + 60
        while any(is_running(pid) for pid in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server, signal.SIGCONT)
        told = end(other, 1)
    assert re.search(r"host 1 .* was lost \(not heard for 6 s\) at step \d+: 2 ranks go on", said)
    for slot in (2, 3):
        assert f"rank in slot {slot} ends, because the job may have gone on without this" in told
    assert f"kill -CONT {server}" in told
    assert job.digests() == {"digest-0": undisturbed, "digest-1": undisturbed}


def test_hosts_that_are_cut_from_each_other_alone_connect_again(tmp_path, undisturbed):
    """The first host hears both, and nobody is lost: only the kernel of each can notice."""
    printed = tmp_path / "printed"
    with simulated_hosts(3) as hosts, printed.open("w") as file:
        job = Job(tmp_path, hosts, ranks=1)
        with (
            job.start(0, hosts=3, stderr=file) as first,
            job.start(1, hosts=3) as second,
            job.start(2, hosts=3) as third,
        ):
            job.begin(0, 1, 2)
            job.wait_for_step(0, 6)
            hosts.cut_between(1, 2)
            job.want(3)
            deadline = time.monotonic() + 120
            while "connections between hosts were lost" not in printed.read_text():
                assert time.monotonic() < deadline, printed.read_text()
                time.sleep(0.05)
            hosts.mend_between(1, 2)
            for host in (first, second, third):
                end(host)
    assert job.digests() == {f"digest-{slot}": undisturbed for slot in range(3)}


def test_a_host_joins_a_running_job_and_leaves_it(job, undisturbed):
    with job.start(0, hosts=1) as first:
        job.begin(0, 1)
        job.wait_for_step(0, 2)
        with job.start(1, hosts=1) as other:
            job.want(4, (20,))
            job.wait_for_step(2, 21)
            job.want(2, (25,))
            other.process.send_signal(signal.SIGTERM)
            left = end(other)
            assert "stopped by SIGTERM: all ranks exited with status 0" in left
            assert "steps on 2 ranks of this host\n" in left
        said = end(first)
    assert re.search(r"host 1 \(.*\) joins the job", said)
    assert re.search(r"host 1 \(.*\) leaves the job", said)
    # The card of the first host is of all ranks.
    assert re.search(r"finished after \d+ steps on 4 ranks\n", said)
    assert "; 0 ranks lost, 2 joined\n" in said
    assert set(job.digests().values()) == {undisturbed}


def test_ranks_that_are_heard_late_are_not_taken_for_ones_that_came_late(job, undisturbed):
    """When the first ranks end, nobody has heard from those that have joined that they train."""
    with job.start(0, hosts=1) as first:
        job.begin(0, 1)
        with job.start(1, hosts=1, fault="not heard") as other:
            job.want(4)
            end(first)
            end(other)
    assert job.digests() == {f"digest-{slot}": undisturbed for slot in range(4)}


def test_a_host_dies_while_it_connects_and_another_while_it_is_given_the_state(job, undisturbed):
    with job.start(0, hosts=1) as first:
        job.begin(0, 1)
        for step, place in ((20, "connecting"), (25, "in hand over")):
            with job.start(1, hosts=1, fault=f"dies {place}") as other:
                job.want(4, (step,))
                assert other.wait(timeout=120) == 137
        said = end(first)
    assert said.count("was lost (connection lost)") == 2
    assert job.digests() == {"digest-0": undisturbed, "digest-1": undisturbed}


def test_when_the_first_host_dies_the_job_ends_and_resumes_from_its_checkpoint(job, undisturbed):
    checkpoint = str(job.folder / "checkpoint")
    with job.start(0, checkpoint) as first, job.start(1, checkpoint) as other:
        job.begin(0, 1, 2, 3)
        job.wait_for_step(0, 12)
        kill(first)
        told = end(other, 1)
    assert f"the first host of the job ({FIRST}), which decides about its ranks" in told
    assert "Start it again on all hosts: it goes on from its last checkpoint" in told
    job.want(4)
    with job.start(0, checkpoint) as first, job.start(1, checkpoint) as other:
        end(first)
        end(other)
    # The file of step 10 is written in the background, and may not have been finished.
    assert int((job.folder / "began-2").read_text()) in {5, 10}
    assert job.digests() == {f"digest-{slot}": undisturbed for slot in range(4)}
