"""What the drift check compares: whatever differs shows, values in another order included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.ddp import weight_digest
from paceline.ddp.weight_digest import digest, digest_of_digests

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.uint8, torch.bool),
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=[True, False], ids=["core", "torch"], scope="module")
def by_core(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_digest, "_BLOCK", 8)  # most tensors below have several blocks
        weight_digest._factors.cache_clear()
        yield request.param
    weight_digest._factors.cache_clear()


def one(tensor, by_core):
    return int(digest([tensor], by_core=by_core))


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SEEDS = st.integers(0, 10**6)


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.data())
def test_values_in_another_order_show(by_core, seed, rows, columns, data):
    tensor = values(seed, rows, columns)
    order = data.draw(st.permutations(range(tensor.numel())))
    other = tensor.flatten()[list(order)].view(rows, columns)
    others = [other, tensor.flip(0), tensor.flip(1), tensor.flatten().sort()[0].view_as(tensor)]
    if rows == columns:
        others.append(tensor.t())
    for changed in others:
        assert (one(changed, by_core) == one(tensor, by_core)) is torch.equal(changed, tensor)


@settings(max_examples=25)
@given(SEEDS, st.integers(2, 40), st.integers(1, 2**31 - 1), st.data())
def test_changes_that_cancel_in_a_sum_show(by_core, seed, length, amount, data):
    tensor = values(seed, length)
    first, second = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2))
    assume(first != second)
    changed = tensor.clone()
    bits = changed.view(torch.int32)
    bits[first] += amount
    bits[second] -= amount
    assert one(changed, by_core) != one(tensor, by_core)


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 40), st.data())
def test_signs_and_single_bits_show(by_core, seed, length, data):
    tensor = values(seed, length)
    positions = data.draw(st.sets(st.integers(0, length - 1), min_size=1))
    signs = tensor.clone()
    signs[list(positions)] *= -1
    assert one(signs, by_core) != one(tensor, by_core)
    bit = tensor.clone()
    bit.view(torch.int32)[next(iter(positions))] ^= 1 << data.draw(st.integers(0, 30))
    assert one(bit, by_core) != one(tensor, by_core)


@settings(max_examples=20)
@given(SEEDS, st.sampled_from(DTYPES), st.integers(0, 20))
def test_every_dtype_and_no_layout_matters(by_core, seed, dtype, length):
    tensor = (values(seed, length, 3) * 50).to(dtype)
    same = torch.empty(3, length, dtype=dtype).t().copy_(tensor)  # other strides
    assert one(same, by_core) == one(tensor, by_core)
    if length:
        changed = tensor.clone()
        width = min(changed.element_size(), 8)
        changed.view(torch.uint8)[-1, -1] ^= 1
        assert width in INTEGERS
        assert one(changed, by_core) != one(tensor, by_core)


def test_lengths_show_and_scalars_have_one(by_core):
    lengths = [one(torch.zeros(n), by_core) for n in range(40)]
    assert len(set(lengths)) == len(lengths)
    assert one(torch.tensor(1.0), by_core) != one(torch.tensor(2.0), by_core)


@settings(max_examples=20)
@given(SEEDS, st.integers(2, 12), st.data())
def test_tensors_exchanged_for_each_other_show(by_core, seed, count, data):
    tensors = [values(seed + i, 3, 3) for i in range(count)]
    order = data.draw(st.permutations(range(count)))
    before = digest_of_digests(digest(tensors, by_core=by_core))
    after = digest_of_digests(digest([tensors[i] for i in order], by_core=by_core))
    assert (after == before) is (list(order) == sorted(order))


def test_thousands_of_neighbours_differ(by_core):
    """Tensors that differ in one element by a step each: no two of them collide."""
    tensor = torch.zeros(100, dtype=torch.int32)
    seen = set()
    for position in range(100):
        for step in range(1, 11):
            tensor[position] = step
            seen.add(one(tensor, by_core))
        tensor[position] = 0
    assert len(seen) == 100 * 10
