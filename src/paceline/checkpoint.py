"""`save` and `load`: checkpoints that are written whole or not at all, and hold data only.

One file, written by rank 0: temporary name, fsync, rename, fsync of the directory. A crash at any
moment leaves the previous file as it was. Nothing in it depends on the world size. Loading never
runs code from the file (`weights_only=True`).

All ranks call both functions. They agree through the group's store, with a time limit, before
anything is written and after: a call on rank 0 only - the classic deadlock - ends in an error that
names the missing ranks.

The module has four parts: the two public functions; what becomes of an object in a file
(`_state_of`, `_restore`); the file itself (`_write`, `_read`); and the agreement of the ranks
(`_RankAgreement`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import pickle
import tempfile
from typing import TYPE_CHECKING, Any

from paceline._state_dict import align_names
from paceline.core.store_exchange import exchange
from paceline.errors import ConfigError, MismatchError, PacelineError
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Phase, WaitLabel

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

__all__ = ["save", "load"]

_FORMAT = 1
_DEFAULT_TIMEOUT_S = 600.0

# Numbers the calls of this process. All ranks make the same calls, so that the numbers keep the
# keys of different calls in the store apart.
_call_numbers = itertools.count()


def save(
    path: str | os.PathLike[str], *, timeout: datetime.timedelta | None = None, **state: Any
) -> None:
    """Write a checkpoint; all ranks call it, rank 0 writes.

        paceline.save("last.pt", model=model, optimizer=optimizer, sampler=sampler, step=step)

    Returns on every rank after the file is in place.

    Args:
        path: of the file; missing directories are made.
        timeout: how long ranks wait for one another and for the writing. Default: 10 minutes.
        state: what to save, by name. Anything with a `state_dict()` is saved as that, a module
            wrapped for data parallelism as the bare module. Anything else is saved as it is and
            must consist of tensors, numbers, strings, None, and lists, tuples or dicts of these.

    Raises:
        ConfigError: there is nothing to save, or something that is no data.
        MismatchError: ranks save different names or to different paths.
        CollectiveTimeout: some ranks did not call this in time.
        PacelineError: on the other ranks, if rank 0 failed; rank 0 raises the error itself.
    """
    if not state:
        raise ConfigError(
            "nothing to save: paceline.save(path, model=model, optimizer=optimizer, step=step)"
        )
    ranks = _RankAgreement("save", path, timeout)
    ranks.check_same_call(sorted(state))
    try:
        if ranks.rank == 0:
            with recorder.during(Phase.SAVE):
                content = {name: _state_of(name, value) for name, value in state.items()}
                _write(pathlib.Path(path), content)
    except Exception as error:
        # The peers wait for the file: they must learn that there will be none.
        ranks.share_outcome(f"{type(error).__name__}: {error}")
        raise
    ranks.share_outcome("")


def load(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    map_location: MAP_LOCATION = "cpu",
    timeout: datetime.timedelta | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Read a checkpoint into `targets`; all ranks call it and read the file.

        step = paceline.load("last.pt", model=model, optimizer=optimizer, sampler=sampler)["step"]

    The world may have another size than the one that saved.

    Args:
        path: of the file.
        strict: as in `Module.load_state_dict`.
        map_location: as in `torch.load`.
        timeout: how long ranks wait for one another. Default: 10 minutes.
        targets: objects with a `load_state_dict()`, by the names they were saved under.

    Returns:
        What the file holds beyond `targets`, by name, such as `step`.

    Raises:
        ConfigError: the file lacks one of the targets, or is no checkpoint.
        MismatchError: ranks load different names or from different paths.
        CollectiveTimeout: some ranks did not call this in time.
    """
    _RankAgreement("load", path, timeout).check_same_call(sorted(targets))
    content = _read(pathlib.Path(path), map_location)
    missing = sorted(set(targets) - set(content))
    if missing:
        raise ConfigError(f"{path} holds {sorted(content)} but not {missing}")
    for name, target in targets.items():
        _restore(name, target, content[name], strict)
    return {name: value for name, value in content.items() if name not in targets}


# --- objects ---------------------------------------------------------------------------------


