"""`paceline completion`: scripts made from the parsers, tried in the shells themselves."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from paceline.cli.completion import Kind, describe_commands
from paceline.cli.main import COMMANDS, main
from paceline.telemetry.recorder import Recorder

JOB = f"c0ffee{os.getpid() % 256:02x}"


@pytest.fixture
def script(tmp_path, capsys):
    """A function that writes the script of a shell; returns its path."""

    def write(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        assert main(["completion", shell]) == 0
        path = tmp_path / f"paceline.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.fixture
def shell_env(tmp_path):
    """An environment in which `paceline` is the one under test."""
    command = tmp_path / "paceline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def running_job():
    recorder = Recorder()
    recorder.open_page(job=JOB + "0" * 24, rank=0, world=1)
    yield JOB
    recorder.close_page()


def _run(command, env, cwd):
    done = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_every_command_and_option_is_known():
    root = describe_commands()
    assert [command.path for command in root.commands] == [(name,) for name in COMMANDS]
    by_name = {command.path[0]: command for command in root.commands}
    options = {name: each for each in by_name["run"].options for name in each.names}
    assert options["--start-method"].value.words == ("fork", "spawn")
    assert options["--trace"].value.kind is Kind.DIRECTORY
    assert options["--summary-json"].value.kind is Kind.FILE
    assert options["--quiet-ranks"].value is None
    assert by_name["run"].is_followed_by_script
    for name in ("ps", "top", "scale"):
        assert by_name[name].values[0].kind is Kind.JOB
    assert ("bench", "ddp") in [each.path for each in by_name["bench"].commands]


def _bash(script, words):
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    return (
        f"source {script}; COMP_WORDS=(paceline {quoted}); COMP_CWORD={len(words)}; "
        'COMPREPLY=(); _paceline; echo "${COMPREPLY[*]}"; '
    )


def test_bash(script, shell_env, tmp_path, running_job):
    path = script("bash")
    (tmp_path / "traces").mkdir()
    cases = {
        ("",): " ".join(COMMANDS),
        ("sc",): "scale",
        ("run", "--st"): "--stall-after --start-method",
        ("run", "--start-method", ""): "fork spawn",
        ("run", "--start-method", "=", "s"): "spawn",
        ("run", "--trace", "tr"): "traces",
        ("run", "-n", "2", "--quiet-r"): "--quiet-ranks",
        ("run", "-n", "2", "train.py", "--quiet-r"): "",  # the script's own
        ("bench", "dd"): "ddp",
        ("bench", "ddp", "--mod"): "--models",
        ("completion", ""): "bash zsh fish",
        ("ps", running_job[:7]): running_job,
        ("top", running_job[:7]): running_job,
        ("scale", running_job[:7]): running_job,
        ("scale", running_job, ""): "",
    }
    text = "".join(_bash(path, words) for words in cases)
    found = _run(["bash", "--norc", "-c", text], shell_env, tmp_path).splitlines()
    assert dict(zip(cases, found, strict=True)) == cases
    assert "complete -o bashdefault" in _run(
        ["bash", "--norc", "-c", f"source {path}; complete -p paceline"], shell_env, tmp_path
    )


def test_fish(script, shell_env, tmp_path, running_job):
    path = script("fish")
    cases = {
        "paceline sc": ["scale"],
        "paceline run --quiet": ["--quiet-ranks"],
        "paceline run --start-method ": ["fork", "spawn"],
        "paceline bench dd": ["ddp"],
        "paceline bench ddp --mod": ["--models"],
        f"paceline top {running_job[:7]}": [running_job],
    }
    for line, expected in cases.items():
        shown = _run(
            ["fish", "--no-config", "-c", f"source {path}; complete -C '{line}'"],
            shell_env,
            tmp_path,
        )
        assert [each.partition("\t")[0] for each in shown.splitlines()] == expected, line


def test_zsh(script, shell_env, tmp_path, running_job):
    """Typed into a shell of its own, on a terminal of its own."""
    path = script("zsh")
    cases = {
        "paceline scal": "paceline scale",
        "paceline run --start-method s": "--start-method spawn",
        "paceline run --quie": "--quiet-ranks",
        "paceline bench coll": "bench collectives",
        f"paceline ps {running_job[:7]}": f"ps {running_job}",
    }
    typing = "".join(
        f"zpty -w -n z $'\\C-u{line}\\t'\nzpty -r -m z out '*{shown}*'\n"
        for line, shown in cases.items()
    )
    typist = tmp_path / "typist.zsh"
    typist.write_text(
        "zmodload zsh/zpty\nzpty z zsh -f -i\n"
        f"zpty -w z \"PS1=; autoload -U compinit; compinit -u -d '{tmp_path}/dump'; "
        f"source '{path}'; echo rea''dy\"\n"
        f"zpty -r -m z out '*ready*'\n{typing}zpty -d z\necho all\n"
    )
    assert pathlib.Path(path).read_text().startswith("#compdef paceline")
    assert _run(["zsh", "-f", str(typist)], shell_env, tmp_path) == "all\n"
