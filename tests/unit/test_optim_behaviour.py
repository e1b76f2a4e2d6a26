"""What users do with optimizers of `paceline.optim` beyond calling `step`: everything that torch's
classes take, and what is replaced under them.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch

import paceline.optim
from paceline.optim import SGD, Adagrad, Adam, AdamW, gradient_norm

ALL = [SGD, Adam, AdamW, Adagrad]
WITH_STATE = [lambda p: SGD(p, momentum=0.9), Adam, AdamW, Adagrad]
DENSE = {"lr": 0.1}


def pair(cls, *tensors, **options):
    """Our optimizer and torch's, on equal parameters."""
    mine = [torch.nn.Parameter(t.clone(memory_format=torch.preserve_format)) for t in tensors]
    theirs = [torch.nn.Parameter(t.clone(memory_format=torch.preserve_format)) for t in tensors]
    return cls(mine, **options), cls.stock(theirs, **options), mine, theirs


def step_both(left, right, mine, theirs, gradients=None):
    for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
        gradient = torch.randn(p.shape, dtype=p.dtype) if gradients is None else gradients[i]
        p.grad, q.grad = gradient.clone(), gradient.clone()
    left.step()
    right.step()


def assert_equal(mine, theirs):
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.fixture
def native_calls(monkeypatch):
    """How many parameters each native call updated."""
    calls = []
    table = paceline.optim.parameter_table.ParameterTable
    original = table.run
    monkeypatch.setattr(
        table, "run", lambda self, at: (calls.append(len(self.parameters)), original(self, at))
    )
    return calls


@pytest.mark.parametrize("cls", ALL)
def test_they_are_torchs_classes_and_take_their_arguments(cls):
    assert issubclass(cls, cls.stock)
    parameter = torch.nn.Parameter(torch.ones(2))
    ours, theirs = cls([parameter]), cls.stock([parameter])
    assert ours.defaults == theirs.defaults
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("cls", ALL)
def test_one_native_call_steps_a_whole_group(cls, native_calls):
    left, right, mine, theirs = pair(cls, *(torch.randn(n) for n in range(1, 9)), **DENSE)
    for _ in range(3):
        step_both(left, right, mine, theirs)
    assert native_calls == [8, 8, 8]
    assert_equal(mine, theirs)


# --- closures, hooks, schedulers, tensor learning rates -------------------------------------------
def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = SGD([parameter], lr=0.25)

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 9.0
    assert parameter.item() == 1.5


@pytest.mark.parametrize("cls", ALL)
def test_hooks_run_once_also_where_torch_steps(cls):
    dense = torch.nn.Parameter(torch.ones(3))
    complex_ = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = cls([dense, complex_])
    # Torch adds hooks to the class at its first instance.
    cls.stock([dense])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    dense.grad, complex_.grad = torch.ones(3), torch.ones(3, dtype=torch.complex64)
    optimizer.step()
    assert seen == ["before", "after"]
    assert not torch.equal(dense, torch.ones(3))
    assert not torch.equal(complex_, torch.ones(3, dtype=torch.complex64))


def test_a_learning_rate_may_be_a_tensor_that_changes_in_place():
    lr = torch.tensor(0.5)
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = SGD([parameter], lr=lr)
    parameter.grad = torch.ones(1)
    optimizer.step()
    lr.fill_(0.25)
    optimizer.step()
    assert parameter.item() == 0.25


def test_a_group_added_later_has_its_own_settings(native_calls):
    left, right, mine, theirs = pair(AdamW, torch.ones(4), torch.ones(4))
    for optimizer, model in ((left, mine), (right, theirs)):
        model.append(torch.nn.Parameter(torch.ones(2, 2)))
        optimizer.add_param_group({"params": [model[-1]], "lr": 0.5, "amsgrad": True})
    for _ in range(3):
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)
    assert native_calls == [2, 1] * 3


