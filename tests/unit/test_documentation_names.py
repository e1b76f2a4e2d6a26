"""What the pages for contributors point at exists."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BASES = (ROOT / "src" / "paceline", ROOT)
NAME = re.compile(r"(?<![\w/.])[A-Za-z_][\w.]*\b(?!/)")  # a name that is no part of a path


def source_text() -> str:
    files = [*BASES[0].rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")]
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize("page", ["design.md", "glossary.md"])
def test_every_path_exists(page):
    text = (ROOT / "docs" / page).read_text()
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)", text))
    assert paths
    missing = [path for path in paths if not any((base / path).exists() for base in BASES)]
    assert not missing


def test_every_name_of_the_glossary_is_in_the_source():
    source = source_text()
    cells = re.findall(r"`([^`]+)`", (ROOT / "docs" / "glossary.md").read_text())
    names = {name for cell in cells for name in NAME.findall(cell)}
    last_parts = {name.removesuffix(".py").rstrip(".").split(".")[-1] for name in names}
    unknown = [name for name in last_parts if not re.search(rf"\b{re.escape(name)}\b", source)]
    assert not unknown
