"""`plc_digest`: any change shows, and nothing but the bytes, their number and the seed matters."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import abi


def digest(data: bytes | bytearray, seed: int = 0) -> int:
    array = np.frombuffer(bytes(data), np.uint8)
    return int(abi.library().plc_digest(array.ctypes.data, array.size, seed))


@settings(max_examples=40)
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_the_same_bytes_give_the_same_digest_wherever_they_lie(data, seed):
    shifted = np.frombuffer(b"x" + data, np.uint8)[1:]  # another alignment
    assert digest(data, seed) == int(
        abi.library().plc_digest(shifted.ctypes.data, shifted.size, seed)
    )


@settings(max_examples=40)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_bit_shows(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest(changed) != digest(data)


@settings(max_examples=40)
@given(st.binary(min_size=64, max_size=300), st.data())
def test_swapped_words_show(data, draw):
    """Sums would not notice: the same words in another order."""
    words = len(data) // 8
    i, j = draw.draw(st.integers(0, words - 1)), draw.draw(st.integers(0, words - 1))
    changed = bytearray(data)
    changed[8 * i : 8 * i + 8], changed[8 * j : 8 * j + 8] = (
        data[8 * j : 8 * j + 8],
        data[8 * i : 8 * i + 8],
    )
    if changed != data:
        assert digest(changed) != digest(data)


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(1, 70))
def test_zeros_at_the_end_show(count, more):
    assert digest(bytes(count)) != digest(bytes(count + more))


@settings(max_examples=40)
@given(st.binary(max_size=100), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_seed_shows(data, one, other):
    if one != other:
        assert digest(data, one) != digest(data, other)


def test_every_bit_of_a_page_matters_to_every_part_of_the_digest():
    """Each bit of the answer changes for about half of the single-bit changes."""
    page = bytearray(np.random.default_rng(1).bytes(512))
    base, counts = digest(page), np.zeros(64, int)
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        counts += (((digest(page) ^ base) >> np.arange(64, dtype=object)) & 1).astype(int)
        page[bit // 8] ^= 1 << bit % 8
    share = counts / (8 * len(page))
    assert share.min() > 0.35, share
    assert share.max() < 0.65, share
