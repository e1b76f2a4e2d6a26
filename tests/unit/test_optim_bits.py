"""The kernels of `paceline.optim`: bits that depend neither on where a part begins, nor on threads,
nor on the instruction set.
"""

from __future__ import annotations

import ctypes as C
import functools
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.optim
from paceline.core import abi
from paceline.core.abi import Status
from paceline.core.dtypes import DTYPE_NAMES
from paceline.core.journal import Journal, journal_bytes
from paceline.core.update import KindFlag, Option, Rule

FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
RULES = {
    "sgd": (Rule.SGD, 0, {}),
    "momentum": (Rule.SGD, 0, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (Rule.SGD, Option.NESTEROV, {"momentum": 0.9}),
    "adam": (Rule.ADAM, 0, {"weight_decay": 0.1}),
    "adamw": (Rule.ADAM, Option.DECOUPLED_DECAY, {"weight_decay": 0.1}),
    "amsgrad": (Rule.ADAM, Option.AMSGRAD | Option.MAXIMIZE, {"beta1": 0.2}),
    "adagrad": (Rule.ADAGRAD, 0, {"lr_decay": 0.1}),
}
ROWS = 6  # parameter, gradient, three of state, steps


@functools.cache
def instruction_sets() -> list[bytes]:
    """Those this machine offers."""
    names = (b"avx512", b"avx2", b"sse2", b"neon", b"portable")
    empty = abi.Update(parts=1, threads=1)
    return [n for n in names if abi.library().plc_update_with(n, C.byref(empty)) == Status.OK]


class Case:
    """Arrays of numbers for one update. Halves are bits in arrays of uint16."""

    def __init__(self, rule: str, dtype: str, counts: list[int], seed: int) -> None:
        self.rule, self.dtype, self.counts = rule, dtype, counts
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)
        self.rows = []
        for row in range(ROWS - 1):
            numbers = [torch.randn(n, generator=generator) for n in counts]
            self.rows.append([(x.abs() if row > 2 else x).to(kind) for x in numbers])
        self.rows.append([torch.tensor([float(3 * i)]) for i in range(len(counts))])

    def update(self, rows, **changes):
        """The update of these arrays, and what it refers to."""
        rule, flags, numbers = RULES[self.rule]
        addresses = (C.c_uint64 * (ROWS * len(self.counts)))(
            *(tensor.data_ptr() for row in rows for tensor in row)
        )
        counts = (C.c_uint64 * len(self.counts))(*self.counts)
        kinds = (C.c_uint32 * len(self.counts))(*[DTYPE_NAMES.index(self.dtype)] * len(self.counts))
        settings = {"lr": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.99}
        update = abi.Update(
            rule=rule,
            options=flags,
            **settings | {"grad_scale": 1.0, "clip": 1.0} | numbers | changes,
            arrays=len(self.counts),
            addresses=C.addressof(addresses),
            counts=C.addressof(counts),
            kinds=C.addressof(kinds),
        )
        return update, (addresses, counts, kinds)

    def run(
        self,
        name: bytes | None = None,
        gradients=None,
        parts: int = 1,
        *,
        journal: bool = False,
        **changes,
    ):
        """All arrays after the update, made in so many parts; `gradients` elsewhere than here."""
        rows = [[tensor.clone() for tensor in row] for row in self.rows]
        if gradients is not None:
            rows[1] = gradients
        update, _keep = self.update(rows, **{"threads": 1, **changes}, parts=parts)
        memory = torch.zeros(journal_bytes(), dtype=torch.uint8)
        if journal:
            update.journal = memory.data_ptr()
        for part in range(parts):
            update.part = part
            if part:  # each part counts the step, as each rank does for itself
                for tensor in rows[-1]:
                    tensor.sub_(1)
            assert abi.library().plc_update_with(name, C.byref(update)) == Status.OK
        if journal:
            progress = Journal(memory.data_ptr()).read()
            assert (progress.begun, progress.made) == (parts, parts)
        return rows

    def square_sums(self, name: bytes | None = None, parts: int = 1, threads: int = 1, **changes):
        """Of the gradients, by block."""
        update, _keep = self.update(self.rows, parts=parts, threads=threads, **changes)
        sums = np.full(abi.library().plc_norm_blocks(C.byref(update)), np.nan)
        for part in range(parts):
            update.part = part
            status = abi.library().plc_square_sums_with(name, C.byref(update), sums.ctypes.data)
            assert status == Status.OK
        return sums


def same_bits(left, right) -> bool:
    return all(
        np.array_equal(x.view(torch.uint8).numpy(), y.view(torch.uint8).numpy())
        for row, other in zip(left, right, strict=True)
        for x, y in zip(row, other, strict=True)
    )


