"""DataParallel from a notebook and from a plain script; many at once; choosing by itself;
parameters exist once.
"""

from __future__ import annotations

import copy
import os
import pickle
import pty
import select
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from paceline import DataParallel
from paceline.bench.bench_dp import _memory_growth
from paceline.core import NativeStatus
from paceline.dp.autotune import Autotune
from paceline.errors import ConfigError

CELLS = [
    "import torch, paceline\n"
    "from torch import nn\n"
    "_ = torch.randn(300, 300) @ torch.randn(300, 300)",
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.layer, self.shift = nn.Linear(4, 1), lambda x: x + 1\n"
    "    def forward(self, x):\n"
    "        return self.shift(self.layer(x))\n"
    "model = paceline.DataParallel(Net(), workers=2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "x = torch.randn(16, 4)\n"
    "losses = []\n"
    "for _ in range(20):\n"
    "    optimizer.zero_grad()\n"
    "    loss = model(x).pow(2).mean()\n"
    "    loss.backward()\n"
    "    optimizer.step()\n"
    "    losses.append(loss.item())\n"
    "print(losses[-1] < losses[0], len(model.worker_pids))",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter's own packages are theirs
def test_a_notebook():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    shown = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert shown[2] == "True 1\n"


REPL = """\
import torch, paceline
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 1), lambda x: x + 1
    def forward(self, x):
        return self.shift(self.layer(x))

model = paceline.DataParallel(Net(), workers=2)
model(torch.randn(6, 3)).sum().backward()
print("found", model.module.layer.bias.grad.item(), len(model.worker_pids))
class Net(nn.Module):
    def forward(self, x):
        return x * 2

print("again", paceline.DataParallel(Net(), workers=2)(torch.ones(4)).sum().item())
exit()
"""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_interactive_session(is_terminal):
    """Typed at a prompt; the second class has the name of the first."""
    command = [sys.executable, "-i", "-q"]
    if not is_terminal:
        done = subprocess.run(
            command, input=REPL, capture_output=True, text=True, check=True, timeout=120
        )
        shown = done.stdout
    else:
        shown = _typed(command, REPL)
    assert "found 6.0 1" in shown
    assert "again 8.0" in shown


def _typed(command: list[str], text: str) -> str:
    """Feed a program through a terminal of its own; all that it shows."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"}
    ) as one:
        os.close(theirs)
        os.write(ours, text.encode())
        deadline = time.monotonic() + 120
        try:
            while time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    shown += os.read(ours, 4096)
        except OSError:
            pass  # the other end was closed: it ended
        finally:
            os.close(ours)
            if time.monotonic() >= deadline:
                one.kill()
    return shown.decode()


def test_without_the_native_core_it_says_so_and_runs_in_one_piece(monkeypatch):
    monkeypatch.setattr(
        "paceline.dp.data_parallel.native_status",
        lambda: NativeStatus(available=False, reason="no compiler"),
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with pytest.warns(UserWarning, match="no compiler"):
        model = DataParallel(nn.Linear(2, 2))
    assert model.workers == 1
    x = torch.randn(4, 2)
    assert torch.equal(model(x), model.module(x))
    with pytest.raises(ConfigError, match="paceline doctor"):
        DataParallel(nn.Linear(2, 2), workers=2)


@pytest.mark.parametrize("pays", [True, False])
def test_auto_says_once_that_it_does_not_split(monkeypatch, pays):
    monkeypatch.setattr(Autotune, "splitting_pays", property(lambda self: pays))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    x = torch.randn(4, 3)
    with (
        DataParallel(nn.Linear(3, 3), workers="auto") as model,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(12):
            model(x)
        assert len([each for each in said if "does not split" in str(each.message)]) == (
            0 if pays else 1
        )
        assert len(model.worker_pids) == (model.workers - 1 if pays else 0)


def test_a_script_without_a_main_guard_prints_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import torch, paceline
            print("start")
            model = paceline.DataParallel(torch.nn.Linear(3, 1), workers=3)
            model(torch.randn(6, 3)).sum().backward()
            print(model.module.bias.grad.item(), end="")
        """)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "start\n6.0"


