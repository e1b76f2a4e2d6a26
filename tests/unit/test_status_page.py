"""Status pages and stacks: what is written is what another process reads; nothing stays."""

from __future__ import annotations

import dataclasses
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.diagnostics import host_ranks
from paceline.diagnostics.diagnosis import RankView, diagnose
from paceline.diagnostics.host_ranks import HostRanks
from paceline.diagnostics.page_reader import find_pages, parse_page, read_page
from paceline.diagnostics.process_state import Activity, activity_of
from paceline.diagnostics.rank_table import stall_page, table
from paceline.diagnostics.stack_reader import main_stack, request_stacks
from paceline.diagnostics.stall_watcher import StallWatch
from paceline.errors import ConfigError
from paceline.telemetry.recorder import Recorder, group_number
from paceline.telemetry.status_page import (
    CALL_AT,
    MEMFD_NAME,
    PAGE_BYTES,
    PAGE_MAGIC,
    PHASES,
    Field,
    Phase,
    WaitLabel,
    new_page,
    read_and_close,
)
from paceline.telemetry.variables import stall_after_s

JOB = f"job-of-test-{os.getpid()}"  # pages are found by everybody on the machine


@pytest.fixture
def recorder():
    recorder = Recorder()
    recorder.open_page(job=JOB, rank=3, world=8)
    yield recorder
    recorder.close_page()


def test_a_page_shows_what_was_recorded(recorder):
    recorder.phase(Phase.LOADER)
    recorder.count(Field.FORWARDS)
    page = read_page(os.getpid())
    assert (page.rank, page.world, page.job, page.phase, page.call) == (
        3,
        8,
        JOB,
        Phase.LOADER,
        None,
    )
    assert page.forwards == 1
    assert 0 <= time.monotonic_ns() - page.phase_since_ns < 60 * 10**9
    assert [page.pid for page in find_pages(JOB)] == [os.getpid()]


def test_a_call_is_on_the_page_while_it_lasts(recorder):
    label = WaitLabel("all_reduce", "Net", group_number("Net"), (0, 3), "a.weight, a.bias").packed()
    recorder.phase(Phase.BACKWARD)
    recorder.enter(label, 12, 4)
    page = read_page(os.getpid())
    assert page.call.describe() == "all_reduce of bucket 4 (a.weight, a.bias)"
    assert (page.call.members, page.call.key, page.phase) == (
        (0, 3),
        (group_number("Net"), 12, "all_reduce"),
        Phase.SYNCHRONISE,
    )
    recorder.enter(WaitLabel("barrier").packed(), 1)  # inside the wait: part of it
    recorder.leave()
    assert read_page(os.getpid()).call is not None
    recorder.leave()
    page = read_page(os.getpid())
    assert (page.call, page.phase) == (None, Phase.BACKWARD)
    (sync_point,) = page.sync_points
    assert (sync_point.group, sync_point.number) == (group_number("Net"), 12)
    assert sync_point.spent_ns[Phase.SYNCHRONISE] == sync_point.left_ns - sync_point.arrived_ns


def test_only_the_latest_sync_points_are_kept(recorder):
    label = WaitLabel("barrier", "g", 1).packed()
    for number in range(300):
        with recorder.waiting(label, number):
            pass
    numbers = [sync_point.number for sync_point in read_page(os.getpid()).sync_points]
    assert numbers == list(range(300 - len(numbers), 300))


@settings(max_examples=20)
@given(st.text(max_size=3000), st.lists(st.integers(0, 10**6), max_size=300))
def test_names_of_any_length_fit(names, members):
    recorder = Recorder()
    recorder.enter(WaitLabel("all_reduce", "Net", 1, tuple(members), names).packed(), 1, 0)
    recorder.page.share()
    try:
        recorder.page.identify(job="j" * 200, script="s" * 500, rank=0, world=1)
        page = read_page(os.getpid())
        assert page.call is not None
        assert page.call.kind == "all_reduce"
    finally:
        recorder.page.unshare()


# -- pages that are not what they seem -------------------------------------------------------------


@pytest.fixture
def raw_page():
    """A memory that is named as a page; returns a function that fills it."""
    descriptor = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)

    def write(content):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)

    yield write
    os.close(descriptor)


