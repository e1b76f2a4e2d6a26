"""The cost model of steps on many hosts: answers worked out by hand, and what must always hold."""

from __future__ import annotations

import dataclasses
import pathlib
import runpy
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.diagnostics.scaling_model import (
    Algorithm,
    Cluster,
    Link,
    Network,
    Variation,
    Workload,
    all_reduce_s,
    efficiency,
    simulated_steps,
    step_s,
)

MB = 1e6
FLAT, OURS, BF16 = Algorithm.FLAT_RING, Algorithm.HIERARCHY, Algorithm.HIERARCHY_BFLOAT16


def cluster(hosts, ranks, latency=0.0, rate=100 * MB, inside=1e12):
    return Cluster(hosts, ranks, Network(Link(latency, rate), Link(0.0, inside)))


@pytest.mark.parametrize(
    ("hosts", "ranks", "algorithm", "seconds"),
    [
        (2, 2, FLAT, 1.5),  # 2 * 3/4 of 100 MB at 100 MB/s
        (2, 2, OURS, 1.0),  # 2 * 1/2
        (2, 2, BF16, 0.5),
        (2, 8, FLAT, 1.875),  # 2 * 15/16
        (4, 4, FLAT, 1.875),
        (4, 4, OURS, 1.5),  # 2 * 3/4
        (4, 4, BF16, 0.75),
        (2, 1, FLAT, 1.0),
        (1, 1, OURS, 0.0),
    ],
)
def test_how_long_the_link_is_busy(hosts, ranks, algorithm, seconds):
    assert all_reduce_s(cluster(hosts, ranks), 100 * MB, algorithm) == pytest.approx(seconds, 1e-3)


def test_how_often_a_short_message_waits():
    slow = cluster(4, 2, latency=1e-3)
    assert all_reduce_s(slow, 0.0, FLAT) == pytest.approx(14e-3)  # 2 * 7 rounds
    assert all_reduce_s(slow, 0.0, OURS) == pytest.approx(2e-3)
    assert all_reduce_s(cluster(2, 2, latency=1e-3), 0.0, OURS) == pytest.approx(1e-3)


def test_a_message_to_every_host_is_paid_for():
    network = Network(Link(1e-4, 1e12), Link(0.0, 1e12), message_s=1e-5)
    assert all_reduce_s(Cluster(101, 8, network), 8.0, OURS) == pytest.approx(2e-4 + 200e-5, 1e-3)


def test_rounding_takes_the_cores_of_each_rank():
    network = Network(Link(0.0, 1e12), Link(0.0, 1e12), rounding_s_per_byte=1 / (50 * MB))
    place = Cluster(2, 2, network)
    assert all_reduce_s(place, 100 * MB, BF16) == pytest.approx(1.0, 1e-2)  # 50 MB a rank
    assert all_reduce_s(place, 100 * MB, OURS) < 1e-3
    # Beside a slow link only that of a block shows; a step has less of its cores for all of it.
    narrow = dataclasses.replace(network, between=Link(0.0, 10 * MB))
    block = (2 << 20) / 2 / (50 * MB)
    seconds = all_reduce_s(Cluster(2, 2, narrow), 100 * MB, BF16)
    assert seconds == pytest.approx(5.0 + block, 1e-3)
    work = Workload(100 * MB, 0.5, bucket_bytes=(100 * MB,))
    assert step_s(place, work, BF16) == pytest.approx(0.5 + 1.0 + 1.0, 1e-2)
    assert step_s(place, work, OURS) == pytest.approx(0.5, 1e-2)


def test_the_update_follows_the_last_average():
    work = Workload(100 * MB, 0.6, forward_share=1 / 3, update_share=1 / 6)
    # One bucket of 1 s on the link, 0.5 s after the step began.
    late = dataclasses.replace(work, bucket_bytes=(100 * MB,))
    assert step_s(cluster(2, 1), late, OURS) == pytest.approx(0.5 + 1.0 + 0.1)
    assert step_s(cluster(1, 1), late, OURS) == pytest.approx(0.6)


def test_the_link_works_while_gradients_are_computed():
    # Four buckets of 25 MB and 0.25 s on the link, a gradient every 0.1 s after a forward of 0.2 s.
    work = Workload(100 * MB, 0.6, forward_share=1 / 3, bucket_bytes=(25 * MB,) * 4)
    assert step_s(cluster(2, 1), work, OURS) == pytest.approx(0.3 + 4 * 0.25)
    # A faster link has nothing to do but wait; only the last bucket shows.
    assert step_s(cluster(2, 1, rate=1000 * MB), work, OURS) == pytest.approx(0.6 + 0.025)
    assert efficiency(cluster(2, 1, rate=1000 * MB), work, OURS) == pytest.approx(0.6 / 0.625)
    assert efficiency(cluster(1, 1), work, OURS) == 1.0
    # While the link is busy, for 0.05 s, the second half is computed at half the speed.
    network = Network(Link(0.0, 1000 * MB), Link(0.0, 1e12), core_share=0.5)
    slower = Workload(100 * MB, 0.6, forward_share=0.0, bucket_bytes=(50 * MB, 50 * MB))
    assert step_s(Cluster(2, 1, network), slower, OURS) == pytest.approx(0.3 + 0.325 + 0.05)


@pytest.mark.parametrize(("algorithm", "mib"), [(FLAT, 25), (OURS, 8), (BF16, 8)])
def test_buckets_are_planned_as_the_classes_plan_them(algorithm, mib):
    sizes = Workload(68e6, 0.1).buckets(algorithm)
    assert sizes[0] == 1 << 20
    assert set(sizes[1:-1]) == {mib << 20}
    assert sum(sizes) == pytest.approx(68e6)
    assert Workload(100.0, 0.1).buckets(algorithm) == (100.0,)
    assert Workload(9.0, 0.1, bucket_bytes=(4, 5)).buckets(algorithm) == (4, 5)


