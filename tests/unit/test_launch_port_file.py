"""Ranks that no launcher gave an address meet through a file that other users cannot interfere
with.
"""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from paceline.errors import CollectiveTimeout, ConfigError
from paceline.launch import store
from paceline.rank_env import RankEnv


def _env(rank, key="slurm-7-0"):
    return RankEnv("Slurm", rank, 2, rank, 2, job_key=key)


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def own(tmp_path):
    return tmp_path / f"paceline-{os.geteuid()}"


def _meet(key="slurm-7-0"):
    """What rank 1 finds through the file of rank 0."""
    serving = store.open_store(_env(0, key), {}, 10.0)
    serving.store.set("word", "found")
    joined = store.open_store(_env(1, key), {}, 10.0)
    word = joined.store.get("word")
    serving.remove_port_file()
    return word


@pytest.mark.parametrize("key", ["slurm-7-0", "ompi-../../x", "ompi-a/b", "ompi-" + "n" * 300])
def test_ranks_meet_in_a_directory_of_their_user(own, key):
    assert _meet(key) == b"found"
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(own.iterdir()) == []


def test_a_file_or_link_in_place_of_the_directory_is_refused(own, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own.symlink_to(elsewhere)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"is not a directory\. Remove it, or set TMPDIR"):
            store.open_store(_env(rank), {}, 10.0)
    assert list(elsewhere.iterdir()) == []
    own.unlink()
    own.write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        store.open_store(_env(0), {}, 10.0)


def test_a_directory_of_another_user_is_refused(monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"directory of user {user + 1} alone but belongs to"):
        store.open_store(_env(0), {}, 10.0)


def test_a_directory_that_others_may_write_to_is_refused(own):
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written to by other users"):
        store.open_store(_env(0), {}, 10.0)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"7", b"{}", b'{"pid": null, "started": 1}', b'{"pid": "x", "port": 1}'],
)
def test_a_file_with_anything_in_it_is_not_taken_for_an_address(own, content):
    own.mkdir(mode=0o700)
    serving = store.open_store(_env(0), {}, 10.0)
    serving.port_file.write_bytes(content)
    with pytest.raises(CollectiveTimeout, match="rank 0 did not join"):
        store.open_store(_env(1), {}, 0.1)


def test_a_link_in_place_of_the_file_is_not_followed(own, tmp_path):
    serving = store.open_store(_env(0), {}, 10.0)
    real = tmp_path / "real.json"
    os.replace(serving.port_file, real)
    assert json.loads(real.read_text())["pid"] == os.getpid()
    serving.port_file.symlink_to(real)
    with pytest.raises(CollectiveTimeout):
        store.open_store(_env(1), {}, 0.1)
