"""What happens to a group on several hosts when one of them is killed, cut off or slow. Hosts are
network namespaces.
"""

from __future__ import annotations

import pytest

from tests.harness import init_group, run_ranks
from tests.harness.hosts import enter, simulated_hosts

pytestmark = pytest.mark.netns

LENGTHS = (3, 2_000_000)  # short, on the caller's thread; long, on the group's


@pytest.mark.parametrize("length", LENGTHS)
def test_a_killed_host_ends_the_waits_of_the_others(length):
    def check(rank, world, hosts):
        import os
        import signal
        import time

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        enter(hosts[rank // 2])
        init_group("paceline")
        dist.all_reduce(torch.ones(length))
        if rank >= 2:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(GroupError):
            dist.all_reduce(torch.ones(length))
        noticed = time.monotonic()
        with pytest.raises(GroupError):  # and at once from then on
            dist.all_reduce(torch.ones(length))
        return time.monotonic() - noticed

    with simulated_hosts(2) as hosts:
        outcomes = run_ranks(4, check, hosts, check=False, timeout=60)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False, False]
    assert all(outcome.value < 5 for outcome in outcomes[:2])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_killed_host_ends_every_kind_of_call(length):
    """The host dies while the others wait for its first message, in a call of each kind."""

    def check(rank, world, hosts, kind):
        import os
        import signal
        import time

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        def parts():
            return [torch.ones(length) for _ in range(world)]

        def call():
            if kind == "all_to_all":
                dist.all_to_all(parts(), parts())
            elif kind == "gather":
                dist.gather(torch.ones(length), parts() if rank == 0 else None, 0)
            elif kind == "scatter":
                dist.scatter(torch.ones(length), parts() if rank == 3 else None, 3)
            elif kind == "reduce":
                dist.reduce(torch.ones(length), 0)
            elif kind == "broadcast":
                dist.broadcast(torch.ones(length), 3)
            else:
                dist.reduce_scatter(torch.ones(length), parts())

        enter(hosts[rank // 2])
        init_group("paceline")
        call()
        dist.barrier()
        if rank >= 2:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(GroupError):
                call()

    with simulated_hosts(2) as hosts:
        for kind in ("all_to_all", "gather", "scatter", "reduce", "broadcast", "reduce_scatter"):
            outcomes = run_ranks(4, check, hosts, kind, check=False, timeout=60)
            assert [outcome.error is None for outcome in outcomes] == [True, True, False, False], (
                kind,
                [outcome.error for outcome in outcomes],
            )


def test_a_host_killed_while_tensors_are_on_their_way_ends_the_calls_of_the_others():
    """One call after the other, until the host dies in the middle of a message: of that Gloo says
    nothing to those who wait for its end, or for the end of what they send.
    """

    def check(rank, world, hosts, kind, root):
        import os
        import signal
        import threading

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        enter(hosts[rank // 2])
        init_group("paceline")
        data = torch.ones(2_000_000)
        parts = [torch.ones(2_000_000) for _ in range(world)]
        received = [torch.zeros(2_000_000) for _ in range(world)]
        calls = {
            "broadcast": lambda: dist.broadcast(data, root),
            "scatter": lambda: dist.scatter(data, parts if rank == root else None, root),
            "gather": lambda: dist.gather(data, received if rank == root else None, root),
            "all_to_all": lambda: dist.all_to_all(received, parts),
            "all_reduce": lambda: dist.all_reduce(data),
            "all_gather": lambda: dist.all_gather(received, data),
        }

        def repeat():
            while True:
                calls[kind]()

        calls[kind]()
        if rank >= 2:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(GroupError):
            repeat()

    with simulated_hosts(2) as hosts:
        for kind, root in (
            ("broadcast", 0),
            ("broadcast", 3),
            ("scatter", 1),
            ("scatter", 2),
            ("gather", 1),
            ("all_to_all", 0),
            *[("all_reduce", 0)] * 4,
            ("all_gather", 0),
        ):
            outcomes = run_ranks(4, check, hosts, kind, root, check=False, timeout=60)
            assert [outcome.error is None for outcome in outcomes[:2]] == [True, True], (
                kind,
                root,
                [outcome.error for outcome in outcomes],
            )


def test_a_host_killed_in_the_middle_of_a_short_message_ends_the_call_of_the_other():
    """Its message has begun to arrive when the other rank comes to wait for it. What it had not
    given to its kernel, usually a part of that, never comes.
    """

    def check(rank, world, hosts):
        import os
        import pathlib
        import signal
        import threading
        import time

        import torch
        import torch.distributed as dist

        from paceline import PeerLost

        enter(hosts[rank])
        pathlib.Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 8192 8192")
        init_group("paceline")
        data = torch.ones(32_000)
        dist.all_reduce(data)
        dist.all_reduce(data[:15_000])
        # Of what the link lets through at once there is less left than the next one takes.
        if rank == 1:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            time.sleep(0.5)

        def repeat():
            while True:
                dist.all_reduce(data)

        began = time.monotonic()
        with pytest.raises(PeerLost):
            repeat()
        return time.monotonic() - began

    with simulated_hosts(2, link="200kbit") as hosts:
        outcomes = run_ranks(2, check, hosts, check=False, timeout=60)
    assert [outcome.error is None for outcome in outcomes] == [True, False], outcomes[0].error
    assert outcomes[0].value < 20  # the rest of what its kernel had takes a while


@pytest.mark.parametrize("length", LENGTHS)
def test_a_cut_link_ends_calls_at_their_time_limit(length):
    def check(rank, world, hosts):
        import subprocess
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from paceline import CollectiveTimeout, GroupError

        enter(hosts[rank // 2])
        init_group("paceline", timeout=timedelta(seconds=4))
        dist.all_reduce(torch.ones(length))
        dist.barrier()
        if rank == 3:
            time.sleep(0.5)  # the others have what the barrier sent them
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        time.sleep(1.0)
        start = time.monotonic()
        with pytest.raises(GroupError) as raised:
            dist.all_reduce(torch.ones(length))
        elapsed = time.monotonic() - start
        dist.group.WORLD.abort()  # nobody is left to say goodbye to
        return elapsed, isinstance(raised.value, CollectiveTimeout)

    with simulated_hosts(2) as hosts:
        outcomes = run_ranks(4, check, hosts, timeout=90)
    assert all(elapsed < 30 for elapsed, _ in outcomes), outcomes
    assert any(is_timeout for _, is_timeout in outcomes), outcomes


@pytest.mark.parametrize("length", LENGTHS)
def test_ctrl_c_ends_a_wait_for_a_host_that_is_cut_off(length, tmp_path):
    def check(rank, world, hosts, is_cut):
        import os
        import signal
        import subprocess
        import threading
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from paceline import GroupError

        enter(hosts[rank])
        init_group("paceline", timeout=timedelta(seconds=60))
        dist.all_reduce(torch.ones(length))
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)  # the others have what the barrier sent them
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            is_cut.touch()
        while not is_cut.exists():
            time.sleep(0.01)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        timer.start()
        with pytest.raises((KeyboardInterrupt, GroupError)):
            dist.all_reduce(torch.ones(length))
        timer.join()
        return time.monotonic() - start

    with simulated_hosts(2) as hosts:
        elapsed = run_ranks(2, check, hosts, tmp_path / "cut", timeout=90)
    assert all(seconds < 20 for seconds in elapsed)


def test_a_slow_host_is_waited_for():
    def check(rank, world, hosts):
        import time

        import torch
        import torch.distributed as dist

        enter(hosts[rank // 2])
        init_group("paceline")
        for length in (*LENGTHS, *LENGTHS):
            if rank >= 2:
                time.sleep(0.3)
            data = torch.ones(length)
            dist.all_reduce(data)
            assert torch.equal(data, torch.full((length,), float(world)))
        dist.destroy_process_group()

    with simulated_hosts(2) as hosts:
        run_ranks(4, check, hosts, timeout=60)


@pytest.mark.parametrize("interface", [None, "lo", "eth7"])
def test_hosts_that_do_not_reach_each_other_are_told_which_variable_to_set(interface):
    def check(rank, world, hosts):
        import os
        import socket
        from datetime import timedelta

        from paceline import GroupError

        enter(hosts[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = interface or ""
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
            if not socket.gethostbyname(socket.gethostname()).startswith("127."):
                return  # another address that both namespaces lack
        with pytest.raises(GroupError, match=r"Set GLOO_SOCKET_IFNAME on every host.*eth0"):
            init_group("paceline", timeout=timedelta(seconds=1))

    with simulated_hosts(2) as hosts:
        run_ranks(2, check, hosts, timeout=60)
