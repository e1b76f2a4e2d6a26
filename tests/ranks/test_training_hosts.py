"""`paceline.Training` on several hosts: the same bits as on one."""

from __future__ import annotations

import pytest

from tests.harness import init_group, run_ranks
from tests.harness.exact_models import train
from tests.harness.hosts import enter, simulated_hosts

pytestmark = pytest.mark.netns

NAMES = ("cnn", "transformer", "embedding")
HOST_OF_RANK = [0, 1, 1, 2]


def hashes(rank, world, hosts, backend):
    if world > 1:
        enter(hosts[HOST_OF_RANK[rank]])
        init_group(backend)
    return [train(name, 4) for name in NAMES]


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_three_hosts_give_the_bits_of_one(backend):
    (expected,) = run_ranks(1, hashes, [], backend)
    with simulated_hosts(3) as hosts:
        assert run_ranks(4, hashes, hosts, backend, timeout=120) == [expected] * 4
