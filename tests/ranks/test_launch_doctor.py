"""`paceline doctor`: healthy here, and unhealthy when something is broken."""

from __future__ import annotations

import json
import sys

import pytest

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
