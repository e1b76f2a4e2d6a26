"""Every figure of README and the manual is that of a file in benchmarks/results/."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from xml.etree import ElementTree

import pytest
from tools import figures

from paceline.cli import bench_command

FILES = sorted(figures.RESULTS.glob("*.json"))


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_tables_are_those_of_the_files(page):
    text = page.read_text()
    assert figures.updated(text) == text, "run python -m tools.figures"


@pytest.mark.parametrize("name", figures.PLOTS)
def test_plots_are_those_of_the_files(name):
    if name == "training-steps.svg" and "ddp" in figures.missing():
        pytest.skip("not measured yet")
    drawn = figures.PLOTS[name]().svg()
    assert (figures.IMAGES / name).read_text() == drawn, "run python -m tools.figures"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_every_table_stands_somewhere_and_only_once():
    names = [name for page in figures.pages() for name in figures.names_in(page.read_text())]
    assert sorted(names) == sorted(figures.TABLES)


def test_every_result_is_what_its_command_measured():
    assert {path.stem for path in FILES} <= set(figures.MEASUREMENTS)
    for path in FILES:
        written = json.loads(path.read_text())
        assert written["command"] == figures.MEASUREMENTS[path.stem]
        assert set(written["machine"]) >= {"cpu", "cores", "torch", "paceline", "date"}


def test_commands_can_be_typed():
    for command in figures.MEASUREMENTS.values():
        program, bench, name, *options = shlex.split(command)
        assert (program, bench) == ("paceline", "bench")
        assert set(vars(bench_command._defaults(name))) >= {
            option.removeprefix("--").replace("-", "_")
            for option in options
            if option.startswith("--")
        }


def test_a_figure_that_was_changed_by_hand_is_found():
    page = figures.ROOT / "docs" / "engine.md"
    text = page.read_text()
    begin = text.index("<!-- figures: collectives -->")
    changed = text[:begin] + re.sub(r"\d(?= us \|)", "77", text[begin:], count=1)
    assert changed != text
    assert figures.updated(changed) == text


def test_times_and_sizes_have_three_digits_and_a_unit():
    shown = [figures._time(seconds) for seconds in (8.44e-6, 0.000999, 0.0123456, 0.5, 12.34)]
    assert shown == ["8.44 us", "999 us", "12.3 ms", "500 ms", "12.3 s"]
    assert [figures._size(nbytes) for nbytes in (4, 4 << 10, 64 << 20)] == ["4 B", "4 KB", "64 MB"]
    assert [figures._ratio(ratio) for ratio in (1.234, 12.34, 1234.5)] == ["1.23", "12.3", "1,234"]


def test_measuring_runs_the_command_and_keeps_its_file(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures.subprocess, "run", lambda words, check: ran.append((words, check)))
    figures.measure("ddp")
    (words, check), file = ran[0], tmp_path / "results" / "ddp.json"
    assert check
    assert shlex.join(["paceline", *words[3:-2]]) == figures.MEASUREMENTS["ddp"]
    assert words[-2:] == ["--json", str(file)]
    assert pathlib.Path(file).parent.is_dir()


@pytest.mark.parametrize(
    ("low", "high", "is_even"), [(0.9, 1.1, True), (1.02, 1.1, False), (0.7, 0.98, False)]
)
def test_steps_are_even_where_rounds_contradict_each_other(low, high, is_even):
    assert figures._Step(1.0, 1.0, "default", low, high).is_even is is_even


def test_columns_of_numbers_are_on_the_right_and_others_on_the_left():
    table = figures._table(("model", "time", "with"), [("a", "3 ms", "`x`"), ("b", "", "`y`")])
    assert table.splitlines()[1] == "| --- | ---: | --- |"


def test_a_table_that_was_not_measured_yet_stays_what_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.result.cache_clear()
    text = "<!-- figures: dp -->\n\nas before\n\n<!-- end of figures -->"
    assert figures.updated(text) == text
    assert figures.missing() == list(figures.MEASUREMENTS)


def written(directory, name, values):
    machine = {
        "cpu": "a processor",
        "cores": 2,
        "torch": "2.13",
        "paceline": "0.2",
        "date": "today",
    }
    content = {"command": figures.MEASUREMENTS[name], "machine": machine, "figures": values}
    (directory / f"{name}.json").write_text(json.dumps(content))


def all_reduces(**seconds):
    return {
        "times": [
            {"bytes": nbytes, "contestant": way, "min_s": took / 2, "p50_s": took}
            for nbytes in (4, 4 << 10, 1 << 20, 64 << 20)
            for way, took in seconds.items()
        ]
    }


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Files as the benchmarks write them, with round numbers."""
    ways = ("plain", "barrier", "paceline", "torch (default)", "torch (view)")
    steps = {
        name: {
            "microseconds": dict(zip(ways, (500, 600, 1000, 3000, 2000), strict=True)),
            "over_paceline": {way: [0.9 if name == "lstm" else 1.5, 2.0, 2.5] for way in ways},
        }
        for name in figures._MODELS
    }
    written(tmp_path, "ddp", {"rounds": 20, "models": steps})
    hosts = dict(zip(("plain", "paceline", "bfloat16", "torch (view)"), (1, 2, 3, 6), strict=True))
    written(tmp_path, "ddp-hosts", {"milliseconds": {"mlp-17m": hosts}})
    methods = {"bare": 4000, "torch": 5000, "paceline": 2000, "ideal": 1000, "ddp": 3000}
    written(tmp_path, "dp", {"mlp-64": {**methods, "memory growth": 0.1}})
    memory = dict.fromkeys(list(figures._WAYS)[2:3] + list(figures._WAYS)[4:], 300.0)
    optim = {
        "step_us": {"mlp-17m": {"AdamW": dict.fromkeys(figures._WAYS, 7000)}},
        "one_process_us": {"mlp-17m": {"torch, default": 1, "torch, fused": 2, "ours": 3}},
        "memory_mib": {"1": memory},
        "least_memory_mib": {"1": 256.0},
    }
    written(tmp_path, "optim", optim)
    for name in ("collectives-hosts", "collectives-hosts-1gbit"):
        written(tmp_path, name, all_reduces(paceline=1e-3, gloo=2e-3, bfloat16=5e-4, limit=1e-4))
    for name in ("collectives", "launch", "sampler"):
        (tmp_path / f"{name}.json").write_text((figures.RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.result.cache_clear()
    yield
    figures.result.cache_clear()


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            "dp",
            "| 1 ms | 4 ms | 3 ms | 2 ms | 0.50 | 2.00 | 1.50 |",
        ),
        ("ddp-hosts", "| Paceline, bfloat16 | 3 ms | 2.00 |"),
        ("optim-steps", f"| MLP of 17 million parameters, AdamW |{' 7 ms |' * 7}"),
        ("optim-alone", "| MLP of 17 million parameters | 1 us | 2 us | 3 us |"),
        ("optim-memory", "| 1 | 300 MiB | 300 MiB | 300 MiB | 300 MiB | 256 MiB |"),
        (
            "collectives-hosts",
            "| 1 MB | 1 ms | 2.00 | 500 us | 4.00 | 1 ms | 2.00 | 500 us | 4.00 |",
        ),
        ("collectives-hosts", "| 4 B | 1 ms | 2.00 |  |  | 1 ms | 2.00 |  |  |"),
        ("ddp", "| LSTM, 2 layers | 2 ms | view | 1 ms | 2.00 | 0.90 to 2.50 | 2.00 |"),
        (
            "readme",
            "| training step, LSTM, 2 layers | 2 ms | 1 ms | 2.00 (even) | `paceline bench ddp",
        ),
        ("readme", "| training step, MLP of 100 layers | 2 ms | 1 ms | 2.00 | `paceline bench ddp"),
        ("readme", "Steps are medians of 20 rounds"),
    ],
)
def test_a_table_says_what_was_measured(measured, table, line):
    assert line in figures.TABLES[table]()
