"""The pure parts of DataParallel: how batches are cut, structures taken apart, outputs joined,
changes noticed.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

from paceline._pytree import (
    Whole,
    flatten,
    is_taken_apart_by_attributes,
    leaf_paths,
    unflatten,
)
from paceline.dp.data_parallel import DataParallel
from paceline.dp.gather import (
    GatherKind,
    ReplicaOutputs,
    ScalarGather,
    check_same_structure,
    plan_gather,
    plan_outputs,
)
from paceline.dp.module_snapshot import ModuleSnapshot
from paceline.dp.protocol import TensorMeta, meta_of
from paceline.dp.scatter import even_ranges, split_inputs
from paceline.errors import ConfigError, MismatchError, PacelineError


@hypothesis.given(batch=st.integers(0, 100), replicas=st.integers(1, 20))
def test_ranges_cover_the_batch_in_order_and_evenly(batch, replicas):
    ranges = even_ranges(batch, replicas)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(batch))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert len(ranges) == max(1, min(batch, replicas))


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class Record:
    value: Any


structures = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner)
    ),
    max_leaves=12,
)


@hypothesis.given(structures)
def test_structures_are_put_back_together(thing):
    spec, leaves = flatten(thing)
    again = unflatten(spec, leaves)
    assert again == thing
    assert type(again) is type(thing)
    hash(spec)


def test_rows_that_belong_to_samples_go_with_them():
    x, boxes, one, scalar, mask = (
        torch.arange(5),
        torch.arange(10),
        torch.ones(1, 3),
        torch.tensor(1.0),
        torch.eye(3),
    )
    split = split_inputs((x, boxes, one, scalar, Whole(mask), "text"), 2, 0, {}, (Whole,))
    assert split.sizes == [3, 2]
    assert split.share(0, 1).tolist() == [3, 4]
    assert split.share(1, 1).tolist() == [6, 7, 8, 9]
    for index in (2, 3, 4, 5):
        assert split.share(index, 0) is split.share(index, 1)
    with pytest.raises(ConfigError, match="multiple of 5"):
        split_inputs((x, torch.arange(7)), 2, 0, {}, (Whole,))


def test_a_declared_split_must_give_a_part_for_each():
    with pytest.raises(ConfigError, match="1 parts for 2 replicas"):
        split_inputs(([1, 2, 3],), 2, 0, {list: lambda thing, ranges: [thing]}, (Whole, list))


def test_gather_plans():
    f32 = torch.float32
    cat = plan_gather(
        [TensorMeta(f32, (3, 2)), TensorMeta(f32, (2, 2), requires_grad=True)], [3, 2], 0, "mean"
    )
    assert (cat.kind, cat.shape, cat.ranges, cat.requires_grad) == (
        GatherKind.CONCATENATE,
        (5, 2),
        ((0, 3), (3, 5)),
        True,
    )
    mean = plan_gather([TensorMeta(f32, ())] * 2, [3, 1], 0, "mean")
    assert (mean.kind, mean.weights) == (GatherKind.MEAN, (0.75, 0.25))
    assert (
        plan_gather([TensorMeta(torch.int64, ())] * 2, [3, 1], 0, "mean").kind is GatherKind.STACK
    )
    with pytest.raises(MismatchError, match="cannot be concatenated"):
        plan_gather([TensorMeta(f32, (3, 2)), TensorMeta(f32, (2, 3))], [3, 2], 0, "mean")


class Layer:
    def __init__(self, keys: Any, **others: Any) -> None:
        self.keys = keys
        vars(self).update(others)


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = list(layers)
        self.kind, self.dtype = Layer, torch.float32


TWO_EACH = split_inputs(torch.ones(4), 2, 0, {}, ())


def returned(outputs: Any) -> ReplicaOutputs:
    spec, leaves = flatten(outputs, opens=is_taken_apart_by_attributes)
    return ReplicaOutputs(
        spec,
        tuple(isinstance(leaf, torch.Tensor) for leaf in leaves),
        [meta_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)],
        [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
    )


class Graphs(list):
    pass


@pytest.mark.parametrize(
    ("inputs", "weights", "reason"),
    [
        ((torch.ones(5, 2), torch.ones(5)), (0.6, 0.4), None),
        ((torch.ones(5, 2), torch.ones(1), Whole(torch.ones(3))), (0.6, 0.4), None),
        ((torch.ones(5), torch.ones(10)), (0.5, 0.5), "inputs have 5, 10 rows along dimension 0"),
        ((torch.ones(4), torch.ones(8)), (0.5, 0.5), None),  # any count gives these
        ((Graphs("abcde"),), (0.5, 0.5), "a Graphs was split by your own function"),
        ((torch.ones(5), Graphs("abcde")), (0.5, 0.5), "a Graphs was split"),
    ],
)
def test_losses_are_weighted_by_samples_where_their_number_is_known(inputs, weights, reason):
    cut = {Graphs: lambda graphs, ranges: [graphs[start:stop] for start, stop in ranges]}
    split = split_inputs(inputs, 2, 0, cut, (Whole, Graphs))
    losses = [returned({"loss": torch.tensor(1.0), "n": torch.tensor(3)})] * 2
    scalars = ScalarGather("mean")
    plan, _ = plan_outputs(losses, split, scalars)
    assert plan.weights == weights
    note = scalars.take_note()
    if reason is None:
        assert note is None
    else:
        assert "outputs['loss']" in note
        assert "3 and 2 rows" in note
        assert reason in note
    plan_outputs(losses, split, scalars)
    assert scalars.take_note() is None, "once"
    for how in ("sum", "stack"):
        scalars = ScalarGather(how)
        plan_outputs(losses, split, scalars)
        assert scalars.take_note() is None


def test_objects_that_hold_tensors_are_put_back_together():
    cache = Cache(Layer(torch.ones(2)), Layer(torch.zeros(2), length=7))
    spec, leaves = flatten({"cache": cache}, opens=is_taken_apart_by_attributes)
    hash(spec)
    again = unflatten(spec, leaves)["cache"]
    assert type(again) is Cache
    assert [vars(layer) for layer in again.layers] == [vars(layer) for layer in cache.layers]
    assert leaf_paths(spec, "out")[:2] == [
        "out['cache'].layers[0].keys",
        "out['cache'].layers[1].keys",
    ]
    cache.layers[0].above = cache  # a cycle: not followed
    _, leaves = flatten(cache, opens=is_taken_apart_by_attributes)
    assert leaves[1] is cache


def test_what_is_registered_with_torch_is_taken_apart():
    values = torch.arange(6.0).view(2, 3).max(1)  # a torch.return_types.max
    queue = collections.deque([torch.ones(1), "text"], maxlen=4)
    spec, leaves = flatten((values, queue))
    hash(spec)
    assert [type(leaf) for leaf in leaves] == [torch.Tensor] * 3 + [str]
    again_values, again_queue = unflatten(spec, leaves)
    assert type(again_values) is type(values)
    assert again_queue == queue
    assert again_queue.maxlen == 4


class Slotted:
    __slots__ = ("x",)


@pytest.mark.parametrize(
    "value",
    [
        7,
        "text",
        None,
        Layer,
        Layer("no tensor"),
        Slotted(),
        nn.Linear(2, 2),
        torch.distributions.Normal(torch.zeros(2), torch.ones(2)),  # knows its shape
        range(3),
    ],
)
def test_other_objects_are_left_whole(value):
    assert flatten([value], opens=is_taken_apart_by_attributes)[1] == [value]


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        ([torch.ones(1)], torch.ones(1), r"outputs is a list of 1 in replica 0 and a single value"),
        ({"a": (1, [2])}, {"a": (1, [])}, r"outputs\['a'\]\[1\] is a list of 1"),
        ({"a": 1}, {"b": 1}, r"the keys 'a' in replica 0 and a dict with the keys 'b'"),
        (Pair(None, 1), Pair(torch.ones(1), 1), r"outputs.one is a tensor in replica 1"),
        (Pair(1, 2.0), Pair(1, 3.0), r"outputs.two is not a tensor.*2.0, 3.0. Return a tensor"),
        (Pair(1, Layer("a")), Pair(1, Layer("b")), "register how a Layer is taken apart"),
        (
            Cache(Layer(torch.ones(2, 2))),
            Cache(Layer(torch.ones(2, 3))),
            r"outputs.layers\[0\].keys .*cannot be concatenated",
        ),
        (
            nn.utils.rnn.pack_sequence([torch.ones(2)]),
            nn.utils.rnn.pack_sequence([torch.ones(2)]),
            "padded",
        ),
    ],
)
def test_outputs_that_do_not_fit_together_are_named(here, there, message):
    with pytest.raises(PacelineError, match=message):
        plan_outputs([returned(here), returned(there)], TWO_EACH, ScalarGather("mean"))


def test_equal_values_beside_tensors():
    for value in (float("nan"), [1, "a"], Layer("same"), np.arange(3), torch.float32):
        check_same_structure([returned(copy.deepcopy(value)) for _ in range(3)])


def test_numbers_in_objects_are_kept_and_must_be_equal():
    seven, eight = torch.tensor(7), torch.tensor(8)
    replicas = [returned(Layer(torch.ones(2), length=seven)) for _ in range(2)]
    _, plan = plan_outputs(replicas, TWO_EACH, ScalarGather("mean"))
    assert plan.kind is GatherKind.SAME
    assert plan.gather([seven, seven.clone()]).item() == 7
    with pytest.raises(ConfigError, match=r"outputs.length: 7, 8"):
        plan.gather([seven, eight])


def test_objects_made_of_samples_are_split_like_containers():
    cache = Cache(Layer(torch.arange(4), empty=torch.ones(0)), Layer(torch.arange(4)))
    split = split_inputs((torch.ones(4, 2), cache), 2, 0, {}, (Whole,))
    shares = [split.share(index, 1) for index in range(len(split.leaves))]
    assert unflatten(split.spec, shares)[1].layers[1].keys.tolist() == [2, 3]
    table = Layer(torch.ones(3))  # not of samples
    for inputs in ((torch.ones(4, 2), table), (torch.ones(4, 2), Whole(cache))):
        split = split_inputs(inputs, 2, 0, {}, (Whole,))
        assert split.share(1, 1) is (table if inputs[1] is table else cache)
    split = split_inputs((cache,), 2, 0, {}, (Whole,))
    assert split.sizes == [2, 2]


def test_a_packed_sequence_is_refused_but_whole():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(2)])
    with pytest.raises(ConfigError, match="cannot split a PackedSequence"):
        split_inputs((torch.ones(2), packed), 2, 0, {}, (Whole,))
    split_inputs((torch.ones(2), Whole(packed)), 2, 0, {}, (Whole,))


def test_changes_to_a_module_are_noticed():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    snapshot = ModuleSnapshot(module)
    assert snapshot.updates() == []
    module.eval()
    assert {(index, name) for index, name, _ in snapshot.updates()} == {
        (0, "training"),
        (1, "training"),
        (2, "training"),
    }
    module[1].p = 0.25
    assert snapshot.updates() == [(2, "p", 0.25)]
    assert snapshot.updates() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m[0].register_buffer("b", torch.ones(1)),
        lambda m: m.__setitem__(1, nn.ReLU()),
        lambda m: setattr(m, "new", 1),
        lambda m: setattr(m[0], "table", [2]),
        lambda m: m[0].table.append(3),
        lambda m: m[0].constant.add_(1),
    ],
)
def test_changes_that_need_new_workers(change):
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    module[0].table, module[0].constant = [1], torch.ones(2)
    snapshot = ModuleSnapshot(module)
    change(module)
    assert snapshot.updates() is None


def test_what_forward_does_is_no_change_but_for_numbers():
    module = nn.Linear(2, 2)
    module.seen, module.count = None, 0
    snapshot = ModuleSnapshot(module)
    module.seen, module.count = torch.ones(1), 1
    snapshot.accept_forward_changes()
    assert snapshot.updates() == [(0, "count", 1)]


def test_a_forward_that_changes_the_module_late_is_looked_at_from_then_on():
    module = nn.Linear(2, 2)
    module.seen = None
    snapshot = ModuleSnapshot(module)
    for _ in range(20):
        snapshot.accept_forward_changes()
    assert snapshot.updates() == []
    module.seen = torch.ones(1)
    snapshot.accept_forward_changes()
    assert snapshot.updates() is None  # it may have been the user
    assert snapshot.forward_mutates
    again = ModuleSnapshot(module, snapshot.forward_mutates)
    for _ in range(20):
        module.seen = torch.ones(1)
        again.accept_forward_changes()
        assert again.updates() == []


def test_hooks_that_only_saving_runs_need_no_new_workers():
    module = nn.Linear(2, 2)
    snapshot = ModuleSnapshot(module)
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    assert snapshot.updates() == []


def test_what_is_no_module_is_refused_when_it_is_wrapped():
    with pytest.raises(ConfigError, match=r"wraps a torch\.nn\.Module, got 3"):
        DataParallel(3)
