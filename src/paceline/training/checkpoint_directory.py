"""A directory of checkpoints, written in the background: `step-000000500.pt` and so on."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
from typing import Any

from paceline.checkpoint.archive import read_archive, write_archive
from paceline.errors import ConfigError, PacelineError

__all__ = ["CheckpointDirectory"]

_NAME = re.compile(r"step-(\d+)\.pt")
_CONTENT = "training"


class CheckpointDirectory:
    """Writes a copy of a state while training goes on, and keeps the newest `keep` files."""

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, found {keep}")
        self.path, self._keep = os.fspath(path), keep
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None

    def names(self) -> list[str]:
        """The files, the newest first. None if there is no directory."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            steps = {
                int(match[1]): name
                for name in os.listdir(self.path)
                if (match := _NAME.fullmatch(name))
            }
            return [steps[step] for step in sorted(steps, reverse=True)]
        return []

    def read(self, name: str) -> dict[str, Any]:
        """The state in a file, checked against its checksum.

        Raises:
            ConfigError: there is no such file, or it is damaged.
        """
        content = read_archive(os.path.join(self.path, name), "cpu")
        if _CONTENT not in content:
            raise ConfigError(f"{os.path.join(self.path, name)} is not a checkpoint of a Training")
        state: dict[str, Any] = content[_CONTENT]
        return state

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Copy a state in memory, and write the copy in the background.

        Raises:
            PacelineError: the write before has failed.
        """
        self.wait()
        content = {_CONTENT: copy.deepcopy(state)}
        # No daemon: the interpreter waits for the file before it ends.
        self._writer = threading.Thread(
            target=self._write, args=(f"step-{step:09d}.pt", content), name="paceline-checkpoint"
        )
        self._writer.start()

    def wait(self) -> None:
        """Until the last file is in place.

        Raises:
            PacelineError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise PacelineError(
                f"a checkpoint could not be written to {self.path}: {failure}. Training stops here "
                "rather than go on without checkpoints"
            ) from failure

    def _write(self, name: str, content: dict[str, Any]) -> None:
        try:
            write_archive(os.path.join(self.path, name), content)
            for old in self.names()[self._keep :]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, old))
        except Exception as error:
            self._failure = error
