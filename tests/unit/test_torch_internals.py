"""Torch's private names are there and do what we take them to do: a new torch fails here first."""

from __future__ import annotations

import collections
import datetime

import pytest
import torch
import torch.distributed as dist

from paceline import _torch_internals as internals
from paceline._interpreter import find_caller


def test_every_name_is_there():
    for name in internals.__all__:
        assert callable(getattr(internals, name))


def test_the_graph_task_is_known_inside_a_backward_only():
    x = torch.ones(2, requires_grad=True)
    inside: list[tuple[int, bool]] = []
    y = x * 2
    y.register_hook(
        lambda _: inside.append((internals.current_graph_task(), internals.keeps_graph()))
    )
    assert internals.current_graph_task() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert inside[0][0] >= 0
    assert [keeps for _, keeps in inside] == [True, False]


def test_without_rpc_there_is_no_context_of_distributed_autograd():
    """With RPC: tests/ranks/test_ddp_torch_compat.py."""
    assert internals.autograd_context() is None
    assert not internals.in_distributed_backward()
    assert callable(torch.distributed.autograd.get_gradients)


def test_the_end_of_backward_is_called_after_all_gradients():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen: list[bool] = []

    def at_output(_: torch.Tensor) -> None:
        internals.queue_end_of_backward(lambda: seen.append(x.grad is not None))

    y.register_hook(at_output)
    y.sum().backward()
    assert seen == [True]


def test_versions_count_changes_in_place_and_can_be_kept():
    x = torch.zeros(2)
    before = internals.version_of(x)
    with internals.preserve_version(x):
        x.add_(1)
    assert internals.version_of(x) == before
    x.add_(1)
    assert internals.version_of(x) == before + 1


def test_containers_registered_with_torch_are_found_by_their_class():
    node = internals.pytree_node(collections.deque)
    parts, context = node.flatten_fn(collections.deque([1, 2], maxlen=3))
    again = node.unflatten_fn(list(parts), context)
    assert again == collections.deque([1, 2])
    assert again.maxlen == 3
    assert internals.pytree_node(object) is None


def test_users_of_a_storage_include_views():
    x = torch.zeros(4)
    alone = internals.storage_users(x)
    view = x[:2]
    assert internals.storage_users(x) == alone + 1
    del view
    assert internals.storage_users(x) == alone


def test_many_tensors_at_once():
    tensors = [torch.ones(2), torch.ones(3)]
    internals.foreach_copy_(tensors, [torch.zeros(2), torch.zeros(3)])
    assert all(not tensor.any() for tensor in tensors)
    flat = internals.flatten_dense(tensors)
    assert [part.shape for part in internals.unflatten_dense(flat, tensors)] == [(2,), (3,)]
    assert [total.sum() for total in internals.foreach_add(tensors, tensors)] == [0, 0]
    internals.foreach_add_(tensors, [torch.ones(2), torch.ones(3)])
    internals.foreach_mul_(tensors, 6)
    internals.foreach_div_(tensors, 2)
    assert [total.sum() for total in tensors] == [6, 9]


def test_tables_of_members_show_what_is_replaced():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    tables = internals.member_tables(net)
    assert sorted(map(len, tables)) == [0, 0, 0, 0, 2, 2]
    net[0].weight, net[1] = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Tanh()
    members = [member for table in tables for member in table.values()]
    assert any(member is net[0].weight for member in members)
    assert any(member is net[1] for member in members)


def test_swapped_tensors_are_others_and_only_empty_hook_tables_are_dropped():
    one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    before = internals.implementation_of(one)
    one.register_post_accumulate_grad_hook(print).remove()
    kept = one.register_hook(lambda gradient: gradient * 2)
    internals.drop_empty_hook_tables(one)
    assert one._post_accumulate_grad_hooks is None
    (one.sum()).backward()
    assert one.grad.tolist() == [2.0, 2.0]
    kept.remove()
    torch.utils.swap_tensors(one, other)
    assert internals.implementation_of(one) != before


def test_stores_and_devices_of_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert internals.default_store() is not None
        assert internals.store_of(group) is not None
        assert "cpu" in internals.device_types_of(group)
    finally:
        dist.destroy_process_group()


def test_worker_info_can_be_hidden_from_a_dataset_in_a_worker():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            with internals.hidden_worker_info():
                hidden = torch.utils.data.get_worker_info() is None
            yield hidden, torch.utils.data.get_worker_info() is None

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None, num_workers=1)
    assert list(loader) == [[True, False]]


def test_timeouts_of_groups():
    timeout = datetime.timedelta(seconds=7)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert set(internals.timeouts_of(group)) == {timeout}
    finally:
        dist.destroy_process_group()


def test_references_from_c_plus_plus_grow_with_the_graph():
    x = torch.zeros(2, requires_grad=True)
    before = internals.cpp_reference_count(x)
    y = x * 2  # its node leads to x
    assert internals.cpp_reference_count(x) >= before
    del y


def test_backward_without_checks_accumulates():
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    internals.run_backward(
        (y,), (torch.ones(2),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_registered_backends_can_be_looked_up():
    import paceline  # noqa: F401 - registers its backend

    assert internals.backend_plugin("paceline").extended_api
    assert internals.backend_plugin("no such backend") is None


def test_a_group_has_options_with_a_time_limit():
    from datetime import timedelta

    options = internals.BackendOptions("paceline", timedelta(seconds=5))
    options._timeout = timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=7)


def test_functions_can_be_left_uncompiled():
    seen: list[bool] = []
    frames: list[bool] = []

    def called(x: torch.Tensor) -> torch.Tensor:
        frames.append(internals.compiler_of_frames() is not None)
        return x + 1

    @internals.not_compiled("a reason")
    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return called(x)

    @internals.not_compiled("a reason", including_calls=False)
    def outer(x: torch.Tensor) -> torch.Tensor:
        frames.append(internals.compiler_of_frames() is not None)
        return function(x)

    x = torch.ones(2)
    assert torch.equal(torch.compile(lambda x: outer(x) * 2, backend="eager")(x), x + 3)
    assert torch.equal(outer(x), x + 1)
    assert seen == [False, False]
    assert frames == [True, False, False, False]
    with pytest.raises(Exception, match="a reason"):
        torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


@pytest.mark.slow
def test_the_pool_of_the_compiler_is_forgotten():
    from torch._inductor.async_compile import AsyncCompile

    if AsyncCompile.pool.cache_info().currsize:
        return  # in use, by a test before this one
    pool = AsyncCompile.pool()
    internals.forget_inherited_compile_threads()
    again = AsyncCompile.pool()
    assert again is not pool
    internals.forget_inherited_compile_threads()
    for each in (pool, again):
        each.shutdown()


def test_a_scaler_can_be_told_of_an_overflow_elsewhere():
    told = []

    class Told(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            told.append(internals.tell_scaler_of_inf(self, find_caller("step")))

    parameter = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = Told([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    optimizer.step()
    assert told == [True, False]