def _with_fields(content, fields):
    """A page of these bytes, but for the magic number, the owner and the fields given."""
    page = bytearray(content[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))
    owner = {Field.MAGIC: PAGE_MAGIC, Field.PID: os.getpid(), Field.RANK: 0, Field.WORLD: 2}
    for field, value in {**owner, **fields}.items():
        struct.pack_into("<q", page, field * 8, value)
    return bytes(page)


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 100, b"\0" * PAGE_BYTES, b"\xff" * 50000])
def test_a_page_that_is_not_ready_is_no_page(raw_page, content):
    raw_page(content)
    assert read_page(os.getpid()) is None
    assert find_pages(JOB) == []


def test_another_page_of_the_same_process_is_not_hidden(raw_page, recorder):
    assert read_page(os.getpid()).rank == 3


_FIELDS = st.dictionaries(
    st.sampled_from([f for f in Field if f not in (Field.MAGIC, Field.PID, Field.STACKS_FD)]),
    st.one_of(st.integers(-3, 10), st.integers(-(1 << 63), (1 << 63) - 1)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=400), st.binary(max_size=200), _FIELDS), max_size=3))
def test_whatever_pages_hold_ranks_can_be_looked_at(contents):
    """Also pages of another version, torn ones and those of somebody who means harm."""
    views = []
    for head, text, fields in contents:
        filler = head.ljust(CALL_AT, b"\0") + text
        page = parse_page(_with_fields(filler, fields))
        assert parse_page(head) is None
        if page is not None:
            views.append(RankView(page.rank, page.pid, page, Activity.RUNNING))
    now = time.monotonic_ns()
    diagnosis = diagnose(views, now, 1)
    if diagnosis is not None:
        stall_page(diagnosis, views, {}, now)
    table(views, now)


def test_a_failed_look_does_not_end_the_watch():
    reports, looks = [], []

    def look():
        looks.append(1)
        if len(looks) < 4:
            raise struct.error("half a page")
        reported.set()
        return []

    reported = threading.Event()
    watch = StallWatch(look, reports.append, 0.04)
    watch.start()
    try:
        assert reported.wait(30)
    finally:
        watch.stop()
    assert len(reports) == 1
    assert "half a page" in reports[0]


def test_watchers_that_look_at_the_same_moment_report_a_stall_once(recorder, monkeypatch):
    """Both have looked before one reports: as when a rank is stopped in a look, and goes on."""
    monkeypatch.setattr(host_ranks, "recorder", recorder)
    both_have_looked, reports = threading.Barrier(2), []
    watched = [HostRanks(), HostRanks()]

    def look_once(ranks):
        def look():
            views = ranks.views()
            both_have_looked.wait(30)
            return views

        StallWatch(look, reports.append, 1e-9, may_report=ranks.may_report).look_once()

    for stalls in (1, 2):
        recorder.enter(WaitLabel("barrier").packed(), stalls)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(look_once, watched))
        assert len(reports) == stalls
        recorder.leave()
    for ranks in watched:
        ranks.close()


def test_a_page_that_names_a_file_as_its_stacks_does_not_cost_it(recorder, tmp_path):
    with open(tmp_path / "weights", "w+") as file:
        file.write("precious")
        file.flush()
        page = dataclasses.replace(read_page(os.getpid()), stacks_fd=file.fileno())
        assert request_stacks(page) == []
        assert (tmp_path / "weights").read_text() == "precious"


