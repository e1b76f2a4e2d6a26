"""`save` and `load`: checkpoints that are written whole or not at all, and hold data only.

One file, written by rank 0: temporary name, fsync, rename, fsync of the directory. A crash at any
moment leaves the previous file as it was. Nothing in it depends on the world size. Loading never
runs code from the file (`weights_only=True`).

All ranks call both functions. They agree through the group's store, with a time limit, before
anything is written and after: a call on rank 0 only - the classic deadlock - ends in an error that
says who is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from paceline.core.store_exchange import exchange
from paceline.errors import ConfigError, MismatchError, PacelineError
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Phase, WaitLabel

__all__ = ["save", "load"]

_FORMAT = 1
_AGREE_TIMEOUT_S = 600.0


class _Calls:
    """Counts calls in this process; the same on every rank, so it keeps their keys in the store
    apart.
    """

    made = 0


def save(
    path: str | os.PathLike[str], *, timeout: datetime.timedelta | None = None, **state: Any
) -> None:
    """Write a checkpoint; all ranks call it, rank 0 writes.

        paceline.save("last.pt", model=model, optimizer=optimizer, sampler=sampler, step=step)

    Anything with a `state_dict()` is saved as that - a module wrapped for data parallelism as the
    bare module -, anything else as it is, as long as it is tensors, numbers, strings, None, lists,
    tuples or dicts of these. Returns on every rank after the file is in place; an error of rank 0
    is raised everywhere. `timeout` (default: 10 minutes) is how long ranks wait for one another and
    for the writing.
    """
    if not state:
        raise ConfigError(
            "nothing to save: paceline.save(path, model=model, optimizer=optimizer, step=step)"
        )
    ranks = _Ranks("save", path, timeout)
    ranks.meet(json.dumps(sorted(state)), "names of what to save")
    error = ""
    if ranks.rank == 0:
        try:
            with recorder.during(Phase.SAVE):
                _write(
                    pathlib.Path(path),
                    {name: _state_of(name, value) for name, value in state.items()},
                )
        except Exception as caught:
            if ranks.world_size == 1:
                raise
            error = f"{type(caught).__name__}: {caught}"
            ranks.finish(error)
            raise
    ranks.finish(error)


def load(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    map_location: Any = "cpu",
    timeout: datetime.timedelta | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Read a checkpoint into `targets`, on every rank; returns what has no `load_state_dict`, such
    as `step`.

        step = paceline.load("last.pt", model=model, optimizer=optimizer, sampler=sampler)["step"]

    The world may be another size than the one that saved. `strict` is that of
    `Module.load_state_dict`. Raises `ConfigError` if the file lacks something asked for, or is no
    checkpoint.
    """
    ranks = _Ranks("load", path, timeout)
    ranks.meet(json.dumps(sorted(targets)), "names of what to load")
    content = _read(pathlib.Path(path), map_location)
    missing = sorted(set(targets) - set(content))
    if missing:
        raise ConfigError(f"{path} holds {sorted(content)} but not {missing}")
    for name, target in targets.items():
        _restore(name, target, content[name], strict)
    return {name: value for name, value in content.items() if name not in targets}


# -- one rank's part -----------------------------------------------------------------------------------------------


def _bare(value: Any) -> Any:
    """The module inside wrappers for data parallelism, however many, torch's or ours."""
    from torch import nn

    while isinstance(value, nn.Module) and type(value).__name__ in {
        "DistributedDataParallel",
        "DataParallel",
    }:
        value = value.module
    return value