@pytest.mark.parametrize("cls", ALL)
def test_settings_changed_between_steps_count(cls):
    left, right, mine, theirs = pair(cls, torch.randn(5), **DENSE)
    for weight_decay in (0.0, 0.3):
        for optimizer in (left, right):
            optimizer.param_groups[0]["weight_decay"] = weight_decay
            optimizer.param_groups[0]["maximize"] = weight_decay == 0
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)


def test_momentum_switched_on_and_off():
    left, right, mine, theirs = pair(SGD, torch.randn(5), lr=0.1)
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.5):
        for optimizer in (left, right):
            optimizer.param_groups[0]["momentum"] = momentum
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)


# --- GradScaler -----------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler(cls, unscale_first):
    results = []
    for kind, options in ((cls, {}), (cls.stock, {})):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).sum() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append([*model.parameters(), torch.tensor(scaler.get_scale())])
    assert_equal(*results)


def test_a_step_of_gradients_that_are_not_finite_counts_for_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum() * float("nan")).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones(2))
    assert not optimizer.state_dict()["state"]


# --- what the core does not take ------------------------------------------------------------------
@pytest.mark.parametrize("cls", [SGD, Adagrad])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_beside_dense_ones(cls, momentum, native_calls):
    options = {"momentum": momentum} if cls is SGD else {}
    left, right, mine, theirs = pair(cls, torch.ones(6, 2), torch.ones(3), lr=0.1, **options)
    with torch.sparse.check_sparse_tensor_invariants():
        for _ in range(3):
            sparse = torch.sparse_coo_tensor([[1, 4, 1]], torch.randn(3, 2), (6, 2))
            step_both(left, right, mine, theirs, [sparse, torch.randn(3)])
    assert_equal(mine, theirs)
    assert native_calls == [1, 1, 1]


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_sparse_gradients_are_refused_where_torch_refuses_them(cls):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        cls([parameter]).step()


@pytest.mark.parametrize("cls", ALL)
def test_complex_parameters(cls):
    left, right, mine, theirs = pair(
        cls, torch.randn(3, dtype=torch.complex64), torch.randn(4), **DENSE
    )
    for _ in range(3):
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("cls", ALL)
def test_other_layouts_of_memory(cls, native_calls):
    """Permuted ones the core takes; those with gaps, or that overlap, are torch's."""
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with_gaps = torch.randn(6, 8)[:, ::2]
    left, right, mine, theirs = pair(cls, channels_last, torch.randn(3, 4).t(), torch.ones(2))
    for model in (mine, theirs):
        model[2].data = with_gaps.clone(memory_format=torch.preserve_format)
        model[2].data = torch.cat([with_gaps, with_gaps], 1)[:, ::2]
    if cls is Adagrad:
        for optimizer, model in ((left, mine), (right, theirs)):
            optimizer.state[model[2]]["sum"] = torch.zeros_like(model[2])
    for _ in range(3):
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)
    assert native_calls == [2, 2, 2]


@pytest.mark.parametrize("cls", ALL)
def test_gradients_in_another_order_of_memory(cls):
    left, right, mine, theirs = pair(cls, torch.randn(4, 6), torch.randn(3, 2))
    for _ in range(2):
        for p, q in zip(mine, theirs, strict=True):
            gradient = torch.randn(p.shape[::-1])
            p.grad, q.grad = gradient.t(), gradient.t().clone()
        left.step()
        right.step()
    assert_equal(mine, theirs)


def test_a_gradient_that_is_lazily_negative():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([1 + 2j]).conj().imag
    assert parameter.grad.is_neg()
    optimizer = SGD([parameter], lr=1.0)
    for expected in (2.0, 4.0):
        optimizer.step()
        assert parameter.item() == expected


def test_subclasses_of_tensors_are_torchs(native_calls):
    class Named(torch.Tensor):
        pass

    parameter = torch.ones(3).as_subclass(Named).requires_grad_()
    parameter.grad = torch.ones(3).as_subclass(Named)
    SGD([parameter], lr=0.5).step()
    assert torch.equal(parameter.detach().as_subclass(torch.Tensor), torch.full((3,), 0.5))
    assert native_calls == [0]


