"""Several hosts on one machine: network and IPC namespaces, connected by a bridge of their own.

A simulated host is a process that holds a fresh network and a fresh IPC namespace; ranks enter
them. Everything is gone when these processes end: nothing has a name, nothing is configured outside
of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from paceline.errors import ConfigError, PacelineError

__all__ = ["SimulatedHosts", "enter", "hosts_and_ranks", "simulated_hosts", "why_not"]

_INTERFACE = "eth0"
# Packets for this address are taken by nobody.
_NOWHERE = ("lladdr", "02:00:00:00:00:01", "dev", _INTERFACE, "nud", "permanent")
_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000


def hosts_and_ranks(text: str | None) -> tuple[int, int]:
    """(hosts, ranks per host) of "2x2", for `--hosts`; zeros if all ranks are on this host."""
    if text is None:
        return 0, 0
    hosts, _, ranks = text.partition("x")
    if not (hosts.isdigit() and ranks.isdigit() and int(hosts) > 1 and int(ranks) > 0):
        raise ConfigError(
            f"--hosts {text}: give hosts x ranks per host, at least two hosts, for example 2x2"
        )
    return int(hosts), int(ranks)


def why_not() -> str | None:
    """Why hosts cannot be simulated here, or None."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    attempt = ["unshare", "--net", "--ipc", "true"]
    if subprocess.run(attempt, capture_output=True, check=False).returncode != 0:
        return "may not create network namespaces here (needs root)"
    return None


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


class SimulatedHosts(list[int]):
    """A pid for each host, to `enter` it by."""

    def __init__(self, hosts: Iterable[int], switch: int) -> None:
        super().__init__(hosts)
        self._switch = switch

    def cut(self, index: int) -> None:
        """Drop all packets from and to a host, from now on. Nobody is told."""
        _inside(self._switch, "ip", "link", "set", f"port{index}", "nomaster")

    def cut_between(self, *pair: int) -> None:
        """Drop all packets between two hosts, from now on. Nobody is told."""
        for index, other in (pair, pair[::-1]):
            _inside(self[index], "ip", "neigh", "replace", _address(other), *_NOWHERE)

    def mend_between(self, *pair: int) -> None:
        """Undo `cut_between`."""
        for index, other in (pair, pair[::-1]):
            _inside(self[index], "ip", "neigh", "del", _address(other), "dev", _INTERFACE)

    def mend(self, index: int) -> None:
        """Undo `cut`."""
        _inside(self._switch, "ip", "link", "set", f"port{index}", "master", "bridge")


@contextlib.contextmanager
def simulated_hosts(
    count: int, link: str | None = None, delay: str | None = None
) -> Iterator[SimulatedHosts]:
    """`count` hosts on one switch, each on a link of rate `link` ("1gbit") that takes `delay`
    ("2ms") each way; yields one pid for each host, to `enter` it by.
    """
    if reason := why_not():
        raise PacelineError(f"cannot simulate hosts: {reason}")
    with contextlib.ExitStack() as stack:
        switch, *hosts = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(switch, "ip", "link", "set", "bridge", "up")
        for index, host in enumerate(hosts):
            port = f"port{index}"
            cable = f"type veth peer name {_INTERFACE} netns {host}".split()
            _inside(switch, "ip", "link", "add", port, *cable)
            _inside(switch, "ip", "link", "set", port, "master", "bridge", "up")
            _inside(host, "ip", "addr", "add", f"{_address(index)}/24", "dev", _INTERFACE)
            _inside(host, "ip", "link", "set", _INTERFACE, "up")
            _inside(host, "ip", "link", "set", "lo", "up")
            if link is not None:
                shape = [
                    "root",
                    "handle",
                    "1:",
                    "tbf",
                    "rate",
                    link,
                    "burst",
                    "256k",
                    "latency",
                    "100ms",
                ]
                # What the host sends, and what it receives.
                for pid, device in ((host, _INTERFACE), (switch, port)):
                    _inside(pid, "tc", "qdisc", "add", "dev", device, *shape)
            if delay is not None:
                place = ["parent", "1:1"] if link is not None else ["root"]
                wait = ["netem", "delay", delay, "limit", "100000"]
                _inside(host, "tc", "qdisc", "add", "dev", _INTERFACE, *place, *wait)
        yield SimulatedHosts(hosts, switch)


def enter(host: int) -> None:
    """Move this process to a simulated host."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", _CLONE_NEWNET), ("ipc", _CLONE_NEWIPC)):
        descriptor = os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY)
        if libc.setns(descriptor, kind) != 0:
            raise OSError(
                ctypes.get_errno(), f"cannot enter the {name} namespace of process {host}"
            )
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """The pid of a process that only holds its namespaces, until its input is closed."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--ipc", "sh", "-c", "echo ready; read _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"ready\n"
        yield holder.pid
    finally:
        holder.communicate()


def _inside(pid: int, *command: str) -> None:
    entered = ["nsenter", "--target", str(pid), "--net", *command]
    ended = subprocess.run(entered, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        raise PacelineError(
            f"cannot simulate hosts: `{' '.join(command)}` failed: {ended.stderr.strip()} (a delay "
            "needs the kernel's sch_netem, a rate its sch_tbf)"
        )
