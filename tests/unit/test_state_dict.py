"""Names of a state dict follow the wrappers of the module it is loaded into."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline._state_dict import align_names

OWN = ["0.weight", "0.bias"]


def aligned(names, own):
    return list(align_names(dict.fromkeys(names), own))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("own_prefix", ["", "module.", "_orig_mod.", "_orig_mod.module."])
def test_any_wrappers_load_into_any_other(prefix, own_prefix):
    own = [own_prefix + name for name in OWN]
    assert aligned([prefix + name for name in OWN], own) == own


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
def test_a_child_called_module_is_no_wrapper(prefix):
    own = ["module.weight", "module.bias"]
    assert aligned([prefix + name for name in own], own) == own


def test_names_that_fit_nowhere_are_left_alone():
    state = {"module.other": 1}
    assert align_names(state, OWN) is state
    assert align_names({}, OWN) == {}


def test_metadata_and_type_go_along():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    wrapped = align_names(state, [f"module.{name}" for name in state])
    assert isinstance(wrapped, collections.OrderedDict)
    assert set(wrapped._metadata) == {"module", "module.0"}
    back = align_names(wrapped, list(state))
    assert back == state
    assert back._metadata == dict(state._metadata)


segments = st.lists(st.sampled_from(["module", "_orig_mod"]), max_size=3)
names = st.lists(
    st.text(alphabet="ab.", min_size=1, max_size=6).filter(lambda text: not text.startswith(".")),
    min_size=1,
    max_size=4,
    unique=True,
)


@given(segments, segments, names)
def test_every_tensor_arrives_under_the_modules_name(saved_with, loaded_into, bare):
    own = [".".join([*loaded_into, name]) for name in bare]
    state = {".".join([*saved_with, name]): name for name in bare}
    result = align_names(state, own)
    assert dict(result) == dict(zip(own, bare, strict=True))
