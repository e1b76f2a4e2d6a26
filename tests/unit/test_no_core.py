"""Without a compiler the package is slower, not broken: groups run on Gloo and say so once."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "src" / "paceline"

SCRIPT = """
import sys, torch, torch.distributed as dist, paceline
from paceline.core import native_status
assert not native_status().available
rank = int(sys.argv[1])
dist.init_process_group("paceline", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
data = torch.ones(3)
dist.all_reduce(data)
dist.all_reduce(data, group=dist.new_group())
assert data.tolist() == [4, 4, 4]
dist.destroy_process_group()
"""


@pytest.fixture
def without_core(tmp_path):
    """An installation made where no compiler was found."""
    copy = tmp_path / "site" / "paceline"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    record = {"command": "cc ...", "error": "cc: No such file or directory"}
    (copy / "core" / "native_build.json").write_text(json.dumps(record))
    return {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def test_groups_run_on_gloo_and_say_so_once(without_core, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(rank), str(tmp_path / "rendezvous")],
            env=without_core,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=90)
        assert rank.returncode == 0, said
        lines = [line for line in said.splitlines() if line.startswith("paceline:")]
        assert len(lines) == 1
        assert "using Gloo instead of shared memory" in lines[0]
        assert "cc: No such file or directory" in lines[0]
        assert "install a C compiler" in lines[0]


def test_a_core_of_another_version_is_refused(monkeypatch):
    from paceline.core import abi
    from paceline.errors import NativeError

    monkeypatch.setattr(abi, "ABI_VERSION", 999)
    with pytest.raises(NativeError, match=r"ABI version \d+, this paceline needs 999.*reinstall"):
        abi._load()
