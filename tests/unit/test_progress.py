"""Progress: lines where there is no terminal, scalars for TensorBoard on request."""

from __future__ import annotations

import sys

import pytest

from paceline.diagnostics import Progress
from paceline.errors import ConfigError


def test_the_last_step_gets_a_line(capsys):
    with Progress(2) as progress:
        progress.step(0.5, 8, 0.0)
        progress.step(0.25, 8, 0.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 2/2  loss 0.2500")
    assert progress.straggler is None  # this process is not a rank


def test_a_disabled_bar_is_silent(capsys, tmp_path):
    with Progress(1, enabled=False, tensorboard=tmp_path) as progress:
        progress.step(0.5, 8, 0.0)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_scalars_are_written_for_tensorboard(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    with Progress(3, tensorboard=tmp_path) as progress:
        for loss in (3.0, 2.0, 1.0):
            progress.step(loss, 8, 0.0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.0),
    ]
    assert set(events.Tags()["scalars"]) == {"loss", "samples_per_second", "sync_share"}


def test_without_tensorboard_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'"):
        Progress(1, tensorboard=tmp_path)
