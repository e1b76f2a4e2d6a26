"""Ranks killed in the middle of an optimizer's step: every element that the others see is as before
the step or as after it, and it is recorded which.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import random
import signal
import threading
import time

import pytest
import torch

import paceline
from paceline.optim import shared_step
from tests.harness import RankDied, init_group, run_ranks

OPTIMIZERS = {
    "SGD": lambda p, **o: paceline.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "Adam": lambda p, **o: paceline.optim.Adam(p, amsgrad=True, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: paceline.optim.AdamW(p, lr=0.01, **o),
}
STATE = {"SGD": 1, "Adam": 3, "AdamW": 2}
SOON_S = 20.0  # far from the group's limit, however busy the machine is


def net(width, dtype=torch.float32):
    """A large array that is seen by its pages, and small ones that are copied."""
    shared_step._WORTH_SHARING_BYTES = 0
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 60),
        torch.nn.Linear(60, 3),
    ).to(dtype)


def compute_gradients(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    batch = torch.randn(4, 5, generator=generator).to(dtype)
    model.zero_grad()
    model(batch).square().mean().backward()


class Expectation:
    """What is there before a step, and what will be after it."""

    def __init__(self, model, optimizer):
        self.before = self.state_of(model.module, optimizer)
        module = copy.deepcopy(model.module)
        alone = type(optimizer)(module.parameters(), shared=False, max_norm=optimizer._max_norm)
        alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        averages = {name: p.grad for name, p in model.module.named_parameters()}
        if optimizer._one_pass is not None:
            averages = model.averaged_gradients()
        for name, parameter in module.named_parameters():
            parameter.grad = averages[name].clone()
        alone.step()
        self.after = self.state_of(module, alone)

    @staticmethod
    def state_of(module, optimizer):
        """Names -> the parameter and its arrays of state, flat; and how often it was stepped."""
        found = {}
        for name, parameter in module.named_parameters():
            state = optimizer.state[parameter]
            arrays = [parameter.detach(), *(v for k, v in state.items() if k != "step")]
            found[name] = (
                [array.detach().flatten().clone() for array in arrays],
                float(state.get("step", 0)),
            )
        return found

    def check(self, model, optimizer):
        """All elements are where the record says they are; returns how many are as after."""
        record, total = optimizer.interrupted_step, 0
        assert record is not None
        assert not record.torn
        assert record.parameters.keys() == self.before.keys()
        for name, (arrays, steps) in self.state_of(model.module, optimizer).items():
            (before, steps_before), (after, steps_after) = self.before[name], self.after[name]
            is_after = torch.zeros(len(arrays[0]), dtype=torch.bool)
            for elements in record.parameters[name].after:
                is_after[elements.start : elements.stop] = True
            for now, old, new in zip(arrays, before, after, strict=True):
                assert not torch.equal(old, new)
                assert torch.equal(now, torch.where(is_after, new, old)), f"{name}: {record}"
            assert steps == (steps_after if record.is_after else steps_before)
            total += int(is_after.sum())
        return total


def protect(address, access):
    """Let this process end when it writes to (or reads from) the page of this address."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), access) == 0


NOTHING, READING = 0, mmap.PROT_READ


def die_at(place, model, optimizer, name):
    """See to it that the next step ends this process while it writes there, or computes."""
    parameter = model.module[2].weight  # the large one
    middle = parameter.nbytes * 3 // 4
    if place == "computing":
        protect(parameter.grad.data_ptr() + middle, NOTHING)
        return
    view, slot = optimizer._shared._view, optimizer._shared._slots[id(parameter)]
    array = {"parameter": 0, "last of the state": STATE[name]}[place]
    protect(view.shared_address(slot.index + array) + middle, READING)


def killed_at(rank, world, name, place, options, dtype):
    init_group("paceline")
    model = paceline.DistributedDataParallel(net(700, dtype))
    optimizer = OPTIMIZERS[name](model.parameters(), shared=True, **options)
    for step in range(2):
        compute_gradients(model, rank, step)
        optimizer.step()
    compute_gradients(model, rank, 2)
    expected = Expectation(model, optimizer)
    if rank == world - 1:
        die_at(place, model, optimizer, name)
    start = time.monotonic()
    with pytest.raises(paceline.PeerLost, match="interrupted_step") as caught:
        optimizer.step()
    assert time.monotonic() - start < SOON_S
    assert caught.value.rank == world - 1
    record = optimizer.interrupted_step
    assert not record.is_before
    assert not record.is_after
    assert str(record) in str(caught.value)
    assert expected.check(model, optimizer) > 0


