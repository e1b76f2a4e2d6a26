"""`save` and `load`: one file for all ranks, whatever their number.

All ranks call both functions. They agree through the group's store, with a time limit, before
anything is written or read and after: a call on rank 0 only - the classic deadlock - ends in an
error that names the missing ranks, and a failure of one rank is raised on all.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.archive import read_archive, write_archive
from paceline.checkpoint.content import state_of
from paceline.checkpoint.rank_agreement import RankAgreement
from paceline.checkpoint.restoration import Restoration
from paceline.errors import ConfigError
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

__all__ = ["save", "load"]


def save(
    path: str | os.PathLike[str], *, timeout: datetime.timedelta | None = None, **state: Any
) -> None:
    """Write a checkpoint; all ranks call it, rank 0 writes.

    Returns on every rank after the file is in place. Until then, and if anything fails, the file
    that was there before stays as it was.

    Args:
        path: of the file; missing directories are made. A file that exists keeps its permissions,
            and a symbolic link stays one.
        timeout: how long ranks wait for one another and for the writing. Default: 10 minutes.
        state: what to save, by name. Anything with a `state_dict()` is saved as that, a module
            wrapped for data parallelism or compiled as the bare module. Anything else is saved as
            it is and must consist of tensors, numbers, strings, None, and lists, tuples or dicts of
            these.

    Raises:
        ConfigError: there is nothing to save, or something that is no data, or the path is not that
            of a file.
        OSError: the file cannot be written, for example because the disk is full.
        MismatchError: ranks save different names or to different paths.
        CollectiveTimeout: some ranks did not call this in time.
        PacelineError: on the other ranks, if rank 0 failed; rank 0 raises the error itself.

    Example:
        ```python
        paceline.save("last.pt", model=model, optimizer=optimizer, step=100)
        ```
    """
    if not state:
        raise ConfigError(
            "nothing to save: paceline.save(path, model=model, optimizer=optimizer, step=step)"
        )
    file = os.fsdecode(path)
    ranks = RankAgreement("save", file, timeout)
    ranks.check_same_call(sorted(state))
    with ranks.sharing_failures():
        # An optimizer whose state is divided among the ranks gathers it on all of them together.
        gathered = {
            name: state[name].state_dict()
            for name in sorted(state)
            if getattr(state[name], "is_divided", False)
        }
        if ranks.rank == 0:
            with recorder.during(Phase.SAVE):
                whole = {**state, **gathered}
                content = {name: state_of(name, value) for name, value in whole.items()}
                write_archive(file, content)


def load(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    map_location: MAP_LOCATION = "cpu",
    timeout: datetime.timedelta | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Read a checkpoint into `targets`; all ranks call it and read the file.

    The world may have another size than the one that saved. If anything fails, on any rank, the
    targets hold what they held before, on all ranks; until all are loaded, a copy of that is kept
    in the host's memory.

    Args:
        path: of the file.
        strict: as in `Module.load_state_dict`.
        map_location: as in `torch.load`.
        timeout: how long ranks wait for one another. Default: 10 minutes.
        targets: objects with a `load_state_dict()`, by the names they were saved under.

    Returns:
        What the file holds beyond `targets`, by name, such as `step`.

    Raises:
        ConfigError: the file lacks one of the targets, is damaged, or is no checkpoint.
        MismatchError: ranks load different names or from different paths.
        CollectiveTimeout: some ranks did not call this in time.
        PacelineError: another rank failed, which raises the error itself. What a target's
            `load_state_dict()` raises comes as it is.

    Example:
        ```python
        paceline.save("last.pt", model=model, optimizer=optimizer, step=100)
        step = paceline.load("last.pt", model=model, optimizer=optimizer)["step"]
        ```
    """
    file = os.fsdecode(path)
    ranks = RankAgreement("load", file, timeout)
    ranks.check_same_call(sorted(targets))
    restoration = None
    try:
        with ranks.sharing_failures():
            restoration = Restoration(targets, strict)
            content = read_archive(file, map_location)
            missing = sorted(set(targets) - set(content))
            if missing:
                raise ConfigError(f"{file} holds {sorted(content)} but not {missing}")
            restoration.load(content)
    except BaseException as error:
        if restoration is not None:
            restoration.undo(error)
        raise
    return {name: value for name, value in content.items() if name not in targets}
