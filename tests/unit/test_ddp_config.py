"""The arguments of DistributedDataParallel, and the state of one step, without ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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
    [({"average": "mean"}, "average must be"), ({"on_error": "retry"}, "on_error must be")],
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
