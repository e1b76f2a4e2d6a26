"""Many arrays in one native call."""

from __future__ import annotations

from array import array

import pytest
import torch

from paceline.backend.host_engine import DTYPE_CODES
from paceline.core.kernels import add_pieces, copy_pieces, differing_pieces

SHAPES = [(3,), (64, 64), (), (0,), (1000, 7)]


def addresses(tensors):
    return array("Q", [tensor.data_ptr() for tensor in tensors])


def test_copies():
    sources = [torch.randn(shape) for shape in SHAPES]
    targets = [torch.zeros(shape) for shape in SHAPES]
    copy_pieces(
        addresses(targets), addresses(sources), array("Q", [source.nbytes for source in sources])
    )
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


def test_finds_what_differs_by_its_bytes():
    ones = [torch.full(shape, float("nan")) for shape in SHAPES]
    others = [tensor.clone() for tensor in ones]
    nbytes = array("Q", [tensor.nbytes for tensor in ones])
    assert differing_pieces(addresses(ones), addresses(others), nbytes) == []
    others[1][-1, -1] = 1.0
    others[2].fill_(0.0)
    assert differing_pieces(addresses(ones), addresses(others), nbytes) == [1, 2]
    assert differing_pieces(array("Q"), array("Q"), array("Q")) == []


@pytest.mark.parametrize("owners", [1, 2, 5])
def test_adds_in_order_and_rounds_once(owners):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32]
    own = [
        torch.randn(shape, dtype=torch.float64).to(dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]
    others = [[torch.randn_like(tensor) for tensor in own] for _ in range(owners)]
    expected = []
    for terms in zip(own, *others, strict=True):
        wide = torch.float64 if terms[0].dtype == torch.float64 else torch.float32
        total = terms[0].to(wide)
        for term in terms[1:]:
            total = total + term.to(wide)
        expected.append(total.to(terms[0].dtype))
    add_pieces(
        addresses(own),
        owners,
        addresses([tensor for each in others for tensor in each]),
        array("Q", [tensor.numel() for tensor in own]),
        array("I", [DTYPE_CODES[tensor.dtype] for tensor in own]),
    )
    for found, total in zip(own, expected, strict=True):
        assert torch.equal(found, total)


def test_a_type_that_cannot_be_added_changes_nothing():
    own, other = torch.ones(3), torch.ones(3)
    two = addresses([own, own]), addresses([other, other])
    with pytest.raises(AssertionError, match="cannot be added"):
        add_pieces(
            two[0], 1, two[1], array("Q", [3, 3]), array("I", [DTYPE_CODES[torch.float32], 999])
        )
    assert torch.equal(own, torch.ones(3))
