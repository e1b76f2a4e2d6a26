"""Which host or link is slow, from figures made up."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from paceline.diagnostics.network_figures import (
    HostFigures,
    NetworkFigures,
    PairFigures,
    pairings,
    slow_parts,
)
from paceline.diagnostics.scaling_model import Link

GOOD = Link(1e-4, 1e8)


def figures(count, links=(), hosts=()):
    """So many good hosts, but for those links and hosts."""
    named = {
        number: HostFigures(f"node{number}", 2, Link(1e-5, 1e9), 0.001) for number in range(count)
    }
    named.update(hosts)
    pairs = [
        PairFigures(pair, dict(links).get(pair, GOOD))
        for pair in itertools.combinations(range(count), 2)
    ]
    return NetworkFigures(tuple(named.values()), tuple(pairs), 1e-5)


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_host_meets_every_other_one(hosts):
    rounds = pairings(hosts)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(hosts), 2))
    for met in rounds:
        assert len(set(itertools.chain(*met))) == 2 * len(met)


def test_many_hosts_do_not_meet_all_others():
    rounds = pairings(1000)
    assert len(rounds) == 15
    assert all(sorted(itertools.chain(*met)) == list(range(1000)) for met in rounds)


def test_one_host_meets_nobody():
    assert pairings(1) == []
    assert slow_parts(NetworkFigures(figures(1).hosts, (), 0.0)) == []


def test_hosts_alike_are_not_blamed():
    assert slow_parts(figures(5)) == []
    assert (
        slow_parts(figures(2, {(0, 1): Link(1e-2, 1e3)})) == []
    )  # which of them it is, is unknown


@pytest.mark.parametrize("count", [3, 5])
def test_a_host_that_is_slow_with_everybody(count):
    slow = {pair: Link(1e-4, 4e7) for pair in itertools.combinations(range(count), 2) if 1 in pair}
    (said,) = slow_parts(figures(count, slow))
    assert said.startswith("host 1 (node1) sends and receives at 40% of")


def test_a_link_that_is_slow_between_good_hosts():
    (said,) = slow_parts(figures(4, {(1, 3): Link(1e-4, 1e7)}))
    assert said.startswith("the link between host 1 and host 3 carries 10% of")
    (said,) = slow_parts(figures(4, {(0, 2): Link(5e-3, 1e8)}))
    assert said == (
        "the link between host 0 and host 2 takes 5000 us one way, both take 100 us or less with "
        "others"
    )


def test_a_host_that_answers_late_computes_or_sums_slowly():
    late = {pair: Link(2e-3, 1e8) for pair in itertools.combinations(range(3), 2) if 2 in pair}
    (said,) = slow_parts(figures(3, late))
    assert said == "host 2 (node2) answers after 2000 us, other hosts after 100 us"
    (said,) = slow_parts(figures(2, hosts={0: HostFigures("old", 2, Link(1e-5, 1e9), 0.004)}))
    assert said.startswith("host 0 (old) computes at 25% of")
    (said,) = slow_parts(figures(3, hosts={0: HostFigures("old", 2, Link(1e-5, 2e8), 0.001)}))
    assert said.startswith("host 0 (old) sums in memory at 20% of")


def test_the_slowest_host_decides_for_all():
    slow = {(0, 1): Link(2e-4, 5e7), (0, 2): Link(3e-4, 4e7)}
    network = figures(3, slow).network()
    assert network.between == Link(2e-4, 5e7)  # the best of host 0
    assert network.inside == Link(1e-5, 1e9)


def test_the_model_gets_what_was_measured_of_the_cores():
    found = dataclasses.replace(figures(2), core_share=0.2, rounding_s_per_byte=3e-10)
    network = found.network()
    assert (network.message_s, network.core_share) == (1e-5, 0.2)
    assert network.rounding_s_per_byte == 3e-10
