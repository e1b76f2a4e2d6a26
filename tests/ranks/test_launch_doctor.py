"""`paceline doctor`: healthy here, and unhealthy when something is broken."""

from __future__ import annotations

import json
import sys

import pytest

from paceline.cli.main import main
from tests.harness import init_group, run_ranks
from tests.harness.launched import launched

TOPICS = [
    "versions", "system", "cores", "threads", "memory", "shared memory", "native core", "backends",
    "accelerator", "environment", "optimizers", "smoke test",
]  # fmt: skip


def _doctor(*arguments, code=0, env=None):
    with launched([sys.executable, "-m", "paceline", "doctor", *arguments], env=env) as job:
        assert job.wait() == code, job.stdout + job.stderr
        assert job.left_after(2.0) == []
    return job.stdout


def test_as_json_with_the_smoke_test():
    found = json.loads(_doctor("--json"))
    assert found["healthy"]
    assert [finding["topic"] for finding in found["findings"]] == TOPICS
    smoke = found["findings"][-1]
    assert smoke["state"] == "ok"
    assert smoke["facts"]["values"] == [1.5, 1.5]


def test_as_text_for_people():
    lines = _doctor("--no-smoke-test").splitlines()
    assert lines[0] == "paceline doctor"
    assert lines[-1] == "healthy"
    assert any("torch 2." in line for line in lines)


def test_a_half_set_environment_is_not_healthy():
    text = _doctor("--no-smoke-test", code=1, env={"RANK": "3"})
    assert "only one of RANK and WORLD_SIZE is set" in text
    assert text.splitlines()[-1].startswith("NOT healthy")


@pytest.mark.slow
def test_a_backend_that_does_not_work_fails_the_smoke_test():
    found = json.loads(_doctor("--json", code=1, env={"PACELINE_BACKEND": "mpi"}))
    assert not found["healthy"]
    assert found["findings"][-1]["state"] == "failed"


# --- several hosts --------------------------------------------------------------------------------


def _measured(rank, host_of):
    """What the probe finds for ranks that believe to be on these hosts."""
    from paceline.diagnostics import network_probe

    network_probe.host_identity = lambda: f"host{host_of[rank]}"
    init_group("gloo")
    return network_probe.measure_network()


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 1, 1], [0, 1, 2], [0, 0]])
def test_the_hosts_of_a_job_are_measured_in_pairs(host_of):
    def check(rank, world):
        import itertools

        import torch.distributed as dist

        figures = _measured(rank, host_of)
        hosts = max(host_of) + 1
        assert [host.ranks for host in figures.hosts] == [host_of.count(h) for h in range(hosts)]
        pairs = sorted(pair.hosts for pair in figures.pairs)
        assert pairs == list(itertools.combinations(range(hosts), 2))
        assert all(0 < pair.link.latency_s < 10 for pair in figures.pairs)
        assert all(1e4 < pair.link.bytes_per_s < 1e12 for pair in figures.pairs)
        assert 1e-12 < figures.rounding_s_per_byte < 1e-3
        assert [host.inside is None for host in figures.hosts] == [
            host.ranks == 1 for host in figures.hosts
        ]
        everywhere = [None] * world
        dist.all_gather_object(everywhere, figures)
        assert everywhere == [figures] * world
        dist.destroy_process_group()

    run_ranks(len(host_of), check, timeout=120)


def test_hosts_are_measured_by_the_ranks_of_a_launcher():
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "-m", "paceline", "doctor"]
    with launched([*command, "--hosts", "--json"]) as job:
        assert job.wait() == 0, job.stdout + job.stderr
        assert job.left_after(2.0) == []
    found = json.loads("".join(line.removeprefix("[0] ") for line in job.stdout.splitlines()))
    assert [host["ranks"] for host in found["hosts"]] == [2]
    assert found["pairs"] == found["slow"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts"], "measures between ranks, and there is one"),
        (["--hosts", "--parameters", "17e6"], "give both"),
        (["--hosts", "--parameters", "17e6", "--step-ms", "0"], "above zero"),
        (["--hosts", "/tmp", "--parameters", "1", "--step-ms", "1"], "not both"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys):
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_how_a_model_scales_is_told_in_a_table(capsys):
    from paceline.cli import doctor_hosts
    from paceline.diagnostics.network_figures import HostFigures, NetworkFigures, PairFigures
    from paceline.diagnostics.scaling_model import Link, Workload

    hosts = tuple(HostFigures(f"node{n}", 2, Link(1e-5, 5e9), 1e-3) for n in range(2))
    figures = NetworkFigures(hosts, (PairFigures((0, 1), Link(1e-4, 118e6)),), 1e-5)
    doctor_hosts._print("paceline", figures, ["host 1 is slow"], Workload(68e6, 0.08))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paceline doctor --hosts: 4 ranks on 2 hosts, paceline"
    assert "   between  100 us, 118 MB/s for the slowest host; best 118 MB/s" in lines
    assert "!  host 1 is slow" in lines
    assert [line.split()[0] for line in lines[-10:]] == [str(2**n) for n in range(1, 11)]
    # 2 * 3/4 of the bytes on the link, once the bytes, half of them; the first bucket comes early.
    assert lines[-10].split()[1::3] == ["9%", "13%", "25%"]
    facts = doctor_hosts._facts("paceline", figures, [], Workload(68e6, 0.08))
    assert len(facts["scaling"]) == 30
    assert json.loads(json.dumps(facts))["hosts"][0]["name"] == "node0"


def test_one_rank_and_one_host_are_counted_in_the_singular(capsys):
    from paceline.cli import doctor_hosts
    from paceline.diagnostics.network_figures import HostFigures, NetworkFigures

    figures = NetworkFigures((HostFigures("node0", 1, None, 1e-3),), (), 1e-5)
    doctor_hosts._print("paceline", figures, [], None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "paceline doctor --hosts: 1 rank on 1 host, paceline",
        "   host 0   node0, 1 rank",
    ]


def test_a_recorded_run_says_how_large_its_gradients_and_steps_are(tmp_path):
    def check(rank, world):
        import torch

        import paceline
        from paceline.diagnostics import trace

        init_group("paceline")
        model = paceline.DistributedDataParallel(torch.nn.Linear(100, 100))
        with trace(tmp_path):
            for _ in range(5):
                model(torch.ones(4, 100)).sum().backward()
        torch.distributed.destroy_process_group()

    run_ranks(2, check)
    from paceline.cli.doctor_hosts import _recorded_workload

    workload = _recorded_workload(tmp_path)
    assert workload.gradient_bytes == 4 * 100 * 101
    assert 0 < workload.compute_s < 10
