"""The connection between hosts of an elastic job: messages, leases, and where hosts meet."""

from __future__ import annotations

import contextlib
import selectors
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.host_link import MARGIN, HostLink, Lease, connect, listen, parse_endpoint
from paceline.launch.membership import Host
from paceline.launch.remote_hosts import RemoteHosts


def pair():
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture
def links():
    ours, theirs = map(HostLink, pair())
    yield ours, theirs
    ours.close()
    theirs.close()


def receive(link, count):
    """As many messages, which may take a moment."""
    found = []
    while len(found) < count:
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            assert selector.select(10.0)
        found += link.receive()
    return found


def test_messages_arrive_in_order_and_whole(links):
    ours, theirs = links
    ours.send("seat", slot=3, member=7)
    ours.send("say", text="a line\nand another \N{SNOWMAN}")
    assert receive(theirs, 2) == [
        {"is": "seat", "slot": 3, "member": 7},
        {"is": "say", "text": "a line\nand another \N{SNOWMAN}"},
    ]
    assert theirs.receive() == []
    assert theirs.is_open


def test_what_the_network_does_not_take_is_sent_later(links):
    ours, theirs = links
    for number in range(200):
        ours.send("say", text="x" * 10_000, number=number)
    found = []
    while len(found) < 200:
        found += theirs.receive()
        ours.flush()
    assert [message["number"] for message in found] == list(range(200))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"[1, 2]\n", b"{}\n", b"x" * (2 << 20)])
def test_another_program_at_the_port_is_no_host(data):
    ours, theirs = pair()
    with theirs:
        link = HostLink(ours)
        theirs.setblocking(False)
        while link.is_open:
            with contextlib.suppress(BlockingIOError):
                data = data[theirs.send(data) :]
            assert link.receive() == []
        link.close()


def test_the_end_of_a_connection_is_noticed_on_both_sides(links):
    ours, theirs = links
    ours.send("over")
    ours.close()
    assert receive(theirs, 1) == [{"is": "over"}]
    while theirs.is_open:
        theirs.receive()
    theirs.send("ping")  # nobody reads it


def test_a_lease_counts_from_the_ping_that_was_answered():
    lease = Lease(5.0, now=100.0)
    first, second = lease.ping(101.0), lease.ping(102.0)
    assert lease.ends_at == 105.0
    lease.answered(second)
    assert lease.ends_at == 107.0
    lease.answered(first)  # overtaken
    lease.answered(99)
    assert lease.ends_at == 107.0


@given(
    st.floats(0.5, 10.0),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.booleans()), max_size=20),
)
def test_a_host_is_never_taken_for_lost_while_it_has_a_lease(length_s, pings):
    """Whatever messages are delayed or dropped: when the first host has waited for so long since a
    ping came, the lease that its answer could have given is over.
    """
    now = 0.0
    lease, heard_at = Lease(length_s, now), now
    for pause_s, delay_s, is_answered in pings:
        now += pause_s
        number = lease.ping(now)
        heard_at = max(heard_at, now + delay_s)
        if is_answered:  # at any later time
            lease.answered(number)
        assert lease.ends_at < lease.ranks_end_at < heard_at + length_s * MARGIN


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        ("node1:1234", ("node1", 1234)),
        ("node1", ("node1", 29400)),
        ("[::1]:1234", ("::1", 1234)),
        ("[::1]", ("::1", 29400)),
    ],
)
def test_endpoints(endpoint, parsed):
    assert parse_endpoint(endpoint) == parsed


def test_the_first_host_is_the_one_that_has_the_address():
    assert listen("192.0.2.1:29400") is None  # an address for documentation: nobody has it
    with listen("localhost:0") as listener:
        port = listener.getsockname()[1]
        link = connect(f"localhost:{port}", 10.0)
        link.send("hello")
        hosts = RemoteHosts(listener, 5.0)
        with selectors.DefaultSelector() as selector:
            hosts.watch(selector)
            selector.select(10.0)
            hosts.accept()
            selector.select(10.0)
            ((arrival, message),) = hosts.introductions(0.0)
            assert message == {"is": "hello"}
            hosts.refuse(arrival, "no")
        link.close()


def test_hosts_get_the_first_slots_in_a_row_that_are_free():
    ours, theirs = pair()
    with theirs:
        hosts = RemoteHosts(None, 5.0)
        assert hosts.free_slots(2, range(2), 8) == range(2, 4)
        arrival = type("Arrival", (), {"link": HostLink(ours)})
        hosts.admit(Host(1, range(4, 6)), arrival, 0.0)
        assert hosts.free_slots(2, range(2), 8) == range(2, 4)
        assert hosts.free_slots(3, range(2), 9) == range(6, 9)
        assert hosts.free_slots(3, range(2), 8) is None
        hosts.close()
