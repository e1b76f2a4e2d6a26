"""The bench command: dispatching, and the sampler's benchmark on a small dataset."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch

import paceline
from paceline.cli import bench_command, main
from paceline.errors import PacelineError


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


class FakeBenchmark:
    """A module of `paceline.bench` that measures nothing."""

    def __init__(self, error=None):
        self.ran, self.error = [], error

    @staticmethod
    def add_arguments(parser):
        parser.add_argument("--size", type=int, default=7)
        parser.add_argument("--ranks", type=int, nargs="+", default=[2])
        parser.add_argument("--only-ours", action="store_true")

    def run(self, options):
        if self.error is not None:
            raise self.error
        self.ran.append(options.size)
        return {"seconds": 0.5 * options.size}


@pytest.fixture
def benchmarks(monkeypatch):
    modules = {"bad": FakeBenchmark(PacelineError("rank 1 exited")), "good": FakeBenchmark()}
    monkeypatch.setattr(bench_command, "_BENCHMARKS", {name: (name, name) for name in modules})
    monkeypatch.setattr(bench_command, "_module", modules.__getitem__)
    return modules


def test_all_runs_each_with_its_defaults_and_reports_failures(benchmarks, capsys):
    assert main(["bench", "all"]) == 1
    assert benchmarks["good"].ran == [7]
    printed = capsys.readouterr()
    assert "failed: bad" in printed.out
    assert "rank 1 exited" in printed.err
    assert main(["bench", "good", "--size", "3"]) == 0
    assert benchmarks["good"].ran[-1] == 3


def test_figures_are_written_with_the_command_and_the_machine(benchmarks, tmp_path):
    file = tmp_path / "figures.json"
    options = ["--size", "3", "--ranks", "2", "4", "--only-ours"]
    assert main(["bench", "good", *options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["benchmark"] == "good"
    assert written["command"] == "paceline bench good --size 3 --ranks 2 4 --only-ours"
    assert written["figures"] == {"seconds": 1.5}
    assert written["machine"]["cpu"]
    assert written["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert written["machine"]["torch"] == torch.__version__
    assert written["machine"]["paceline"] == paceline.__version__


def test_options_that_are_the_default_are_not_in_the_command(benchmarks, tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "good", "--size", "7", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["command"] == "paceline bench good"


def test_all_writes_a_file_for_each_that_succeeded(benchmarks, tmp_path):
    assert main(["bench", "all", "--json", str(tmp_path / "results")]) == 1
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["good.json"]


def test_a_missing_directory_is_found_before_anything_is_measured(benchmarks, tmp_path, capsys):
    assert main(["bench", "good", "--json", str(tmp_path / "missing" / "figures.json")]) == 2
    assert benchmarks["good"].ran == []
    assert "there is no such directory" in capsys.readouterr().err


def test_every_benchmark_takes_json():
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    for name in [*bench_command._BENCHMARKS, "all"]:
        assert parser.parse_args([name, "--json", "here"]).json == "here"
