"""What the command line says to somebody who does not know it yet."""

from __future__ import annotations

import itertools
import re

import pytest

from paceline.cli import top
from paceline.cli.main import COMMANDS, main


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"^ +{name}\b", shown, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("rn", "there is no command 'rn': did you mean `paceline run`?"),
        ("train.py", "`paceline run train.py` starts a script"),
        ("xyzzy", "`paceline --help` lists them"),
    ],
)
def test_a_word_that_is_no_command_gets_advice(word, advice, capsys):
    assert main([word]) == 2
    assert advice in capsys.readouterr().err


def test_options_are_left_to_the_parser(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("paceline ")


def test_top_says_once_that_nothing_runs(monkeypatch, capsys):
    looks = itertools.chain([top.NOTHING_RUNS] * 3, ["a job"] * 2, [top.NOTHING_RUNS] * 2)

    def sleep(_seconds):
        pass

    def render():
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(top.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        top._show_again_and_again(render, 1.0)
    shown = capsys.readouterr().out.split("\n\n")
    assert shown == [top.NOTHING_RUNS, "a job", "a job", top.NOTHING_RUNS, ""]
