"""Simulated hosts whose packets take a while: what arrives, when at the earliest, and what a cut
does. Hosts are network namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline._linux import descendants, is_running
from tests.harness import run_ranks
from tests.harness.hosts import enter, simulated_hosts
from tests.harness.launched import wait_for_files

pytestmark = pytest.mark.netns

DELAY, DELAY_S = "3ms", 0.003


def connect(rank, hosts, folder):
    """A TCP connection between two ranks, each on a host of its own."""
    import socket

    enter(hosts[rank])
    port = folder / "port"
    if rank == 1:
        with socket.create_server(("10.77.0.2", 0)) as server:
            port.write_text(str(server.getsockname()[1]))
            server.settimeout(30)
            connection = server.accept()[0]
    else:
        wait_for_files(port, timeout=30)
        connection = socket.create_connection(("10.77.0.2", int(port.read_text())), timeout=30)
    connection.settimeout(30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def test_an_answer_takes_the_delay_twice(tmp_path):
    def shortest_round_trip(rank, world, hosts, folder):
        times = []
        with connect(rank, hosts, folder) as connection:
            for _ in range(20):
                start = time.monotonic()
                if rank == 0:
                    connection.sendall(b"?")
                assert connection.recv(1)
                if rank == 1:
                    connection.sendall(b"!")
                times.append(time.monotonic() - start)
        return min(times)

    with simulated_hosts(2, delay=DELAY) as hosts:
        assert run_ranks(2, shortest_round_trip, hosts, tmp_path)[0] >= 2 * DELAY_S


def test_long_packets_arrive_as_they_were_sent_both_ways_at_once(tmp_path):
    def digests(rank, world, hosts, folder):
        import hashlib
        import random
        import threading

        data = random.Random(rank).randbytes(16 << 20)
        received = bytearray()
        with connect(rank, hosts, folder) as connection:
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            while len(received) < len(data):
                piece = connection.recv(1 << 20)
                assert piece
                received += piece
            sending.join()
        return hashlib.sha256(data).hexdigest(), hashlib.sha256(received).hexdigest()

    with simulated_hosts(2, delay=DELAY) as hosts:
        (sent, received), (other_sent, other_received) = run_ranks(2, digests, hosts, tmp_path)
    assert sent == other_received
    assert other_sent == received


@pytest.mark.parametrize("delay", [None, DELAY])
def test_a_host_that_is_cut_off_hears_nobody_until_that_is_mended(delay):
    def check(rank, world, hosts):
        import itertools
        import socket

        numbers = itertools.count()
        pairs = list(itertools.permutations(range(3), 2))
        sockets = []
        for index, host in enumerate(hosts):
            enter(host)
            sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sockets[-1].bind((f"10.77.0.{index + 1}", 0))
            sockets[-1].settimeout(0.05)

        def arrives(sender, receiver, attempts):
            """Whether one of some datagrams is received; older ones do not count."""
            datagram = b"%d" % next(numbers)
            for _ in range(attempts):
                sockets[sender].sendto(datagram, sockets[receiver].getsockname())
                try:
                    while sockets[receiver].recv(16) != datagram:
                        pass
                    return True
                except TimeoutError:
                    pass
            return False

        def that_hear(attempts=200):
            return [pair for pair in pairs if arrives(*pair, attempts)]

        assert that_hear() == pairs
        hosts.cut(1)
        assert that_hear(attempts=4) == [(0, 2), (2, 0)]
        hosts.mend(1)
        assert that_hear() == pairs
        for each in sockets:
            each.close()

    with simulated_hosts(3, delay=delay) as hosts:
        run_ranks(1, check, hosts)


def wait_until_gone(pids):
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_no_process_remains():
    before = set(descendants(os.getpid()))
    with simulated_hosts(2, delay=DELAY):
        made = set(descendants(os.getpid())) - before
        assert len(made) == 4  # two hosts, and a switch that is one to hold and one to pass packets
    assert not any(is_running(pid) for pid in made)


def test_no_process_remains_when_the_one_that_made_them_is_killed():
    with simulated_hosts(2):
        pass  # or a skip
    program = (
        "import sys\n"
        "from paceline.bench.simulated_hosts import simulated_hosts\n"
        "with simulated_hosts(2, delay='3ms'):\n"
        "    print('made', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as maker:
        assert maker.stdout.readline() == b"made\n"
        made = descendants(maker.pid)
        assert len(made) == 4
        maker.send_signal(signal.SIGKILL)
    wait_until_gone(made)
