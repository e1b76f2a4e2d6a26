"""`paceline bench optim` on the smallest model."""

from __future__ import annotations

import json
import sys

import pytest

from tests.harness.launched import launched


@pytest.mark.slow
def test_every_way_of_training_is_measured(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "paceline", "bench", "optim", "--rounds", "1"]
    with launched([*command, "--models", "mlp-64", "--json", str(figures)]) as job:
        assert job.wait(200) == 0, job.stdout + job.stderr
        assert job.left_after(2.0) == []
    assert "paceline.optim, shared" in job.stdout
    assert "one pass" in job.stdout
    written = json.loads(figures.read_text())["figures"]
    measured = written["step_us"]["mlp-64"]
    assert set(measured) == {"AdamW", "SGD"}
    assert all(len(times) == 7 and min(times.values()) > 0 for times in measured.values())
    alone = written["one_process_us"]["mlp-64"]
    assert set(alone) == {"torch, default", "torch, fused", "paceline.optim"}
    assert min(alone.values()) > 0


def test_unknown_models_are_named():
    command = [sys.executable, "-m", "paceline", "bench", "optim", "--models", "gpt"]
    with launched(command) as job:
        assert job.wait() == 1
    assert "unknown model gpt; there are mlp-64" in job.stderr
