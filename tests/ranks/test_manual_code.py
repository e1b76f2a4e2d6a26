"""Every piece of code in the manual runs."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.harness.manual_page import ManualPage
from tests.harness.ranks import run_ranks

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [path for path in PAGES if ManualPage(path).has_code]
# The interpreter's own directory first: `python`, `torchrun` and `paceline` of this environment.
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


def name_of(path):
    return str(path.relative_to(ROOT))


def run(command, directory, **options):
    done = subprocess.run(
        command,
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_blocks(rank, world, page, directory):
    os.chdir(directory)
    page.run_blocks()


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(path, tmp_path):
    page = ManualPage(path)
    page.write_files(tmp_path)
    run_ranks(1, run_blocks, page, str(tmp_path), timeout=100)
    for command in page.commands(tmp_path):
        run(command, tmp_path, shell=True)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_says_what_it_is(path):
    """Without a language a block is neither coloured nor run."""
    fences = re.findall(r"^ *```(\w*)", path.read_text(), flags=re.MULTILINE)
    opening = fences[::2]
    assert "" not in opening, f"{name_of(path)}: block {opening.index('') + 1}"


def test_skipped_blocks_are_few_and_say_why():
    skipped = {
        f"{name_of(path)}:{block.line}": block.skipped
        for path in PAGES
        for block in ManualPage(path).blocks
        if block.skipped is not None
    }
    assert all(skipped.values())
    assert len(skipped) <= 12, skipped
