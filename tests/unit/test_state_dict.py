"""Names of a state dict follow the wrappers of the module it is loaded into."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
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


# --- wrappers anywhere in a model ------------------------------------------------------------


class DataParallelLike(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class CompiledLike(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


class Node(torch.nn.Module):
    """A module with a tensor of its own or none, and children that may be called as a wrapper's."""

    def __init__(self, has_tensor, children):
        super().__init__()
        if has_tensor:
            self.weight = torch.nn.Parameter(torch.zeros(()))
        for name, child in children.items():
            self.add_module(name, child())


def trees(depth):
    children = st.dictionaries(
        st.sampled_from(["a", "module", "_orig_mod"]),
        trees(depth - 1) if depth else st.nothing(),
        max_size=2,
    )
    return st.builds(
        lambda has_tensor, children: lambda: Node(has_tensor, children), st.booleans(), children
    )


def wrapped_somewhere(model, data):
    """The same model with wrappers around some of its modules."""
    for name, child in list(model.named_children()):
        setattr(model, name, wrapped_somewhere(child, data))
    for wrapper in data.draw(
        st.lists(st.sampled_from([DataParallelLike, CompiledLike]), max_size=2)
    ):
        model = wrapper(model)
    return model


@given(trees(3), st.data())
def test_every_tensor_finds_its_place_whatever_was_wrapped(tree, data):
    saved, loaded = (wrapped_somewhere(tree(), data) for _ in range(2))
    for number, parameter in enumerate(saved.parameters()):
        parameter.data.fill_(number)
    loaded.load_state_dict(align_names(saved.state_dict(), loaded.state_dict()))
    assert [int(p) for p in loaded.parameters()] == list(range(len(list(loaded.parameters()))))


def test_a_part_that_was_wrapped_loads_into_one_that_is_not():
    own = ["features.0.weight", "features.0.bias", "classifier.weight"]
    saved = ["features.module.0.weight", "features.module.0.bias", "classifier.weight"]
    assert aligned(saved, own) == own
    assert aligned(own, saved) == saved
    # The order helps but is not needed, nor that the state is complete.
    assert aligned(saved[::-1], own) == own[::-1]
    assert aligned(saved[:2], own) == own[:2]


def test_a_name_that_could_be_two_of_the_modules_is_left_alone():
    own = ["weight", "module.weight", "other"]
    assert aligned(["module._orig_mod.weight", "other"], own) == [
        "module._orig_mod.weight",
        "other",
    ]


def test_versions_of_modules_inside_wrapped_parts_go_along():
    model = torch.nn.Sequential(CompiledLike(torch.nn.BatchNorm1d(2)))
    bare = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    state = align_names(model.state_dict(), list(bare.state_dict()))
    assert state._metadata["0"] == {"version": 2}


class OnlyChildCalledModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


def around(model, wrappers):
    for wrapper in wrappers:
        model = (
            torch.compile(model, backend="eager")
            if wrapper == "compile"
            else torch.nn.DataParallel(model)
        )
    return model


WRAPPINGS = [(), ("compile",), ("dp",), ("compile", "dp"), ("dp", "compile")]


@pytest.mark.parametrize("model", [OnlyChildCalledModule, lambda: torch.nn.Linear(2, 2)])
@pytest.mark.parametrize("saved_with", WRAPPINGS)
def test_checkpoints_of_real_wrappers_load_into_any_other(tmp_path, model, saved_with):
    saved = around(model(), saved_with)
    paceline.save(tmp_path / "x.pt", saved_as_object=saved, saved_as_state=saved.state_dict())
    for loaded_with in WRAPPINGS:
        for name in ("saved_as_object", "saved_as_state"):
            loaded = around(model(), loaded_with)
            paceline.load(tmp_path / "x.pt", **{name: loaded})
            for ours, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
                assert torch.equal(ours, theirs)
