"""Every example runs, with less work than by default, and comes to something."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PACELINE = (sys.executable, "-m", "paceline", "run", "-n", "2")


def run(*command, timeout=200):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_table_with_embeddings():
    output = run(*PACELINE, str(EXAMPLES / "tabular.py"), "--epochs", "6")
    share = float(re.search(r"([\d.]+)% of 100 rows right", output)[1])
    assert share > 80


def test_a_pole_on_a_cart():
    output = run(*PACELINE, str(EXAMPLES / "cart_pole.py"), "--updates", "20")
    assert "update 20: a game lasts" in output


def test_a_character_level_gpt():
    output = run(*PACELINE, str(EXAMPLES / "char_gpt.py"), "--steps", "25", "--write", "20")
    bits = float(re.search(r"step 25: ([\d.]+) bits", output)[1])
    assert bits < 5  # about 6.6 for characters chosen at random


def test_a_rank_that_dies_changes_nothing():
    example = (str(EXAMPLES / "elastic.py"), "--epochs", "3")
    alone = run(sys.executable, *example)
    elastic = ("run", "--elastic", "1:2", *example, "--kill-at", "20")
    job = subprocess.run(
        [sys.executable, "-m", "paceline", *elastic],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "was killed by SIGKILL at step 20" in job.stderr
    (expected,) = re.findall(r"48 steps, SHA-256 \w{64}", alone)
    assert re.findall(r"48 steps, SHA-256 \w{64}", job.stdout) == [expected]


def test_two_launchers_on_one_machine():
    output = run(
        sys.executable,
        str(EXAMPLES / "two_hosts.py"),
        str(EXAMPLES / "tabular.py"),
        *("--epochs", "2"),
    )
    assert "rows right" in output


@pytest.mark.filterwarnings("default")  # those of Jupyter's own packages are theirs
def test_the_notebook():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
    losses = "".join(output.get("text", "") for output in notebook.cells[2].outputs)
    assert "epoch 2: loss" in losses
    (result,) = [out for out in notebook.cells[4].outputs if out.output_type == "execute_result"]
    accuracies = [float(text) for text in re.findall(r"0\.\d+", result["data"]["text/plain"])]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.5
