"""DataParallel when things go wrong: exceptions, killed workers, interrupts, and every way to leave
the program.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

from paceline import DataParallel
from paceline.dp.worker_pool import WorkerHandle
from paceline.errors import CollectiveTimeout, ConfigError, GroupError, PeerLost


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.two, self.lock = two, threading.Lock()  # a lock cannot be pickled


class Fails(nn.Module):
    def __init__(self, main, what):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.main, self.what = main, what

    def forward(self, x):
        if self.what is not None and (os.getpid() == self.main) == (self.what == "here"):
            if self.what == "odd":
                raise Odd("this", "that")
            raise KeyError("not found")
        return self.linear(x)


@pytest.mark.parametrize(("what", "kind"), [("there", KeyError), ("here", KeyError), ("odd", Odd)])
def test_an_exception_of_a_replica_keeps_its_type_and_traceback(what, kind):
    with DataParallel(Fails(os.getpid(), what), workers=2) as model:
        x = torch.randn(4, 2)
        with pytest.raises(kind) as caught:
            model(x)
        if what != "here":
            assert "in forward" in caught.value.__notes__[0]
            assert "replica 1" in caught.value.__notes__[0]
        if what == "odd":
            assert str(caught.value) == "this and that"
            assert caught.value.two == "that"
        pids = model.worker_pids
        model.module.what = None
        model(x).sum().backward()  # and it goes on
        assert model.worker_pids == pids


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, main):
        ctx.main = main
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.getpid() != ctx.main:
            raise ZeroDivisionError("in backward")
        return grad, None


def test_an_exception_in_backward():
    class Net(nn.Module):
        def __init__(self, main):
            super().__init__()
            self.linear, self.main, self.good = nn.Linear(2, 2), main, False

        def forward(self, x):
            y = self.linear(x)
            return y if self.good else BadBackward.apply(y, self.main)

    with DataParallel(Net(os.getpid()), workers=2) as model:
        x = torch.randn(4, 2)
        with pytest.raises(ZeroDivisionError, match="in backward"):
            model(x).sum().backward()
        model.zero_grad()
        model.module.good = True
        model(x).sum().backward()
        torch.testing.assert_close(model.module.linear.bias.grad, torch.full((2,), 4.0))


def test_an_order_that_only_some_workers_got_is_not_answered_later():
    class Bag(list):
        pass

    def cut(bag, ranges):
        # A lock cannot be sent.
        return [
            threading.Lock() if bag.is_bad and start == 4 else Bag(bag[start:stop])
            for start, stop in ranges
        ]

    class Net(nn.Module):
        def forward(self, bag):
            return torch.tensor(bag)

    bad, good = Bag(range(6)), Bag(range(10, 16))
    bad.is_bad, good.is_bad = True, False
    with DataParallel(Net(), workers=3, split={Bag: cut}) as model:
        assert model(good).tolist() == [*range(10, 16)]
        pids = model.worker_pids
        for _ in range(2):
            with pytest.raises(ConfigError, match="pickle"):
                model(bad)
            assert model(good).tolist() == [*range(10, 16)]
        assert model.worker_pids == pids


def test_gradients_that_only_some_workers_got_are_not_used_later(monkeypatch):
    with DataParallel(nn.Linear(2, 2), workers=3) as model:
        x = torch.ones(6, 2)
        model(x).sum().backward()
        pids = model.worker_pids
        out = model(x)
        send = WorkerHandle.send

        def fail_for_the_last(handle, *args, **kwargs):
            if handle.replica == 2:
                raise MemoryError("no room for gradients")
            send(handle, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(WorkerHandle, "send", fail_for_the_last)
            with pytest.raises(MemoryError, match="no room"):
                (out * 100).sum().backward()
        with pytest.raises(RuntimeError):
            out.sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        assert model.module.bias.grad.tolist() == [6.0, 6.0]
        assert model.worker_pids == pids


def test_a_killed_worker_is_noticed_and_replaced():
    class Slow(nn.Module):
        def __init__(self, main):
            super().__init__()
            self.linear, self.main, self.wait = nn.Linear(2, 2), main, False

        def forward(self, x):
            if self.wait and os.getpid() != self.main:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.linear(x)

    with DataParallel(Slow(os.getpid()), workers=2) as model:
        x = torch.randn(4, 2)
        out = model(x)
        model.module.wait = True
        with pytest.raises(PeerLost, match="SIGKILL") as caught:
            model(x)
        assert caught.value.rank == 1
        assert caught.value.signal == signal.SIGKILL
        with pytest.raises(GroupError, match="run the forward again"):
            out.sum().backward()
        model.module.wait = False
        model(x).sum().backward()
        assert len(model.worker_pids) == 1


def test_a_worker_killed_between_steps():
    with DataParallel(nn.Linear(2, 2), workers=3) as model:
        x = torch.randn(6, 2)
        model(x)
        os.kill(model.worker_pids[1], signal.SIGKILL)
        with pytest.raises(PeerLost, match="replica 2"):
            model(x)
        torch.testing.assert_close(model(x), model.module(x))


def test_workers_do_not_collect_the_garbage_of_the_main_process():
    """It may be a process group, say: whose end waits for threads that a forked process does not
    have.
    """
    collected, main = mmap.mmap(-1, 1), os.getpid()

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            if os.getpid() != main:
                collected[0] = 1

    class Collects(nn.Module):
        def forward(self, x):
            if os.getpid() != main:
                gc.collect()
            return x

    gc.disable()
    try:
        Cycle()
        with DataParallel(Collects(), workers=2) as model:
            model(torch.randn(4, 2))
            assert not gc.isenabled()
    finally:
        gc.enable()
    assert collected[0] == 0


def test_a_worker_that_does_not_answer():
    class Stuck(nn.Module):
        def __init__(self, main):
            super().__init__()
            self.main = main

        def forward(self, x):
            if os.getpid() != self.main:
                time.sleep(60)
            return x

    with (
        DataParallel(Stuck(os.getpid()), workers=2, timeout=0.3) as model,
        pytest.raises(CollectiveTimeout),
    ):
        model(torch.randn(4, 2))


def test_closing():
    model = DataParallel(nn.Linear(2, 2), workers=2)
    out = model(torch.randn(4, 2))
    threads = torch.get_num_threads()
    (pid,) = model.worker_pids
    model.close()
    model.close()
    assert not pathlib.Path(f"/proc/{pid}").exists()
    assert torch.get_num_threads() >= threads
    with pytest.raises(ConfigError, match="closed"):
        model(torch.randn(4, 2))
    with pytest.raises(GroupError):
        out.sum().backward()
    assert model.module(torch.randn(4, 2)).shape == (4, 2)


def test_forgotten_models_end_their_workers():
    model = DataParallel(nn.Linear(2, 2), workers=2)
    model(torch.randn(4, 2)).sum().backward()
    (pid,) = model.worker_pids
    del model
    assert not pathlib.Path(f"/proc/{pid}").exists()


def test_graphs_without_backward_are_released():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x):
            held = pathlib.Path("/proc/self/statm").read_text().split()[1]
            return (x * self.weight).exp(), torch.full((len(x),), int(held))

    with DataParallel(Counts(), workers=2) as model:
        x = torch.randn(2000, 1000)
        pages = [model(x)[1][-1].item() for _ in range(12)]
        # Kept graphs would hold seven times x.nbytes more; one or two may be on their way out.
        assert (pages[-1] - pages[4]) * 4096 < 3 * x.nbytes


SCRIPT = """
import os, sys, time, torch, paceline
model = paceline.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)), workers=3)
out = model(torch.randn(6, 2))
out.sum().backward()
print(*model.worker_pids, flush=True)
{how}
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("pass", 0),
        ("raise RuntimeError('the end')", 1),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), 9)", -9),
        ("model.module.forward = None; model.close(); print('closed')", 0),
        (
            "interrupt = __import__('threading').Thread(target=lambda: os.kill(os.getpid(), 2))\n"
            "interrupt.start(); time.sleep(30)",
            None,
        ),
    ],
)
def test_every_way_to_leave_leaves_nothing(how, code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(how=how)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    pids = [int(pid) for pid in done.stdout.split("\n")[0].split()]
    assert len(pids) == 2, done.stderr
    assert done.returncode == code or (code is None and "KeyboardInterrupt" in done.stderr)
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        )
    return False


def test_an_interrupt_while_workers_compute():
    script = """
        import os, signal, threading, time, torch, paceline
        from torch import nn
        class Endless(nn.Module):
            def __init__(self, main):
                super().__init__(); self.main = main
            def forward(self, x):
                if os.getpid() != self.main:
                    while self.main: time.sleep(0.1)
                return x
        model = paceline.DataParallel(Endless(os.getpid()), workers=2)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            model(torch.randn(4, 2))
        except KeyboardInterrupt:
            model.module.main = 0
            print(model(torch.ones(4, 2)).sum().item())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "8.0\n", done.stderr
