"""Checkpoints in one process: whole or not at all, data only, wrapped or bare."""

from __future__ import annotations

import copy
import datetime
import fcntl
import os
import pathlib
import pickle
import re

import numpy as np
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
    with pytest.raises(
        ConfigError, match=r"^thing is a .*(Foreign|PosixPath|function)\. A checkpoint holds"
    ):
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
    [
        (b"", "x.pt is empty"),
        (b"PK\x03\x04 half a file", "its end is missing"),
        (b"epoch,loss\n1,0.5\n", "not a checkpoint: .* zip archives, and this is none"),
        (pickle.dumps({"a": 1}), "zip archives, and this is none"),
    ],
)
def test_a_file_that_is_no_archive_is_refused(tmp_path, content, message):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        paceline.load(tmp_path / "x.pt")


def test_every_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "x.pt"
    paceline.save(path, model=nn.Linear(3, 2), step=1)
    content = path.read_bytes()
    # Everywhere in the file, and each byte of its end, where the checksum is.
    for position in {*range(0, len(content), 23), *range(len(content) - 60, len(content))}:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"x\.pt (is damaged|cannot be read|is not a)"):
            paceline.load(path)
    path.write_bytes(content)
    paceline.load(path, model=nn.Linear(3, 2))


@pytest.mark.parametrize("cut", [1, 20, 1000])
def test_a_file_that_was_cut_off_is_refused(tmp_path, cut):
    path = tmp_path / "x.pt"
    paceline.save(path, model=nn.Linear(30, 20))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match=r"x\.pt is damaged"):
        paceline.load(path)


def test_a_checkpoint_is_a_file_of_torchs_and_one_without_a_checksum_loads(tmp_path):
    paceline.save(tmp_path / "x.pt", step=1)
    assert torch.load(tmp_path / "x.pt", weights_only=True)["state"] == {"step": 1}
    torch.save({"paceline": 1, "state": {"step": 2}}, tmp_path / "old.pt")
    assert paceline.load(tmp_path / "old.pt") == {"step": 2}


def test_other_files_are_recognised(tmp_path):
    torch.save({"weights": 1}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"not written by paceline\.save"):
        paceline.load(tmp_path / "x.pt")
    torch.save({"paceline": "text", "state": {}}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"not written by paceline\.save"):
        paceline.load(tmp_path / "x.pt")
    torch.save({"paceline": 1}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"not written by paceline\.save"):
        paceline.load(tmp_path / "x.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"plain values \(torch\.nn\.modules\.linear\.Linear\)"):
        paceline.load(tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="is a directory"):
        paceline.load(tmp_path)
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


# --- what is saved ---------------------------------------------------------------------------


def test_numpy_scalars_come_back_as_python_numbers(tmp_path):
    class Scheduler:
        def state_dict(self):
            return {"best": np.float32(0.5), "history": [np.int64(3), (np.bool_(True), 1)]}

    model = nn.Linear(1, 1)
    paceline.save(
        tmp_path / "x.pt",
        loss=np.float64(1.5),
        scheduler=Scheduler(),
        names={np.int64(3): np.str_("three")},
        model=model.state_dict(),
    )
    rest = paceline.load(tmp_path / "x.pt")
    assert rest["loss"] == 1.5
    assert type(rest["loss"]) is float
    assert rest["scheduler"] == {"best": 0.5, "history": [3, (True, 1)]}
    assert rest["names"] == {3: "three"}
    assert type(next(iter(rest["names"]))) is int
    assert rest["model"]._metadata == model.state_dict()._metadata


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"history": {"losses": [1.0, np.zeros(2)]}},
            r"history\['losses'\]\[1\] is a numpy\.ndarray",
        ),
        ({"where": {"last": pathlib.Path("/")}}, r"where\['last'\] is a pathlib\.PosixPath"),
        ({"when": datetime.date(2020, 1, 1)}, r"when is a datetime\.date"),
        ({"model": nn.Linear(1, 1, device="meta")}, r"model\['weight'\] is on the meta device"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_place(tmp_path, state, message):
    with pytest.raises(ConfigError, match=message):
        paceline.save(tmp_path / "x.pt", step=1, **state)
    assert os.listdir(tmp_path) == []


def test_a_container_that_holds_itself_is_no_problem(tmp_path):
    loop = [1.0]
    loop.append(loop)
    paceline.save(tmp_path / "x.pt", loop=loop)
    assert paceline.load(tmp_path / "x.pt")["loop"][0] == 1.0


def test_a_time_limit_that_is_none_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"timeout must be a datetime\.timedelta, found 5"):
        paceline.save(tmp_path / "x.pt", timeout=5, step=1)


# --- how the file is replaced ----------------------------------------------------------------