def assert_only_the_last_rank_died(world, fn, *arguments):
    *survivors, lost = run_ranks(world, fn, *arguments, check=False)
    for survivor in survivors:
        if survivor.error is not None:
            raise survivor.error
    assert isinstance(lost.error, RankDied), lost.error


@pytest.mark.parametrize("place", ["computing", "parameter", "last of the state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_block_is_left_half_written(name, place):
    assert_only_the_last_rank_died(2, killed_at, name, place, {}, torch.float32)


@pytest.mark.parametrize("place", ["parameter", "last of the state"])
def test_nor_with_sums_in_the_step(place):
    assert_only_the_last_rank_died(3, killed_at, "AdamW", place, {"one_pass": True}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nor_in_other_types(dtype):
    assert_only_the_last_rank_died(2, killed_at, "AdamW", "last of the state", {}, dtype)


# --- at random moments ----------------------------------------------------------------------------
def killed_at_random(rank, world, options, seed):
    init_group("paceline")
    torch.set_num_threads(2)
    model = paceline.DistributedDataParallel(net(9000))
    optimizer = paceline.optim.AdamW(model.parameters(), shared=True, **options)
    step_s = 1.0
    for step in range(3):
        compute_gradients(model, rank, step)
        start = time.monotonic()
        optimizer.step()
        step_s = time.monotonic() - start
    compute_gradients(model, rank, 3)
    expected = Expectation(model, optimizer)
    if rank == world - 1:
        moment = random.Random(seed).random() * step_s

        def end_here():
            time.sleep(moment)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end_here, daemon=True).start()
    try:
        optimizer.step()
    except paceline.PeerLost:
        expected.check(model, optimizer)
        return
    time.sleep(step_s)
    assert rank < world - 1, "still alive"
    assert optimizer.interrupted_step is None
    after = Expectation.state_of(model.module, optimizer)
    for name, (arrays, steps) in expected.after.items():
        assert after[name][1] == steps
        assert all(map(torch.equal, after[name][0], arrays))


@pytest.mark.parametrize("options", [{}, {"one_pass": True, "max_norm": 0.01}])
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment(seed, options):
    assert_only_the_last_rank_died(3, killed_at_random, options, seed)


# --- whole parameters, stepped by torch's own code ------------------------------------------------
class Dying(torch.optim.SGD):
    """Ends its process in the middle of a step: some parameters are made, some are not."""

    dies = False

    def step(self, closure=None):
        if self.dies:
            for group in self.param_groups:
                group["params"][0].data.fill_(1234.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def killed_in_sharded(rank, world, moment):
    init_group("paceline")
    model = paceline.DistributedDataParallel(net(700))
    optimizer = paceline.optim.Sharded(Dying, model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        compute_gradients(model, rank, step)
        optimizer.step()
    compute_gradients(model, rank, 2)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    if rank == world - 1 and moment == "in the step":
        optimizer.inner.dies = True
    elif rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(paceline.PeerLost) as caught:
        optimizer.step()
    assert time.monotonic() - start < SOON_S
    record = optimizer.interrupted_step
    assert str(record) in str(caught.value)
    of_lost = {
        name
        for name, p in model.module.named_parameters()
        if optimizer._stepper(p, range(world)) == world - 1
    }
    assert of_lost
    if moment == "before the step":
        assert record.is_before
        assert all(torch.equal(p, before[n]) for n, p in model.module.named_parameters())
        return
    assert set(record.torn) == of_lost
    for name, parameter in model.module.named_parameters():
        assert record.parameters[name].is_after == (name not in of_lost)
        assert torch.equal(parameter, before[name]) == (
            name in of_lost and not bool((parameter == 1234.5).all())
        )


@pytest.mark.parametrize("moment", ["before the step", "in the step"])
def test_sharded_names_what_a_lost_rank_was_stepping(moment):
    assert_only_the_last_rank_died(3, killed_in_sharded, moment)
