"""A real notebook, executed headlessly by a real kernel: `paceline.spawn` of a function defined in
a cell.
"""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = [
    "import torch, paceline\n"
    "scale = 2.0\n"
    "class Answer:\n"
    "    def __init__(self, value): self.value = value",
    "# using torch's threads first: forking this process would now be dangerous\n"
    "_ = torch.randn(300, 300) @ torch.randn(300, 300)\n"
    "def train(base):\n"
    "    import torch.distributed as dist\n"
    "    paceline.init_process_group()\n"
    "    value = torch.tensor([base + paceline.rank()])\n"
    "    dist.all_reduce(value)\n"
    "    print('in rank', paceline.rank())\n"
    "    return Answer(scale * value.item())",
    "answers = paceline.spawn(train, (1.0,), 2)\n"
    "print([a.value for a in answers], type(answers[0]) is Answer)",
    "try:\n"
    "    paceline.spawn(lambda: 1 / 0, nprocs=1)\n"
    "except ZeroDivisionError as e:\n"
    "    print('caught', e)",
    "print(paceline.init_process_group(), paceline.world_size())",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter's own packages are theirs
def test_a_notebook():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    shown = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "[0] in rank 0" in shown[2]
    assert "[1] in rank 1" in shown[2]
    assert "[6.0, 6.0] True" in shown[2]
    assert "caught division by zero" in shown[3]
    assert "single process (alone)" in shown[4]
