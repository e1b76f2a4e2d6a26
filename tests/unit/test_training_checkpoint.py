"""`Training(checkpoint=...)`: resumes by itself from the newest whole checkpoint, and writes new
ones.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import signal
import threading

import pytest
import torch

import paceline
from paceline import ConfigError, PacelineError
from paceline.launch.process_context import drop_context
from paceline.training import automatic_saves, checkpoint_directory
from tests.harness import exact_models

NAME = "cnn"


@pytest.fixture(autouse=True)
def _one_thread_and_no_listener():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    drop_context()


class Interrupted(Exception):
    pass


def run(directory, steps, interrupt_at=None, **options):
    """Train until `steps`, or an interruption; returns the training and the hash."""
    model, optimizer, training = exact_models.make(
        NAME, checkpoint=directory, **{"save_every": 2, **options}
    )
    for _ in training.epochs(steps // 3):
        for batch in training.batches():
            if training.step == interrupt_at:
                training._saves._wait()
                raise Interrupted
            exact_models.CASES[NAME].step(model, training, batch, optimizer)
    return training, exact_models.digest(model, optimizer, [])


def names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_run_that_was_killed_goes_on_from_its_newest_checkpoint(tmp_path):
    _, expected = run(tmp_path / "whole", 9)
    with pytest.raises(Interrupted):
        run(tmp_path / "killed", 9, interrupt_at=7)
    assert names(tmp_path / "killed") == [f"step-00000000{n}.pt" for n in (2, 4, 6)]
    training, found = run(tmp_path / "killed", 9)
    assert found == expected
    assert names(tmp_path / "killed") == [f"step-00000000{n}.pt" for n in (6, 8, 9)]
    # Nothing is left to do, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").iterdir()}
    training, found = run(tmp_path / "killed", 9)
    assert (training.step, found) == (9, expected)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").iterdir()}
    # More epochs go on from there.
    assert run(tmp_path / "killed", 12)[1] == run(tmp_path / "other", 12)[1]


def damage(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    _, expected = run(tmp_path / "whole", 9)
    with pytest.raises(Interrupted):
        run(tmp_path / "killed", 9, interrupt_at=7)
    damage(tmp_path / "killed" / "step-000000006.pt")
    (tmp_path / "killed" / "step-000000007.pt").write_bytes(b"")
    _, found = run(tmp_path / "killed", 9)
    assert found == expected
    seen = capsys.readouterr().err.splitlines()
    assert len(seen) == 2
    assert "step-000000007.pt is empty" in seen[0]
    assert "step-000000006.pt is damaged" in seen[1]
    assert all(line.endswith("going back to the checkpoint before it") for line in seen)


def test_nothing_is_begun_anew_if_no_checkpoint_can_be_read(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, 9, interrupt_at=3)
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(ConfigError, match=r"none of the 1 checkpoints .* Move them away"):
        run(tmp_path, 9)


def test_the_directory_may_hold_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "step-x.pt").write_text("")
    training, _ = run(tmp_path, 3)
    assert names(tmp_path) == ["notes.txt", *(f"step-00000000{n}.pt" for n in (2, 3)), "step-x.pt"]
    assert training.step == 3


def test_another_way_of_training_is_refused(tmp_path):
    run(tmp_path, 3)
    with pytest.raises(ConfigError, match="shards was 8 and is now 4"):
        run(tmp_path, 6, shards=4)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    go_on, written = threading.Event(), []
    original = checkpoint_directory.write_archive

    def slowly(path, content):
        go_on.wait(30)
        original(path, content)
        written.append(os.path.basename(path))

    monkeypatch.setattr(checkpoint_directory, "write_archive", slowly)
    model, optimizer, training = exact_models.make(NAME, checkpoint=tmp_path, save_every=2)
    for batch in training.batches():
        exact_models.CASES[NAME].step(model, training, batch, optimizer)
    # The state of step 2 is being written, and step 3 has changed the weights since.
    assert (training.step, written) == (3, [])
    go_on.set()
    training._saves._wait()
    reference = exact_models.make(NAME)
    exact_models.run(NAME, *reference, 2)
    saved = torch.load(tmp_path / "step-000000002.pt")["state"]["training"]["model"]
    for name, value in reference[0].state_dict().items():
        assert torch.equal(saved[name], value)


def test_a_checkpoint_that_cannot_be_written_stops_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match="could not be written"):
        run(tmp_path / "file", 9)


def test_every_so_many_seconds(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(automatic_saves.time, "monotonic", lambda: now[0])
    model, optimizer, training = exact_models.make(
        NAME, checkpoint=tmp_path, save_every=datetime.timedelta(seconds=10), keep=100
    )
    for _ in training.epochs(12):
        for batch in training.batches():
            exact_models.CASES[NAME].step(model, training, batch, optimizer)
            now[0] += 1.0
    steps = [int(name[5:14]) for name in names(tmp_path)]
    assert steps == [10, 20, 30, 36]


def test_a_signal_saves_and_sigterm_ends_the_loops(tmp_path):
    model, optimizer, training = exact_models.make(NAME, checkpoint=tmp_path)
    seen = []
    for _ in training.epochs(5):
        for batch in training.batches():
            exact_models.CASES[NAME].step(model, training, batch, optimizer)
            seen.append(training.step)
            if training.step in (2, 5):
                os.kill(os.getpid(), signal.SIGUSR1 if training.step == 2 else signal.SIGTERM)
        if training.stopping:
            break
    assert seen == [1, 2, 3, 4, 5]
    assert names(tmp_path) == ["step-000000002.pt", "step-000000005.pt"]
    assert run(tmp_path, 9)[1] == run(tmp_path / "whole", 9)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 5}, "needs checkpoint="),
        ({"checkpoint": "x", "save_every": 0}, "found 0"),
        ({"checkpoint": "x", "save_every": "daily"}, "found 'daily'"),
        ({"checkpoint": "x", "keep": 0}, "keep must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        exact_models.make(NAME, **options)


def test_files_are_those_of_save(tmp_path):
    run(tmp_path, 3)
    training = exact_models.make(NAME)[2]
    training.load(tmp_path / "step-000000003.pt")
    assert training.step == 3
    assert paceline.load(tmp_path / "step-000000003.pt")["training"]["step"] == 3