COUNTS = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from([4095, 4096, 5000])), min_size=1, max_size=6
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8)
@given(
    counts=COUNTS,
    seed=st.integers(0, 1000),
    parts=st.integers(2, 9),
    threads=st.integers(2, 5),
    grad_scale=st.sampled_from([1.0, 3.0]),
)
def test_bits_depend_on_nothing_but_the_numbers(
    rule, dtype, counts, seed, parts, threads, grad_scale
):
    case = Case(rule, dtype, counts, seed)
    expected = case.run(grad_scale=grad_scale)
    assert [step.item() for step in expected[-1]] == [3 * i + 1 for i in range(len(counts))]
    assert same_bits(case.run(parts=parts, grad_scale=grad_scale), expected)
    assert same_bits(case.run(threads=threads, parts=2, grad_scale=grad_scale), expected)
    assert instruction_sets()
    for name in instruction_sets():
        assert same_bits(case.run(name, grad_scale=grad_scale), expected), name
        journaled = case.run(
            name, None, parts, journal=True, threads=threads, grad_scale=grad_scale
        )
        assert same_bits(journaled, expected), name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parts_begin_at_lines_of_an_array(dtype):
    """64 bytes from the array's begin: other parts leave the rest alone."""
    case = Case("sgd", dtype, [1000, 7, 3000], 1)
    before = case.run(lr=0.0)
    touched = []
    rows = [[tensor.clone() for tensor in row] for row in case.rows]
    addresses = (C.c_uint64 * (ROWS * 3))(*(t.data_ptr() for row in rows for t in row))
    update = abi.Update(
        rule=Rule.SGD,
        lr=1.0,
        grad_scale=1.0,
        clip=1.0,
        parts=3,
        threads=1,
        arrays=3,
        addresses=C.addressof(addresses),
        counts=C.addressof(counts := (C.c_uint64 * 3)(1000, 7, 3000)),
        kinds=C.addressof(kinds := (C.c_uint32 * 3)(*[DTYPE_NAMES.index(dtype)] * 3)),
    )
    assert counts[2] == 3000
    assert kinds[2] == DTYPE_NAMES.index(dtype)
    for part in range(3):
        update.part = part
        assert abi.library().plc_update_arrays(C.byref(update)) == Status.OK
        changed = [~torch.eq(x, y) for x, y in zip(rows[0], before[0], strict=True)]
        touched.append([int(flags.sum()) for flags in changed])
    per_line = 64 // FLOATS[dtype]
    assert touched[-1] == [1000, 7, 3000]
    for numbers in touched[:-1]:
        assert any(0 < n < count for n, count in zip(numbers, case.counts, strict=True))
        assert all(n == c or n % per_line == 0 for n, c in zip(numbers, case.counts, strict=True))


def test_the_first_momentum_is_the_gradient_whatever_was_there():
    parameter, gradient = torch.zeros(20), torch.randn(20)
    buffer = torch.full((20,), float("nan"))
    addresses = (C.c_uint64 * ROWS)(
        parameter.data_ptr(), gradient.data_ptr(), buffer.data_ptr(), 0, 0, 0
    )
    kinds = (C.c_uint32 * 1)(DTYPE_NAMES.index("float32") | KindFlag.FIRST_UPDATE)
    counts = (C.c_uint64 * 1)(20)
    update = abi.Update(
        rule=Rule.SGD,
        lr=1.0,
        momentum=0.9,
        dampening=0.5,
        grad_scale=1.0,
        clip=1.0,
        parts=1,
        arrays=1,
        addresses=C.addressof(addresses),
        counts=C.addressof(counts),
        kinds=C.addressof(kinds),
    )
    assert abi.library().plc_update_arrays(C.byref(update)) == Status.OK
    assert torch.equal(buffer, gradient)
    assert torch.equal(parameter, -gradient)


@pytest.mark.parametrize(
    "changes", [{"rule": 3}, {"parts": 0}, {"part": 2, "parts": 2}, {"dtype": "int32"}]
)
def test_what_cannot_be_updated_is_refused(changes):
    data = torch.zeros(4)
    kind = DTYPE_NAMES.index(changes.pop("dtype", "float32"))
    addresses = (C.c_uint64 * ROWS)(*[data.data_ptr()] * ROWS)
    counts, kinds = (C.c_uint64 * 1)(4), (C.c_uint32 * 1)(kind)
    update = abi.Update(
        **{"parts": 1, **changes},
        arrays=1,
        addresses=C.addressof(addresses),
        counts=C.addressof(counts),
        kinds=C.addressof(kinds),
    )
    assert abi.library().plc_update_arrays(C.byref(update)) == Status.INVALID
    assert not data.any()


