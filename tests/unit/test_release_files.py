"""Files that a release is made of agree with each other."""

from __future__ import annotations

import pathlib
import re

import yaml

import paceline

ROOT = pathlib.Path(__file__).parents[2]


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == paceline.__version__ == released[0]
    assert citation["license"] == "Apache-2.0"


def test_ci_runs_the_oldest_and_newest_versions_on_both_kinds_of_machine():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.search(r'"torch>=([\d.]+)"', project)
    assert oldest is not None
    assert oldest[1] in matrix["torch"]
    pythons = set(re.findall(r"Python :: (3\.\d+)", project))
    assert pythons == {*matrix["python"], *(row["python"] for row in matrix["include"])}
    assert {row["machine"] for row in matrix["include"]} == {"ubuntu-24.04", "ubuntu-24.04-arm"}


def test_reports_of_bugs_ask_for_the_doctor():
    for name in ("bug", "slow"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        required = [
            field["attributes"]["label"]
            for field in form["body"]
            if field.get("validations", {}).get("required")
        ]
        assert "paceline doctor" in required