def _state_of(name: str, value: Any) -> Any:
    value = _bare(value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if (
        hasattr(value, "__dict__")
        and not dataclasses.is_dataclass(value)
        and type(value).__module__ == "__main__"
    ):
        raise ConfigError(
            f"{name} is a {type(value).__name__} without state_dict(): give it one, or save plain values"
        )
    return value


def _restore(name: str, target: Any, state: Any, strict: bool) -> None:
    from torch import nn

    target = _bare(target)
    if isinstance(target, nn.Module):
        target.load_state_dict(_without_prefix(state), strict=strict)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(state)
    else:
        raise ConfigError(
            f"{name} is a {type(target).__name__}, which has no load_state_dict(); read it from the result"
        )


def _without_prefix(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Names as the bare module has them: checkpoints of wrapped modules, written by others, say
    `module.` first.
    """
    if state and all(name.startswith("module.") for name in state):
        return {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"paceline": _FORMAT, "state": content}, file)
            file.flush()
            os.fsync(file.fileno())
        _check_readable(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # as a file that was simply written would have
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _check_readable(path: pathlib.Path) -> None:
    """What `load` would refuse must not replace a good checkpoint. Reads the structure, not the
    tensors' bytes.
    """
    import pickle

    import torch

    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"a checkpoint holds tensors and plain values only, so that loading it runs no code: {reason}"
        ) from error


def _sync_directory(path: pathlib.Path) -> None:
    """Make the rename itself durable."""
    with contextlib.suppress(OSError):  # some file systems cannot open a directory
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: pathlib.Path, map_location: Any) -> dict[str, Any]:
    import torch

    if not path.exists():
        raise ConfigError(f"there is no checkpoint {path}")
    try:
        content = torch.load(path, weights_only=True, map_location=map_location)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{path} is not a checkpoint that can be read safely: {reason}"
        ) from error
    if not isinstance(content, dict) or "paceline" not in content:
        raise ConfigError(f"{path} was not written by paceline.save; read it with torch.load")
    if content["paceline"] > _FORMAT:
        raise ConfigError(
            f"{path} has format {content['paceline']}, this version of Paceline reads up to {_FORMAT}"
        )
    state: dict[str, Any] = content["state"]
    return state


# -- all ranks' part -----------------------------------------------------------------------------------------------


class _Ranks:
    """All ranks around one call of `save` or `load`."""

    def __init__(
        self, verb: str, path: str | os.PathLike[str], timeout: datetime.timedelta | None
    ) -> None:
        import torch.distributed as dist

        self.rank, self.world_size, self._store = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            from torch._C._distributed_c10d import PrefixStore
            from torch.distributed.distributed_c10d import _get_default_store

            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._store = PrefixStore("paceline/checkpoint", _get_default_store())
        self._name = f"paceline.{verb}({os.fspath(path)!r})"
        self._timeout_s = _AGREE_TIMEOUT_S if timeout is None else timeout.total_seconds()
        self._call = f"{verb}/{_Calls.made}"
        _Calls.made += 1

    def meet(self, value: str, what: str) -> None:
        """All ranks are in this call, with the same arguments."""
        values = self._exchange("begin", f"{self._name} {value}")
        if len(set(values)) > 1:
            table = "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError(
                f"ranks disagree in the path or the {what}:\n{table}", dict(enumerate(values))
            )

    def finish(self, error: str) -> None:
        """The file is in place, or rank 0 says why not."""
        outcome = self._exchange("end", error)[0]
        if outcome and self.rank != 0:
            raise PacelineError(f"{self._name} failed on rank 0: {outcome}")

    def _exchange(self, moment: str, value: str) -> list[str]:
        if self._store is None:
            return [value]
        place = WaitLabel(self._name, number=group_number(f"{self._call}/{moment}")).packed()
        with recorder.during(Phase.SAVE), recorder.waiting(place, 1):
            values = exchange(
                self._store,
                f"{self._call}/{moment}",
                self.rank,
                range(self.world_size),
                value,
                datetime.timedelta(seconds=self._timeout_s),
                describe_missing=lambda missing: (
                    f"rank {self.rank} called {self._name} and waited {self._timeout_s:g} s, but ranks {missing} did "
                    "not come to it. Call it on every rank - rank 0 alone writes - not inside `if rank == 0:`"
                ),
            )
        return list(values.values())
