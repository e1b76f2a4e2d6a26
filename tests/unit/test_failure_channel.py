"""Which errors are published to the peers, and that hooks of others are left as they were."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import failure_channel


class Channel:
    """Remembers what was published."""

    def __init__(self):
        self.published = []
        self.waits = 0
        self.peer = None

    def publish(self, text, *, leaving):
        self.published.append((text, leaving))

    def lost_peer(self):
        return self.peer

    def wait_for_readers(self):
        self.waits += 1


@pytest.fixture
def called(monkeypatch):
    """The hooks there are before ours, and what they were called with."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    monkeypatch.setattr(threading, "excepthook", seen.append)
    return seen


@pytest.fixture
def channel(called):
    """A channel that is kept, as a group's is."""
    before = sys.excepthook, threading.excepthook
    channel = Channel()
    failure_channel.register_channel(channel)
    yield channel
    failure_channel.unregister_channel(channel)
    assert (sys.excepthook, threading.excepthook) == before


@pytest.fixture
def at_top(monkeypatch):
    """As if the interpreter itself called the hook."""
    monkeypatch.setattr(failure_channel, "_is_end_of_program", lambda: True)


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return type(caught), caught, caught.__traceback__


def test_an_uncaught_error_is_published_then_printed(channel, called, at_top):
    info = raised(ValueError("the needle"))
    sys.excepthook(*info)
    ((text, leaving),) = channel.published
    assert leaving
    assert "ValueError: the needle" in text
    assert "in raised" in text
    assert called == [info]
    assert channel.waits == 1


def test_an_error_is_published_once(channel, at_top):
    info = raised(ValueError("the needle"))
    failure_channel.publish_error(info[1])
    sys.excepthook(*info)
    assert len(channel.published) == 1


@pytest.mark.parametrize("code", [None, 0])
def test_a_successful_exit_is_not_published(channel, code):
    failure_channel.publish_error(SystemExit(code))
    assert channel.published == []


def test_a_failed_exit_is_published(channel):
    failure_channel.publish_error(SystemExit(3))
    assert "SystemExit: 3" in channel.published[0][0]


def test_a_program_that_calls_the_hook_itself_goes_on(channel, called):
    sys.excepthook(*raised(ValueError("logged")))
    assert [leaving for _, leaving in channel.published] == [False]
    assert channel.waits == 0
    assert len(called) == 1


def test_an_error_at_a_prompt_does_not_end_the_session(channel, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not failure_channel._is_end_of_program()


def test_a_thread_that_dies_does_not_end_the_rank(channel, called):
    def work():
        raise ValueError("the needle")

    thread = threading.Thread(target=work, name="prefetch")
    thread.start()
    thread.join()
    ((text, leaving),) = channel.published
    assert not leaving
    assert text.startswith("thread prefetch died with an error")
    assert "ValueError: the needle" in text
    assert len(called) == 1


def test_a_channel_that_fails_hides_nothing(channel, called, at_top, monkeypatch):
    monkeypatch.setattr(channel, "publish", lambda *_, **__: 1 / 0)
    sys.excepthook(*raised(ValueError("the needle")))
    assert "the needle" in str(called[0][1])


def test_a_lost_connection_is_explained_by_the_error_of_the_peer(channel, at_top):
    channel.peer = failure_channel.peer_failed(1, 77, "ValueError: the needle\n", "meanwhile")
    error = RuntimeError("Connection closed by peer")
    sys.excepthook(*raised(error))
    assert "rank 1 (pid 77) failed" in error.__notes__[0]
    assert "the needle" in error.__notes__[0]
    assert error.__notes__[0].endswith("correct that error, then start all ranks again")


def test_hooks_put_over_ours_stay(called):
    first = Channel()
    failure_channel.register_channel(first)
    ours = sys.excepthook

    def theirs(*args):  # as torch.distributed does
        ours(*args)

    sys.excepthook = theirs
    failure_channel.unregister_channel(first)
    assert sys.excepthook is theirs
    theirs(*raised(ValueError("passed on")))
    assert len(called) == 1
    assert first.published == []
    sys.excepthook = ours  # and a later group takes them over
    second = Channel()
    failure_channel.register_channel(second)
    assert sys.excepthook == ours
    failure_channel.unregister_channel(second)
    assert len(called) == 1
    assert sys.excepthook != ours


def test_the_error_that_passes_while_a_group_is_left():
    assert failure_channel.error_in_flight() == ""
    try:
        raise ValueError("the needle")
    except ValueError:
        assert "ValueError: the needle" in failure_channel.error_in_flight()


def test_an_error_that_cannot_be_printed():
    class Rude(Exception):
        def __str__(self):
            raise TypeError("no")

    assert "Rude" in failure_channel.format_error(Rude())


@given(st.text(max_size=3000), st.integers(64, 2000))
def test_long_texts_keep_their_end(text, limit):
    short = failure_channel.truncate(text, limit)
    whole = text.encode(errors="replace")
    assert len(short) <= limit
    assert short == whole or (
        whole.startswith(short[: limit // 4]) and whole.endswith(short[-limit // 2 :])
    )
