"""The `paceline` backend inside torch.distributed: what users and torch's own libraries do with a
backend.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist

from paceline._backend_registration import register_backend
from tests.harness import init_group, run_ranks

ROOT = pathlib.Path(__file__).parents[2]


def test_asynchronous_calls_are_asynchronous():
    """A call returns at once though its peer comes much later, and finishes without being waited
    for.
    """

    def check(rank, world):
        import time

        init_group("paceline")
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
        data = torch.ones(100_000)
        start = time.monotonic()
        works = [dist.all_reduce(data, async_op=True) for _ in range(3)]
        returned = time.monotonic() - start
        if rank == 0:
            assert returned < 0.5
            assert not works[0].is_completed()
        deadline = time.monotonic() + 20
        while not works[2].is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(work.is_success() and work.exception() is None for work in works)
        assert data[0].item() == 8
        dist.destroy_process_group()

    run_ranks(2, check)


def test_futures_and_callbacks_that_call_again():
    def check(rank, world):

        init_group("paceline")
        data = torch.ones(1000)

        def again(future):
            (value,) = future.value()
            return dist.all_reduce(value, async_op=True).get_future().wait()[0] * 10

        chained = dist.all_reduce(data, async_op=True).get_future().then(again)
        assert chained.wait()[0].item() == 40
        gathered = [torch.zeros(2) for _ in range(world)]
        future = dist.all_gather(
            gathered, torch.full((2,), float(rank)), async_op=True
        ).get_future()
        assert [t[0].item() for t in future.wait()] == [0.0, 1.0]
        dist.destroy_process_group()

    run_ranks(2, check)


def test_wait_with_a_limit():
    def check(rank, world):
        import time
        from datetime import timedelta

        import pytest

        from paceline import CollectiveTimeout

        init_group("paceline")
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(CollectiveTimeout, match="given to wait"):
                work.wait(timedelta(milliseconds=100))
            work.wait()
        else:
            time.sleep(0.8)
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    run_ranks(2, check)


def test_groups_of_any_shape_two_at_a_time_from_two_threads():
    def check(rank, world):
        import threading

        init_group("paceline")
        members = [[0, 1, 2], [0, 2], [1, 3], [3]]
        groups = [(ranks, dist.new_group(ranks)) for ranks in members]
        everyone = dist.new_group()
        for ranks, group in groups:
            if rank in ranks:
                data = torch.tensor([float(rank)])
                dist.all_reduce(data, group=group)
                assert data.item() == sum(ranks)
        results = {}

        def work(name, group):
            total = 0.0
            for i in range(200):
                data = torch.full((50,), float(i))
                dist.all_reduce(data, group=group)
                total += data[0].item()
            results[name] = total

        threads = [
            threading.Thread(target=work, args=("a", everyone)),
            threading.Thread(target=work, args=("b", dist.group.WORLD)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"a": 4 * sum(range(200)), "b": 4 * sum(range(200))}
        dist.destroy_process_group()

    run_ranks(4, check)


@pytest.mark.one_host("Gloo closes its sockets later")
def test_destroy_and_init_again_leaves_nothing():
    def check(rank, world):
        import os
        import pathlib

        def holdings():
            descriptors = len(os.listdir("/proc/self/fd"))
            segments = pathlib.Path("/proc/self/maps").read_text().count("memfd:paceline")
            return descriptors, segments

        store = dist.FileStore(os.environ["PACELINE_TEST_RENDEZVOUS"] + "-again", world)
        seen = []
        for i in range(4):
            dist.init_process_group(
                "paceline", store=dist.PrefixStore(str(i), store), rank=rank, world_size=world
            )
            data = torch.ones(3)
            dist.all_reduce(data)
            assert data[0].item() == world
            dist.destroy_process_group()
            seen.append(holdings())
        assert seen[-1][1] == 0
        assert seen[-1] == seen[1]

    run_ranks(2, check)


def test_coalescing_and_functional_collectives():
    def check(rank, world):
        import torch
        import torch.distributed as dist
        import torch.distributed._functional_collectives as funcol

        init_group("paceline")
        tensors = [torch.full((n,), float(rank)) for n in (1, 10, 100)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert all(tensor[0].item() == 1 for tensor in tensors)
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(tensor[0].item() == 2 for tensor in tensors)
        group = dist.group.WORLD
        assert funcol.all_reduce(torch.ones(3), "sum", group).tolist() == [2, 2, 2]
        gathered = funcol.all_gather_tensor(torch.tensor([float(rank)]), 0, group)
        assert gathered.tolist() == [0, 1]
        scattered = funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)
        assert scattered.tolist() == [[0, 2], [4, 6]][rank]
        swapped = funcol.all_to_all_single(torch.tensor([float(rank)] * 2), None, None, group)
        assert swapped.tolist() == [0, 1]
        assert funcol.broadcast(torch.tensor([float(rank)]), 1, group).tolist() == [1]
        dist.destroy_process_group()

    run_ranks(2, check)


def test_objects_sparse_tensors_and_device_mesh():
    def check(rank, world):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        init_group("paceline")
        found = [None] * world
        dist.all_gather_object(found, {"rank": rank, "data": "x" * rank * 1000})
        assert [o["rank"] for o in found] == list(range(world))
        shared = [f"from {rank}"]
        dist.broadcast_object_list(shared, src=2)
        assert shared == ["from 2"]
        given = [None]
        dist.scatter_object_list(given, [10, 20, 30, 40] if rank == 1 else None, src=1)
        assert given == [10 * (rank + 1)]
        sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1, 1, 1, 9, 0]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        data = torch.tensor([float(rank)])
        dist.all_reduce(data, group=mesh.get_group("b"))
        assert data.item() == (1 if rank < 2 else 5)
        dist.destroy_process_group()

    run_ranks(4, check)


def test_several_gigabytes_through_bounded_memory(tmp_path):
    """Chunked through the arena: the extra memory of a 1 GB all-reduce stays below 64 MB."""

    def check(rank, world, megabytes):
        import resource

        init_group("paceline")
        data = torch.ones(megabytes << 18)
        dist.all_reduce(torch.ones(1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dist.all_reduce(data)
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert data[0].item() == data[-1].item() == world
        dist.destroy_process_group()
        return grown_kb

    assert all(grown < 64 * 1024 for grown in run_ranks(2, check, 1024))


@pytest.mark.parametrize("world", [32])
def test_many_more_ranks_than_cores(world):
    def check(rank, world):

        init_group("paceline")
        data = torch.full((1000,), float(rank))
        for _ in range(3):
            data.fill_(rank)
            dist.all_reduce(data)
        assert data[0].item() == sum(range(world))
        outputs = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(outputs, torch.tensor([float(rank)]))
        assert [o.item() for o in outputs] == list(range(world))
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(world, check, timeout=100)


def test_stock_ddp_trains_on_it():
    def train(rank, world, backend):
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        init_group(backend)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 3)
        )
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
        return [p.detach().clone() for p in model.parameters()]

    import torch

    ours = run_ranks(2, train, "paceline")
    gloo = run_ranks(2, train, "gloo")
    for a, b in zip(ours[0], ours[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours[0], gloo[0], strict=True):
        assert torch.equal(a, b)  # two ranks: one addition, in any order the same bits


def test_fsdp2_trains_and_checkpoints_on_it(tmp_path):
    def train(rank, world, path):
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        init_group("paceline")
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5)
        )
        plain = torch.nn.Sequential(
            torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5)
        )
        plain.load_state_dict(model.state_dict())
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        data = torch.randn(world, 4, 16, generator=torch.Generator().manual_seed(1))
        for module, batch in ((model, data[rank]), (plain, data.reshape(-1, 16))):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                module(batch).square().mean().backward()
                optimizer.step()
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), whole)
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(state, checkpoint_id=path)
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), whole)
        dist.destroy_process_group()

    run_ranks(2, train, str(tmp_path / "checkpoint"), timeout=100)


def test_splitting_a_group():
    def check(rank, world):

        init_group("paceline")
        part = dist.group.WORLD.split_group([0, 2] if rank in (0, 2) else [1, 3])
        data = torch.tensor([float(rank)])
        part.allreduce([data]).wait()
        assert data.item() == (2 if rank in (0, 2) else 4)
        part.shutdown()
        dist.destroy_process_group()

    run_ranks(4, check)


def test_splitting_a_group_twice_with_the_same_ranks():
    def check(rank, world):

        init_group("paceline")
        groups = [dist.group.WORLD.split_group([0, 1]) for _ in range(3)]
        groups.append(dist.group.WORLD.split_group([0, 1], group_name="named"))
        groups.append(dist.group.WORLD.split_group([0, 1], group_name="named"))
        for group in groups:
            data = torch.ones(1)
            group.allreduce([data]).wait()
            assert data.item() == world
            group.shutdown()
        dist.destroy_process_group()

    run_ranks(2, check)


def test_calls_are_numbered_and_roots_and_time_limits_checked():
    def check(rank, world):
        from datetime import timedelta

        import paceline

        init_group("paceline")
        group = dist.group.WORLD
        first = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.broadcast(torch.ones(3), 0)
        dist.barrier()
        assert group._get_sequence_number_for_group() == first + 4

        for call, kind, lists in (
            (group.broadcast, dist.BroadcastOptions, ([torch.ones(1)],)),
            (group.reduce, dist.ReduceOptions, ([torch.ones(1)],)),
            (group.gather, dist.GatherOptions, ([], [torch.ones(1)])),
            (group.scatter, dist.ScatterOptions, ([torch.ones(1)], [])),
        ):
            for root in (-1, world):
                options = kind()
                options.rootRank = root
                with pytest.raises(paceline.ConfigError, match=f"invalid root rank: {root}"):
                    call(*lists, options)

        assert type(group.create_device(interface="lo")) is type(
            dist.ProcessGroupGloo.create_device(interface="lo")
        )
        group._set_default_timeout(timedelta(seconds=77))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        dist.destroy_process_group()

    run_ranks(2, check)


def test_wrong_arguments_say_what_is_wrong():
    def check(rank, world):
        import pytest

        from paceline import ConfigError

        init_group("paceline")
        with pytest.raises(ConfigError, match="float8"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        with pytest.raises(ConfigError, match="does not support BAND of float32"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(ConfigError, match="must be 2 numbers that add up to the 3 rows"):
            dist.group.WORLD.all_to_all_single(
                torch.zeros(3), torch.zeros(3), [1, 1], [2, 2]
            ).wait()
        with pytest.raises(RuntimeError, match=r"no backend for meta tensors.*init_process_group"):
            dist.all_reduce(torch.ones(2, device="meta"))
        data = torch.ones(1)
        dist.all_reduce(data)  # and the group still works
        assert data.item() == world
        dist.destroy_process_group()

    run_ranks(2, check)


@pytest.mark.parametrize("backend", ["cpu:paceline,cuda:gloo", "cuda:gloo,cpu:paceline"])
def test_beside_a_backend_for_another_device(backend):
    def check(rank, world):

        init_group(backend)
        group = dist.group.WORLD
        data = torch.ones(3)
        dist.all_reduce(data)
        assert data[0].item() == world
        assert group._get_backend(torch.device("cpu")).name() == "paceline"
        assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
        assert set(group._device_types) == {torch.device("cpu"), torch.device("cuda")}
        part = dist.new_group([0, 1])
        dist.all_reduce(data, group=part)
        assert data[0].item() == world**2
        dist.destroy_process_group()

    run_ranks(2, check)


USES_TORCH_ONLY = """
import sys
import torch
loaded = sorted(name for name in sys.modules if name.startswith("paceline"))
assert loaded == [
    "paceline", "paceline._backend_registration", "paceline._version", "paceline.errors"
], loaded
import torch.distributed as dist
assert dist.is_backend_available("paceline")
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
numbers = torch.ones(3)
dist.all_reduce(numbers)
print(dist.get_backend(), numbers.tolist())
dist.destroy_process_group()
"""


def test_torch_knows_the_backend_where_nobody_imports_the_package(tmp_path):
    """By the entry points of an installed package, which torch loads when it is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "paceline-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0.0.1\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USES_TORCH_ONLY],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "paceline [1.0, 1.0, 1.0]\n"


@pytest.mark.parametrize(
    "backend", [object(), type("Backend", (), {"_plugins": {}})], ids=["unlike", "refusing"]
)
def test_an_unknown_torch_is_imported_without_the_backend(monkeypatch, caplog, backend):
    """`import torch` must not fail because of a package that only happens to be installed."""
    monkeypatch.setattr(dist.distributed_c10d, "Backend", backend)
    register_backend()
    assert "the backend paceline is not available" in caplog.text
    assert torch.__version__ in caplog.text


def call_from_compiled_code(rank, world):
    """As torch's own DistributedDataParallel calls a group: from C++, which torch.compile leaves
    alone. It must leave our side of the call alone, too.
    """
    init_group("paceline")

    @torch.compile(backend="eager")
    def step(data):
        total = data + 1
        dist._broadcast_coalesced(dist.group.WORLD, [total], 100, 0)
        return total * 2

    assert step(torch.full((3,), float(rank))).tolist() == [2.0] * 3
    dist.destroy_process_group()


def test_calls_inside_compiled_code():
    run_ranks(2, call_from_compiled_code)
