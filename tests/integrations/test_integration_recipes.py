"""The recipes of the manual, and what the packages give without Paceline.

Both sides of a recipe's diff are run and print one figure at their end, which has to be the same.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.harness.manual_page import ManualPage
from tests.integrations.programs import PACELINE_RUN, PYTHON, ROOT, TORCHRUN, figure_of, run

pytestmark = [pytest.mark.timeout(900)]
HOW_TO = ROOT / "docs" / "how-to"


def write_programs(page: str, directory: pathlib.Path) -> None:
    ManualPage(HOW_TO / f"{page}.md").write_files(directory)


@pytest.mark.parametrize(
    ("page", "script", "without", "command"),
    [
        pytest.param(
            "migrate-accelerate", "accelerated.py", TORCHRUN, PACELINE_RUN, id="accelerate"
        ),
        pytest.param(
            "migrate-accelerate", "accelerated.py", TORCHRUN, TORCHRUN, id="accelerate-torchrun"
        ),
        pytest.param(
            "transformers", "language_model.py", TORCHRUN, PACELINE_RUN, id="transformers"
        ),
        pytest.param("migrate-lightning", "trained.py", TORCHRUN, PACELINE_RUN, id="lightning"),
        pytest.param("migrate-lightning", "trained.py", TORCHRUN, PYTHON, id="lightning-python"),
        pytest.param("migrate-lightning", "fabric.py", TORCHRUN, PACELINE_RUN, id="fabric"),
        pytest.param("ray", "ray_train.py", PYTHON, PYTHON, id="ray"),
        pytest.param("skorch", "estimator.py", PYTHON, PYTHON, id="skorch"),
    ],
)
def test_a_recipe_gives_what_the_package_alone_gives(page, script, without, command, tmp_path):
    write_programs(page, tmp_path)
    plain = figure_of(run(without, tmp_path, f"old_{script}"))
    ours = figure_of(run(command, tmp_path, script))
    assert ours == pytest.approx(plain, abs=1e-6)


def test_torchmetrics_counts_each_sample_once(tmp_path):
    write_programs("torchmetrics", tmp_path)
    alone = figure_of(run(PYTHON, tmp_path, "evaluate.py"))
    assert figure_of(run(PACELINE_RUN, tmp_path, "evaluate.py")) == alone


def test_every_recipe_with_a_package_is_here():
    needing = {
        path.stem
        for path in HOW_TO.glob("*.md")
        if any(block.needs for block in ManualPage(path).blocks)
    }
    covered = {"migrate-accelerate", "transformers", "migrate-lightning", "ray", "skorch"}
    assert needing == covered | {"torchmetrics"}
