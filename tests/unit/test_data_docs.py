"""The examples of docs/data.md run, in the order of the page."""

from __future__ import annotations

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) >= 6
    names: dict[str, object] = {"__name__": "examples"}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert "Share(start=1709, stop=2050, size=4096, world_size=12)" in capsys.readouterr().out
