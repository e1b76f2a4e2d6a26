"""What a training step will take on so many hosts: arithmetic on a few measured numbers. Pure.

An all-reduce is priced by what it must move and how often it must wait:

    flat ring    2 (N - 1) rounds over N ranks; in each, every host's link carries 1/N of the bytes
    hierarchy    ranks of a host sum in memory; each host sends 2 (H - 1) / H of the bytes, in one
                 round for two hosts and in two for more, to every other host directly; sums in
                 memory go on while the link works, except for the first block and the last. With
                 bfloat16 half the bytes; what is sent is rounded and what comes widened, in memory

A step is its computation and its buckets, one after the other on the link, each from the moment its
last gradient is there. Sums in memory are made by the cores that compute, and a busy link has work
for them, too: both make the computation longer, they do not hide behind it.

What it leaves out: other traffic, a switch that cannot carry all links at once, loss of packets.
`simulated_steps` adds ranks and links of different speeds, and stragglers.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Iterable, Sequence

__all__ = [
    "Algorithm",
    "Cluster",
    "Link",
    "Network",
    "Variation",
    "Workload",
    "all_reduce_s",
    "efficiency",
    "simulated_steps",
    "step_s",
]

# What `paceline.backend` sends at once: a block per rank of a host.
_BLOCK_BYTES = 1 << 20
# A small first bucket, then larger ones: those of torch's class, and of ours between hosts.
_FIRST_BUCKET_BYTES, _STOCK_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20, 8 << 20


class Algorithm(enum.Enum):
    """How gradients are summed over hosts."""

    FLAT_RING = "flat ring"
    HIERARCHY = "paceline"
    HIERARCHY_BFLOAT16 = "paceline, bfloat16"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Link:
    """Between two places: what the shortest message takes one way, and how many bytes follow each
    other in a second.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"a link has no negative latency and some bandwidth, got {self}")