def test_a_forked_child_neither_writes_nor_shows_the_page(recorder):
    pid = os.fork()
    if pid == 0:
        recorder.after_fork()
        recorder.phase(Phase.SAVE)
        os._exit(0 if read_page(os.getpid()) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_page(os.getpid()).phase is Phase.STARTING


def test_a_closed_page_is_gone():
    recorder = Recorder()
    recorder.open_page(job="gone", rank=0, world=1)
    recorder.close_page()
    recorder.phase(Phase.FORWARD)
    assert read_page(os.getpid()) is None
    assert recorder.current == Phase.FORWARD


def test_a_forked_child_dumps_its_stacks_into_memory_of_its_own(recorder):
    parent = os.stat(f"/proc/self/fd/{read_page(os.getpid()).stacks_fd}")
    pid = os.fork()
    if pid == 0:
        recorder.after_fork()
        recorder.open_page(job="child", rank=4, world=8)
        child = os.stat(f"/proc/self/fd/{read_page(os.getpid()).stacks_fd}")
        os._exit(0 if child.st_ino != parent.st_ino else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_time_goes_to_the_phase_it_was_spent_in(recorder):
    recorder.phase(Phase.FORWARD)
    time.sleep(0.03)
    with recorder.during(Phase.SAVE):
        time.sleep(0.01)
    with recorder.waiting(WaitLabel("barrier").packed(), 1):
        pass
    (sync_point,) = read_page(os.getpid()).sync_points
    assert sync_point.spent_ns[Phase.FORWARD] >= 0.03e9
    assert sync_point.spent_ns[Phase.SAVE] >= 0.01e9
    assert len(sync_point.spent_ns) == len(PHASES)


def test_stacks_come_from_a_process_that_does_not_cooperate(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        "import sys\n"
        "from paceline.telemetry.recorder import recorder\n"
        "recorder.open_page(job='stuck', rank=0, world=1)\n"
        "def spin():\n"
        "    print('ready', flush=True)\n"
        "    while True: pass\n"
        "spin()\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        page = read_page(process.pid)
        deadline = time.monotonic() + 10
        while (
            stack := main_stack(request_stacks(page), page)
        ).innermost.code != "while True: pass":
            assert time.monotonic() < deadline, stack  # at first it may still be printing
        assert [frame.function for frame in stack.frames] == ["spin", "<module>"]
        assert activity_of(page.pid, page.main_tid) is Activity.RUNNING
        process.send_signal(signal.SIGSTOP)
        while activity_of(page.pid, page.main_tid) is not Activity.STOPPED:
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert activity_of(page.pid, page.main_tid) is Activity.ENDED
    assert read_page(page.pid) is None


def test_a_process_that_does_not_expect_the_signal_is_left_alone(recorder):
    page = read_page(os.getpid())
    other = subprocess.Popen(
        [sys.executable, "-c", "print('ready', flush=True); input()"], stdin=-1, stdout=-1
    )
    try:
        assert other.stdout.readline() == b"ready\n"
        assert request_stacks(dataclasses.replace(page, pid=other.pid)) == []
        assert other.poll() is None
    finally:
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.parametrize(("text", "seconds"), [(None, 30.0), ("", 30.0), ("2.5", 2.5), ("0", 0.0)])
def test_the_stall_limit(text, seconds):
    assert stall_after_s(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_an_invalid_stall_limit_is_refused(text):
    with pytest.raises(ConfigError, match="PACELINE_STALL_AFTER"):
        stall_after_s(text)


# -- what is left when a rank is gone --------------------------------------------------------------


def test_time_before_the_first_phase_of_a_step_is_not_part_of_the_training(recorder):
    with recorder.waiting(WaitLabel("barrier", "g", 1).packed(), 1):
        time.sleep(0.02)
    recorder.phase(Phase.OTHER)
    assert read_page(os.getpid()).training_since_ns == 0
    before = time.monotonic_ns()
    recorder.phase(Phase.LOADER)
    time.sleep(0.01)
    recorder.phase(Phase.BACKWARD)
    recorder.phase(Phase.OTHER)
    page = read_page(os.getpid())
    assert before <= page.training_since_ns <= page.last_step_ns <= time.monotonic_ns()
    assert (page.spent_ns[Phase.STARTING], page.spent_ns[Phase.SYNCHRONISE]) == (0, 0)
    assert page.spent_ns[Phase.LOADER] >= 0.01e9
    assert page.sync_points[0].spent_ns[Phase.SYNCHRONISE] >= 0.02e9  # of the whole life


def test_samples_and_steps_add_up(recorder):
    recorder.add_samples(8)
    recorder.add_samples(4)
    recorder.scalars(0.5, 24)
    for step in (501, 502):
        recorder.reach_step(step, 16)
        recorder.scalars(0.5, 16)  # of the same samples
    page = read_page(os.getpid())
    assert (page.samples, page.reported_samples) == (12, 56)
    assert (page.steps_before, page.reached_step) == (500, 502)


def test_an_inherited_page_outlives_the_rank_and_is_no_page_of_one_that_has_left():
    kept = new_page()
    recorder = Recorder()
    inherited = os.dup(kept)
    recorder.inherit_page(inherited)
    recorder.open_page(job=JOB, rank=0, world=1)
    recorder.add_samples(3)
    assert read_page(os.getpid()).samples == 3
    recorder.close_page()
    assert read_page(os.getpid()) is None
    recorder.add_samples(4)  # in private
    recorder.open_page(job=JOB, rank=0, world=1)  # the same memory again
    assert read_page(os.getpid()).samples == 7
    recorder.close_page()
    os.close(inherited)
    page = parse_page(read_and_close(kept))
    assert (page.samples, page.has_left) == (7, True)