def test_threads_of_the_process_change_no_bits():
    """Large enough for several threads."""
    results = []
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            generator = torch.Generator().manual_seed(0)
            parameter = torch.nn.Parameter(torch.randn(1_500_001, generator=generator))
            optimizer = paceline.optim.AdamW([parameter])
            for _ in range(2):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        results.append(parameter.detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# --- gradients summed in the pass, and their norm -------------------------------------------------
def laid_out(case: Case, ranks: int):
    """Gradients of several ranks, each rank's arrays as far from the first one's as the others'."""
    kind = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(len(case.counts))
    room = [-(-n // 8) * 8 for n in case.counts]
    memory = torch.randn(ranks, sum(room), generator=generator).to(kind)
    begins = [sum(room[:i]) for i in range(len(room))]
    distances = array("q", [r * sum(room) * FLOATS[case.dtype] for r in range(ranks)])
    by_array = [
        [memory[r, at : at + n] for r in range(ranks)]
        for at, n in zip(begins, case.counts, strict=True)
    ]
    return distances, by_array


def averaged(gradients, dtype: str, weights: list[float]):
    """As buckets average: with one factor, or each scaled by its own and rounded first."""
    reduce, kind = abi.library().plc_reduce_local, DTYPE_NAMES.index(dtype)
    premultiplied, plain = 8, 0

    def reduced(inputs, op, factor):
        out = torch.empty_like(inputs[0])
        pointers = (C.c_void_p * len(inputs))(*(x.data_ptr() for x in inputs))
        assert reduce(out.data_ptr(), pointers, len(inputs), out.numel(), kind, op, factor) == 0
        return out

    if not gradients[0].numel():
        return gradients[0].clone()
    if len({w for w in weights if w}) <= 1:
        return reduced(gradients, premultiplied, max(weights))
    scaled = [reduced([x], premultiplied, w) for x, w in zip(gradients, weights, strict=True)]
    return reduced(scaled, plain, 1.0)


WEIGHTS = st.lists(st.sampled_from([0.5, 0.25, 0.125, 0.3]), min_size=1, max_size=5)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=10)
@given(
    counts=COUNTS,
    weights=st.one_of(WEIGHTS, st.integers(1, 5).map(lambda n: [1 / n] * n)),
    rule=st.sampled_from(sorted(RULES)),
    parts=st.integers(2, 5),
    threads=st.integers(1, 3),
    grad_scale=st.sampled_from([1.0, 3.0]),
)
def test_a_sum_in_the_pass_has_the_bits_of_an_average_before_it(
    dtype, counts, weights, rule, parts, threads, grad_scale
):
    case = Case(rule, dtype, counts, 3)
    distances, gradients = laid_out(case, len(weights))
    case.rows[1] = [averaged(each, dtype, weights) for each in gradients]
    expected = case.run(grad_scale=grad_scale)
    factors = array("d", weights)
    options = {
        "gradients": [each[0] for each in gradients],
        "ranks": len(weights),
        "distances": distances.buffer_info()[0],
        "weights": factors.buffer_info()[0],
        "grad_scale": grad_scale,
    }
    before = [each[0].clone() for each in gradients]
    for name in instruction_sets():
        assert same_bits(without_gradients(case.run(name, **options)), without_gradients(expected))
    result = case.run(parts=parts, threads=threads, **options)
    assert same_bits(without_gradients(result), without_gradients(expected))
    assert same_bits([[each[0] for each in gradients]], [before])  # read, not written


def without_gradients(rows):
    return [row for number, row in enumerate(rows) if number != 1]


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=10)
@given(
    counts=COUNTS,
    parts=st.integers(1, 6),
    threads=st.integers(1, 3),
    clip=st.sampled_from([1.0, 0.3]),
)
def test_square_sums_depend_on_nothing_but_the_numbers(dtype, counts, parts, threads, clip):
    case = Case("sgd", dtype, counts, 5)
    expected = case.square_sums()
    for name in instruction_sets():
        assert np.array_equal(case.square_sums(name), expected)
    assert np.array_equal(case.square_sums(parts=parts, threads=threads, clip=clip), expected)
    exact = sum(float((x.double() ** 2).sum()) for x in case.rows[1])
    assert np.isclose(expected.sum(), exact, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipped_gradients_are_multiplied_once(dtype):
    case = Case("adamw", dtype, [5000, 3], 7)
    clipped = case.run(clip=0.3)
    case.rows[1] = [x * 0.3 for x in case.rows[1]]
    assert same_bits(without_gradients(clipped), without_gradients(case.run()))