def test_a_differentiable_step():
    start = torch.tensor([2.0], requires_grad=True)
    parameter = start.clone()
    parameter.grad = torch.tensor([1.0])
    SGD([parameter], lr=0.5, differentiable=True).step()
    parameter.backward()
    assert start.grad.item() == 1.0


@pytest.mark.parametrize("cls", ALL)
def test_without_the_core_torch_steps(cls, monkeypatch, native_calls):
    status = paceline.core.abi.NativeStatus(False, "not built")
    monkeypatch.setattr(paceline.optim.native_optimizer, "native_status", lambda: status)
    left, right, mine, theirs = pair(cls, torch.randn(5))
    step_both(left, right, mine, theirs)
    assert torch.equal(mine[0], theirs[0])
    assert not native_calls


# --- what is replaced between steps ---------------------------------------------------------------
def replace_data(optimizer, parameter):
    parameter.data = parameter.data.clone()


def resize(optimizer, parameter):
    parameter.data = torch.ones(3)
    optimizer.state.clear()


def replace_state(optimizer, parameter):
    state = optimizer.state[parameter]
    for name in set(state) - {"step"}:
        state[name] = torch.full_like(state[name], 0.5)


def replace_state_dict_of_a_parameter(optimizer, parameter):
    optimizer.state[parameter] = {k: v.clone() for k, v in optimizer.state[parameter].items()}


def move_state(optimizer, parameter):
    for value in optimizer.state[parameter].values():
        value.data = value.data.clone()


def share_memory(optimizer, parameter):
    parameter.share_memory_()
    for value in optimizer.state[parameter].values():
        value.share_memory_()


def forget_state(optimizer, parameter):
    optimizer.state.clear()


def load_own_state(optimizer, parameter):
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))


def change_type(optimizer, parameter):
    parameter.data = parameter.data.double()
    parameter.grad = None
    load_own_state(optimizer, parameter)


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        resize,
        replace_state,
        replace_state_dict_of_a_parameter,
        move_state,
        share_memory,
        forget_state,
        load_own_state,
        change_type,
    ],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("make", WITH_STATE, ids=["SGD", "Adam", "AdamW", "Adagrad"])
def test_changes_between_steps_are_noticed(make, change):
    name = type(make([torch.nn.Parameter(torch.ones(1))])).__name__
    options = {"momentum": 0.9} if name == "SGD" else {}
    left, right, mine, theirs = pair(getattr(paceline.optim, name), torch.randn(5), **options)
    step_both(left, right, mine, theirs)
    for optimizer, (parameter,) in ((left, mine), (right, theirs)):
        change(optimizer, parameter)
    for _ in range(2):
        step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)
    assert left.state[mine[0]].keys() == right.state[theirs[0]].keys()


def test_frozen_and_thawed_parameters():
    left, right, mine, theirs = pair(AdamW, torch.randn(5), torch.randn(4))
    step_both(left, right, mine, theirs)
    for p, q in zip(mine, theirs, strict=True):
        p.grad = q.grad = None
    mine[0].grad = theirs[0].grad = torch.ones(5)
    left.step()
    right.step()
    assert [left.state[p]["step"].item() for p in mine] == [2.0, 1.0]
    step_both(left, right, mine, theirs)
    assert_equal(mine, theirs)


def test_no_gradient_at_all_is_no_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter])
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    assert not optimizer.state


def test_autograd_notices_that_parameters_changed():
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter**2).sum()
    parameter.grad = torch.ones(3)
    SGD([parameter], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_not_kept_alive():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(3)
    gradient = weakref.ref(parameter.grad.untyped_storage())
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_pickled_optimizers_go_on():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=0.5, momentum=0.5)
    parameter.grad = torch.ones(3)
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    (twin,) = other.param_groups[0]["params"]
    twin.grad = torch.ones(3)
    optimizer.step()
    other.step()
    assert torch.equal(twin, parameter)


