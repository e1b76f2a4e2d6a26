"""Which rank is to blame, from pages alone: no rank runs here."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.diagnostics.diagnosis import Cause, RankView, diagnose
from paceline.diagnostics.page_reader import Call, StatusPage
from paceline.diagnostics.process_state import Activity
from paceline.diagnostics.rank_table import stall_page, table
from paceline.telemetry.status_page import Phase

S = 10**9
NOW = 1000 * S


def call(
    kind="all_reduce",
    number=7,
    seconds=31.0,
    bucket=-1,
    names="",
    members=(),
    group="Net",
    group_number=1,
):
    since = NOW - int(seconds * S)
    return Call(kind, group, group_number, number, members, since, bucket, names)


def view(
    rank,
    *,
    activity=Activity.IDLE,
    phase=Phase.OTHER,
    seconds=33.0,
    exitcode=None,
    line="",
    world=2,
    **facts,
):
    page = StatusPage(
        pid=100 + rank,
        rank=rank,
        world=world,
        job="job",
        script="train.py",
        main_tid=0,
        main_thread=0,
        started_ns=0,
        phase=phase,
        phase_since_ns=NOW - int(seconds * S),
        call=facts.pop("call", None),
        forwards=facts.pop("forwards", 4),
        backwards=facts.pop("backwards", 4),
        syncs=3,
        optimizer_steps=3,
        calls=facts.pop("calls", 3),
        timeout_ns=facts.pop("timeout_ns", 0),
        stacks_fd=5,
        concluded_forwards=facts.pop("concluded_forwards", 3),
        calls_of_kind=facts.pop("calls_of_kind", 0),
    )
    assert not facts
    return RankView(rank, 100 + rank, page, activity, exitcode, line)


def waiting(rank, **facts):
    return view(
        rank, call=facts.pop("call", call(bucket=3, names="head.weight, head.bias")), **facts
    )


def diagnose_job(*views, limit=30.0):
    return diagnose(views, NOW, int(limit * S))


def test_a_slow_loader_is_named():
    diagnosis = diagnose_job(
        waiting(0),
        view(1, phase=Phase.LOADER, activity=Activity.SLEEPING, line="data.py:3 in read"),
    )
    assert diagnosis.blamed == (1,)
    assert diagnosis.sentence.startswith(
        "rank 1 has not reached all_reduce of bucket 3 (head.weight, head.bias): "
        "it has been in the data loader for 33 s, sleeping at data.py:3 in read. "
        "Rank 0 has been waiting for it for 31 s. "
    )
    assert "num_workers" in diagnosis.sentence


@pytest.mark.parametrize(
    ("activity", "cause", "text"),
    [
        (Activity.SLEEPING, Cause.SLEEPING, "sleeping"),
        (Activity.RUNNING, Cause.RUNNING, "endless loop"),
        (Activity.LOCK, Cause.LOCK, "lock"),
        (Activity.INPUT, Cause.INPUT, "input or output"),
        (Activity.STOPPED, Cause.STOPPED, "kill -CONT 101"),
        (Activity.ENDED, Cause.ENDED, "killed by SIGKILL"),
    ],
)
def test_what_a_late_rank_does_is_the_cause(activity, cause, text):
    diagnosis = diagnose_job(
        waiting(0), view(1, activity=activity, exitcode=-9 if activity is Activity.ENDED else None)
    )
    assert (diagnosis.blamed, diagnosis.cause) == ((1,), cause)
    assert text in diagnosis.sentence


def test_a_rank_stopped_inside_the_call_is_late_all_the_same():
    diagnosis = diagnose_job(waiting(0), waiting(1, activity=Activity.STOPPED))
    assert (diagnosis.blamed, diagnosis.cause) == ((1,), Cause.STOPPED)
    assert diagnosis.sentence.startswith("rank 1 is stuck in all_reduce of bucket 3 ")
    assert "Rank 0 has been waiting for it" in diagnosis.sentence


def test_nothing_is_reported_before_the_limit():
    assert diagnose_job(waiting(0, call=call(seconds=29)), view(1)) is None
    assert diagnose_job(view(0), view(1)) is None


def test_the_diagnosis_comes_before_the_groups_own_timeout():
    diagnosis = diagnose_job(waiting(0, call=call(seconds=8.5), timeout_ns=10 * S), view(1))
    assert diagnosis is not None
    assert diagnosis.blamed == (1,)


def test_a_skipped_backward_is_distinguished_from_an_extra_call():
    barrier = call("barrier", 4, group="the default group", group_number=9)
    skipped = diagnose_job(
        waiting(0, forwards=8, backwards=8),
        view(1, call=barrier, forwards=8, backwards=7, concluded_forwards=8),
    )
    assert (skipped.blamed, skipped.cause) == ((1,), Cause.SKIPPED_BACKWARD)
    assert "8 forwards, 7 backwards" in skipped.sentence
    extra = diagnose_job(
        waiting(0, forwards=4, backwards=4),
        view(1, call=barrier, backwards=3, concluded_forwards=3, calls=4),
    )
    assert (extra.blamed, extra.cause) == ((1,), Cause.EXTRA_COLLECTIVE)
    assert "barrier (call 4 of the default group)" in extra.sentence


def test_several_forwards_for_one_backward_are_no_skip():
    # A siamese model: two forwards, one backward, on every rank.
    diagnosis = diagnose_job(
        waiting(0, forwards=16, backwards=8, concluded_forwards=15),
        view(1, forwards=15, backwards=7, concluded_forwards=14, line="x.py:1"),
    )
    assert diagnosis.cause is not Cause.SKIPPED_BACKWARD


@pytest.mark.parametrize("odd", [0, 1])
def test_two_kinds_of_call_with_one_number_differ_and_the_unusual_one_is_blamed(odd):
    """On torch's groups both ranks have made as many calls, but one of them makes another kind."""
    usual, unusual = call("all_reduce", 7, group="g"), call("barrier", 7, group="g")
    views = [view(rank, call=usual, calls_of_kind=6) for rank in (0, 1)]
    views[odd] = view(odd, call=unusual, calls_of_kind=1)
    diagnosis = diagnose_job(*views)
    assert (diagnosis.blamed, diagnosis.cause) == ((odd,), Cause.EXTRA_COLLECTIVE)


