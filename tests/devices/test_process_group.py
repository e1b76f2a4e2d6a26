"""The stream-ordered process group: right values, right order, and each ordering step missed when
it is gone.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.devices.machine import Machine
from tests.harness.single_tensor_calls import all_gather_single
from tests.sim import process_group

WORLD = 2


@pytest.fixture(autouse=True)
def _only_simulated(sim_machine: Machine) -> None:
    """The group exists for simulated devices; on real ones NCCL takes its place."""


def test_collectives_give_the_right_values(sim_machine):
    def body(machine: Machine, rank: int, world: int) -> None:
        device = machine.device(rank)

        def ramp(*scale: float) -> torch.Tensor:
            return torch.arange(4.0, device=device) * (scale[0] if scale else rank + 1)

        for op, expected in (
            (dist.ReduceOp.SUM, 3),
            (dist.ReduceOp.MAX, 2),
            (dist.ReduceOp.AVG, 1.5),
        ):
            value = ramp()
            dist.all_reduce(value, op)
            assert value.tolist() == ramp(expected).tolist()
        value = ramp()
        dist.broadcast(value, 1)
        assert value.tolist() == ramp(2).tolist()
        value = ramp()
        dist.reduce(value, 0)
        assert value.tolist() == ramp(3 if rank == 0 else 2).tolist()
        gathered = [torch.empty(4, device=device) for _ in range(world)]
        dist.all_gather(gathered, ramp())
        assert [part.tolist() for part in gathered] == [ramp(1).tolist(), ramp(2).tolist()]
        flat = torch.empty(8, device=device)
        all_gather_single(flat, ramp())
        assert flat.tolist() == [*ramp(1).tolist(), *ramp(2).tolist()]
        share = torch.empty(2, device=device)
        dist.reduce_scatter_single(share, ramp())
        assert share.tolist() == ramp(3).tolist()[2 * rank : 2 * rank + 2]
        swapped = torch.empty(4, device=device)
        dist.all_to_all_single(swapped, ramp())
        assert swapped.tolist() == [
            *ramp(1).tolist()[2 * rank :][:2],
            *ramp(2).tolist()[2 * rank :][:2],
        ]
        received = torch.empty(4, device=device)
        requests = [dist.isend(ramp(), 1 - rank), dist.irecv(received, 1 - rank)]
        for request in requests:
            request.wait()
        assert received.tolist() == ramp(2 - rank).tolist()
        objects: list[object] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        group = dist.distributed_c10d._get_default_group()
        value = ramp()
        group.allreduce(value, dist.ReduceOp.MAX).wait()
        assert value.tolist() == ramp(2).tolist()
        value = ramp()
        group.broadcast(value, 1).wait()
        assert value.tolist() == ramp(2).tolist()
        group.allgather(gathered, ramp()).wait()
        assert [part.tolist() for part in gathered] == [ramp(1).tolist(), ramp(2).tolist()]
        host = torch.ones(3)
        dist.all_reduce(host, group=dist.new_group([0, 1]))
        assert host.tolist() == [2, 2, 2]

    sim_machine.on_ranks(WORLD, body)


def test_one_collective_is_for_one_device(sim_machine):
    def body(machine: Machine, rank: int, world: int) -> None:
        tensors = [torch.ones(1, device="sim:0"), torch.ones(1, device="sim:1")]
        with pytest.raises(ValueError, match=r"live on one device, found \['sim:0', 'sim:1'\]"):
            dist.distributed_c10d._get_default_group().allreduce(tensors)

    sim_machine.on_ranks(1, body)


def test_the_host_goes_on_and_the_stream_waits_when_told(sim_machine):
    def body(machine: Machine, rank: int, world: int) -> None:
        value = torch.ones(4, device=machine.device(rank))
        work = dist.all_reduce(value, async_op=True)
        assert not work.is_completed()
        work.wait()
        assert (value + 1).tolist() == [3.0] * 4

    sim_machine.on_ranks(WORLD, body)


# ---- the ways a group or its caller gets the order wrong


class NoStartAfterCaller(process_group.StreamOrderedGroup):
    def _start_after_caller(self, stream):
        pass


class FutureWithoutDevices(process_group.StreamOrderedGroup):
    def _future(self, device):
        return torch.futures.Future()


class NothingHeld(process_group.StreamOrderedGroup):
    def _held(self, tensors):
        return []

    def _launch(self, name, reads, writes, exchange, result):
        return super()._launch(name, reads, writes, exchange, [])


class WaitThatDoesNot(process_group.StreamOrderedGroup):
    def _launch(self, *arguments):
        work = super()._launch(*arguments)
        work._done = None
        return work


def reduce_and_use(device: str) -> None:
    value = torch.ones(4, device=device)
    dist.all_reduce(value, async_op=True).wait()
    value.add_(1)


def reduce_and_use_by_future(device: str) -> None:
    value = torch.ones(4, device=device)
    work = dist.all_reduce(value, async_op=True)
    work.get_future().then(lambda done: done.value()[0].div_(2)).wait()
    value.add_(1)


def reduce_and_drop(device: str) -> None:
    work = dist.all_reduce(torch.ones(4, device=device), async_op=True)
    work.wait()


def reduce_and_forget(device: str) -> None:
    dist.all_reduce(torch.ones(4, device=device), async_op=True)


def train_stock_ddp(device: str) -> None:
    torch.manual_seed(0)
    index = torch.device(device).index
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    model = nn.parallel.DistributedDataParallel(layers, device_ids=[index], bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()


def hazards_with(machine: Machine, rank: int, world: int, group: type, program) -> list[str]:
    """Run a program over a (faulty) group in place of the good one."""
    store = dist.PrefixStore(group.__name__, dist.distributed_c10d._get_default_store())
    good = dist.distributed_c10d._get_default_group()
    faulty = group(store, rank, world, datetime.timedelta(seconds=60))
    for name in ("allreduce", "broadcast", "allgather"):
        setattr(good, name, getattr(faulty, name))
    program(machine.device(rank))
    torch.accelerator.synchronize(rank)
    return machine.hazards()


PROGRAMS = [
    reduce_and_use,
    reduce_and_use_by_future,
    reduce_and_drop,
    reduce_and_forget,
    train_stock_ddp,
]
FAULTS = [
    (NoStartAfterCaller, reduce_and_use, "unordered write after write: all_reduce"),
    (WaitThatDoesNot, reduce_and_use, "unordered read after write"),
    (FutureWithoutDevices, reduce_and_use_by_future, "unordered read after write"),
    (NothingHeld, reduce_and_drop, "freed in use"),
    (NothingHeld, reduce_and_forget, "freed in use"),
    (NoStartAfterCaller, train_stock_ddp, "unordered write after write: all_reduce"),
    (FutureWithoutDevices, train_stock_ddp, "unordered read after write"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_good_group_has_no_hazards(sim_machine, program):
    for found in sim_machine.on_ranks(
        WORLD, hazards_with, process_group.StreamOrderedGroup, program
    ):
        assert found == []


@pytest.mark.parametrize(
    ("group", "program", "kind"), FAULTS, ids=lambda part: getattr(part, "__name__", "")
)
def test_a_faulty_group_is_found(sim_machine, group, program, kind):
    for found in sim_machine.on_ranks(WORLD, hazards_with, group, program):
        assert any(hazard.startswith(kind) for hazard in found), found


def test_a_caller_that_does_not_wait_is_found(sim_machine):
    def body(machine: Machine, rank: int, world: int) -> list[str]:
        value = torch.ones(4, device=machine.device(rank))
        work = dist.all_reduce(value, async_op=True)
        value.add_(1)
        found = machine.hazards()
        work.wait()
        return found

    for found in sim_machine.on_ranks(WORLD, body):
        assert any(hazard.startswith("unordered write after write") for hazard in found), found
