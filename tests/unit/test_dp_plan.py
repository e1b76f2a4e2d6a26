"""The pure parts of DataParallel: how batches are cut, structures taken apart, outputs joined,
changes noticed.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from paceline._pytree import Whole, flatten, unflatten
from paceline.dp.gather import GatherKind, check_same_structure, plan_gather
from paceline.dp.module_snapshot import ModuleSnapshot
from paceline.dp.protocol import TensorMeta
from paceline.dp.scatter import even_ranges, split_inputs
from paceline.errors import ConfigError, MismatchError


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
    with pytest.raises(MismatchError, match="different structure"):
        check_same_structure([("leaf",), ("list", ())], [[], []])
    with pytest.raises(ConfigError, match="different values"):
        check_same_structure([("leaf",), ("leaf",)], [[1], [2]])


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
