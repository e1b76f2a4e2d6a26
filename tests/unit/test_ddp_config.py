"""The arguments of DistributedDataParallel, and the state of one step, without ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.ddp.config import DDPConfig, bucket_limits, delayed_names, refuse_unknown
from paceline.ddp.plan import MIB, BucketLimits
from paceline.ddp.step import Phase, Step
from paceline.ddp.weighting import AverageRule, Contribution, SampleCount, SampleWindow
from paceline.errors import ConfigError


def config(**options):
    return DDPConfig(limits=BucketLimits.create(None, None), **options)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().average = "ranks"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "mean"}, "average must be"),
        ({"on_error": "retry"}, "on_error must be"),
        ({"wire_dtype": torch.float16}, "wire_dtype must be torch.bfloat16 or None"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_unknown_arguments_are_named():
    with pytest.raises(ConfigError, match="no argument bucket_size"):
        refuse_unknown({"bucket_size": 1})


@pytest.mark.parametrize(
    ("options", "has_comm_hook", "every"),
    [
        ({}, False, 200),
        ({}, True, 0),
        ({"init_sync": False}, False, 0),
        ({"check_replicas_every": 7}, True, 7),
        ({"check_replicas_every": 0}, False, 0),
    ],
)
def test_when_replicas_are_compared(options, has_comm_hook, every):
    assert config(**options).drift_interval(has_comm_hook=has_comm_hook) == every


def test_the_average_over_ranks_divides_by_all_of_them():
    assert config().average == "auto"
    assert config().average_rule == config(average="samples").average_rule == AverageRule()
    assert config(average="ranks").average_rule == AverageRule(by_ranks=True, divide_by_world=True)


def test_buckets_are_planned_anew_unless_unused_parameters_are_sought():
    assert config().replans
    assert not config(find_unused_parameters=True).replans
    assert config(find_unused_parameters=True, static_graph=True).replans


def test_a_list_of_limits_wins():
    limits, sizes = bucket_limits(5, [1, 2])
    assert limits.bytes == sizes == (MIB, 2 * MIB)


def test_delayed_parameters_come_with_their_trigger_or_not_at_all():
    net = torch.nn.Linear(2, 2)
    assert delayed_names(net, None, None) is None
    names = delayed_names(net, [("bias", net.bias)], net.weight)
    assert (names.names, names.trigger) == (("bias",), "weight")
    with pytest.raises(ConfigError, match="at the same time"):
        delayed_names(net, [("bias", net.bias)], None)
    with pytest.raises(ConfigError, match="not a parameter of the module"):
        delayed_names(net, [("bias", net.bias)], torch.nn.Parameter(torch.ones(1)))


def test_a_step_counts_its_samples_once():
    window, step = SampleWindow(), Step(Phase.FILLING, count=SampleCount(3.0))
    assert step.count_samples(window) == step.count_samples(window) == Contribution(3.0, 3.0, 1)


def test_an_accumulating_step_becomes_a_synchronised_one():
    step = Step(Phase.ACCUMULATING)
    assert not step.is_filling
    assert not step.synchronised
    assert step.synchronise()
    assert not step.synchronise()
    assert step.is_filling
    assert step.synchronised


def test_a_bucket_that_was_sent_or_is_full_takes_no_more():
    step = Step(Phase.EXCHANGING)
    step.cursor = 2
    step.ready.add(3)
    assert [step.has_sealed(index) for index in range(5)] == [True, True, False, True, False]


def test_a_dropped_step_is_neither_filling_nor_forgotten():
    step = Step(Phase.EXCHANGING)
    step.drop()
    assert step.phase is Phase.DROPPED
    assert not step.is_filling
    assert step.synchronised


NAN, INF = float("nan"), float("inf")
LAYER = torch.nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": 3}, r"wraps a torch\.nn\.Module, got 3"),
        ({"module": None}, r"wraps a torch\.nn\.Module, got None"),
        ({"module": torch.nn.Linear}, r"wraps a torch\.nn\.Module, got the class Linear"),
        ({"module": [LAYER]}, r"wraps a torch\.nn\.Module, got \[Linear"),
        ({"bucket_cap_mb": NAN}, "bucket_cap_mb should be a number of MiB, 0 or more, got nan"),
        ({"bucket_cap_mb": INF}, "0 or more, got inf"),
        ({"bucket_cap_mb": -INF}, "0 or more, got -inf"),
        ({"bucket_cap_mb": -1}, "0 or more, got -1"),
        ({"bucket_cap_mb": 1e30}, r"0 or more, got 1e\+30"),
        ({"bucket_cap_mb": "25"}, "0 or more, got '25'"),
        ({"bucket_cap_mb": True}, "0 or more, got True"),
        ({"bucket_cap_mb": [25]}, r"0 or more, got \[25\]"),
        ({"bucket_cap_mb": 1j}, "0 or more, got 1j"),
        ({"bucket_cap_mb_list": 3}, "bucket_cap_mb_list should be a list of numbers, got 3"),
        ({"bucket_cap_mb_list": "12"}, "bucket_cap_mb_list should be a list of numbers, got '12'"),
        ({"bucket_cap_mb_list": [1, NAN]}, r"bucket_cap_mb_list\[1\] should be a number of MiB"),
        ({"bucket_cap_mb_list": [None]}, r"bucket_cap_mb_list\[0\] should .*, got None"),
        ({"process_group": "gloo"}, "process_group should be a process group .*, got 'gloo'"),
        ({"process_group": 3}, "process_group should be a process group .*, got 3"),
        ({"process_group": dist.ProcessGroup}, "got the class ProcessGroup"),
        ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "this rank is not a member"),
        ({"device_mesh": [0]}, r"device_mesh should be a DeviceMesh, got \[0\]"),
        ({"device_ids": 0}, "device_ids should be None or a list of one device, got 0"),
        ({"device_ids": "cuda:0"}, "device_ids should be None or a list of one device, got 'cuda"),
        ({"device_ids": [0, 1]}, "device_ids can only be None or contain a single element"),
        ({"device_ids": ["nonsense"]}, r"device_ids .* got device_ids \['nonsense'\]"),
        ({"dim": "x"}, "dim should be a whole number, got 'x'"),
        ({"init_sync": "no"}, "init_sync should be True or False, got 'no'"),
        ({"find_unused_parameters": "yes"}, "find_unused_parameters should be True or False"),
        ({"forward_sync_buffers": 0.5}, "forward_sync_buffers should be True or False, got 0.5"),
        ({"check_finite": [1]}, r"check_finite should be True or False, got \[1\]"),
        ({"check_replicas_every": -1}, "check_replicas_every should be .* 0 for never, got -1"),
        ({"check_replicas_every": 1.5}, "check_replicas_every should be .*, got 1.5"),
        ({"check_replicas_every": "x"}, "check_replicas_every should be .*, got 'x'"),
        ({"check_replicas_every": True}, "check_replicas_every should be .*, got True"),
        ({"mixed_precision": torch.bfloat16}, r"mixed_precision should .*, got torch\.bfloat16"),
        ({"mixed_precision": "bf16"}, "mixed_precision should .*, got 'bf16'"),
        (
            {"delay_all_reduce_named_params": ["weight"], "param_to_hook_all_reduce": LAYER.bias},
            r"delay_all_reduce_named_params should be a list of .*, got \['weight'\]",
        ),
        (
            {
                "delay_all_reduce_named_params": [("nope", LAYER.weight)],
                "param_to_hook_all_reduce": LAYER.bias,
            },
            "delay_all_reduce_named_params: .* has no parameter 'nope'",
        ),
        ({"average": "mean"}, "average must be"),
        ({"on_error": None}, "on_error must be"),
        ({"bucket_size": 1}, "no argument bucket_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_answered_in_one_sentence(arguments, message):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises((ConfigError, TypeError), match=message) as caught:
            paceline.DistributedDataParallel(**{"module": torch.nn.Linear(2, 1), **arguments})
    finally:
        dist.destroy_process_group()
    assert "\n" not in str(caught.value)


def test_numbers_of_any_kind_are_numbers():
    for mb in (2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0)):
        assert bucket_limits(mb, None)[0].bytes == (2 * MIB,)
        assert bucket_limits(None, (mb, mb))[1] == (2 * MIB, 2 * MIB)
    # As in torch: every gradient in a bucket of its own.
    assert bucket_limits(0, None)[0].bytes == (0,)
    assert config(check_replicas_every=np.int64(5)).check_replicas_every == 5
