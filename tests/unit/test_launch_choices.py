"""The pure decisions of launching: cores and threads, backend, placement, output lines."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.core import NativeStatus
from paceline.errors import ConfigError
from paceline.launch.backend_choice import choose_backend
from paceline.launch.messages import exit_code_for_shell
from paceline.launch.output import Lines, Output
from paceline.launch.placement import RankResources, placement_from
from paceline.launch.resources import (
    allow_open_files,
    count_ranks,
    cpu_quota,
    threads_for,
    threads_per_rank,
)
from paceline.rank_env import RankEnv

KNOWN = {"paceline", "gloo", "nccl"}
WORKS, MISSING = NativeStatus(True), NativeStatus(False, "cc: not found")


@pytest.mark.parametrize(
    ("requested", "environ", "native", "accelerator", "expected"),
    [
        (None, {}, WORKS, None, "paceline"),
        (None, {}, WORKS, ("cuda", "nccl"), "cpu:paceline,cuda:nccl"),
        (None, {}, WORKS, ("xpu", "xccl"), "cpu:paceline,xpu:xccl"),
        (None, {}, MISSING, None, "gloo"),
        (None, {}, MISSING, ("cuda", "nccl"), "cpu:gloo,cuda:nccl"),
        (None, {"PACELINE_BACKEND": "gloo"}, WORKS, None, "gloo"),
        (None, {"PACELINE_BACKEND": "gloo"}, WORKS, ("cuda", "nccl"), "cpu:gloo,cuda:nccl"),
        ("nccl", {"PACELINE_BACKEND": "gloo"}, WORKS, ("cuda", "nccl"), "nccl"),
    ],
)
def test_the_backend(requested, environ, native, accelerator, expected):
    assert choose_backend(requested, environ, native, accelerator, KNOWN).backend == expected


def test_falling_back_to_gloo_says_why():
    assert "cc: not found" in choose_backend(None, {}, MISSING, None, KNOWN).note


def test_asking_for_the_missing_core_is_an_error():
    with pytest.raises(ConfigError, match="cc: not found"):
        choose_backend(None, {"PACELINE_BACKEND": "paceline"}, MISSING, None, KNOWN)


@pytest.mark.parametrize(
    "name", ["nosuch", "cpu:nosuch", "cpu:gloo,nccl", "gloo,", ":gloo", "cpu:"]
)
def test_a_backend_that_torch_does_not_know_is_an_error(name):
    with pytest.raises(ConfigError, match=f"PACELINE_BACKEND should be one of .* but is {name!r}"):
        choose_backend(None, {"PACELINE_BACKEND": name}, WORKS, None, KNOWN)
    with pytest.raises(ConfigError, match=f"backend should be one of .* but is {name!r}"):
        choose_backend(name, {}, WORKS, None, KNOWN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": 3}, "backend should be one of .*but is 3"),
        ({"rank": "0"}, "rank should be a whole number but is '0'"),
        ({"world_size": 1.5}, "world_size should be a whole number but is 1.5"),
        ({"rank": 5, "world_size": 2}, "a rank is one of 0"),
        ({"rank": 0, "world_size": 0}, "a rank is one of 0"),
        ({"threads": "x"}, "threads should be a number of threads but is 'x'"),
        ({"threads": -1}, "threads should be a number of threads but is -1"),
        ({"device_id": "cuda"}, r"device_id should be a number or a torch\.device but is 'cuda'"),
        ({"timeout": 30}, r"timeout should be a datetime\.timedelta but is 30"),
    ],
)
def test_wrong_arguments_of_init_process_group(monkeypatch, arguments, message):
    for name in ("RANK", "WORLD_SIZE", "PACELINE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((ConfigError, TypeError), match=message):
        paceline.init_process_group(**arguments)


@pytest.mark.parametrize(
    ("mine", "others", "quota", "threads"),
    [
        (range(8), [range(8)], None, 4),
        (range(8), [range(8)] * 2, None, 2),
        (range(2), [range(2)] * 3, None, 1),
        ([0, 1], [[2, 3]], None, 2),  # bound to cores of their own, by mpirun or srun
        (range(64), [range(64)], 8.0, 4),
        (range(4), [], None, 4),
    ],
)
def test_threads_follow_from_the_cores_ranks_share(mine, others, quota, threads):
    assert threads_per_rank(mine, others, quota) == threads


@given(st.integers(1, 64), st.integers(1, 16))
def test_ranks_never_get_more_threads_than_there_are_cores(cores, ranks):
    threads = threads_per_rank(range(cores), [range(cores)] * (ranks - 1))
    assert threads >= 1
    assert threads * ranks <= max(cores, ranks)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("nonsense", None)]
)
def test_the_quota_of_a_container(tmp_path, text, quota):
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_local_ranks_are_found_by_comparing_hosts():
    """Two hosts, ranks dealt out in turn, and nobody set LOCAL_RANK."""
    resources = [RankResources("ab"[rank % 2], [0, 1, 2, 3]) for rank in range(4)]
    placements = [placement_from(RankEnv("k8s", rank, 4), resources, None) for rank in range(4)]
    assert [placement.local_rank for placement in placements] == [0, 0, 1, 1]
    assert {(p.local_world_size, p.hosts, p.threads) for p in placements} == {(2, 2, 2)}


@pytest.mark.parametrize("requested", ["0", "-1", "many", "1.5"])
def test_an_invalid_number_of_ranks(requested):
    with pytest.raises(ConfigError, match="number of ranks"):
        count_ranks(requested)


def test_threads_the_user_set_are_kept():
    assert threads_for(2, {"OMP_NUM_THREADS": "7"}) == 7
    assert threads_for(2, {"PACELINE_THREADS": "3", "OMP_NUM_THREADS": "7"}) == 3
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        threads_for(2, {"OMP_NUM_THREADS": "all"})


def test_exit_codes_are_those_of_a_shell():
    assert [exit_code_for_shell(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


# -- output ----------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and b"\r" not in line)),
    st.data(),
)
def test_lines_are_the_same_however_the_bytes_are_cut(lines, data):
    text = b"".join(line + b"\n" for line in lines) + b"rest"
    cutter, found = Lines(), []
    while text:
        size = data.draw(st.integers(1, len(text)))
        found += cutter.feed(text[:size])
        text = text[size:]
    assert found + cutter.end() == [*lines, b"rest"]


def test_a_progress_bar_shows_its_last_state():
    lines = Lines()
    assert lines.feed(b"\r10%\r20") == []
    assert lines.feed(b"%\r100%\nnext\r\n") == [b"100%", b"next"]
    assert len(lines.end()) == 0


def test_a_bar_that_never_ends_its_line_needs_no_memory():
    lines = Lines()
    for _ in range(1000):
        lines.feed(b"\r" + b"x" * 1000)
    assert len(lines.end()[0]) == 1000


def test_every_line_carries_its_rank_and_no_line_is_torn():
    written = []
    output = Output(12, lambda stream, data: written.append((stream, data)))
    output.feed(3, 1, b"one\ntw")
    output.feed(11, 2, b"other\n")
    output.feed(3, 1, b"o\n")
    output.end(3)
    assert written == [(1, b"[ 3] one\n"), (2, b"[11] other\n"), (1, b"[ 3] two\n")]
    assert list(output.tails[11]) == ["other"]


def test_quiet_ranks_still_go_to_their_logs(tmp_path):
    written = []
    output = Output(
        2,
        lambda stream, data: written.append(data),
        shown=frozenset({0}),
        log_dir=tmp_path / "logs",
    )
    for rank in (0, 1):
        output.feed(rank, 1, b"line\n")
    output.report(1, "it failed\n")
    output.close()
    assert written == [b"[0] line\n", b"[1] it failed\n"]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "line\nit failed\n"


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to run"),
        (["missing.py"], "there is no file 'missing.py'"),
        (["-n", "0", __file__], "number of ranks"),
        (["--nnodes", "2", "-n", "1", __file__], "--rdzv-endpoint"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1", __file__], "from 0 to 1"),
        (["--nnodes", "1:4", __file__], "--nnodes should be a whole number but is '1:4'"),
        (["--nnodes", "0", __file__], "--nnodes should be 1 or more"),
        (["--node-rank", "x", __file__], "--node-rank should be a whole number but is 'x'"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b", __file__], "should be HOST:PORT"),
        (["-n", "100000", __file__], "at most 1024 but is 100000"),
        (["--stall-after", "nan", __file__], "number of seconds, or 0 for never, not 'nan'"),
        (["--stall-after", "inf", __file__], "number of seconds, or 0 for never, not 'inf'"),
        (["--grace", "nan", __file__], "--grace should be a number of seconds, 0 or more"),
        (["--grace", "inf", __file__], "--grace should be a number of seconds, 0 or more"),
        (["--grace=-1", __file__], "--grace should be a number of seconds, 0 or more"),
        (["--grace", "soon", __file__], "but is 'soon'"),
        (["--log-dir", "/dev/null/logs", __file__], "--log-dir should be a directory"),
        (["--trace", __file__, __file__], "--trace (PACELINE_TRACE) should be a directory"),
        (["-n", "1", "/"], "a directory without a __main__.py"),
        (["-m", "nosuch_package.train"], "there is no module 'nosuch_package.train'"),
        (["-m", "train.py"], "there is no module 'train.py'"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys, monkeypatch):
    from paceline.cli import main, run

    # A process cannot tell orphans it adopted from children of its own: not before there are ranks.
    monkeypatch.setattr(run, "adopt_orphans", lambda: pytest.fail("adopts orphans for no job"))
    assert main(["run", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PET_NODE_RANK", "abc", "--node-rank (PET_NODE_RANK) should be a whole number"),
        ("PET_NNODES", "1:2", "--nnodes (PET_NNODES) should be a whole number but is '1:2'"),
        ("PET_NPROC_PER_NODE", "gpu", "number of ranks should be 1 or more, or auto"),
        ("PACELINE_STALL_AFTER", "nan", "PACELINE_STALL_AFTER"),
        ("PACELINE_TRACE", "/dev/null/trace", "PACELINE_TRACE"),
        ("PACELINE_THREADS", "some", "PACELINE_THREADS should be a number of threads"),
    ],
)
def test_mistakes_in_the_environment(variable, value, message, capsys, monkeypatch):
    from paceline.cli import main

    monkeypatch.setenv(variable, value)
    assert main(["run", __file__]) == 2
    assert message in capsys.readouterr().err


def test_a_script_that_cannot_be_read(capsys, monkeypatch):
    from paceline.cli import main

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    assert main(["run", __file__]) == 2
    assert "cannot be read: permission denied" in capsys.readouterr().err


def test_a_current_directory_that_is_gone(tmp_path, capsys, monkeypatch):
    from paceline.cli import main

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in (["train.py"], ["-m", "train"]):
        assert main(["run", *arguments]) == 2
        assert "the current directory cannot be used" in capsys.readouterr().err


def test_the_limit_of_open_files(monkeypatch):
    limits = {"now": (256, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.update(now=new))
    allow_open_files(2)
    assert limits["now"] == (256, 4096)
    allow_open_files(192)
    assert 192 * 6 < limits["now"][0] < 4096
    assert limits["now"][1] == 4096
    with pytest.raises(ConfigError, match=r"1000 ranks need \d+ open files, but only 4096 are"):
        allow_open_files(1000)


@pytest.mark.parametrize(
    "command", ["paceline.cli.run", "paceline.cli.doctor", "paceline.launch.supervisor"]
)
def test_the_launcher_itself_imports_no_torch(command):
    code = f"import {command}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
