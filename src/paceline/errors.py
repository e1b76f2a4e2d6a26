"""Every exception Paceline raises.

    PacelineError
    |- ConfigError(ValueError)              the caller's mistake: an argument, the environment
    |- MismatchError                        ranks disagree: shape, dtype, order, call; all values
    |- GroupError                           the group is lost
    |  |- CollectiveTimeout(TimeoutError)   who is missing, in which call, since when
    |  |- PeerLost                          rank, pid, signal or exit code
    |  `- GroupAborted                      someone called abort
    |- StepError                            a rank failed in this step, so no rank applies it
    |- LaunchError                          first failed rank, exit code, tail of its log
    `- NativeError                          the native core is missing or does not fit

A message says what happened, on which rank, what was expected and what was found, and what to do
about it. The same facts are attributes of the exception, for programs.
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Mapping, Sequence

__all__ = [
    "PacelineError",
    "ConfigError",
    "MismatchError",
    "GroupError",
    "CollectiveTimeout",
    "PeerLost",
    "GroupAborted",
    "StepError",
    "LaunchError",
    "NativeError",
    "describe_exit",
]


class PacelineError(RuntimeError):
    """Base of all errors raised by Paceline.

    Example:
        ```python
        try:
            train()
        except paceline.PacelineError as error:
            print(f"rank {paceline.rank()}: {error}")
        ```
    """


class ConfigError(PacelineError, ValueError):
    """The caller's mistake: a wrong argument or a contradictory environment.

    Example:
        ```python
        try:
            paceline.DataLoader(dataset, batch_size=0)
        except paceline.ConfigError as error:  # a ValueError, too
            print(error)
        ```
    """


class MismatchError(PacelineError):
    """Ranks disagree about something they must share. `values` maps each rank to what it had.

    Example:
        ```python
        try:
            model = paceline.DistributedDataParallel(model)
        except paceline.MismatchError as error:
            for rank, value in error.values.items():
                print(rank, value)
        ```
    """

    def __init__(self, message: str, values: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.values: dict[int, str] = dict(values or {})


class GroupError(PacelineError):
    """The process group can no longer be used.

    Example:
        ```python
        try:
            train()
        except paceline.GroupError:  # nothing more can be exchanged
            paceline.destroy_process_group()
        ```
    """


class CollectiveTimeout(GroupError, TimeoutError):
    """A wait reached its deadline. `missing` lists the ranks that had not arrived.

    Example:
        ```python
        try:
            torch.distributed.barrier()
        except paceline.CollectiveTimeout as error:
            print("still waiting for ranks", error.missing)
        ```
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PeerLost(GroupError):
    """A peer process ended while others were waiting for it.

    `exitcode` follows `subprocess`: negative for a signal, None when the system would not tell.
    `traceback` is that of the error the peer failed with, as text; empty if it could not tell.

    Example:
        ```python
        try:
            torch.distributed.barrier()
        except paceline.PeerLost as error:
            print(f"rank {error.rank} ended with {error.exitcode}", error.traceback)
        ```
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        pid: int | None = None,
        exitcode: int | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.rank = rank
        self.pid = pid
        self.exitcode = exitcode

    @property
    def signal(self) -> int | None:
        """The signal that ended the peer, if one did."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None


class GroupAborted(GroupError):
    """Someone aborted the group while this rank was using it.

    Example:
        ```python
        try:
            torch.distributed.barrier()
        except paceline.GroupAborted as error:
            print(error)
        ```
    """


class StepError(PacelineError):
    """A rank failed in this step, so no rank applies it. `rank` failed first; `traceback` is its
    own, as text.

    Example:
        ```python
        model = paceline.DistributedDataParallel(model)
        try:
            with model.all_or_none():
                model(x).sum().backward()
        except paceline.StepError as error:
            print(f"rank {error.rank} failed, nobody steps", error.traceback)
        ```
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class LaunchError(PacelineError):
    """A launched rank failed. Carries the first rank to fail, its exit code and the tail of its
    output.

    Example:
        ```python
        try:
            results = paceline.spawn(train, nprocs=2)
        except paceline.LaunchError as error:
            print(f"rank {error.rank} ended with {error.exitcode}", error.tail)
        ```
    """

    def __init__(
        self, message: str, rank: int | None = None, exitcode: int | None = None, tail: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.tail = tail


class NativeError(PacelineError):
    """The native core is missing, was built for another version, or refused to work.

    Example:
        ```python
        try:
            paceline.init_process_group("paceline")
        except paceline.NativeError:
            paceline.init_process_group("gloo")
        ```
    """


def describe_exit(exitcode: int | None) -> str:
    """Say how a process ended, in words: "killed by SIGKILL", "exited with code 3"."""
    if exitcode is None:
        return "exited with unknown status"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"killed by {_signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"
