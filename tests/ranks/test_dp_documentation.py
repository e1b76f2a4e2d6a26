"""The example of docs/dp.md runs and prints what it says."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys


def test_the_example_runs(tmp_path):
    text = (pathlib.Path(__file__).parents[2] / "docs" / "dp.md").read_text()
    examples = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.S)
        if "with paceline" in block
    ]
    script = tmp_path / "example.py"
    script.write_text(examples[0])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "torch.Size([8, 2])\ntorch.Size([5])\n"
