"""The memory in which an elastic job's fork server tells its ranks who belongs to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from paceline.errors import CollectiveTimeout, GroupError
from paceline.launch import elastic_job
from paceline.launch.elastic_job import ElasticJob, current_elastic_job, elastic_variable
from paceline.launch.generation import Generation, Member
from paceline.launch.job_page import JobPage, Word, find_job_page_below
from paceline.launch.messages import ELASTIC


@pytest.fixture
def page():
    page = JobPage.create("some-job", min_ranks=1, max_ranks=4)
    yield page
    page.close()


def _generation(number, *members):
    return Generation(number, tuple(Member(*each) for each in members), f"reason {number}")


def test_a_new_page_has_no_generation_and_nobody_in_its_slots(page):
    assert page.job == "some-job"
    assert page.newest() is None
    assert page.latest_published() == []
    assert [page.member_in(slot) for slot in range(4)] == [None] * 4
    assert [page.step_in(slot) for slot in range(4)] == [None] * 4


def test_the_newest_generation_is_read_back_and_older_ones_stay_for_a_while(page):
    published = [_generation(number, (0, number), (3, 9)) for number in range(40)]
    for generation in published:
        page.publish(generation)
        assert page.newest().generation == generation
    kept = [each.generation for each in page.latest_published()]
    assert kept == published[-len(kept) :]
    assert len(kept) > 8
    assert page.published(0) is None


def test_a_record_that_is_being_overwritten_is_not_taken(page):
    page.publish(_generation(3, (0, 0)))
    before = os.pread(page.descriptor, 1 << 16, 0)
    at = before.index(b'"reason 3"')
    os.pwrite(page.descriptor, b'"other', at)
    assert page.published(3) is None


def test_a_full_page_of_the_most_ranks_has_room_for_its_record():
    page = JobPage.create("x" * 64, min_ranks=1, max_ranks=1024)
    members = tuple(Member(slot, 10_000_000 + slot) for slot in range(1024))
    page.publish(Generation(99_999_999, members, "\N{SNOWMAN}" * 1000))
    assert page.newest().generation.members == members
    assert page.job == "x" * 64
    page.close()


def test_a_rank_sees_the_newest_generation_and_who_was_lost(page):
    read_end, write_end = os.pipe()
    job = ElasticJob(page, write_end, member=7, slot=2)
    assert (job.latest(), job.min_ranks, job.max_ranks) == (-1, 1, 4)
    with pytest.raises(CollectiveTimeout, match="needs 1 ranks"):
        job.wait_beyond(-1, 0.01)
    first = _generation(0, (0, 5), (2, 7))
    for member in first.members:
        page.seat(member.slot, member.id, os.getpid())
    page.publish(first)
    assert job.wait_beyond(-1, 1.0) == first
    assert (first.rank_of(7), first.rank_of(6)) == (1, None)
    assert not job.has_lost(first)
    page.vacate(0)
    assert job.has_lost(first)
    page.seat(0, 8, os.getpid())
    assert job.has_lost(first), "a replacement is another member"
    job.report_step(12)
    assert page.step_in(2) == 12
    assert not job.is_ending()
    page.words[Word.IS_ENDING] = 1
    assert job.is_ending()
    for each in (job.ready, job.leaving, job.failing):
        each()
    lines = os.read(read_end, 4096).decode().splitlines()
    assert [line.split('"')[3] for line in lines] == ["ready", "leaving", "failing"]
    os.close(read_end)
    os.close(write_end)


def test_a_rank_ends_when_the_lease_of_its_host_is_over(page):
    job = ElasticJob(page, -1, member=7, slot=2)
    job.check_lease()  # on the first host there is none
    page.words[Word.LEASE_ENDS] = time.monotonic_ns() + 3600 * 10**9
    job.check_lease()
    page.publish(Generation(0, (Member(2, 7),), "start"))
    page.words[Word.LEASE_ENDS] = time.monotonic_ns()
    for ends in (
        job.check_lease,
        lambda: job.wait_beyond(0, 60.0),
        lambda: job.wait_beyond(-1, 60.0),  # there is one, which may be out of date
    ):
        with pytest.raises(GroupError, match=f"slot 2 ends.*kill -CONT {os.getpid()}"):
            ends()


def test_only_the_rank_itself_has_an_elastic_job(page, monkeypatch):
    assert current_elastic_job() is None
    for pid, is_rank in ((os.getpid(), True), (os.getpid() + 1, False)):
        variable = elastic_variable(
            pid=pid, page_fd=page.descriptor, requests_fd=page.descriptor, member=1, slot=1
        )
        monkeypatch.setenv(ELASTIC, variable)
        assert (current_elastic_job() is not None) == is_rank
    elastic_job._open_job.cache_clear()


_SERVERS = """
import os, sys
from paceline.launch.job_page import JobPage
for _ in range(3):  # each with a page, as a fork server has
    if os.fork() == 0:
        page = JobPage.create("some-job", min_ranks=1, max_ranks=2)
        os.write(1, b"%d\\n" % os.getpid())
        sys.stdin.read()
        os._exit(0)
sys.stdin.read()
for _ in range(3):
    os.wait()
"""


def test_the_page_below_a_launcher_is_found_and_all_others_are_closed():
    launcher = subprocess.Popen(
        [sys.executable, "-c", _SERVERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        servers = {int(launcher.stdout.readline()) for _ in range(3)}
        before = set(os.listdir("/proc/self/fd"))
        found = find_job_page_below(launcher.pid)
        assert found.words[Word.SERVER_PID] in servers
        found.close()
        assert find_job_page_below(min(servers)) is None, "its page is its own"
        assert set(os.listdir("/proc/self/fd")) == before
        launcher.stdin.close()
