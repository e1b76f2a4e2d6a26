"""`plc_reduce_local` against torch and numpy: every type, every operation, awkward values, one to
nine inputs.
"""

from __future__ import annotations

import ctypes as C
import functools
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import abi
from paceline.core.abi import Status
from paceline.core.dtypes import DTYPE_NAMES, OP_NAMES

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
HALVES = ("float16", "bfloat16")
REALS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")


@functools.cache
def instruction_sets() -> list[bytes]:
    """Those this machine offers, best first."""
    core, one = abi.library(), (C.c_float * 1)(1.0)
    inputs = (C.c_void_p * 1)(C.addressof(one))
    names = (b"avx512", b"avx2", b"sse2", b"neon", b"portable")
    return [
        name
        for name in names
        if core.plc_reduce_with(name, one, inputs, 1, 1, 10, 0, 1.0) == Status.OK
    ]


LENGTHS = st.one_of(
    st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 3000])
)  # around the kernels' block


def reduce_local(arrays: list[np.ndarray], dtype: str, op: str, factor: float = 1.0) -> np.ndarray:
    """The core's own reduction. Arrays hold the bytes; `dtype` says what they are."""
    core = abi.library()
    pointers = (C.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    count = arrays[0].nbytes // core.plc_element_bytes(DTYPE_NAMES.index(dtype))
    numbers = (pointers, len(arrays), count, DTYPE_NAMES.index(dtype), OP_NAMES.index(op), factor)
    out = np.zeros_like(arrays[0])
    assert core.plc_reduce_local(out.ctypes.data, *numbers) == Status.OK
    for name in instruction_sets():
        other = np.zeros_like(out)
        assert core.plc_reduce_with(name, other.ctypes.data, *numbers) == Status.OK
        assert same_bits(_as_numbers(other, dtype), _as_numbers(out, dtype)), (name, dtype, op)
    return out


def _as_numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """For comparing: bfloat16, which numpy does not know, as bits that hold for NaNs as well."""
    if dtype in ("float16", "complex32"):
        return array.view(np.float16)
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bit for bit, but that any NaN is as good as another."""
    if found.dtype.kind not in "fc":
        return bool(np.array_equal(found, expected))
    kind = np.dtype(f"f{found.real.itemsize}")
    left, right = found.view(kind), expected.view(kind)
    bits = np.dtype(f"u{kind.itemsize}")
    return bool(np.all((left.view(bits) == right.view(bits)) | (np.isnan(left) & np.isnan(right))))


def in_order(combine, arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return functools.reduce(combine, arrays)


@st.composite
def random_bits(draw, dtype: str):
    """One to nine arrays of one type and length: random bits, so NaNs, infinities, subnormals and
    both zeros are in.
    """
    count, ranks = draw(LENGTHS), draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = np.dtype(dtype)
    arrays = [
        np.frombuffer(generator.bytes(count * kind.itemsize), kind).copy() for _ in range(ranks)
    ]
    if kind.kind in "fc" and count:
        part = np.dtype(f"f{arrays[0].real.itemsize}")
        special = np.array(
            [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5, np.finfo(part).smallest_subnormal], part
        )
        for array in arrays:
            if draw(st.booleans()):
                parts = array.view(part)
                parts[:] = generator.choice(special, parts.size)
    return arrays


# --- integers and bool: wrap around, exactly ------------------------------------------------------
INTEGER_OPS = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=10)
@given(data=st.data())
def test_integers(dtype, data):
    arrays = data.draw(random_bits(dtype))
    for op, combine in INTEGER_OPS.items():
        assert same_bits(reduce_local(arrays, dtype, op), in_order(combine, arrays)), op


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=6)
@given(data=st.data())
def test_the_average_of_integers_is_cut_towards_zero(dtype, data):
    arrays = data.draw(random_bits(dtype))
    total = in_order(operator.add, arrays)
    expected = [int(abs(int(x)) // len(arrays)) * (-1 if x < 0 else 1) for x in total]
    assert reduce_local(arrays, dtype, "AVG").tolist() == expected


BOOL_OPS = {
    "SUM": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "MAX": np.logical_or,
    "BAND": np.logical_and,
    "BOR": np.logical_or,
    "BXOR": np.logical_xor,
}


@settings(max_examples=15)
@given(data=st.data())
def test_booleans(data):
    arrays = [array & 1 for array in data.draw(random_bits("uint8"))]
    for op, combine in BOOL_OPS.items():
        found = reduce_local(arrays, "bool", op)
        assert np.array_equal(
            found, in_order(combine, [array != 0 for array in arrays]).astype(np.uint8)
        ), op


# --- floats: in order of rank, one operation after the other --------------------------------------
@pytest.mark.parametrize("dtype", REALS)
@settings(max_examples=25)
@given(data=st.data(), factor=st.sampled_from([0.5, -3.0, 0.1, 0.0]))
def test_reals_bit_for_bit(dtype, data, factor):
    arrays = data.draw(random_bits(dtype))
    kind = np.dtype(dtype).type
    total = in_order(operator.add, arrays)
    with np.errstate(all="ignore"):
        expected = {
            "SUM": total,
            "AVG": total / kind(len(arrays)),
            "PRODUCT": in_order(operator.mul, arrays),
            "PREMUL_SUM": in_order(operator.add, [array * kind(factor) for array in arrays]),
        }
    for op, values in expected.items():
        assert same_bits(reduce_local(arrays, dtype, op, factor), values), op


@pytest.mark.parametrize("dtype", REALS)
@settings(max_examples=20)
@given(data=st.data())
def test_smallest_and_largest_keep_every_nan(dtype, data):
    arrays = data.draw(random_bits(dtype))
    for op, combine in {"MIN": np.minimum, "MAX": np.maximum}.items():
        found, expected = reduce_local(arrays, dtype, op), in_order(combine, arrays)
        assert np.array_equal(found, expected, equal_nan=True), (
            op
        )  # which of two equal zeros wins is not promised


@pytest.mark.parametrize("dtype", COMPLEX)
@settings(max_examples=15)
@given(data=st.data())
def test_complex_numbers_are_reduced_part_by_part(dtype, data):
    arrays = data.draw(random_bits(dtype))
    part = "float32" if dtype == "complex64" else "float64"
    for op in ("SUM", "AVG", "PREMUL_SUM"):
        expected = reduce_local([array.view(part) for array in arrays], part, op, 2.5).view(dtype)
        assert same_bits(reduce_local(arrays, dtype, op, 2.5), expected), op


@pytest.mark.parametrize("dtype", COMPLEX)
@settings(max_examples=20)
@given(data=st.data(), ranks=st.integers(1, 5), count=st.integers(0, 40))
def test_complex_product(dtype, data, ranks, count):
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    part = np.dtype("f4" if dtype == "complex64" else "f8")
    arrays = [generator.standard_normal(2 * count).astype(part).view(dtype) for _ in range(ranks)]
    re, im = arrays[0].real.copy(), arrays[0].imag.copy()
    for array in arrays[1:]:
        re, im = re * array.real - im * array.imag, re * array.imag + im * array.real
    found = reduce_local(arrays, dtype, "PRODUCT")
    assert same_bits(np.ascontiguousarray(found.real), re)
    assert same_bits(np.ascontiguousarray(found.imag), im)


# --- halves: accumulated in float32, rounded once -------------------------------------------------
HALF_OPS = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PREMUL_SUM": operator.add,
}


def _tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype))


def half_reduced(arrays: list[np.ndarray], dtype: str, op: str, factor: float) -> torch.Tensor:
    """What torch gives when it computes in float32 and converts once."""
    wide = [_tensor(array, dtype).to(torch.float32) for array in arrays]
    if op == "PREMUL_SUM":
        wide = [tensor * factor for tensor in wide]
    total = functools.reduce(HALF_OPS[op], wide)
    if op == "AVG":
        total = total / len(arrays)
    return total.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", HALVES)
@settings(max_examples=30)
@given(data=st.data())
def test_halves_round_once(dtype, data):
    arrays = data.draw(random_bits("uint16"))
    for op in HALF_OPS:
        found, expected = (
            _tensor(reduce_local(arrays, dtype, op, 0.75), dtype),
            half_reduced(arrays, dtype, op, 0.75),
        )
        same = (found.view(torch.int16) == expected.view(torch.int16)) | (
            found.isnan() & expected.isnan()
        )
        if op in ("MIN", "MAX"):
            same |= (found == 0) & (expected == 0)
        assert same.all(), (op, [(array[~same.numpy()][:3]).tolist() for array in arrays])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_survives_a_sum_with_nothing(dtype):
    """All 65536 values through load and store."""
    every = np.arange(65536, dtype=np.uint16)
    found, given_ = _tensor(reduce_local([every], dtype, "SUM"), dtype), _tensor(every, dtype)
    assert torch.equal(found.isnan(), given_.isnan())
    number = ~given_.isnan()
    assert torch.equal(found[number].view(torch.int16), given_[number].view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_rounding_of_a_half_is_torchs(dtype):
    """Each half plus a small part of its neighbour's distance: ties, overflows and subnormal
    results.
    """
    every = np.arange(65536, dtype=np.uint16)
    for shift in (1, 7, 0x3C00, 0x8001):
        other = (every.astype(np.uint32) + shift).astype(np.uint16)
        found = _tensor(reduce_local([every, other, other], dtype, "AVG"), dtype)
        expected = half_reduced([every, other, other], dtype, "AVG", 1.0)
        same = (found.view(torch.int16) == expected.view(torch.int16)) | (
            found.isnan() & expected.isnan()
        )
        assert same.all()


@settings(max_examples=20)
@given(data=st.data())
def test_complex_halves(data):
    arrays = data.draw(random_bits("uint16"))
    arrays = [array[: array.size // 2 * 2] for array in arrays]
    found, expected = (
        reduce_local(arrays, "complex32", "SUM"),
        reduce_local(arrays, "float16", "SUM"),
    )
    assert np.array_equal(found, expected)


# --- instruction sets: every reduction above was compared among all that this machine offers ------
def test_the_best_instruction_set_is_one_of_those_compared():
    best = abi.library().plc_instruction_set()
    assert best == instruction_sets()[0]
    assert len(instruction_sets()) > 1 or best in (b"sse2", b"neon", b"portable")


# --- what cannot be done, and what may alias ------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("bytes", "SUM"),
        ("float32", "BAND"),
        ("complex64", "MAX"),
        ("bool", "AVG"),
        ("int32", "PREMUL_SUM"),
    ],
)
def test_a_reduction_without_meaning_is_refused(dtype, op):
    core, data = abi.library(), (C.c_double * 4)()
    pointers = (C.c_void_p * 1)(C.addressof(data))
    status = core.plc_reduce_local(
        data, pointers, 1, 1, DTYPE_NAMES.index(dtype), OP_NAMES.index(op), 1.0
    )
    assert status == Status.INVALID


@settings(max_examples=30)
@given(data=st.data(), place=st.integers(0, 8))
def test_the_output_may_be_one_of_the_inputs(data, place):
    arrays = data.draw(random_bits("float32"))
    expected = reduce_local(arrays, "float32", "SUM")
    out = arrays[place % len(arrays)]
    pointers = (C.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    abi.library().plc_reduce_local(out.ctypes.data, pointers, len(arrays), out.size, 10, 0, 1.0)
    assert same_bits(out, expected)


@settings(max_examples=30)
@given(data=st.data(), divisor=st.integers(1, 1000))
def test_scaling_divides_as_an_average_does(data, divisor):
    array = data.draw(random_bits("float32"))[0]
    with np.errstate(all="ignore"):
        expected = array / np.float32(divisor)
    abi.library().plc_scale_local(array.ctypes.data, array.size, 10, divisor)
    assert same_bits(array, expected)


@settings(max_examples=30)
@given(data=st.data())
def test_float32_travels_as_bfloat16_as_torch_rounds_and_adds_it(data):
    arrays = data.draw(random_bits("float32").filter(lambda drawn: len(drawn) > 1))
    rounded = [torch.from_numpy(array).bfloat16() for array in arrays]
    found = [torch.empty_like(tensor) for tensor in rounded]
    core, count = abi.library(), len(arrays[0])
    for array, out in zip(arrays, found, strict=True):
        core.plc_round_to_bf16(out.data_ptr(), array.ctypes.data, count)
    for out, wanted in zip(found, rounded, strict=True):
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.nan_to_num(0.0), wanted.nan_to_num(0.0))
    total = torch.empty(count)
    pointers = (C.c_void_p * len(found))(*[tensor.data_ptr() for tensor in found])
    assert core.plc_sum_of_bf16(total.data_ptr(), pointers, len(found), count) == Status.OK
    expected = functools.reduce(operator.add, [tensor.float() for tensor in rounded])
    torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
