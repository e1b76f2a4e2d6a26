"""What needs no peers: structure of inputs, signals, buckets, consistency texts, arguments, a world
of one.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline._pytree import tensors_in
from paceline.ddp.buckets import DenseBucket
from paceline.ddp.consistency import describe, differences
from paceline.ddp.distributed_data_parallel import first_batch_size
from paceline.ddp.signals import SIGNAL_WIDTH, Call, Signal, calls_mismatch, common_call
from paceline.ddp.weighting import Basis, Contribution


@dataclasses.dataclass
class Holder:
    inner: object
    name: str = "x"


class OwnOutput:
    def __init__(self, logits):
        self.logits = logits


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Lonely(dist.ProcessGroup):
    """A group of one that torch has no record of."""

    def getBackendName(self):  # noqa: N802 - torch's
        return "lonely"


def test_a_group_of_one_that_torch_does_not_know():
    module = torch.nn.Linear(2, 1)
    model = paceline.DistributedDataParallel(module, process_group=Lonely(0, 1))
    model(torch.ones(3, 2)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((1, 2), 3.0))
    assert model._get_ddp_logging_data()["backend_name"] == "lonely"


def test_tensors_are_found_in_anything():
    a, b = torch.ones(3), torch.ones(2, 4)
    pair = collections.namedtuple("pair", "left right")
    for thing in (
        [a, b],
        (a, [b]),
        {"x": a, "y": {"z": b}},
        Holder([a, b]),
        pair(a, b),
        OwnOutput([a, b]),
    ):
        assert [id(t) for t in tensors_in(thing)] == [id(a), id(b)]
    assert tensors_in("text") == tensors_in(None) == tensors_in(3) == []
    loop: list = [a]
    loop.append(loop)
    assert len(tensors_in(loop)) == 1


def test_batch_size_is_the_first_tensors_leading_dimension():
    assert first_batch_size((torch.ones(5, 2), torch.ones(3)), {}) == 5
    assert first_batch_size(("text", {"x": torch.ones(4)}), {}) == 4
    assert first_batch_size((), {"x": torch.ones(7, 1)}) == 7
    assert first_batch_size((torch.tensor(1.0),), {}) == 1
    assert first_batch_size((), {}) == 1


def test_signal_survives_the_wire():
    signal = Signal(
        Call.BACKWARD, Contribution(3.0, 7.5, 2, Basis.SHARE, 4.0), failed=True, buffers=True
    )
    assert len(signal.pack()) == SIGNAL_WIDTH
    assert Signal.unpack(signal.pack()) == signal


def test_ranks_at_different_points_are_named():
    assert common_call([Signal(Call.ANSWER), Signal(Call.FORWARD)]) is Call.FORWARD
    assert common_call([Signal(Call.ANSWER)] * 2) is Call.ANSWER
    signals = [Signal(Call.FORWARD), Signal(Call.BACKWARD)]
    assert common_call(signals) is None
    error = calls_mismatch(signals, "Net", ["", "the last batch"])
    assert error.values == {0: "forward", 1: "backward (the last batch)"}
    assert "rank 0 is at forward, rank 1 is at backward (the last batch)" in str(error)


def allocate(nbytes, device):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def dense(*parameters):
    return DenseBucket(0, range(len(parameters)), list(parameters), allocate)


def test_gradients_move_into_the_bucket_and_stay_there():
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    bucket = dense(*parameters)
    parameters[0].grad, parameters[1].grad = torch.full((2, 3), 2.0), torch.full((4,), 3.0)
    bucket.gather({0, 1}, contribute=True)
    assert bucket.flat.tolist() == [2.0] * 6 + [3.0] * 4
    bucket.scale(0.5)
    bucket.scatter({0, 1})
    assert parameters[0].grad is bucket.views[0]
    assert parameters[1].grad.tolist() == [1.5] * 4
    parameters[1].grad.detach_()  # no view in autograd's sense


def test_strides_of_a_parameter_are_kept():
    parameter = torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    gap = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    bucket = dense(parameter, gap)
    bucket.prepare()
    assert bucket.views[0].is_contiguous(memory_format=torch.channels_last)
    assert bucket.views[1].is_contiguous()
    parameter.grad, gap.grad = torch.randn_like(parameter), torch.randn(4, 3)
    expected = parameter.grad.clone()
    bucket.gather({0, 1}, contribute=True)
    bucket.scatter({0, 1})
    assert torch.equal(parameter.grad, expected)


def test_a_gradient_someone_kept_is_not_overwritten():
    parameter = torch.nn.Parameter(torch.ones(3))
    bucket = dense(parameter)
    parameter.grad = torch.full((3,), 1.0)
    bucket.gather({0}, contribute=True)
    bucket.scatter({0})
    kept, piece = parameter.grad, None
    parameter.grad = torch.full((3,), 2.0)
    bucket.gather({0}, contribute=True)
    assert kept.tolist() == [1.0] * 3
    bucket.scatter({0})
    piece = parameter.grad[
        1:
    ]  # a slice keeps no reference to the tensor object, only to its memory
    parameter.grad = torch.full((3,), 3.0)
    bucket.prepare()
    bucket.gather({0}, contribute=True)
    assert piece.tolist() == [2.0] * 2
    assert kept.tolist() == [1.0] * 3
    assert bucket.flat.tolist() == [3.0] * 3


def test_a_rank_without_samples_contributes_nothing_not_even_nan():
    parameter = torch.nn.Parameter(torch.ones(3))
    bucket = dense(parameter)
    parameter.grad = torch.full((3,), float("nan"))
    bucket.gather({0}, contribute=False)
    bucket.scale(0.0)
    assert bucket.flat.tolist() == [0.0] * 3


def test_a_parameter_no_rank_used_keeps_its_gradient():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    bucket = dense(used, unused)
    used.grad, unused.grad = torch.ones(2), torch.full((2,), 5.0)
    bucket.gather({0, 1}, contribute=True)
    bucket.scatter({0, 1})
    used.grad = torch.full((2,), 7.0)
    bucket.gather({0}, contribute=True)
    bucket.scale(1 / 3)
    bucket.scatter({0})
    assert unused.grad.tolist() == [5.0] * 2


def test_differences_name_the_parameter_and_every_rank():
    def shapes(net):
        return describe(net.named_parameters(), net.named_buffers())

    one = shapes(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    other = shapes(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)))
    lines = differences([one, other], [list(one), list(other)])
    assert lines[0] == "0.weight: rank 0 (3, 4) float32, rank 1 (5, 4) float32"
    assert any(line.startswith("buffer 1.running_mean") for line in lines)
    order = differences([{"a": "x", "b": "x"}] * 2, [["a", "b"], ["b", "a"]])
    assert order == ["registered in another order, first at position 0: rank 0 a, rank 1 b"]
    missing = differences([{"a": "x", "b": "x"}, {"a": "x"}], [["a", "b"], ["a"]])
    assert missing == ["b: rank 0 x, rank 1 missing"]


def test_without_a_group_the_message_says_what_to_do():
    with pytest.raises(paceline.ConfigError, match="init_process_group"):
        paceline.DistributedDataParallel(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": 3}, "no argument bucket_size"),
        ({"average": "mean"}, "average must be .* got 'mean'"),
        ({"on_error": "ignore"}, "on_error must be .* got 'ignore'"),
        ({"device_ids": [0, 1]}, "single element"),
        ({"device_ids": [0]}, "only work with modules on one accelerator"),
        ({"param_to_hook_all_reduce": torch.nn.Parameter(torch.ones(1))}, "at the same time"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(world_of_one, options, message):
    with pytest.raises(paceline.ConfigError, match=message):
        paceline.DistributedDataParallel(torch.nn.Linear(1, 1), **options)


def test_a_module_without_trainable_parameters_is_refused(world_of_one):
    with pytest.raises(
        paceline.ConfigError, match="doesn't have any parameter that requires a gradient"
    ):
        paceline.DistributedDataParallel(torch.nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(paceline.ConfigError, match="uninitialized"):
        paceline.DistributedDataParallel(torch.nn.LazyLinear(1))


def test_the_signature_is_torchs_and_then_ours(world_of_one):
    import inspect

    ours = inspect.signature(paceline.DistributedDataParallel.__init__).parameters
    torchs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    assert [ours[n].default for n in torchs] == [one.default for one in torchs.values()]
    public = {n for n in vars(torch.nn.parallel.DistributedDataParallel) if not n.startswith("_")}
    assert public <= set(dir(paceline.DistributedDataParallel))


def test_a_world_of_one_installs_no_hooks(world_of_one):
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 2))
    output = model(torch.randn(4, 3))
    assert not output._backward_hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    output.mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_ragged_accumulation_in_a_world_of_one_is_exact(world_of_one):
    data = torch.randn(9, 3, dtype=torch.float64)
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    plain = copy.deepcopy(net)
    plain(data).square().mean().backward()
    model = paceline.DistributedDataParallel(net, average="samples")
    with model.no_sync():
        for part in data[:2], data[2:2], data[2:3]:
            (model(part).square().mean() / 4).backward()
    (model(data[3:]).square().mean() / 4).backward()
    assert torch.allclose(net.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)


def test_attributes_and_state_dict_are_transparent(world_of_one):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    net.custom = "here"
    model = paceline.DistributedDataParallel(net)
    assert model.custom == "here"
    with pytest.raises(AttributeError):
        _ = model.nothing
    assert list(model.state_dict()) == [f"module.{key}" for key in net.state_dict()]
    for state in (net.state_dict(), model.state_dict()):
        assert model.load_state_dict(state).missing_keys == []


def test_pickle_and_deepcopy(world_of_one):
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 2), average="ranks")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
        assert torch.equal(twin.module.weight, model.module.weight)
        assert twin.average == "ranks"
        twin(torch.randn(2, 3)).sum().backward()
        assert twin.module.weight.grad is not None
    assert model.module.weight.grad is None


def test_replicate_keeps_class_and_keys(world_of_one):
    net = torch.nn.Linear(3, 2)
    keys = list(net.state_dict())
    same = paceline.replicate(net, average="ranks")
    assert same is net
    assert type(net) is torch.nn.Linear
    assert list(net.state_dict()) == keys
    prefixed = {
        f"module.{key}": torch.full_like(value, 3.0) for key, value in net.state_dict().items()
    }
    net.load_state_dict(prefixed)
    assert float(net.weight.detach().sum()) == 18.0
    with paceline.replica_of(net).no_sync():
        net(torch.randn(2, 3)).sum().backward()
    with pytest.raises(paceline.ConfigError, match="already"):
        paceline.replicate(net)
    with pytest.raises(paceline.ConfigError, match="not given"):
        paceline.replica_of(torch.nn.Linear(1, 1))


def test_a_copy_of_a_replicated_model_is_a_plain_model(world_of_one):
    net = paceline.replicate(torch.nn.Linear(3, 2))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with pytest.raises(paceline.ConfigError, match="not given"):
            paceline.replica_of(twin)
        twin(torch.randn(2, 3)).sum().backward()
        assert twin.weight.grad is not None
        assert net.weight.grad is None


def test_a_module_with_a_child_of_the_name_module(world_of_one):
    net = torch.nn.Module()
    net.module = torch.nn.Linear(3, 2)
    model = paceline.DistributedDataParallel(net)
    for state in (net.state_dict(), model.state_dict()):
        assert model.load_state_dict(state).missing_keys == []


def test_dropping_the_wrapper_frees_the_module_of_its_hooks(world_of_one):
    import gc

    net = torch.nn.Linear(3, 2)
    model = paceline.DistributedDataParallel(net)
    # One rank has hooks only for this.
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    model(torch.ones(1, 3))  # installed by the first forward that may have a backward
    assert net.weight._post_accumulate_grad_hooks
    del model
    gc.collect()
    assert not net.weight._post_accumulate_grad_hooks


def test_negative_counts_are_refused(world_of_one):
    model = paceline.DistributedDataParallel(torch.nn.Linear(3, 2))
    with pytest.raises(paceline.ConfigError, match="not negative"), model.count(-1):
        pass
