"""The format of a checkpoint: the zip archive that `torch.save` writes, with a checksum of the
whole file as the archive's comment.

`torch.load` ignores the comment, so a checkpoint is also an ordinary file of torch's. (Each record
of the archive has a checksum of its own; torch writes it and never looks at it, and it does not
cover the directory of the archive.) Files of earlier versions have no checksum and load without.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import zlib
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from paceline.checkpoint.atomic_file import replacement_of
from paceline.checkpoint.content import first_refused
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

__all__ = ["read_archive", "write_archive"]

_FORMAT = 1
_COMMENT = re.compile(rb"paceline crc32 ([0-9a-f]{8})")
_COMMENT_BYTES = len(b"paceline crc32 00000000")
# The last field of an archive is the length of its comment.
_LENGTH_BYTES = 2
_NO_COMMENT = bytes(_LENGTH_BYTES)
# How far from its end the last record of an archive begins at most: itself and a comment.
_END_BYTES = 22 + (1 << 16)
_CHUNK_BYTES = 1 << 20
_DEVICE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


# --- writing ---------------------------------------------------------------------------------


def write_archive(path: str, content: dict[str, Any]) -> None:
    """Replace the file by a checkpoint with this content.

    Raises:
        ConfigError: `load` would refuse the content.
        OSError: the file cannot be written. What was there before is unchanged.
    """
    try:
        with replacement_of(path) as new, ThreadPoolExecutor(1) as background:
            writer = _ChecksumWriter(new.file, background)
            _save(writer, content)
            writer.append_checksum()
            # Before it replaces anything: the previous checkpoint stays where this one is of no
            # use.
            _check_loadable(new.readable_path, content)
    except OSError as error:
        if error.errno not in _DEVICE_ERRORS:
            raise
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: the checkpoint was not written, and what was there "
            "before is unchanged",
            path,
        ) from error


class _ChecksumWriter:
    """The file that `torch.save` writes to. It remembers the first error, which torch hides behind
    one of its own.
    """

    def __init__(self, file: BinaryIO, background: Executor) -> None:
        self._file, self._background, self._checksum = file, background, 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < _CHUNK_BYTES:
            self._checksum = zlib.crc32(data, self._checksum)
            return self._write(data)
        # Computed while the system takes the bytes.
        checksum = self._background.submit(zlib.crc32, data, self._checksum)
        try:
            return self._write(data)
        finally:
            self._checksum = checksum.result()

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()

    def append_checksum(self) -> None:
        comment = b"paceline crc32 %08x" % self._checksum
        self._file.seek(-_LENGTH_BYTES, os.SEEK_END)
        self._file.write(len(comment).to_bytes(_LENGTH_BYTES, "little") + comment)
        self._file.flush()


def _save(writer: _ChecksumWriter, content: dict[str, Any]) -> None:
    try:
        torch.save(
            {"paceline": _FORMAT, "checksum": "crc32", "state": content},
            writer,  # type: ignore[arg-type]  # torch needs no more of a file than this
        )
    except Exception as error:
        if writer.error is not None:
            raise writer.error from error
        raise _refusal(content, error) from error


def _check_loadable(path: str, content: dict[str, Any]) -> None:
    """What `load` would refuse must not replace a good checkpoint. Reads the structure, not the
    tensors' bytes.
    """
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise _refusal(content, error) from error


def _refusal(content: dict[str, Any], error: Exception) -> ConfigError:
    return ConfigError(
        f"{first_refused(content) or _first_line(error)}. A checkpoint holds tensors, numbers, "
        "strings, None, and lists, tuples and dicts of these, so that loading it runs no code; "
        "save plain values, or objects with a state_dict() of such"
    )


# --- reading ---------------------------------------------------------------------------------


def read_archive(path: str, map_location: MAP_LOCATION) -> dict[str, Any]:
    """The content of a checkpoint, by name.

    Raises:
        ConfigError: there is no such file, it is damaged, or `save` did not write it.
    """
    _check_is_archive(path)
    # The checksum is computed while torch reads: both mostly wait for the same bytes.
    with ThreadPoolExecutor(1) as background:
        damage = background.submit(_damage, path)
        try:
            loaded = torch.load(path, weights_only=True, map_location=map_location)
        except Exception as error:
            if found := damage.result():
                raise ConfigError(found) from error
            if isinstance(error, OSError | MemoryError):
                raise
            raise _unreadable(path, error) from error
        if found := damage.result():
            raise ConfigError(found)
    if not _is_checkpoint(loaded):
        raise ConfigError(f"{path} was not written by paceline.save; read it with torch.load")
    if loaded["paceline"] > _FORMAT:
        raise ConfigError(
            f"{path} has format {loaded['paceline']}; "
            f"this version of Paceline reads formats up to {_FORMAT}"
        )
    if "checksum" in loaded and _stored_checksum(path) is None:
        raise ConfigError(f"{path} is damaged: its checksum is missing")
    state: dict[str, Any] = loaded["state"]
    return state


def _check_is_archive(path: str) -> None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no checkpoint {path}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ConfigError(f"{path} is {kind}: give the name of a checkpoint")
    if status.st_size == 0:
        raise ConfigError(f"{path} is empty, so it is not a checkpoint")
    with open(path, "rb") as file:
        begins_as_archive = file.read(4) == b"PK\x03\x04"
        file.seek(-min(status.st_size, _END_BYTES), os.SEEK_END)
        ends_as_archive = b"PK\x05\x06" in file.read()
    if not begins_as_archive:
        raise ConfigError(
            f"{path} is not a checkpoint: paceline.save writes zip archives, and this is none"
        )
    if not ends_as_archive:
        raise ConfigError(f"{path} is damaged: its end is missing, as if it was cut off")


def _damage(path: str) -> str:
    """What the checksum says is wrong with the file; empty if it fits or there is none."""
    expected = _stored_checksum(path)
    if expected is None:
        return ""
    found = zlib.crc32(_NO_COMMENT, _checksum_of_archive(path))
    if found == expected:
        return ""
    return (
        f"{path} is damaged: its bytes have the checksum {found:08x}, but {expected:08x} was "
        "written. Load another checkpoint"
    )


def _stored_checksum(path: str) -> int | None:
    with open(path, "rb") as file:
        file.seek(-(_LENGTH_BYTES + _COMMENT_BYTES), os.SEEK_END)
        length, comment = file.read(_LENGTH_BYTES), file.read()
    match = _COMMENT.fullmatch(comment)
    if match is None or int.from_bytes(length, "little") != _COMMENT_BYTES:
        return None
    return int(match[1], 16)


def _checksum_of_archive(path: str) -> int:
    """Of all bytes before the length of the comment."""
    checksum, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        left = os.fstat(file.fileno()).st_size - _LENGTH_BYTES - _COMMENT_BYTES
        while left > 0 and (count := file.readinto(chunk[: min(left, _CHUNK_BYTES)])):
            checksum = zlib.crc32(chunk[:count], checksum)
            left -= count
    return checksum


def _is_checkpoint(loaded: object) -> bool:
    return (
        isinstance(loaded, dict)
        and isinstance(loaded.get("paceline"), int)
        and isinstance(loaded.get("state"), dict)
    )


def _unreadable(path: str, error: Exception) -> ConfigError:
    """The error to raise for one of torch's."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        return ConfigError(
            f"{path} is not a checkpoint that can be read safely: it holds more than tensors and "
            f"plain values ({named[1] if named else _first_line(error)}), and loading that could "
            "run code. paceline.save did not write it"
        )
    return ConfigError(f"{path} cannot be read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0].rstrip(".") or type(error).__name__