@dataclasses.dataclass(frozen=True)
class Network:
    """`between` hosts, and `inside` a host: an all-reduce of its ranks in shared memory, per byte
    of the tensor. `message_s`: what one more message costs its sender. `core_share`: by how much of
    its speed a rank computes more slowly while its link is busy. `rounding_s_per_byte`: what
    a byte of float32 takes a rank to round to bfloat16 and to add to another's, while all do.
    """

    between: Link
    inside: Link
    message_s: float = 0.0
    core_share: float = 0.0
    rounding_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.core_share < 1:
            raise ValueError(f"a rank goes on computing while its link is busy, got {self}")
        if self.rounding_s_per_byte < 0:
            raise ValueError(f"rounding takes no negative time, got {self}")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts alike, with as many ranks each."""

    hosts: int
    ranks_per_host: int
    network: Network

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(f"a cluster has hosts and ranks on them, got {self}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step: its gradients, and what it takes without exchanging them. `forward_share` of
    that is over before the first gradient is there, `update_share` follows when all are averaged.
    """

    gradient_bytes: float
    compute_s: float
    forward_share: float = 1 / 3
    update_share: float = 0.0
    bucket_bytes: tuple[float, ...] | None = None  # None: as they would be planned

    def __post_init__(self) -> None:
        if (
            min(self.forward_share, self.update_share, 1 - self.forward_share - self.update_share)
            < 0
        ):
            raise ValueError(f"forward, backward and update are shares of a step, got {self}")

    def buckets(self, algorithm: Algorithm) -> tuple[float, ...]:
        """The sizes of buckets, in the order they are sent."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        is_stock = algorithm is Algorithm.FLAT_RING
        size = float(_STOCK_BUCKET_BYTES if is_stock else _BUCKET_BYTES)
        first = min(_FIRST_BUCKET_BYTES, self.gradient_bytes)
        whole, rest = divmod(self.gradient_bytes - first, size)
        return (first, *[size] * int(whole), *([rest] if rest else []))


# --- one all-reduce -------------------------------------------------------------------------------


def all_reduce_s(cluster: Cluster, nbytes: float, algorithm: Algorithm) -> float:
    """Seconds for a tensor of float32."""
    if cluster.ranks == 1:
        return 0.0
    if algorithm is Algorithm.FLAT_RING:
        return _flat_ring_s(cluster, nbytes)
    if cluster.hosts == 1:
        return _inside_s(cluster, nbytes)
    return _hierarchy_s(cluster, nbytes, algorithm)


def _flat_ring_s(cluster: Cluster, nbytes: float) -> float:
    link = cluster.network.between if cluster.hosts > 1 else cluster.network.inside
    rounds = 2 * (cluster.ranks - 1)
    return rounds * (link.latency_s + nbytes / cluster.ranks / link.bytes_per_s)


def _hierarchy_s(cluster: Cluster, nbytes: float, algorithm: Algorithm) -> float:
    between, others = cluster.network.between, cluster.hosts - 1
    rounds = 1 if cluster.hosts == 2 else 2
    wire_share = 0.5 if algorithm is Algorithm.HIERARCHY_BFLOAT16 else 1.0
    sent = 2 * others / cluster.hosts * nbytes * wire_share
    block = min(nbytes, _BLOCK_BYTES * cluster.ranks_per_host)
    blocks = nbytes / block if block else 1.0
    messages_s = blocks * rounds * others * cluster.network.message_s
    wire = rounds * between.latency_s + sent / between.bytes_per_s + messages_s
    return max(
        wire + _in_memory_s(cluster, block, algorithm), _in_memory_s(cluster, nbytes, algorithm)
    )


def _in_memory_s(cluster: Cluster, nbytes: float, algorithm: Algorithm) -> float:
    """What the cores of a host do for a sum: each of its ranks rounds a slice."""
    rounding_s = 0.0
    if algorithm is Algorithm.HIERARCHY_BFLOAT16:
        rounding_s = nbytes / cluster.ranks_per_host * cluster.network.rounding_s_per_byte
    return _inside_s(cluster, nbytes) + rounding_s


def _inside_s(cluster: Cluster, nbytes: float) -> float:
    if cluster.ranks_per_host == 1:
        return 0.0
    inside = cluster.network.inside
    return inside.latency_s + nbytes / inside.bytes_per_s


# --- one step -------------------------------------------------------------------------------------


def step_s(cluster: Cluster, workload: Workload, algorithm: Algorithm) -> float:
    """Seconds of one training step."""
    now = workload.forward_share * workload.compute_s
    update_s = workload.update_share * workload.compute_s
    backward_s = workload.compute_s - now - update_s
    if cluster.hosts > 1:
        # Sums while gradients are still computed. A ring makes as many, and moves more.
        backward_s += _in_memory_s(cluster, workload.gradient_bytes, algorithm)
    speed_beside_link = 1 - cluster.network.core_share if cluster.hosts > 1 else 1.0
    sent_until = 0.0
    for nbytes in workload.buckets(algorithm):
        left = backward_s * nbytes / workload.gradient_bytes
        if sent_until > now:
            beside_link = min(left, (sent_until - now) * speed_beside_link)
            now += beside_link / speed_beside_link
            left -= beside_link
        now += left
        sent_until = max(now, sent_until) + all_reduce_s(cluster, nbytes, algorithm)
    return sent_until + update_s


def efficiency(cluster: Cluster, workload: Workload, algorithm: Algorithm) -> float:
    """The share of perfect scaling: of as many times one host's speed as there are hosts."""
    alone = step_s(dataclasses.replace(cluster, hosts=1), workload, Algorithm.HIERARCHY)
    return min(1.0, alone / step_s(cluster, workload, algorithm))


# --- many steps of unlike ranks -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variation:
    """How ranks differ. `speed` and `jitter` are standard deviations, as shares of a rank's
    computation: from rank to rank for good, and from step to step. In each step a rank is a
    straggler with probability `straggler_share` and takes `straggler_factor` times as long. The
    slowest link has `slowest_link` of the usual bandwidth.
    """

    speed: float = 0.0
    jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    slowest_link: float = 1.0


def simulated_steps(
    cluster: Cluster,
    workload: Workload,
    algorithm: Algorithm,
    variation: Variation,
    *,
    steps: int,
    seed: int,
) -> list[float]:
    """Seconds of each step: all wait for the rank that is last, and for the slowest link."""
    chance = random.Random(f"{seed} {cluster.ranks}")
    between = cluster.network.between
    slow = dataclasses.replace(between, bytes_per_s=between.bytes_per_s * variation.slowest_link)
    network = dataclasses.replace(cluster.network, between=slow)
    slowed = dataclasses.replace(cluster, network=network)
    paces = [_pace(chance, variation.speed) for _ in range(cluster.ranks)]
    seconds = []
    for _ in range(steps):
        last = max(_factors(chance, paces, variation))
        late = dataclasses.replace(workload, compute_s=workload.compute_s * last)
        seconds.append(step_s(slowed, late, algorithm))
    return seconds


def _factors(
    chance: random.Random, paces: Sequence[float], variation: Variation
) -> Iterable[float]:
    for pace in paces:
        straggles = chance.random() < variation.straggler_share
        factor = variation.straggler_factor if straggles else 1.0
        yield pace * factor * _pace(chance, variation.jitter)


def _pace(chance: random.Random, deviation: float) -> float:
    return max(0.1, chance.gauss(1.0, deviation)) if deviation else 1.0