def test_optimizers_of_several_threads():
    """Each steps its own; the native call of a large one lets the others run."""
    results = []

    def train():
        parameter = torch.nn.Parameter(torch.ones(200_000))
        optimizer = AdamW([parameter])
        for _ in range(5):
            parameter.grad = torch.ones(200_000)
            optimizer.step()
        results.append(parameter.detach())

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(results) == 4


# --- max_norm -------------------------------------------------------------------------------------
def clipped(make, parameters, gradients, clip=None):
    """Parameters after some steps; `clip` is called before each."""
    mine = [torch.nn.Parameter(parameter.clone()) for parameter in parameters]
    optimizer = make(mine)
    for step in range(4):
        for parameter, gradient in zip(mine, gradients, strict=True):
            parameter.grad = gradient * (step + 1)
        if clip is not None:
            clip(mine)
        optimizer.step()
    return mine


@pytest.mark.parametrize("max_norm", [0.01, 3.0, 1e6])
@pytest.mark.parametrize("cls", [SGD, Adam, AdamW, Adagrad])
def test_clipped_as_torch_clips_before_the_step(cls, max_norm):
    generator = torch.Generator().manual_seed(1)
    shapes = [(5,), (70, 100), (1,), (3, 3)]
    numbers = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = clipped(
        lambda parameters: cls.stock(parameters, lr=0.1),
        numbers,
        gradients,
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
    )
    ours = clipped(lambda p: cls(p, lr=0.1, max_norm=max_norm), numbers, gradients)
    for left, right in zip(theirs, ours, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6)
    for parameter, gradient in zip(ours, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient * 4)  # left as it was


def test_one_norm_for_all_groups_and_for_what_torch_steps(native_calls):
    dense, other = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(6, 2))
    strange = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    groups = [{"params": [dense, strange]}, {"params": [other], "lr": 2.0}]
    optimizer = SGD(groups, lr=1.0, max_norm=2.0)
    for parameter in (dense, other, strange):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    factor = 2.0 / (19**0.5 + 1e-6)
    torch.testing.assert_close(dense.detach(), torch.full((4,), -factor))
    torch.testing.assert_close(other.detach(), torch.full((6, 2), -2 * factor))
    torch.testing.assert_close(strange.detach().real, torch.full((3,), -factor))
    assert dense.grad.eq(1).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_spoils_all_gradients_as_in_torch(number):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = SGD(parameters, lr=1.0, max_norm=1.0)
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.full((3,), number)
    optimizer.step()
    assert parameters[1].isnan().all()
    torch.testing.assert_close(
        parameters[0].detach(), torch.full((3,), -1.0 / number), equal_nan=True
    )


def test_clipped_after_the_scale_is_taken_out():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = SGD([parameter], lr=1.0, max_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale((parameter * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, -0.8, 0.0, 0.0]))


def test_the_norm_does_not_depend_on_how_parameters_are_grouped():
    """Nor, with that, on which of them ranks have in shared memory."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(7, generator=generator).double() for _ in range(30)]

    def stepped(*cuts):
        parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in gradients]
        bounds = [0, *cuts, len(parameters)]
        pairs = itertools.pairwise(bounds)
        optimizer = SGD([{"params": parameters[a:b]} for a, b in pairs], lr=1.0, max_norm=1.0)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    expected = stepped()
    for cut in range(1, 30):
        assert torch.equal(stepped(cut), expected)


def test_a_norm_beyond_all_numbers_is_infinite():
    assert gradient_norm.total_of([1e308, 1e308]) == float("inf")


def test_max_norm_goes_with_copies():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = pickle.loads(pickle.dumps(SGD([parameter], lr=1.0, max_norm=1.0)))
    (copied,) = optimizer.param_groups[0]["params"]
    copied.grad = torch.full((4,), 10.0)
    optimizer.step()
    torch.testing.assert_close(copied.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1"])
def test_a_max_norm_that_nothing_can_be_clipped_to(max_norm):
    with pytest.raises(ValueError, match="max_norm"):
        SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, max_norm=max_norm)