@pytest.fixture(params=["unnamed", "named"])
def temporary_files(request, monkeypatch):
    """Both kinds of temporary files: not every file system has those without a name."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")
    return request.param


@pytest.mark.usefixtures("temporary_files")
def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real.pt", tmp_path / "last.pt"
    link.symlink_to(pathlib.Path("disk", "real.pt"))
    for step in (1, 2):  # a link to nothing yet, and one to a file
        paceline.save(link, step=step)
        assert link.is_symlink()
        assert paceline.load(real) == {"step": step}
    assert os.listdir(tmp_path / "disk") == ["real.pt"]


@pytest.mark.usefixtures("temporary_files")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_an_existing_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "x.pt"
    paceline.save(path, step=1)
    path.chmod(mode)
    paceline.save(path, step=2)
    assert path.stat().st_mode & 0o7777 == mode
    assert paceline.load(path) == {"step": 2}


@pytest.mark.usefixtures("temporary_files")
def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    paceline.save(tmp_path / "x.pt", step=1)
    (tmp_path / "other").touch()
    assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.usefixtures("temporary_files")
def test_a_name_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("x" * 252 + ".pt")
    paceline.save(path, step=1)
    paceline.save(path, step=2)
    assert paceline.load(path) == {"step": 2}


def test_temporary_files_are_removed_unless_somebody_writes_them(tmp_path):
    left_over, in_use = (tmp_path / f".paceline-save-{digit * 16}.tmp" for digit in "01")
    of_somebody_else = tmp_path / ".last.pt.backup.tmp"
    for path in (left_over, in_use, of_somebody_else):
        path.touch()
    with in_use.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        paceline.save(tmp_path / "x.pt", step=1)
    assert {*os.listdir(tmp_path)} == {in_use.name, of_somebody_else.name, "x.pt"}


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "is a directory"),
        (f"{tmp_path}/new/", "is a directory"),
        ("", "is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            paceline.save(path, step=1)
    assert os.listdir(tmp_path) == ["pipe"]


# --- all or nothing --------------------------------------------------------------------------


def _contents(*objects):
    """A copy of what objects hold, to be compared."""
    return [re.sub(r"\s+", " ", repr(copy.deepcopy(thing.state_dict()))) for thing in objects]


def test_a_load_that_fails_at_the_optimizer_changes_nothing(tmp_path):
    model, optimizer = _trained(0)
    paceline.save(tmp_path / "x.pt", model=model, optimizer=optimizer, sampler=Sampler(7))
    other, _ = _trained(1)
    groups = [{"params": [parameter]} for parameter in other.parameters()]
    other_optimizer, sampler = torch.optim.AdamW(groups), Sampler()
    before = _contents(other, other_optimizer, sampler)
    with pytest.raises(ValueError, match="parameter groups") as caught:
        paceline.load(tmp_path / "x.pt", sampler=sampler, model=other, optimizer=other_optimizer)
    assert _contents(other, other_optimizer, sampler) == before
    assert caught.value.__notes__ == [
        "raised while optimizer was loaded",
        "nothing was loaded: every object holds what it held before",
    ]


def test_a_model_that_fits_in_part_is_not_loaded_in_part(tmp_path):
    model, _ = _trained(0)
    paceline.save(tmp_path / "x.pt", model=model)
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = _contents(other)
    with pytest.raises(RuntimeError, match="Missing key"):
        paceline.load(tmp_path / "x.pt", model=other)
    assert _contents(other) == before


class Stubborn(Sampler):
    """Changes, and then fails."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if state["position"]:
            raise KeyError("too late")


class WithoutState:
    """Can be loaded but tells nobody what it holds."""

    position = 0

    def load_state_dict(self, state):
        self.position = state["position"]


def test_everything_loaded_before_is_put_back(tmp_path):
    model, optimizer = _trained(0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    path = tmp_path / "x.pt"
    paceline.save(path, model=model, optimizer=optimizer, scheduler=scheduler, last={"position": 1})
    other, other_optimizer = _trained(1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 5)
    last = Stubborn()
    before = _contents(other, other_optimizer, other_scheduler, last)
    with pytest.raises(KeyError, match="too late"):
        paceline.load(
            path, model=other, optimizer=other_optimizer, scheduler=other_scheduler, last=last
        )
    assert _contents(other, other_optimizer, other_scheduler, last) == before
    # The optimizer still updates the parameters it had.
    weight = other[0].weight.detach().clone()
    other_optimizer.step()
    assert not torch.equal(weight, other[0].weight)


def test_an_optimizer_is_put_back_without_rounding(tmp_path):
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["master"] = torch.tensor([1.001])
    paceline.save(tmp_path / "x.pt", optimizer=optimizer, last={"position": 1})
    with pytest.raises(KeyError):
        paceline.load(tmp_path / "x.pt", optimizer=optimizer, last=Stubborn())
    assert torch.equal(optimizer.state[parameter]["master"], torch.tensor([1.001]))


def test_what_cannot_be_put_back_comes_last_and_is_named(tmp_path):
    paceline.save(tmp_path / "x.pt", a={"position": 3}, b={"position": 1})
    opaque = WithoutState()
    with pytest.raises(KeyError, match="too late"):
        paceline.load(tmp_path / "x.pt", a=opaque, b=Stubborn())
    assert opaque.position == 0

    opaque = type("Opaque", (WithoutState,), {"load_state_dict": _set_and_fail})()
    with pytest.raises(KeyError, match="too late") as caught:
        paceline.load(tmp_path / "x.pt", a=opaque, b=Sampler())
    assert opaque.position == 3
    assert any("a could not be put back" in note for note in caught.value.__notes__)


def _set_and_fail(self, state):
    self.position = state["position"]
    raise KeyError("too late")


def test_extra_state_of_modules_is_put_back(tmp_path):
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = Counting(1, 1)
    model.count = 5
    paceline.save(tmp_path / "x.pt", model=model, last={"position": 1})
    other = Counting(1, 1)
    with pytest.raises(KeyError):
        paceline.load(tmp_path / "x.pt", model=other, last=Stubborn())
    assert other.count == 0
    paceline.load(tmp_path / "x.pt", model=other)
    assert other.count == 5
