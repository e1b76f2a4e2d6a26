"""The bench command: dispatching, and the sampler's benchmark on a small dataset."""

from __future__ import annotations

import types

import pytest

from paceline.cli import bench_command, main


@pytest.mark.slow
def test_sampler_prints_ours_beside_torch_s(capfd):
    assert main(["bench", "sampler", "--samples", "20000", "--rounds", "1"]) == 0
    printed = capfd.readouterr().out
    for words in (
        "torch DistributedSampler",
        "paceline GlobalBatchSampler",
        "20,000 samples",
        "times sooner",
    ):
        assert words in printed


def test_all_runs_each_with_its_defaults_and_reports_failures(monkeypatch, capsys):
    ran = []

    def module(name, code):
        def run(options):
            ran.append((name, options.size))
            return code

        return types.SimpleNamespace(
            add_arguments=lambda p: p.add_argument("--size", type=int, default=7), run=run
        )

    modules = {"good": module("good", 0), "bad": module("bad", 3)}
    monkeypatch.setattr(bench_command, "_BENCHMARKS", {name: (name, name) for name in modules})
    monkeypatch.setattr(bench_command, "_module", modules.__getitem__)
    assert main(["bench", "all"]) == 1
    assert ran == [("good", 7), ("bad", 7)]
    assert "failed: bad" in capsys.readouterr().out
    assert main(["bench", "good", "--size", "3"]) == 0
    assert ran[-1] == ("good", 3)
