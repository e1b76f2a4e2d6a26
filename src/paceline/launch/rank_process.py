"""How the fork server makes a process that becomes a rank: fork, descriptors, environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator

from paceline._interpreter import interpreter_flags
from paceline.launch.messages import Job

__all__ = [
    "CannotStart",
    "LIMITS",
    "ThisRank",
    "become_rank",
    "inherited_descriptors",
    "role_variables",
    "wake_on_child_change",
]

LIMITS = ". Start fewer ranks, or raise the limits of processes and open files (ulimit -u, -n)"


class CannotStart(Exception):
    """The job cannot start, for a reason that the message tells the user."""

    def __init__(self, message: str, exitcode: int) -> None:
        super().__init__(message)
        self.exitcode = exitcode


@dataclasses.dataclass(frozen=True)
class ThisRank:
    """What a function that forks ranks returns in one of them."""

    role_fd: int
    report_fd: int
    page_fd: int  # its status page


def inherited_descriptors(job: Job) -> Iterable[int]:
    """What the fork server has got from the launcher, but for their connection."""
    for pipes in job.pipes:
        yield from pipes.all()
    if job.rendezvous.listen_fd >= 0:
        yield job.rendezvous.listen_fd


def become_rank(
    job: Job, rank: int, role_fd: int, page_fd: int, kept: tuple[int, ...] = ()
) -> ThisRank:
    """In the child: take over the rank's pipes, and close those of the others. `kept` are further
    descriptors that the rank has to know.
    """
    mine = job.pipes[rank]
    os.dup2(mine.stdout, 1)
    os.dup2(mine.stderr, 2)
    if rank != 0:  # two readers of one terminal would each get part of the input
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for descriptor in inherited_descriptors(job):
        if descriptor != mine.report:
            os.close(descriptor)
    if job.start_method == "spawn":
        _exec_rank(job, ThisRank(role_fd, mine.report, page_fd), kept)
    return ThisRank(role_fd, mine.report, page_fd)


def _exec_rank(job: Job, rank: ThisRank, kept: tuple[int, ...]) -> None:
    descriptors = dataclasses.astuple(rank)
    for descriptor in (*descriptors, *kept):
        os.set_inheritable(descriptor, True)
    code = (
        f"import sys; sys.path[:] = {list(job.path)!r}; "
        "from paceline.launch.rank_main import main; "
        f"sys.exit(main{descriptors})"
    )
    os.execv(sys.executable, [sys.executable, *interpreter_flags(), "-c", code])


def role_variables(
    job: Job,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    node: int,
    address: str,
    port: int,
) -> dict[str, str]:
    """The environment that makes a process a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # What torch's own env:// looks at: the store is served already, by the launcher.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PACELINE_LAUNCHER": job.launcher,
        "OMP_NUM_THREADS": str(job.threads),
    }


@contextlib.contextmanager
def wake_on_child_change() -> Iterator[socket.socket]:
    """A socket that becomes readable when a child has ended, was stopped or goes on."""
    wake, written = socket.socketpair()
    with wake, written:
        wake.setblocking(False)
        written.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
