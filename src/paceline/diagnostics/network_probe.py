"""Measures what hosts have between and inside them, with all ranks at work as in training.

Hosts meet in pairs, all pairs of a round at once: as many ranks on each side as the smallest host
has, each with one partner, sending both ways. Of what ranks of a host or a pair measure at the same
time, the worst counts: a collective waits for it. Of what is measured several times, the best
counts: the others show what else the machines had to do.
"""

from __future__ import annotations

import ctypes as C
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline._linux import host_identity
from paceline.backend.host_placement import Placement
from paceline.core import abi, native_status
from paceline.ddp.group_transport import GroupTransport
from paceline.diagnostics.network_figures import (
    HostFigures,
    NetworkFigures,
    PairFigures,
    pairings,
)
from paceline.diagnostics.scaling_model import Link

__all__ = ["measure_network"]

_PINGS, _BURST, _REPEATS = 30, 64, 5
_TRANSFERS = 10  # more of them: what else a machine has to do may last a second
_TRIAL_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_TRANSFER_S = 0.2
_WARM_UPS = 4
_INSIDE_BYTES = 16 << 20
_ROUNDED_BYTES = 1 << 20  # about what is rounded at once
_MATRIX = 384
_LARGEST_SHARE = 0.9


def measure_network() -> NetworkFigures:
    """The hosts of the default group. All its ranks call this, and all get the result."""
    probe = _Probe()
    try:
        return probe.measure()
    finally:
        probe.close()


