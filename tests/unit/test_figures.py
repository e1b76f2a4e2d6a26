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
    drawn = figures.PLOTS[name]().svg()
    assert (figures.IMAGES / name).read_text() == drawn, "run python -m tools.figures"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_every_table_stands_somewhere_and_only_once():
    names = [name for page in figures.pages() for name in figures.names_in(page.read_text())]
    assert sorted(names) == sorted(figures.TABLES)


def test_every_result_is_what_its_command_measured():
    assert [path.stem for path in FILES] == sorted(figures.MEASUREMENTS)
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
    page = figures.ROOT / "README.md"
    text = page.read_text()
    begin = text.index("<!-- figures: readme -->")
    changed = text[:begin] + re.sub(r"\d(?= ms \|)", "77", text[begin:], count=1)
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
