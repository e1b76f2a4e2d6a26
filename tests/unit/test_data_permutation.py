"""The keyed permutation: a bijection, the same everywhere, and as random as a shuffle should be."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.permutation import Permutation
from paceline.data.rng import derive_keys, random_bits

SORTED, NETWORK = 1000, 20_000  # one length for each of the two ways
HUGE = 10**12

KNOWN_KEYS = [12692024711052662870, 10227912462795119623]
KNOWN_BITS = [13168350753275463132, 7134611160154358618, 5517130817076012570]
KNOWN_SMALL = [8, 6, 0, 4, 9, 7, 1, 2, 3, 5]
KNOWN_LARGE = [58671424, 57861601, 91276500, 633582]
KNOWN_HUGE = [447541713042, 286024499773, 47620859102, 504332604308]


def whole(length, seed=0, epoch=0):
    return Permutation(length, seed, epoch)(np.arange(length, dtype=np.int64))


@given(
    st.integers(0, 60_000) | st.sampled_from([16_383, 16_384, 16_385, 128 * 128 + 1]),
    st.integers(0, 2**64 - 1),
)
def test_it_is_a_bijection(length, seed):
    assert np.array_equal(np.sort(whole(length, seed)), np.arange(length))


@pytest.mark.parametrize("length", [10**8, HUGE, 2**62, 2**62 - 1, 4_294_967_296, 4_294_967_297])
def test_long_ones_stay_inside_and_do_not_collide(length):
    positions = np.concatenate([np.arange(50_000), length - 1 - np.arange(50_000)])
    found = Permutation(length, 3, 1)(positions)
    assert found.min() >= 0
    assert found.max() < length
    assert len(np.unique(found)) == len(positions)


@pytest.mark.parametrize("length", [SORTED, NETWORK, HUGE])
def test_positions_are_independent_of_what_is_asked_with_them(length):
    permutation = Permutation(length, 1, 2)
    positions = np.random.default_rng(0).integers(0, length, 20_000)
    together = permutation(positions)
    alone = [int(permutation(positions[i : i + 1])[0]) for i in range(0, 20_000, 997)]
    assert together[::997].tolist() == alone


def test_known_values_pin_the_algorithm():
    """These may never change without a new name in `ALGORITHM`: saved states depend on them."""
    assert derive_keys("permutation", 0, 0, 2).tolist() == KNOWN_KEYS
    assert (
        random_bits(np.uint64(5), np.array([0, 1, 2**63], dtype=np.uint64)).tolist() == KNOWN_BITS
    )
    assert whole(10, 7, 3).tolist() == KNOWN_SMALL
    assert Permutation(10**8, 7, 3)(np.arange(4)).tolist() == KNOWN_LARGE
    assert Permutation(HUGE, 7, 3)(np.arange(4)).tolist() == KNOWN_HUGE


def network_by_hand(x, length, seed, epoch):
    """The documented algorithm in plain integers."""
    digest = hashlib.blake2b(
        f"paceline/1/permutation/{seed}/{epoch}".encode(), digest_size=64
    ).digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)

    def bits(key, number):
        z = (number * 0x9E3779B97F4A7C15 + key) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    while True:
        left, right = divmod(x, b)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + bits(even, right) // 2) % a
            right = (right + bits(odd, left) // 2) % b
        x = left * b + right
        if x < length:
            return x


@given(st.integers(16_385, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.data())
def test_it_is_the_documented_algorithm(length, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=5))
    found = Permutation(length, seed, epoch)(np.array(positions, dtype=np.int64)).tolist()
    assert found == [network_by_hand(x, length, seed, epoch) for x in positions]


@pytest.mark.parametrize("length", [SORTED, NETWORK])
def test_where_an_index_lands_is_uniform(length):
    """Chi-square over a grid of (index, place), counted over many seeds: 15 x 15 degrees of
    freedom.
    """
    counts = np.zeros((16, 16))
    seeds = 40
    for seed in range(seeds):
        order = whole(length, seed)
        places = np.arange(length) * 16 // length
        np.add.at(counts, (order * 16 // length, places), 1)
    expected = counts.sum() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 140 < chi_square < 330  # 225 +- 5 standard deviations of 21


@pytest.mark.parametrize("length", [4, 5])
def test_short_orders_are_all_equally_likely(length):
    draws = 100 * math.factorial(length)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(draws):
        order = tuple(whole(length, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    freedom = math.factorial(length) - 1
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values()) + 100 * (
        freedom + 1 - len(counts)
    )
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("length", [SORTED, NETWORK, HUGE])
def test_neighbours_are_not_correlated(length):
    size = min(length, 200_000)
    order = Permutation(length, 11, 0)(np.arange(size)).astype(np.float64)
    for lag in (1, 2, 3, 64, 128, 141, 142):  # 142 is the side of the network of 20,000
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) < 5 / (size - lag) ** 0.5, lag


@pytest.mark.parametrize("length", [SORTED, NETWORK])
def test_differences_of_neighbours_are_uniform(length):
    """What betrays a bad mixing of halves: some steps from one index to the next would come too
    often.
    """
    steps = np.concatenate([np.diff(whole(length, seed)) % length for seed in range(20)])
    counts = np.bincount(steps * 64 // length, minlength=64)
    expected = counts.sum() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 14 < chi_square < 130  # 63 degrees of freedom, 11 is a standard deviation


@pytest.mark.parametrize("length", [SORTED, NETWORK])
def test_fixed_points_and_cycles_are_those_of_chance(length):
    """A random permutation has one fixed point on average, with variance one; and one index of
    cycle length two.
    """
    fixed, pairs = [], []
    for seed in range(300):
        order = whole(length, seed)
        fixed.append((order == np.arange(length)).sum())
        pairs.append((order[order] == np.arange(length)).sum() - fixed[-1])
    assert abs(np.mean(fixed) - 1) < 5 / 300**0.5
    assert 0.6 < np.var(fixed) < 1.6
    assert abs(np.mean(pairs) - 1) < 5 * 2**0.5 / 300**0.5


def test_both_parities_occur():
    """A plain Feistel network gives even permutations only; with odd sides and cycle walking both
    occur.
    """

    def odd(order):
        seen, transpositions = np.zeros(len(order), dtype=bool), 0
        for start in range(len(order)):
            at = start
            while not seen[at]:
                seen[at] = True
                at = order[at]
                transpositions += not seen[at]
        return transpositions % 2

    parities = [odd(whole(16_387, seed).tolist()) for seed in range(24)]
    assert {0, 1} == set(parities)


@pytest.mark.parametrize("length", [SORTED, NETWORK, HUGE])
@pytest.mark.parametrize("other", [(1, 0), (0, 1), (2**63, 0)])
def test_another_seed_or_epoch_is_an_unrelated_order(length, other):
    size = min(length, 100_000)
    first = Permutation(length, 0, 0)(np.arange(size)).astype(np.float64)
    second = Permutation(length, *other)(np.arange(size)).astype(np.float64)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / size**0.5
    assert (first == second).sum() < 10  # chance gives one per whole order


def test_every_bit_of_the_seed_and_the_number_flips_half_of_the_bits():
    numbers = np.arange(2000, dtype=np.uint64)
    before = random_bits(np.uint64(12345), numbers)
    for bit in range(64):
        flip = np.uint64(1) << np.uint64(bit)
        for after in (
            random_bits(np.uint64(12345), numbers ^ flip),
            random_bits(np.uint64(12345) ^ flip, numbers),
        ):
            changed = np.unpackbits((before ^ after).view(np.uint8)).mean()
            assert 0.48 < changed < 0.52, bit
