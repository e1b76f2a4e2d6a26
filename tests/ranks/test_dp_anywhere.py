"""DataParallel from a notebook and from a plain script; many at once; choosing by itself; parameters exist once."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

from paceline import DataParallel
from paceline.cli.benchmarks.dp import _memory_growth
from paceline.dp.trial import Trial

CELLS = [
    "import torch, paceline\nfrom torch import nn\n_ = torch.randn(300, 300) @ torch.randn(300, 300)",
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
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "start\n6.0"


def test_two_models_at_once_and_one_inside_the_other():
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with DataParallel(copy.deepcopy(first), workers=2) as a, DataParallel(copy.deepcopy(second), workers=2) as b:
        b(a(x)).pow(2).sum().backward()
        second(first(x)).pow(2).sum().backward()
        torch.testing.assert_close(a.module.weight.grad, first.weight.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(b.module.weight.grad, second.weight.grad, rtol=1e-12, atol=0)


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

    trial = Trial(lambda: now)
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