class _Probe:
    """One rank's part in the measurement."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        told = GroupTransport(group, torch.device("cpu")).all_gather_text(
            f"{host_identity()} {socket.gethostname()}"
        )
        identities = [text.split(" ")[0] for text in told]
        distinct = list(dict.fromkeys(identities))
        self._placement = Placement.of(
            dist.get_rank(), [distinct.index(identity) for identity in identities]
        )
        # How much longer than its work this rank takes where cores are shared with others; and the
        # share of its speed that a busy link takes.
        self._waits_for_core, self._core_share = 1.0, 0.0
        self._names = [told[members[0]].split(" ")[1] for members in self._placement.members]
        # Each way over connections of its own, as collectives do it: Gloo works badly both ways.
        self._ways = dist.new_group(), dist.new_group()

    def close(self) -> None:
        for group in self._ways:
            dist.destroy_process_group(group)

    def measure(self) -> NetworkFigures:
        hosts = self._measure_hosts()
        rounds = pairings(len(hosts))
        nbytes = self._choose_transfer(rounds)
        pairs, messages, core_shares = [], [0.0], [0.0]
        for met in rounds:
            peer = self._peer(met)
            latency_s = self._over_hosts(self._ping(peer))
            transfers_s = self._turns_over_hosts(self._transfers(peer, nbytes))
            own_latency_s = latency_s[self._placement.host]
            bursts_s = self._turns_over_hosts(self._bursts(peer, own_latency_s))
            messages.append(min(map(max, zip(*bursts_s, strict=True))))
            core_shares += self._over_hosts(self._core_share)
            for pair in met:
                latency = max(latency_s[host] for host in pair)
                seconds = min(map(max, *(transfers_s[host] for host in pair)))
                link = Link(latency, self._placement.lanes * nbytes / seconds)
                pairs.append(PairFigures(pair, link))
        return NetworkFigures(
            tuple(hosts),
            tuple(pairs),
            max(messages),
            max(core_shares),
            max(self._over_hosts(self._rounding_s_per_byte())),
        )

    def _over_hosts(self, value: float) -> list[float]:
        """The largest value of any rank, by host; the same list on all ranks."""
        return [largest for (largest,) in self._turns_over_hosts([value])]

    def _turns_over_hosts(self, values: Sequence[float]) -> list[list[float]]:
        """The same for each turn of a measurement."""
        table = torch.zeros(self._placement.hosts, len(values), dtype=torch.float64)
        table[self._placement.host] = torch.tensor(values)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        by_host: list[list[float]] = table.tolist()
        return by_host

    # --- inside a host ----------------------------------------------------------------------------

    def _measure_hosts(self) -> list[HostFigures]:
        latency_s, transfer_s = self._sum_inside()
        matrix = torch.ones(_MATRIX, _MATRIX)
        dist.barrier()
        shortest_s, waits = [], []
        for _ in range(_REPEATS):
            began, cpu_began = time.perf_counter(), time.thread_time()
            shortest_s.append(_shortest(lambda: matrix @ matrix, 10))
            taken, cpu_taken = time.perf_counter() - began, time.thread_time() - cpu_began
            waits.append(taken / cpu_taken)
        self._waits_for_core = max(statistics.median(waits), 1.0)
        figures = zip(
            self._names,
            self._placement.members,
            self._over_hosts(latency_s),
            self._over_hosts(transfer_s),
            self._over_hosts(min(shortest_s)),
            strict=True,
        )
        return [
            HostFigures(
                name,
                len(members),
                None if len(members) == 1 else Link(latency, _INSIDE_BYTES / seconds),
                compute,
            )
            for name, members, latency, seconds, compute in figures
        ]

    def _sum_inside(self) -> tuple[float, float]:
        """Seconds of an all-reduce of this host's ranks: a short one, and what a long one adds."""
        members = list(self._placement.local)
        if len(members) == 1:
            return 0.0, 1.0
        group = dist.new_group(members, use_local_synchronization=True)
        assert group is not None
        short, long = torch.zeros(2), torch.zeros(_INSIDE_BYTES // 4)
        latency_s = _shortest(lambda: dist.all_reduce(short, group=group), 10 * _REPEATS)
        transfer_s = _shortest(lambda: dist.all_reduce(long, group=group))
        dist.destroy_process_group(group)
        return latency_s, max(transfer_s - latency_s, 1e-9)

    def _rounding_s_per_byte(self) -> float:
        """Seconds to round a byte of float32 as it is sent with `wire_dtype`, and to add two such,
        while all ranks do. None where there is no core: then nobody rounds.
        """
        if not native_status().available:
            return 0.0
        values = torch.zeros(_ROUNDED_BYTES // 4)
        rounded = torch.empty_like(values, dtype=torch.bfloat16)
        shares = (C.c_void_p * 2)(rounded.data_ptr(), rounded.data_ptr())
        core = abi.library()

        def round_and_add() -> None:
            core.plc_round_to_bf16(rounded.data_ptr(), values.data_ptr(), values.numel())
            core.plc_sum_of_bf16(values.data_ptr(), shares, len(shares), values.numel())

        round_and_add()
        shortest = _shortest(round_and_add, clock=time.thread_time)
        return shortest * self._waits_for_core / _ROUNDED_BYTES

    # --- between hosts ----------------------------------------------------------------------------

    def _peer(self, met: list[tuple[int, int]]) -> int | None:
        """The rank this one talks to in a round; None if it has none."""
        host = self._placement.host
        for pair in met:
            if host in pair and self._placement.has_lane:
                other = pair[1] if pair[0] == host else pair[0]
                return self._placement.members[other][self._placement.local_index]
        return None

    def _choose_transfer(self, rounds: list[list[tuple[int, int]]]) -> int:
        """How many bytes a rank sends in about the time a measurement may take."""
        if not rounds:
            return 0
        peer = self._peer(rounds[0])
        trials_s = self._turns_over_hosts(self._transfers(peer, _TRIAL_BYTES))
        seconds = min(map(max, zip(*trials_s, strict=True)))
        return min(max(int(_TRIAL_BYTES * _TRANSFER_S / seconds), _TRIAL_BYTES), _MOST_BYTES)

    def _transfers(self, peer: int | None, nbytes: int) -> list[float]:
        """Seconds for so many bytes each way, in each of a few turns, in which all ranks begin
        together: those of a host share its link.
        """
        if peer is None:
            for _ in range(_TRANSFERS):
                dist.barrier()
            return [0.0] * _TRANSFERS
        sent = torch.zeros(nbytes, dtype=torch.uint8)
        received = torch.empty_like(sent)
        outwards, inwards = self._ways if self._placement.rank < peer else reversed(self._ways)

        def both_ways() -> None:
            _wait(dist.irecv(received, peer, group=inwards), dist.isend(sent, peer, group=outwards))

        # Connects, lets both begin together, and lets the kernel find out how much may be on its
        # way at once.
        for _ in range(_WARM_UPS):
            both_ways()
        times, shares = [], []
        for _ in range(_TRANSFERS):
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            both_ways()
            times.append(time.perf_counter() - began)
            shares.append((time.process_time() - cpu_began) / times[-1])
        share = statistics.median(shares) * self._waits_for_core
        self._core_share = min(share, _LARGEST_SHARE)
        return times

    def _ping(self, peer: int | None) -> float:
        """Half of a round trip, between the first ranks of two hosts."""
        if peer is None or self._placement.local_index:
            return 0.0
        data = torch.zeros(1)
        times = []
        for _ in range(_PINGS):
            started = time.perf_counter()
            if self._placement.rank < peer:
                dist.send(data, peer)
                dist.recv(data, peer)
            else:
                dist.recv(data, peer)
                dist.send(data, peer)
            times.append(time.perf_counter() - started)
        # One trip in a few waits for a core: that is no property of the link.
        return statistics.quantiles(times, n=4)[0] / 2

    def _bursts(self, peer: int | None, latency_s: float) -> list[float]:
        """What each of many short messages takes its sender, several times."""
        if peer is None or self._placement.local_index:
            return [0.0] * _REPEATS
        return [self._burst(peer, latency_s) for _ in range(_REPEATS)]

    def _burst(self, peer: int, latency_s: float) -> float:
        data = [torch.zeros(1) for _ in range(_BURST)]
        started = time.perf_counter()
        if self._placement.rank < peer:
            _wait(*[dist.isend(message, peer) for message in data])
            dist.recv(data[0], peer)
        else:
            _wait(*[dist.irecv(message, peer) for message in data])
            dist.send(data[0], peer)
        return max(time.perf_counter() - started - 2 * latency_s, 0.0) / _BURST


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def _shortest(
    action: Callable[[], object],
    repeats: int = _REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    times = []
    for _ in range(repeats):
        started = clock()
        action()
        times.append(clock() - started)
    return min(times)
