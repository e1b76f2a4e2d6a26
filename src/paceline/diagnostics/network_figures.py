"""What was measured between and inside hosts, and which host or link is slow. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from paceline.diagnostics.scaling_model import Link, Network

__all__ = ["HostFigures", "NetworkFigures", "PairFigures", "pairings", "slow_parts"]

# Each round pairs every host with another one; more rounds would say little more.
_MOST_ROUNDS = 15
# What counts as slow, next to the other hosts.
_SLOW_SHARE, _SLOW_COMPUTE_SHARE = 0.7, 0.6
_LATE_FACTOR, _LATE_S = 2.0, 1e-4


@dataclasses.dataclass(frozen=True)
class HostFigures:
    """One host. `inside` is an all-reduce of its ranks, per byte of the tensor; None if it has one
    rank. `compute_s`: the same small computation on each of its ranks at once; the slowest counts.
    """

    name: str
    ranks: int
    inside: Link | None
    compute_s: float


@dataclasses.dataclass(frozen=True)
class PairFigures:
    """What two hosts, given by number, have between them; both send at the same time."""

    hosts: tuple[int, int]
    link: Link


@dataclasses.dataclass(frozen=True)
class NetworkFigures:
    """A job as it was measured. The last three figures are those of the scaling model."""

    hosts: tuple[HostFigures, ...]
    pairs: tuple[PairFigures, ...]
    message_s: float
    core_share: float = 0.0
    rounding_s_per_byte: float = 0.0

    def link_of(self, host: int) -> Link:
        """The best that a host has with any other."""
        links = [pair.link for pair in self.pairs if host in pair.hosts]
        return Link(min(link.latency_s for link in links), max(link.bytes_per_s for link in links))

    def network(self) -> Network:
        """What all hosts together have: all wait for the slowest."""
        links = [self.link_of(host) for host in range(len(self.hosts))]
        inside = [host.inside for host in self.hosts if host.inside is not None]
        return Network(
            _worst(links),
            _worst(inside or [Link(0.0, float("inf"))]),
            self.message_s,
            self.core_share,
            self.rounding_s_per_byte,
        )


def _worst(links: Sequence[Link]) -> Link:
    return Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))


def pairings(hosts: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every host meets another one; over all rounds every other one, as long as
    there are few hosts.
    """
    if hosts < 2:
        return []
    # The circle method: one stays, the others move on by one place. An odd one out pauses.
    places = [*range(hosts), *([-1] if hosts % 2 else [])]
    half = len(places) // 2
    rounds = []
    for _ in range(min(len(places) - 1, _MOST_ROUNDS)):
        met = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in met if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def slow_parts(figures: NetworkFigures) -> list[str]:
    """Hosts and links that are slower than the others, in words."""
    if len(figures.hosts) < 2:
        return []
    return [*_slow_hosts(figures), *_slow_links(figures)]


def _slow_hosts(figures: NetworkFigures) -> Iterable[str]:
    # A slow host is slow with everybody, a good one quick with somebody: so the best of each.
    links = [figures.link_of(host) for host in range(len(figures.hosts))]
    usual_rate = statistics.median(link.bytes_per_s for link in links)
    usual_latency = statistics.median(link.latency_s for link in links)
    usual_compute_s = statistics.median_low([host.compute_s for host in figures.hosts])
    usual_inside = statistics.median(
        [host.inside.bytes_per_s for host in figures.hosts if host.inside is not None] or [0.0]
    )
    for number, (host, link) in enumerate(zip(figures.hosts, links, strict=True)):
        named = f"host {number} ({host.name})"
        if link.bytes_per_s < _SLOW_SHARE * usual_rate:
            yield (
                f"{named} sends and receives at {_share(link.bytes_per_s, usual_rate)} of the "
                "other hosts' rate, whoever it talks to: look at its network card, cable or port"
            )
        if _is_late(link, usual_latency):
            yield (
                f"{named} answers after {link.latency_s * 1e6:.0f} us, other hosts after "
                f"{usual_latency * 1e6:.0f} us"
            )
        if usual_compute_s < _SLOW_COMPUTE_SHARE * host.compute_s:
            yield (
                f"{named} computes at {_share(usual_compute_s, host.compute_s)} of the other "
                "hosts' speed: it may have fewer cores than ranks x threads, or other work to do"
            )
        if host.inside is not None and host.inside.bytes_per_s < _SLOW_SHARE * usual_inside:
            yield (
                f"{named} sums in memory at {_share(host.inside.bytes_per_s, usual_inside)} of the "
                "other hosts' rate"
            )


def _slow_links(figures: NetworkFigures) -> Iterable[str]:
    for pair in figures.pairs:
        ends = [figures.link_of(host) for host in pair.hosts]
        possible = min(link.bytes_per_s for link in ends)
        soonest = max(link.latency_s for link in ends)
        named = "the link between host {} and host {}".format(*pair.hosts)
        if pair.link.bytes_per_s < _SLOW_SHARE * possible:
            yield (
                f"{named} carries {_share(pair.link.bytes_per_s, possible)} of what both reach "
                "with others: look at the switches between them"
            )
        if _is_late(pair.link, soonest):
            yield (
                f"{named} takes {pair.link.latency_s * 1e6:.0f} us one way, both take "
                f"{soonest * 1e6:.0f} us or less with others"
            )


def _is_late(link: Link, usual_s: float) -> bool:
    return link.latency_s > _LATE_FACTOR * usual_s and link.latency_s > usual_s + _LATE_S


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"