def test_two_models_at_once_and_one_inside_the_other():
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with (
        DataParallel(copy.deepcopy(first), workers=2) as a,
        DataParallel(copy.deepcopy(second), workers=2) as b,
    ):
        b(a(x)).pow(2).sum().backward()
        second(first(x)).pow(2).sum().backward()
        torch.testing.assert_close(a.module.weight.grad, first.weight.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(b.module.weight.grad, second.weight.grad, rtol=1e-12, atol=0)


def test_threads_take_turns():
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs = [torch.randn(size, 6, dtype=torch.float64) for size in (8, 5, 7)]
    parameters = list(bare.parameters())
    expected = [torch.autograd.grad(bare(x).pow(2).sum(), parameters) for x in inputs]
    # The second time inputs have gradients, too, which are read at the end of a backward.
    with DataParallel(copy.deepcopy(bare), workers=2) as model:

        def train(x: torch.Tensor, right: Sequence[torch.Tensor]) -> None:
            for wants_gradient in (False, True) * 15:
                x = x.detach().requires_grad_(wants_gradient)
                outputs, more = model(x), model(x)
                wanted = [*model.parameters(), *([x] if wants_gradient else [])]
                for out in (outputs, more):
                    found = torch.autograd.grad(out.pow(2).sum(), wanted)
                    for one, other in zip(found, right, strict=False):
                        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
                with torch.no_grad():
                    torch.testing.assert_close(model(x), outputs, rtol=1e-12, atol=1e-14)

        with ThreadPoolExecutor(len(inputs)) as threads:
            for result in [*map(threads.submit, [train] * len(inputs), inputs, expected)]:
                result.result()
        assert len(model.worker_pids) == 1


def test_parameters_asked_for_during_the_forward_of_another_thread_are_the_real_ones():
    main, entered, may_end = os.getpid(), threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x):
            if os.getpid() == main:
                entered.set()
                assert may_end.wait(30)
            return super().forward(x)

    module = Slow(3, 2)
    weight, bias = real = [*module.parameters()]
    questions: list[Callable[[DataParallel], Sequence[torch.Tensor]]] = [
        lambda model: [*model.parameters()],
        lambda model: [parameter for _, parameter in model.named_parameters()],
        lambda model: [*model.state_dict(keep_vars=True).values()],
        lambda model: [model.weight, model.bias],
    ]
    with DataParallel(module, workers=2) as model, ThreadPoolExecutor(1) as thread:
        for question in questions:
            entered.clear(), may_end.clear()
            forward = thread.submit(model, torch.randn(4, 3))
            assert entered.wait(30)
            # The answer comes when the forward has ended, or at once and then it is wrong.
            end = threading.Timer(0.1, may_end.set)
            end.start()
            found = question(model)
            end.join()
            assert [*map(id, found)] == [*map(id, real)]
            forward.result().sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(bias.grad, torch.full((2,), 4.0 * len(questions)))


def test_a_whole_forward_of_workers_auto_is_not_disturbed_by_a_split_one():
    main, paused, is_split, is_over = os.getpid(), *(threading.Event() for _ in range(3))
    calls = 0

    class Pausing(nn.Linear):
        def forward(self, x):
            nonlocal calls
            calls += 1
            if os.getpid() == main and calls == 4:  # the last one that is measured whole
                paused.set()
                is_split.wait(1)  # for ever, if others wait for their turn
            elif os.getpid() == main and calls == 6:
                is_split.set()
                is_over.wait(30)
            return super().forward(x)

    model, x = DataParallel(Pausing(3, 2), workers="auto"), torch.randn(4, 3)
    if model.workers == 1:
        pytest.skip("one core: nothing is measured")
    with model, ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            model(x)
        whole = threads.submit(model, x)
        assert paused.wait(30)
        later = threads.submit(lambda: [model(x) for _ in range(2)])
        outputs = whole.result()
        is_over.set()
        later.result()
        outputs.sum().backward()
        torch.testing.assert_close(model.bias.grad, torch.full((2,), 4.0))


def test_one_inside_another_is_the_module_it_wraps():
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inner = DataParallel(copy.deepcopy(bare), workers=2)
    x = torch.randn(7, 6, dtype=torch.float64)
    with inner, DataParallel(nn.Sequential(inner, nn.Tanh()), workers=3) as outer:
        for _ in range(2):
            outer(x).pow(2).sum().backward()
            bare(x).tanh().pow(2).sum().backward()
            assert len(outer.worker_pids) == 2
            assert len(inner.worker_pids) <= 1
            for one, other in zip(inner.module.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
            # By itself it splits, and the parameters follow from one to the other.
            torch.testing.assert_close(inner(x), bare(x), rtol=1e-12, atol=1e-14)
            assert len(inner.worker_pids) == 1
            with torch.no_grad():
                for parameter in (*inner.module.parameters(), *bare.parameters()):
                    parameter.mul_(0.9)


def test_a_model_called_within_its_own_forward_is_the_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.wrapper = nn.Linear(2, 2), []

        def forward(self, x, again=True):
            return self.wrapper[0](self.linear(x), again=False) if again else self.linear(x)

    module = Twice()
    x = torch.randn(4, 2)
    with DataParallel(module, workers=2) as model:
        module.wrapper.append(model)
        torch.testing.assert_close(model(x), module.linear(module.linear(x)))
        module.wrapper.clear()


def test_copies_and_pickles_have_workers_of_their_own():
    with DataParallel(nn.Linear(3, 3), workers=2) as model:
        x = torch.randn(4, 3)
        expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with other:
                torch.testing.assert_close(other(x), expected)
                assert other.worker_pids != model.worker_pids
        assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_parameters_exist_once():
    with DataParallel(nn.Linear(2000, 1000), workers=3) as model:
        model(torch.randn(6, 2000)).sum().backward()
        assert _memory_growth(model) < 0.1


def test_a_parameter_saved_alone_is_no_larger_than_itself(tmp_path):
    with DataParallel(nn.Linear(100, 100), workers=2) as model:
        model(torch.randn(4, 100))
        torch.save(model.module.bias, tmp_path / "bias.pt")
        assert (tmp_path / "bias.pt").stat().st_size < 4000


@pytest.mark.parametrize(("whole_s", "split_s", "pays"), [(1.0, 0.6, True), (1.0, 1.2, False)])
def test_a_trial_keeps_the_faster_way(whole_s, split_s, pays):
    now = 0.0

    def take(seconds):
        nonlocal now
        now += seconds

    trial = Autotune(lambda: now)
    while not trial.is_over:
        trial.run(lambda: take(whole_s), lambda: take(split_s))
    assert trial.splitting_pays is pays


def test_auto_decides_and_computes_the_same_all_along():
    module = nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with DataParallel(module, workers="auto") as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which way wins is up to the machine
        for _ in range(10):
            torch.testing.assert_close(model(x), module(x), rtol=1e-12, atol=1e-15)
