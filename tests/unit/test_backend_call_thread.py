"""Calls that run in a thread of their own, and are given up when it is known that they are in
vain.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time

import pytest

from paceline.backend.call_thread import CallThread, GivingUp
from paceline.errors import GroupAborted, PeerLost


class Broken:
    """A group that may be broken; its calls wait until they are ended."""

    def __init__(self):
        self.is_broken, self.ended = threading.Event(), threading.Event()
        self.calls = CallThread("test", GivingUp(self.why_give_up, self.ended.set))

    def why_give_up(self):
        return GroupAborted("the ranks have changed") if self.is_broken.is_set() else None

    def wait_forever(self):
        assert self.ended.wait(30)
        raise RuntimeError("connection closed")


@pytest.fixture
def group():
    group = Broken()
    yield group
    group.ended.set()
    group.calls.close()


def test_a_call_is_waited_for_while_the_group_is_whole(group):
    ticket = group.calls.start(group.wait_forever)
    assert not ticket.wait(timeout_ns=50_000_000)
    assert not ticket.done()
    group.ended.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        ticket.wait()


def test_a_call_of_a_broken_group_is_made_to_end(group):
    ticket = group.calls.start(group.wait_forever)
    threading.Timer(0.1, group.is_broken.set).start()
    with pytest.raises(GroupAborted, match="have changed"):
        ticket.wait()
    assert ticket.done()


def test_what_is_under_way_when_the_group_breaks_still_counts(group):
    group.is_broken.set()
    ticket = group.calls.start(lambda: time.sleep(0.04))
    assert ticket.wait()
    assert not group.ended.is_set()


def test_a_call_that_cannot_be_ended_is_left_behind():
    stuck, is_lost = threading.Event(), threading.Event()
    error = PeerLost("the connection was lost in the middle of a message")
    giving_up = GivingUp(lambda: error if is_lost.is_set() else None, lambda: None)
    calls = CallThread("test", giving_up)
    ticket = calls.start(lambda: stuck.wait(30))
    is_lost.set()
    with pytest.raises(PeerLost, match="middle of a message"):
        ticket.wait()
    calls.close()  # waits for nobody
    assert not ticket.done()
    stuck.set()
    assert ticket.has_ended(30)


def test_all_who_wait_for_a_call_at_once_learn_how_it_ended():
    """None of them is in the way of another one that looks at the same moment."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def fail():
        raise RuntimeError("connection closed")

    def wait_often():
        for _ in range(2_000):
            with pytest.raises(RuntimeError, match="connection closed"):
                ticket.wait()
            assert ticket.done()
            assert ticket.has_ended(0)

    calls = CallThread("test", GivingUp(lambda: None, lambda: None))
    try:
        ticket = calls.start(fail)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for waiting in [pool.submit(wait_often) for _ in range(4)]:
                waiting.result()
    finally:
        sys.setswitchinterval(usual)
        calls.close()
