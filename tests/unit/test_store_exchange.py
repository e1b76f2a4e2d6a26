"""One exchange through a store: all ranks get every value, or all learn who is missing or lost.

Ranks are threads over one store here; as processes they are tested by everything that makes groups.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from paceline.core.store_exchange import (
    AbandonableStore,
    exchange,
    format_ranks,
    wait_for_peer,
)
from paceline.errors import CollectiveTimeout, GroupAborted, PeerLost

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.5)


def on_threads(ranks, work):
    """What `work(rank)` returned or raised on each rank."""

    def run(rank):
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


@pytest.fixture
def ended_pid():
    """A process that has ended and was not waited for, as a peer's looks from outside."""
    child = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"])
    time.sleep(0.3)
    yield child.pid
    child.wait()


@pytest.mark.parametrize("ranks", [[0, 1, 2], [3, 5], [4]])
def test_every_rank_gets_every_value(ranks):
    store = HashStore()
    values = {rank: f"line one\nof rank {rank}" for rank in ranks}
    got = on_threads(ranks, lambda rank: exchange(store, "t", rank, ranks, values[rank], LONG))
    assert got == dict.fromkeys(ranks, values)


def test_all_that_came_name_the_missing_ones():
    store = HashStore()
    errors = on_threads([0, 2], lambda rank: exchange(store, "t", rank, range(4), "", SHORT))
    for rank, error in errors.items():
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == (1, 3)
        assert f"rank {rank}: ranks 1, 3 of 4 did not join" in str(error)


def test_the_collector_stays_until_the_others_know_of_a_failure():
    """It may serve the store, which ends with it."""
    store, known_when_left = HashStore(), []

    class SlowToRead:
        """Looks a second late."""

        set, get = store.set, store.get

        def check(self, keys):
            time.sleep(1.0 if keys == ["topic/outcome"] else 0.0)
            return store.check(keys)

    def work(rank):
        try:
            exchange(SlowToRead() if rank else store, "topic", rank, (0, 1, 2), "", SHORT)
        finally:
            if rank == 0:
                known_when_left.append(store.check(["topic/1/read"]))

    errors = on_threads([0, 1], work)
    assert all(isinstance(error, CollectiveTimeout) for error in errors.values())
    assert [error.missing for error in errors.values()] == [(2,), (2,)]
    assert known_when_left == [True]


def test_a_missing_collector_is_named_by_the_others():
    error = on_threads([1], lambda rank: exchange(HashStore(), "t", rank, range(2), "", SHORT))[1]
    assert isinstance(error, CollectiveTimeout)
    assert error.missing == (0,)


def test_the_caller_words_the_error():
    with pytest.raises(CollectiveTimeout, match=r"nobody called \[1\]"):
        exchange(
            HashStore(),
            "t",
            0,
            range(2),
            "",
            SHORT,
            describe_missing=lambda missing: f"nobody called {missing}",
        )


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_peer_that_ended_is_noticed_by_its_pid_long_before_the_time_limit(ended_pid, victim):
    """It published its value, which holds its pid, and ended before the last rank came."""
    store = HashStore()
    store.set(f"t/{victim}", str(ended_pid))
    alive = [rank for rank in (0, 1, 2) if rank != victim]
    began = time.monotonic()
    errors = on_threads(
        alive, lambda rank: exchange(store, "t", rank, range(4), "1", LONG, pid_in=int)
    )
    assert time.monotonic() - began < 10
    for error in errors.values():
        assert isinstance(error, PeerLost)
        assert (error.rank, error.pid, error.exitcode) == (victim, ended_pid, 3)


def test_a_lost_store_is_a_lost_peer():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer\nmore")

    with pytest.raises(PeerLost, match=r"lost the store .* \(Connection reset by peer\)"):
        exchange(Gone(), "t", 1, range(2), "", LONG)


def test_waiting_for_what_one_peer_publishes(ended_pid):
    store = HashStore()
    store.set("here", "it")
    assert wait_for_peer(store, "here", 1, 0, LONG, {0: ended_pid}, "the memory") == "it"
    with pytest.raises(PeerLost, match=rf"rank 0 \(pid {ended_pid}\)"):
        wait_for_peer(store, "not here", 1, 0, LONG, {0: ended_pid}, "the memory")
    with pytest.raises(CollectiveTimeout, match=r"rank 1 waited 0\.5 s for the memory"):
        wait_for_peer(store, "not here", 1, 0, SHORT, {}, "the memory")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 2], "ranks 1, 2"), (range(20), "ranks 0, .*, 15 and 4 more")],
)
def test_lists_of_ranks(ranks, text):
    assert re.fullmatch(text, format_ranks(list(ranks)))


def test_nobody_waits_any_longer_for_ranks_of_an_obsolete_group():
    is_obsolete = threading.Event()
    store = AbandonableStore(HashStore(), is_obsolete.is_set)
    threading.Timer(0.1, is_obsolete.set).start()
    began = time.monotonic()
    with pytest.raises(GroupAborted, match="have changed before it was complete"):
        exchange(store, "topic", 0, [0, 1], "value", LONG, prompt=True)
    with pytest.raises(GroupAborted):
        wait_for_peer(store, "key", 0, 1, LONG, {}, "a key")
    assert time.monotonic() - began < LONG.total_seconds() / 2


def test_a_group_that_is_of_use_is_met_as_through_any_other_store():
    inner = HashStore()

    def meet(rank):
        store = AbandonableStore(inner, lambda: False)
        return exchange(store, "topic", rank, [0, 1], str(rank), LONG, prompt=True)

    assert on_threads([0, 1], meet) == {rank: {0: "0", 1: "1"} for rank in (0, 1)}
