"""The messages between the launcher, its fork server and the ranks.

launcher -> fork server   Job, then Signals
fork server -> launcher   Started, JobPlaced, a RankEnd for each rank; StartFailure instead or
                          in between; in an elastic job also MemberStarted, MemberLost,
                          GenerationBegan, RankFailing, StopRequested and Announcement
rank -> launcher          a Report, over a pipe of its own
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping

__all__ = [
    "Script",
    "Function",
    "RendezvousConfig",
    "ElasticConfig",
    "RankPipes",
    "RemoteEnd",
    "Job",
    "ReportKind",
    "Report",
    "RankEnd",
    "Started",
    "Signal",
    "JobPlaced",
    "StartFailure",
    "MemberStarted",
    "MemberLost",
    "GenerationBegan",
    "RankFailing",
    "StopRequested",
    "Announcement",
    "ElasticMessage",
    "ServerMessage",
    "exit_code_for_shell",
    "ELASTIC",
    "PRELOAD",
]

# What nearly every training script imports: the first optimizer a process makes imports
# torch._dynamo, which costs as much as torch itself.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")


# Set in the ranks of an elastic job: `launch/elastic_job.py` reads it.
ELASTIC = "PACELINE_ELASTIC"


@dataclasses.dataclass(frozen=True)
class Script:
    """`paceline run [-m] target arguments...`"""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclasses.dataclass(frozen=True)
class Function:
    """`paceline.spawn(fn, args)`: the call, pickled by value where it must be."""

    payload: bytes


@dataclasses.dataclass(frozen=True)
class RendezvousConfig:
    """Where nodes meet. With one node the launcher listens on a port the system chose."""

    nodes: int = 1
    node_rank: int | None = None
    endpoint: str = ""
    run_id: str = "none"
    listen_fd: int = -1
    timeout_s: float = 300.0


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """An elastic job: it has from `min_ranks` to `max_ranks` ranks, and begins with `start_ranks`
    on this host.
    """

    min_ranks: int
    max_ranks: int
    start_ranks: int
    max_restarts: int = 100
    restart_on_error: bool = False  # also after an exception that nobody handled
    stopped_s: float = 10.0  # a rank that is stopped for longer is killed
    hosts: int = 1  # the job begins when so many have come
    host_silence_s: float = 5.0  # a host that is not heard for longer is lost


@dataclasses.dataclass(frozen=True)
class RankPipes:
    """One rank's ends of the pipes to the launcher, as descriptor numbers."""

    stdout: int
    stderr: int
    report: int

    def all(self) -> tuple[int, int, int]:
        return (self.stdout, self.stderr, self.report)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything the fork server needs to start the ranks. In an elastic job `ranks` is the most
    there may be on this host.
    """

    work: Script | Function
    ranks: int
    pipes: tuple[RankPipes, ...]
    rendezvous: RendezvousConfig
    threads: int
    launcher: str
    launcher_pid: int
    start_method: str = "fork"
    preload: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    elastic: ElasticConfig | None = None


class ReportKind(enum.Enum):
    """What a rank reports."""

    RESULT = enum.auto()
    ERROR = enum.auto()
    EXIT = enum.auto()  # sys.exit with a status other than 0
    INTERRUPT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Report:
    """What a rank reports before it ends: a result, or the error that ends it. Times are
    `time.monotonic`.
    """

    kind: ReportKind
    when: float
    text: str = ""  # the traceback, or where it was interrupted
    summary: str = ""  # the last line of it
    payload: bytes = b""  # the pickled result or exception
    caused_by: int | None = None  # another rank, whose own error this one only passes on
    exitcode: int = 1  # with which the rank is about to end
    pid: int = dataclasses.field(default_factory=os.getpid)


@dataclasses.dataclass(frozen=True)
class Started:
    """From the fork server: ranks, by number, have their processes."""

    pids: Mapping[int, int]
    server_pid: int


@dataclasses.dataclass(frozen=True)
class JobPlaced:
    """From the fork server: all nodes met, and ranks know their number."""

    first_rank: int
    world_size: int


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """From the fork server: a rank's process ended. `exitcode` is negative for a signal. `page` is
    a copy of its status page.
    """

    rank: int
    exitcode: int
    when: float
    page: bytes = b""


@dataclasses.dataclass(frozen=True)
class StartFailure:
    """From the fork server: the job could not start, or another node failed."""

    reason: str
    exitcode: int = 1


@dataclasses.dataclass(frozen=True)
class MemberStarted:
    """From the fork server of an elastic job: a process was started as this rank."""

    rank: int
    pid: int


@dataclasses.dataclass(frozen=True)
class MemberLost:
    """From the fork server of an elastic job: a rank's process ended, and the job goes on. `page`
    is a copy of its status page.
    """

    rank: int
    exitcode: int
    when: float
    page: bytes = b""


@dataclasses.dataclass(frozen=True)
class RemoteEnd:
    """From the fork server of the first host of an elastic job: a rank of another host has ended.
    `page` is a copy of its status page.
    """

    slot: int
    host: int
    is_lost: bool  # it died, and the job goes on
    page: bytes


@dataclasses.dataclass(frozen=True)
class GenerationBegan:
    """From the fork server of an elastic job: other ranks than before belong to it."""

    number: int


@dataclasses.dataclass(frozen=True)
class RankFailing:
    """From the fork server of an elastic job: an error is ending this rank, and so the job."""

    rank: int


@dataclasses.dataclass(frozen=True)
class StopRequested:
    """From the fork server of an elastic job: the launcher of its first host was sent a signal that
    ends the job.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class Announcement:
    """From the fork server of an elastic job: a line for the screen."""

    text: str


@dataclasses.dataclass(frozen=True)
class Signal:
    """To the fork server: send a signal to every rank that still runs, but for one that is ending
    anyway.
    """

    number: int
    skip: int | None = None


ElasticMessage = (
    MemberStarted
    | MemberLost
    | RemoteEnd
    | GenerationBegan
    | RankFailing
    | StopRequested
    | Announcement
)
ServerMessage = Started | JobPlaced | RankEnd | StartFailure | ElasticMessage


def exit_code_for_shell(exitcode: int) -> int:
    """A process's end as a shell shows it: 128 + signal number."""
    return 128 - exitcode if exitcode < 0 else exitcode