def _state_of(name: str, value: Any) -> Any:
    """What the file holds of an object."""
    value = _unwrapped(value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    # An object of the script's own class would be refused when the file is checked, with a message
    # about pickling; this one names the cure.
    if (
        hasattr(value, "__dict__")
        and not dataclasses.is_dataclass(value)
        and type(value).__module__ == "__main__"
    ):
        raise ConfigError(
            f"{name} is a {type(value).__name__} without state_dict(): "
            "give it one, or save plain values"
        )
    return value


def _restore(name: str, target: Any, state: Any, strict: bool) -> None:
    """Put what the file holds back into an object."""
    from torch import nn

    target = _unwrapped(target)
    if isinstance(target, nn.Module):
        target.load_state_dict(align_names(state, target.state_dict()), strict=strict)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(state)
    else:
        raise ConfigError(
            f"{name} is a {type(target).__name__}, which has no load_state_dict(); "
            "read it from the result"
        )


def _unwrapped(value: Any) -> Any:
    """The module inside any number of wrappers for data parallelism, torch's or ours."""
    from torch import nn

    while isinstance(value, nn.Module) and type(value).__name__ in {
        "DistributedDataParallel",
        "DataParallel",
    }:
        value = value.module
    return value


# --- the file --------------------------------------------------------------------------------


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
        # Before the rename: the previous checkpoint stays where this one is of no use.
        _check_readable(temporary)
        _give_default_permissions(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _check_readable(path: pathlib.Path) -> None:
    """What `load` would refuse must not replace a good checkpoint. Reads the structure, not the
    tensors' bytes.
    """
    import torch

    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "a checkpoint holds tensors and plain values only, so that loading it runs no code: "
            f"{reason}"
        ) from error


def _give_default_permissions(path: pathlib.Path) -> None:
    """Those of any new file; `mkstemp` makes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _sync_directory(path: pathlib.Path) -> None:
    """Make the rename itself durable. Some file systems cannot open a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: pathlib.Path, map_location: MAP_LOCATION) -> dict[str, Any]:
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
            f"{path} has format {content['paceline']}; "
            f"this version of Paceline reads formats up to {_FORMAT}"
        )
    state: dict[str, Any] = content["state"]
    return state


# --- the ranks -------------------------------------------------------------------------------


class _RankAgreement:
    """The agreement of all ranks about one call of `save` or `load`. A single process agrees with
    itself.
    """

    def __init__(
        self, verb: str, path: str | os.PathLike[str], timeout: datetime.timedelta | None
    ) -> None:
        import torch.distributed as dist

        self.rank, self._world_size, self._store = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            from paceline._torch_internals import PrefixStore, default_store

            self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
            self._store = PrefixStore("paceline/checkpoint", default_store())
        self._call = f"paceline.{verb}({os.fspath(path)!r})"
        self._key = f"{verb}/{next(_call_numbers)}"
        self._timeout_s = _DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()

    def check_same_call(self, names: list[str]) -> None:
        """Wait until all ranks are in this call; raise `MismatchError` if they differ in the path
        or the names.
        """
        calls = self._exchange("begin", f"{self._call} {json.dumps(names)}")
        if len(set(calls)) > 1:
            table = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
            raise MismatchError(
                f"ranks disagree about the path or the names in a checkpoint:\n{table}",
                dict(enumerate(calls)),
            )

    def share_outcome(self, failure: str) -> None:
        """Wait until rank 0 has written the file or failed; raise its failure on the other ranks.

        `failure` is rank 0's, empty if the file is in place.
        """
        outcome = self._exchange("end", failure)[0]
        if outcome and self.rank != 0:
            raise PacelineError(f"{self._call} failed on rank 0: {outcome}")

    def _exchange(self, moment: str, value: str) -> list[str]:
        if self._store is None:
            return [value]
        label = WaitLabel(self._call, number=group_number(f"{self._key}/{moment}")).packed()
        with recorder.during(Phase.SAVE), recorder.waiting(label, 1):
            values = exchange(
                self._store,
                f"{self._key}/{moment}",
                self.rank,
                range(self._world_size),
                value,
                datetime.timedelta(seconds=self._timeout_s),
                describe_missing=lambda missing: (
                    f"rank {self.rank} called {self._call} and waited {self._timeout_s:g} s, but "
                    f"ranks {missing} did not call it. Call it on every rank - only rank 0 writes "
                    "- not inside `if rank == 0:`"
                ),
            )
        return list(values.values())
