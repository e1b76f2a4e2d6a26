"""`paceline.optim` against torch's own classes: the same numbers, the same checkpoints, the same
errors.

Torch's database of optimizers (what its own tests run over) gives configurations and errors;
hypothesis gives the rest.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
import unittest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.optim

CLASSES = ("SGD", "Adam", "AdamW", "Adagrad")
STEPS = 100
# Relative to the largest number of a tensor after all steps, or to 1: the numbers it is the sum of
# are of that size, and a tensor of one element may come to lie near 0.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float64: 1e-12,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}


def ours(name: str):
    return getattr(paceline.optim, name)


def stock(name: str):
    return getattr(torch.optim, name)


def new_parameters(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def copies(parameters):
    return [torch.nn.Parameter(p.detach().clone()) for p in parameters]


def give_gradients(generator, *models):
    """The same random gradients to the parameters of all models."""
    for together in zip(*models, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator).to(together[0].dtype)
        for parameter in together:
            parameter.grad = gradient.to(parameter.dtype, copy=True)


@torch.no_grad()
def round_to(dtype, optimizer):
    """What halves are to be: computed in float32, rounded once. Torch's loop rounds after each
    operation.
    """
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if name != "step":
                tensor.copy_(tensor.to(dtype))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.copy_(parameter.to(dtype))


def assert_close(found, expected, times=1):
    for left, right in zip(found, expected, strict=True):
        scale = max(largest(right), 1.0)
        error = largest(left.double() - right.double())
        assert error <= times * TOLERANCE[right.dtype] * scale, (left.shape, left.dtype)


def largest(tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def assert_same_state(found, expected):
    """Two state dicts: the same structure, types and, closely, numbers."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert list(found["state"][key]) == list(state)
        for name, value in state.items():
            mine = found["state"][key][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert (mine.dtype, mine.shape, mine.stride()) == (
                    (value.dtype, value.shape, value.stride())
                )
                assert_close([mine], [value], 10)


@pytest.fixture(scope="module")
def database():
    """Torch's own, by the name of the class. It asks for a package that only its tests need."""
    absent = "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    if absent:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        module = importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        if absent:
            del sys.modules["expecttest"]
    return {info.optim_cls.__name__: info for info in module.optim_db}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_configuration_of_torchs_database(name, dtype, database):
    inputs = database[name].optim_inputs_func("cpu", dtype)
    assert len(inputs) > 4
    for case in inputs:
        mine = new_parameters([(3, 5), (70, 11), (1001,), ()], dtype)
        theirs = copies(mine)
        is_half = dtype.itemsize == 2
        if is_half:
            theirs = [torch.nn.Parameter(p.detach().float()) for p in theirs]
        left = ours(name)(mine, **copy.deepcopy(case.kwargs))
        right = stock(name)(theirs, **copy.deepcopy(case.kwargs))
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            give_gradients(generator, mine, theirs)
            left.step()
            right.step()
            if is_half:
                round_to(dtype, right)
        assert_close(mine, [p.to(dtype) for p in theirs])
        if not is_half:
            assert_same_state(left.state_dict(), right.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_error_of_torchs_database(name, database):
    cases = database[name].optim_error_inputs_func("cpu", torch.float32)
    assert cases
    for case in cases:
        given_ = case.optimizer_error_input
        parameters = given_.params if given_.params is not None else new_parameters([(2,)])
        with pytest.raises(case.error_type, match=case.error_regex):
            ours(name)(parameters, **given_.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_scheduler_of_torchs_database(name, database):
    for constructors in database[name].scheduler_inputs:
        mine = new_parameters([(9, 4)])
        theirs = copies(mine)
        generator = torch.Generator().manual_seed(2)
        optimizers = ours(name)(mine, lr=0.01), stock(name)(theirs, lr=0.01)
        schedulers = [[make(optimizer) for make in constructors] for optimizer in optimizers]
        for step in range(30):
            give_gradients(generator, mine, theirs)
            for optimizer, its in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                for scheduler in its:
                    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
                    scheduler.step(*([1.0 / (step + 1)] if isinstance(scheduler, plateau) else []))
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert_close(mine, theirs)


# --- whatever hypothesis thinks of ----------------------------------------------------------------
@st.composite
def options(draw, name: str) -> dict:
    chosen = {
        "lr": draw(st.sampled_from([1e-3, 0.1, 0.0])),
        "weight_decay": draw(st.sampled_from([0, 0.1])),
        "maximize": draw(st.booleans()),
    }
    if name == "SGD":
        chosen["momentum"] = draw(st.sampled_from([0, 0.9]))
        if chosen["momentum"]:
            chosen["nesterov"] = draw(st.booleans())
        if not chosen.get("nesterov"):
            chosen["dampening"] = draw(st.sampled_from([0, 0.5]))
    elif name == "Adagrad":
        chosen["lr_decay"] = draw(st.sampled_from([0, 0.01]))
        chosen["initial_accumulator_value"] = draw(st.sampled_from([0, 0.1]))
    else:
        chosen["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.3, 0.9), (0.0, 0.5)]))
        chosen["amsgrad"] = draw(st.booleans())
    return chosen


SHAPES = st.lists(
    st.sampled_from([(), (0,), (1,), (7,), (16,), (17, 3), (2, 3, 5, 2), (1000,)]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=15)
@given(data=st.data(), shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_like_torch_for_groups_and_gaps(name, data, shapes, dtype):
    """Two groups of other settings, parameters that get no gradient in some steps."""
    first, second = data.draw(options(name)), data.draw(options(name))
    mine = new_parameters([*shapes, (5, 2)], dtype)
    theirs = copies(mine)
    optimizers = [
        cls([{"params": model[:-1]}, {"params": model[-1:], **second}], **first)
        for cls, model in ((ours(name), mine), (stock(name), theirs))
    ]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for _ in range(12):
        give_gradients(generator, mine, theirs)
        if data.draw(st.booleans()):
            gap = data.draw(st.integers(0, len(mine) - 1))
            mine[gap].grad = theirs[gap].grad = None
        for optimizer in optimizers:
            optimizer.step()
    assert_close(mine, theirs)
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
@pytest.mark.parametrize(
    ("name", "given_options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("SGD", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("Adagrad", {}),
    ],
)
def test_a_checkpoint_loads_into_the_other_class(name, given_options, direction, tmp_path):
    classes = [stock(name), ours(name)]
    if direction == "to torch":
        classes.reverse()
    generator = torch.Generator().manual_seed(3)
    before = new_parameters([(4, 4), (33,)])
    optimizer = classes[0](before, **given_options)
    for _ in range(3):
        give_gradients(generator, before)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    after = copies(before)
    other = classes[1](after, **given_options)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for _ in range(3):
        give_gradients(generator, before, after)
        optimizer.step()
        other.step()
    assert_close(after, before)
    assert_same_state(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", CLASSES)
def test_a_copy_goes_on_by_itself(name):
    parameters = new_parameters([(6,)])
    optimizer = ours(name)(parameters)
    generator = torch.Generator().manual_seed(4)
    give_gradients(generator, parameters)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    assert other is not parameters[0]
    give_gradients(generator, parameters, [other])
    optimizer.step()
    assert not torch.equal(other, parameters[0])
    twin.step()
    assert torch.equal(other, parameters[0])
