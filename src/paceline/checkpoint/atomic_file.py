"""A file that is replaced as a whole: whoever reads it, and every crash, meets the old content or
the new one.

The new content is written to a file without a name (`O_TMPFILE`), synced, and put in place by a
rename. A process that is killed while it writes leaves nothing behind, since nothing had a name. On
file systems without such files it has a temporary name from the start; and everywhere it has one
for the moment between link and rename. Temporary files are locked by their writer, so a file that
can be locked belongs to nobody any more: the next replacement in the directory removes it. A lock
tells that across containers and hosts, where a process id would not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

from paceline.errors import ConfigError

__all__ = ["Replacement", "replacement_of"]

_TEMPORARY_NAME = re.compile(r"\.paceline-save-[0-9a-f]{16}\.tmp")
_PRIVATE = 0o600
_ANYONE = 0o666  # less what the umask takes away


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The new content while it is written. It can be opened as `readable_path`."""

    file: BinaryIO
    readable_path: str


@contextlib.contextmanager
def replacement_of(path: str) -> Iterator[Replacement]:
    """Open the future content of `path`; it is put in place when the block ends without an error.

    Missing directories are made. A symbolic link stays one: the file it names is replaced. A file
    that exists keeps its permissions, its owner and its group, as far as the system allows.

    Raises:
        ConfigError: the path is not that of a regular file.
    """
    target, existing = _resolved(path)
    directory = os.path.dirname(target)
    _make_directories(directory)
    _remove_left_overs(directory)
    # Nobody reads a private file's new content while it is written, either.
    mode = _ANYONE if existing is None else _PRIVATE
    descriptor, temporary = _open_unnamed(directory, mode), None
    if descriptor is None:
        descriptor, temporary = _open_named(directory, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield Replacement(file, temporary or f"/proc/self/fd/{descriptor}")
            file.flush()
            if existing is not None:
                _keep_permissions(descriptor, existing)
            os.fsync(descriptor)
            temporary = temporary or _give_name(descriptor, directory)
            os.replace(temporary, target)
    except BaseException:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    _sync_directory(directory)


def _resolved(path: str) -> tuple[str, os.stat_result | None]:
    """The file that `path` names in the end, and what is known of it if it exists."""
    if not path:
        raise ConfigError("the path of the checkpoint is empty: give the name of a file")
    target = os.path.realpath(path)
    try:
        existing = os.stat(target)
    except FileNotFoundError:
        existing = None
    if path.endswith(os.sep) or (existing is not None and stat.S_ISDIR(existing.st_mode)):
        raise ConfigError(f"{path} is a directory: give the name of a file in it")
    if existing is not None and not stat.S_ISREG(existing.st_mode):
        raise ConfigError(f"{path} is not a regular file, and a checkpoint would replace it")
    return target, existing


def _make_directories(directory: str) -> None:
    missing = []
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        _sync_directory(os.path.dirname(directory))


# --- temporary files -------------------------------------------------------------------------


def _open_unnamed(directory: str, mode: int) -> int | None:
    """A file without a name, or None where the system has none that can be given a name later."""
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        descriptor = os.open(directory, unnamed | os.O_RDWR, mode)
    except OSError:
        return None  # if there is another reason, creating a named file will tell
    _lock(descriptor)
    return descriptor


def _open_named(directory: str, mode: int) -> tuple[int, str]:
    while True:
        name = _temporary_name(directory)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
        # Between its creation and the lock, somebody else may have taken it for a left-over.
        if _lock(descriptor) and os.path.exists(name):
            return descriptor, name
        os.close(descriptor)


def _give_name(descriptor: int, directory: str) -> str:
    """A temporary name for a file without one: no system call replaces a file by an unnamed one."""
    name = _temporary_name(directory)
    root = os.open("/", os.O_RDONLY)
    try:
        # Follows the link in /proc only if it is given a directory, whose value does not matter.
        os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=root, follow_symlinks=True)
    finally:
        os.close(root)
    return name


def _temporary_name(directory: str) -> str:
    return os.path.join(directory, f".paceline-save-{secrets.token_hex(8)}.tmp")


def _remove_left_overs(directory: str) -> None:
    """Remove temporary files whose writers were killed."""
    names = []
    # One may write in a directory without being allowed to read it.
    with contextlib.suppress(PermissionError):
        names = [name for name in os.listdir(directory) if _TEMPORARY_NAME.fullmatch(name)]
    for name in names:
        # Others may remove it at the same time, or own it.
        with contextlib.suppress(OSError):
            path = os.path.join(directory, name)
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether the file is ours. Where files cannot be locked, nobody removes those of others."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# --- permissions and durability --------------------------------------------------------------


def _keep_permissions(descriptor: int, existing: os.stat_result) -> None:
    # Only the superuser gives files away; a group one belongs to can be kept by anyone. The mode
    # comes last: a change of the owner takes bits away.
    for user, group in ((-1, existing.st_gid), (existing.st_uid, -1)):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, user, group)
    os.fchmod(descriptor, stat.S_IMODE(existing.st_mode))


def _sync_directory(directory: str) -> None:
    """Make changed names durable. Some file systems cannot open or sync a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
