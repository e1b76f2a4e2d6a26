"""Several hosts on one machine: network and IPC namespaces, connected by a switch of their own.

A simulated host is a process that holds a fresh network and a fresh IPC namespace; ranks enter
them. Everything is gone when these processes end: nothing has a name, nothing is configured outside
of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from decimal import Decimal

from paceline.errors import ConfigError, PacelineError

__all__ = [
    "SimulatedHosts",
    "add_host_arguments",
    "delay_ns",
    "enter",
    "hosts_and_ranks",
    "hosts_of_options",
    "simulated_hosts",
    "why_not",
]

_INTERFACE = "eth0"
# Packets for this address are taken by nobody.
_NOWHERE = ("lladdr", "02:00:00:00:00:01", "dev", _INTERFACE, "nud", "permanent")
_NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}
_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """`--hosts`, `--link` and `--delay`."""
    parser.add_argument(
        "--hosts",
        metavar="HxR",
        help="simulate H hosts of R ranks with network namespaces (needs root), e.g. 2x2",
    )
    parser.add_argument(
        "--link", metavar="RATE", help="with --hosts: the rate of each host's link, e.g. 1gbit"
    )
    parser.add_argument(
        "--delay",
        metavar="TIME",
        help="with --hosts: what a packet takes from host to host, one way, in us, ms or s, "
        "e.g. 2ms: an answer is there after 4",
    )


def hosts_of_options(options: argparse.Namespace) -> tuple[int, int]:
    """(hosts, ranks per host); zeros if all ranks are on this host."""
    if not options.hosts and (options.link or options.delay):
        raise ConfigError("--link and --delay are of simulated hosts: add --hosts 2x2, for example")
    return hosts_and_ranks(options.hosts)


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


def delay_ns(text: str) -> int:
    """Nanoseconds of "2ms", for `--delay`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text)
    if found is None:
        raise ConfigError(f"--delay {text}: give a number with us, ms or s, for example 2ms")
    number, unit = found.groups()
    return round(Decimal(number) * _NANOSECONDS[unit])


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
    """A pid for each host, to `enter` it by. `bridge`: the pid that holds the one between them;
    None if they are connected otherwise.
    """

    def __init__(self, hosts: Iterable[int], bridge: int | None) -> None:
        super().__init__(hosts)
        self._bridge = bridge

    def cut(self, index: int) -> None:
        """Drop all packets from and to a host, from now on. Nobody is told."""
        if self._bridge is not None:
            _inside(self._bridge, "ip", "link", "set", f"port{index}", "nomaster")
            return
        for other in self._others(index):
            self.cut_between(index, other)

    def mend(self, index: int) -> None:
        """Undo `cut`."""
        if self._bridge is not None:
            _inside(self._bridge, "ip", "link", "set", f"port{index}", "master", "bridge")
            return
        for other in self._others(index):
            self.mend_between(index, other)

    def cut_between(self, *pair: int) -> None:
        """Drop all packets between two hosts, from now on. Nobody is told."""
        for index, other in (pair, pair[::-1]):
            _inside(self[index], "ip", "neigh", "replace", _address(other), *_NOWHERE)

    def mend_between(self, *pair: int) -> None:
        """Undo `cut_between`."""
        for index, other in (pair, pair[::-1]):
            _inside(self[index], "ip", "neigh", "del", _address(other), "dev", _INTERFACE)

    def _others(self, index: int) -> list[int]:
        return [other for other in range(len(self)) if other != index]


@contextlib.contextmanager
def simulated_hosts(
    count: int, link: str | None = None, delay: str | None = None
) -> Iterator[SimulatedHosts]:
    """`count` hosts on one switch, each on a link of rate `link` ("1gbit"); the switch holds each
    packet for `delay` ("2ms"), so that a question and its answer take at least twice as long.
    Yields one pid for each host, to `enter` it by.
    """
    held_ns = None if delay is None else delay_ns(delay)
    if reason := why_not():
        raise PacelineError(f"cannot simulate hosts: {reason}")
    with contextlib.ExitStack() as stack:
        switch, *hosts = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        ports = [f"port{index}" for index in range(count)]
        for port, host, index in zip(ports, hosts, range(count), strict=True):
            _plug_in(host, _address(index), switch, port)
            if link is not None:
                # What the host sends, and what it receives.
                _limit_rate(host, _INTERFACE, link)
                _limit_rate(switch, port, link)
        if held_ns is None:
            _bridge(switch, ports)
        else:
            stack.enter_context(_delayed_switch(switch, ports, held_ns))
        yield SimulatedHosts(hosts, switch if held_ns is None else None)


def _plug_in(host: int, address: str, switch: int, port: str) -> None:
    cable = f"type veth peer name {_INTERFACE} netns {host}".split()
    _inside(switch, "ip", "link", "add", port, *cable)
    _inside(switch, "ip", "link", "set", port, "up")
    _inside(host, "ip", "addr", "add", f"{address}/24", "dev", _INTERFACE)
    _inside(host, "ip", "link", "set", _INTERFACE, "up")
    _inside(host, "ip", "link", "set", "lo", "up")


def _limit_rate(pid: int, device: str, rate: str) -> None:
    shape = ["root", "handle", "1:", "tbf", "rate", rate, "burst", "256k", "latency", "100ms"]
    _inside(pid, "tc", "qdisc", "add", "dev", device, *shape)


def _bridge(switch: int, ports: list[str]) -> None:
    _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
    _inside(switch, "ip", "link", "set", "bridge", "up")
    for port in ports:
        _inside(switch, "ip", "link", "set", port, "master", "bridge")


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


def _namespace() -> contextlib.AbstractContextManager[int]:
    """A process that only holds its namespaces."""
    return _holder("unshare", "--net", "--ipc", "sh", "-c", "echo ready; read _")


def _delayed_switch(
    switch: int, ports: list[str], held_ns: int
) -> contextlib.AbstractContextManager[int]:
    """A process that passes packets between ports, and holds each for a while."""
    program = [sys.executable, "-m", "paceline.bench.delayed_switch", str(held_ns), *ports]
    return _holder(*_entered(switch, *program))


@contextlib.contextmanager
def _holder(*command: str) -> Iterator[int]:
    """The pid of a process that says "ready" and lives until its input is closed."""
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"ready\n":
            raise PacelineError(f"cannot simulate hosts: `{' '.join(command)}` failed")
        yield holder.pid
    finally:
        holder.communicate()


def _inside(pid: int, *command: str) -> None:
    ended = subprocess.run(_entered(pid, *command), check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        raise PacelineError(
            f"cannot simulate hosts: `{' '.join(command)}` failed: {ended.stderr.strip()} (a rate "
            "needs the kernel's sch_tbf)"
        )


def _entered(pid: int, *command: str) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", *command]