def test_a_stall_is_known_by_the_wait_that_began_first():
    first = waiting(2, world=3)
    later = view(0, world=3, call=dataclasses.replace(first.call, since_ns=first.call.since_ns + 1))
    diagnosis = diagnose_job(later, view(1, world=3), first)
    assert diagnosis.longest_wait == (2, first.call.since_ns)


def test_among_many_ranks_the_odd_one_is_blamed():
    odd = call("barrier", 4, group="the default group", group_number=9)
    views = [waiting(rank, world=4, calls=9) for rank in range(4)]
    views[2] = view(2, call=odd, world=4, calls=4)
    assert diagnose_job(*views).blamed == (2,)


def test_ranks_outside_the_group_are_not_late():
    group = call("all_reduce", 3, members=(0, 2), group="group 5", group_number=5)
    diagnosis = diagnose_job(
        waiting(0, call=group, world=3),
        view(1, world=3),
        view(2, world=3, phase=Phase.FORWARD),
        limit=30.0,
    )
    assert diagnosis.blamed == (2,)


def test_all_in_the_same_call_means_the_transport_or_another_host():
    here = diagnose_job(waiting(0), waiting(1))
    assert (here.blamed, here.cause) == ((), Cause.TRANSPORT)
    elsewhere = diagnose_job(waiting(0, world=4), waiting(1, world=4))
    assert elsewhere.cause is Cause.OTHER_HOST
    assert "2 on other hosts" in elsewhere.sentence


def test_loaders_that_all_wait_are_reported_though_nobody_waits_for_a_peer():
    diagnosis = diagnose_job(
        view(0, phase=Phase.LOADER, activity=Activity.INPUT), view(1, phase=Phase.LOADER)
    )
    assert (diagnosis.blamed, diagnosis.cause) == ((0, 1), Cause.LOADER)
    assert diagnosis.sentence.startswith(
        "ranks 0, 1 have been in the data loader for 33 s, waiting"
    )


def test_a_stall_is_the_same_as_long_as_one_rank_stays_in_its_wait():
    first, late = diagnose_job(waiting(0), view(1)), diagnose_job(waiting(0), view(1, seconds=60))
    other = diagnose_job(waiting(0, call=call(number=8, seconds=40)), view(1))
    assert late.same_stall(first)
    assert not other.same_stall(first)
    assert not first.same_stall(None)


def test_the_page_has_a_line_per_rank_and_ends_with_the_diagnosis():
    views = [waiting(0), view(1, activity=Activity.SLEEPING, line="train.py:3 in f: sleep(9)")]
    text = stall_page(diagnose(views, NOW, 30 * S), views, {}, NOW)
    lines = text.splitlines()
    assert lines[1].split() == ["rank", "pid", "state", "phase", "step", "since", "where"]
    assert lines[2].split()[:4] == ["0", "100", "waiting", "other"]
    assert lines[3].startswith(">    1")
    assert lines[-1].startswith("diagnosis: rank 1")


def test_the_table_shows_how_a_rank_ended():
    ended = dataclasses.replace(view(1, activity=Activity.ENDED), exitcode=-9)
    assert "killed by SIGKILL" in table([waiting(0), ended], NOW)
