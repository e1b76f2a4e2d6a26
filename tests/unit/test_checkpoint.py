"""Checkpoints in one process: whole or not at all, data only, wrapped or bare."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigError


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class Sampler:
    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_everything_comes_back(tmp_path):
    model, optimizer = _trained(0)
    path = tmp_path / "deep" / "last.pt"
    paceline.save(
        path,
        model=model,
        optimizer=optimizer,
        sampler=Sampler(7),
        step=12,
        losses=[1.5, None],
        name="run",
    )
    other, other_optimizer = _trained(1)
    sampler = Sampler()
    rest = paceline.load(path, model=other, optimizer=other_optimizer, sampler=sampler)
    assert rest == {"step": 12, "losses": [1.5, None], "name": "run"}
    assert sampler.position == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    first, second = (o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, other_optimizer))
    assert torch.equal(first, second)
    assert os.listdir(path.parent) == ["last.pt"]


def test_a_wrapped_model_is_saved_bare_and_loads_into_either(tmp_path):
    model, _ = _trained(0)
    paceline.save(tmp_path / "a.pt", model=nn.DataParallel(model))
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in content["state"]["model"])
    for target in (_trained(1)[0], nn.DataParallel(_trained(2)[0])):
        paceline.load(tmp_path / "a.pt", model=target)


def test_names_with_the_prefix_of_a_wrapper_are_understood(tmp_path):
    model, _ = _trained(0)
    paceline.save(
        tmp_path / "a.pt", model={f"module.{k}": v for k, v in model.state_dict().items()}
    )
    other, _ = _trained(1)
    paceline.load(tmp_path / "a.pt", model=other)
    assert torch.equal(other[0].weight, model[0].weight)


class Foreign:
    pass


@pytest.mark.parametrize("value", [Foreign(), pathlib.Path("/"), lambda: 1])
def test_objects_that_would_run_code_are_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "last.pt"
    paceline.save(path, step=1)
    with pytest.raises(Exception, match=r"(?i)tensors and plain values|pickle"):
        paceline.save(path, step=2, thing=value)
    assert paceline.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_foreign_pickle_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pathlib.Path(tmp_path, "ran").touch, ())

    torch.save({"paceline": 1, "state": {"x": Bomb()}}, tmp_path / "bomb.pt")
    with pytest.raises(ConfigError, match="not a checkpoint that can be read safely"):
        paceline.load(tmp_path / "bomb.pt")
    assert not (tmp_path / "ran").exists()


def test_an_error_while_writing_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    paceline.save(path, step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        paceline.save(path, step=2)
    monkeypatch.undo()
    assert paceline.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "can be read safely"), (b"PK\x03\x04 half a file", "can be read safely")],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        paceline.load(tmp_path / "x.pt")


def test_other_files_are_recognised(tmp_path):
    torch.save({"weights": 1}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"not written by paceline\.save"):
        paceline.load(tmp_path / "x.pt")
    torch.save({"paceline": 99, "state": {}}, tmp_path / "y.pt")
    with pytest.raises(ConfigError, match="format 99"):
        paceline.load(tmp_path / "y.pt")
    with pytest.raises(ConfigError, match="no checkpoint"):
        paceline.load(tmp_path / "z.pt")


def test_what_is_missing_in_the_file_is_named(tmp_path):
    paceline.save(tmp_path / "x.pt", step=1)
    with pytest.raises(ConfigError, match=r"holds \['step'\] but not \['model'\]"):
        paceline.load(tmp_path / "x.pt", model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="read it from the result"):
        paceline.load(tmp_path / "x.pt", step=0)
    with pytest.raises(ConfigError, match="nothing to save"):
        paceline.save(tmp_path / "x.pt")
