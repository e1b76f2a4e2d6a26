"""The example in docs/devices.md prints what the page says."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_the_example_shows_its_hazard(sim_machine):
    page = (ROOT / "docs" / "devices.md").read_text()
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "sim.load" in block
    )
    expected = [line.removeprefix("# ") for line in example.splitlines() if line.startswith("# ")]
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:1] == expected