def test_what_no_cluster_has_is_refused():
    with pytest.raises(ValueError, match="some bandwidth"):
        Link(0.0, 0.0)
    with pytest.raises(ValueError, match="hosts and ranks"):
        cluster(0, 2)
    with pytest.raises(ValueError, match="no negative time"):
        Network(Link(0.0, MB), Link(0.0, MB), rounding_s_per_byte=-1.0)
    with pytest.raises(ValueError, match="shares of a step"):
        Workload(MB, 1.0, forward_share=0.6, update_share=0.5)


def test_it_needs_no_torch():
    code = "import sys, paceline.diagnostics.scaling_model; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


# --- what holds always ----------------------------------------------------------------------------

_networks = st.builds(
    Network,
    st.builds(Link, st.floats(0, 1e-1), st.floats(1e5, 1e11)),
    st.builds(Link, st.floats(0, 1e-2), st.floats(1e6, 1e12)),
    st.floats(0, 1e-3),
    st.floats(0, 0.9),
    st.floats(0, 1e-6),
)
_clusters = st.builds(Cluster, st.integers(1, 2000), st.integers(1, 16), _networks)
_workloads = st.builds(
    Workload,
    st.floats(1e3, 1e10),
    st.floats(1e-3, 1e2),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
_algorithms = st.sampled_from(Algorithm)


def _with_link(given_cluster, **changes):
    network = given_cluster.network
    between = dataclasses.replace(network.between, **changes)
    return dataclasses.replace(given_cluster, network=dataclasses.replace(network, between=between))


@given(_clusters, st.floats(0, 1e10), st.floats(1, 10), _algorithms)
def test_more_bytes_take_no_less(place, nbytes, times, algorithm):
    few, many = (all_reduce_s(place, n, algorithm) for n in (nbytes, nbytes * times))
    assert few <= many * (1 + 1e-9)


@given(_clusters, _workloads, st.floats(1, 10), _algorithms)
def test_a_worse_link_makes_no_step_shorter(place, work, times, algorithm):
    between = place.network.between
    later = _with_link(place, latency_s=between.latency_s * times)
    narrower = _with_link(place, bytes_per_s=between.bytes_per_s / times)
    seconds = step_s(place, work, algorithm)
    for worse in (later, narrower):
        assert seconds <= step_s(worse, work, algorithm) * (1 + 1e-9)


# Hosts whose memory is no limit, and to which many messages cost no more than one.
_bound_by_links = st.builds(
    Cluster,
    st.integers(2, 2000),
    st.integers(1, 16),
    st.builds(
        Network,
        st.builds(Link, st.floats(0, 1e-1), st.floats(1e5, 1e11)),
        st.just(Link(0.0, 1e18)),
        core_share=st.floats(0, 0.9),
    ),
)


@given(_bound_by_links, st.floats(0, 1e10))
def test_ours_is_never_worse_than_a_flat_ring_nor_half_the_bytes_than_all(place, nbytes):
    flat, ours, rounded = (all_reduce_s(place, nbytes, each) for each in (FLAT, OURS, BF16))
    assert rounded <= ours * (1 + 1e-6)
    assert ours <= flat * (1 + 1e-6) + 1e-12


@given(_bound_by_links, _workloads)
def test_nor_is_a_step_with_the_same_buckets(place, work):
    buckets = dataclasses.replace(work, bucket_bytes=work.buckets(OURS))
    flat, ours, rounded = (step_s(place, buckets, each) for each in (FLAT, OURS, BF16))
    assert rounded <= ours * (1 + 1e-6)
    assert ours <= flat * (1 + 1e-6)


@given(_clusters, _workloads, _algorithms)
def test_no_step_is_shorter_than_its_computation(place, work, algorithm):
    assert step_s(place, work, algorithm) >= work.compute_s * (1 - 1e-9)
    assert 0 < efficiency(place, work, algorithm) <= 1


# --- unlike ranks ---------------------------------------------------------------------------------


def simulate(ranks, variation, seed=1):
    return simulated_steps(
        cluster(ranks, 1), Workload(MB, 1.0), OURS, variation, steps=5, seed=seed
    )


def test_ranks_that_are_alike_take_what_the_model_says():
    assert simulate(8, Variation()) == [step_s(cluster(8, 1), Workload(MB, 1.0), OURS)] * 5


def test_everybody_waits_for_the_last():
    varied = Variation(speed=0.02, jitter=0.05, straggler_share=0.001, straggler_factor=3.0)
    few, many = sum(simulate(4, varied)), sum(simulate(2000, varied))
    assert sum(simulate(4, Variation())) < few < many
    assert simulate(100, varied) == simulate(100, varied)
    assert simulate(100, varied) != simulate(100, varied, seed=2)


def test_the_slowest_link_decides():
    work = Workload(100 * MB, 0.1)
    slow = simulated_steps(cluster(8, 1), work, OURS, Variation(slowest_link=0.5), steps=1, seed=1)
    assert slow == [step_s(cluster(8, 1, rate=50 * MB), work, OURS)]


# --- the plots of the manual ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale-hosts.svg", "scale-all-reduce.svg"])
def test_the_plots_in_the_manual_are_those_of_the_model(name):
    path = pathlib.Path(__file__).parents[2] / "tools" / "draw_scale_plots.py"
    plots = runpy.run_path(str(path))
    drawn = plots["PLOTS"][name]().svg()
    assert (plots["IMAGES"] / name).read_text() == drawn, f"run {path}"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
