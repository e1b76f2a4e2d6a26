"""Where the switch of simulated hosts sends a frame, and when; without sockets."""

from __future__ import annotations

import pytest

from paceline.bench.delayed_switch import DelayLine, ForwardingTable

A, B, C = (bytes([2, 0, 0, 0, 0, last]) for last in (1, 2, 3))
EVERYBODY = b"\xff" * 6
SOME = bytes([0x33, 0x33, 0, 0, 0, 1])  # a multicast address


def test_a_frame_for_an_unknown_host_goes_to_all_others():
    table = ForwardingTable(3)
    assert table.ports_for(1, receiver=A, sender=B) == (0, 2)


def test_a_frame_for_a_known_host_goes_to_it_alone():
    table = ForwardingTable(3)
    table.ports_for(2, receiver=EVERYBODY, sender=A)
    assert table.ports_for(0, receiver=A, sender=B) == (2,)
    assert table.ports_for(2, receiver=B, sender=A) == (0,)


@pytest.mark.parametrize("receiver", [EVERYBODY, SOME])
def test_a_frame_for_several_goes_to_all_others_also_when_its_address_was_a_sender(receiver):
    table = ForwardingTable(3)
    table.ports_for(0, receiver=B, sender=receiver)
    assert table.ports_for(1, receiver=receiver, sender=B) == (0, 2)


def test_a_host_that_moves_is_found_at_its_new_port():
    table = ForwardingTable(3)
    table.ports_for(0, receiver=EVERYBODY, sender=A)
    table.ports_for(2, receiver=EVERYBODY, sender=A)
    assert table.ports_for(1, receiver=A, sender=B) == (2,)


def test_a_frame_for_a_host_behind_its_own_port_goes_nowhere():
    table = ForwardingTable(2)
    table.ports_for(0, receiver=EVERYBODY, sender=A)
    assert table.ports_for(0, receiver=A, sender=C) == ()


def test_an_empty_line_has_nothing_due():
    line = DelayLine[str](100)
    assert line.due_ns is None
    assert list(line.take(10**9)) == []


def test_what_is_put_in_comes_out_after_the_delay_and_not_before():
    line = DelayLine[str](100)
    line.put("first", arrived_ns=1000)
    line.put("second", arrived_ns=1010)
    line.put("third", arrived_ns=1500)
    assert line.due_ns == 1100
    assert list(line.take(1099)) == []
    assert list(line.take(1100)) == ["first"]
    assert line.due_ns == 1110
    assert list(line.take(1599)) == ["second"]
    assert list(line.take(5000)) == ["third"]
    assert line.due_ns is None


def test_order_is_kept_when_the_clock_of_arrivals_is_set_back():
    line = DelayLine[str](100)
    line.put("first", arrived_ns=1000)
    line.put("second", arrived_ns=400)
    assert list(line.take(1099)) == []
    assert list(line.take(1100)) == ["first", "second"]


def test_a_line_without_a_delay_is_due_at_once():
    line = DelayLine[str](0)
    line.put("frame", arrived_ns=1000)
    assert list(line.take(1000)) == ["frame"]
