"""Finds out which rank this process is: the only place where rank and world size are read from the
environment.

`find_rank_env` is pure: it reads the variables a launcher left in a mapping. They are looked at in
this order, the first match wins:

    RANK + WORLD_SIZE      paceline run, torchrun, Ray Train, Kubernetes' PyTorchJob, by hand
    OMPI_COMM_WORLD_*      Open MPI's mpirun
    PMI_RANK + PMI_SIZE    MPICH, Intel MPI and other users of Hydra
    SLURM_PROCID           srun (inside a step; the batch script itself is no rank)
    JOB_COMPLETION_INDEX   an indexed Kubernetes Job, with WORLD_SIZE and MASTER_ADDR set by hand
    nothing                alone: a single process

The schedulers below the first line are looked at even when the first matched, to notice a
contradiction: four processes that all read a left-over `RANK=0 WORLD_SIZE=1` would each train alone
and the mistake would go unnoticed.

`current_rank_and_world` is the question everything else asks, before and after a group exists.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping

from paceline.errors import ConfigError

__all__ = ["RankEnv", "current_rank_and_world", "find_rank_env", "expand_hostlist"]


@dataclasses.dataclass(frozen=True)
class RankEnv:
    """A process's rank in its job, as far as the environment knows."""

    source: str  # who started the job, for messages
    rank: int
    world_size: int
    local_rank: int | None = None  # None: has to be found by comparing hosts with the other ranks
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    # Distinguishes jobs on one host; set where ranks may meet through a local file.
    job_key: str | None = None

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size


def current_rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the default group if there is one, else as
    the environment describes, else (0, 1).

    Does not import torch: without torch.distributed loaded there is no group. Raises `ConfigError`
    if the environment is incomplete or contradicts itself.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    env = find_rank_env(os.environ)
    return env.rank, env.world_size


def find_rank_env(environ: Mapping[str, str]) -> RankEnv:
    """The rank the environment describes. Raises `ConfigError` if it is incomplete or
    contradicts itself.
    """
    variables = _Variables(environ)
    explicit = _from_rank_and_world(variables)
    scheduler = _from_open_mpi(variables) or _from_pmi(variables) or _from_slurm(variables)
    if explicit and scheduler:
        _check_agreement(variables, explicit, scheduler)
    env = explicit or scheduler or _from_indexed_job(variables) or RankEnv("alone", 0, 1, 0, 1)
    _check_ranges(variables, env)
    return env


class _Variables:
    """Environment variables, read with errors that name them; remembers which were read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._read: list[str] = []

    def text(self, *names: str) -> str | None:
        """The first of the variables that is set and not empty."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                self._read.append(name)
                return value
        return None

    def number(self, *names: str) -> int | None:
        value = self.text(*names)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise ConfigError(
                f"the environment variable {self._read[-1]} should be a whole number but is "
                f"{value!r}"
            ) from None

    def show(self, *names: str) -> str:
        """`NAME=value` for each, "not set" included."""
        return ", ".join(
            f"{n}={self._environ[n]}" if n in self._environ else f"{n} not set" for n in names
        )

    def read(self) -> str:
        """What was read so far, for a message about it."""
        return self.show(*dict.fromkeys(self._read))


def _from_rank_and_world(variables: _Variables) -> RankEnv | None:
    rank, world = variables.number("RANK"), variables.number("WORLD_SIZE")
    if rank is None and world is not None and variables.text("JOB_COMPLETION_INDEX"):
        return None  # an indexed Job gives the rank under its own name
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        raise ConfigError(
            f"only one of RANK and WORLD_SIZE is set: {variables.show(*names)}. Set both, or "
            "neither; `paceline run` and torchrun set them for you"
        )
    return RankEnv(
        _launcher(variables),
        rank,
        world,
        variables.number("LOCAL_RANK"),
        variables.number("LOCAL_WORLD_SIZE"),
        *_master(variables),
    )


def _launcher(variables: _Variables) -> str:
    if name := variables.text("PACELINE_LAUNCHER"):
        return name
    if variables.text("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    return "Kubernetes" if variables.text("KUBERNETES_SERVICE_HOST") else "RANK and WORLD_SIZE"


def _master(variables: _Variables) -> tuple[str | None, int | None]:
    return variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")


def _from_open_mpi(variables: _Variables) -> RankEnv | None:
    rank, world = variables.number("OMPI_COMM_WORLD_RANK"), variables.number("OMPI_COMM_WORLD_SIZE")
    if rank is None or world is None:
        return None
    local = (
        variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    key = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return RankEnv(
        "Open MPI", rank, world, *local, *_master(variables), job_key=f"ompi-{key}" if key else None
    )


def _from_pmi(variables: _Variables) -> RankEnv | None:
    rank, world = variables.number("PMI_RANK"), variables.number("PMI_SIZE")
    if rank is None or world is None:
        return None
    local = variables.number("MPI_LOCALRANKID"), variables.number("MPI_LOCALNRANKS")
    return RankEnv("MPICH", rank, world, *local, *_master(variables))


def _from_slurm(variables: _Variables) -> RankEnv | None:
    rank, world = variables.number("SLURM_PROCID"), variables.number("SLURM_STEP_NUM_TASKS")
    if rank is None or world is None:
        return None
    nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    address, port = _master(variables)
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    job, step = (
        variables.number("SLURM_JOB_ID", "SLURM_JOBID"),
        variables.text("SLURM_STEP_ID", "SLURM_STEPID"),
    )
    if address is None and nodes != 1 and hosts:
        address = expand_hostlist(hosts)[0]
    if port is None and nodes != 1 and job is not None:
        # Every task must choose the same port without communicating: one of the upper range, spread
        # by job and step.
        port = 29500 + (job * 31 + sum(map(ord, step or ""))) % 20000
    local_world = world if nodes == 1 else _tasks_on_this_node(variables)
    return RankEnv(
        "Slurm",
        rank,
        world,
        variables.number("SLURM_LOCALID"),
        local_world,
        address,
        port,
        job_key=f"slurm-{job}-{step}" if job is not None else None,
    )


def _tasks_on_this_node(variables: _Variables) -> int | None:
    """From `SLURM_STEP_TASKS_PER_NODE`, such as "4(x2),3", and the index of this node."""
    layout, node = (
        variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        variables.number("SLURM_NODEID"),
    )
    if layout is None or node is None:
        return None
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _from_indexed_job(variables: _Variables) -> RankEnv | None:
    index, world = variables.number("JOB_COMPLETION_INDEX"), variables.number("WORLD_SIZE")
    if index is None or world is None:
        return None
    return RankEnv("Kubernetes", index, world, None, None, *_master(variables))


def _check_agreement(variables: _Variables, explicit: RankEnv, scheduler: RankEnv) -> None:
    """RANK and WORLD_SIZE must not deny what the scheduler knows; a launcher inside a scheduler's
    task may differ.
    """
    if variables.text("TORCHELASTIC_RUN_ID", "PACELINE_LAUNCHER"):
        return
    same = (explicit.rank, explicit.world_size) == (scheduler.rank, scheduler.world_size)
    if same or explicit.world_size > scheduler.world_size:
        return
    raise ConfigError(
        "two launchers disagree about this process: RANK and WORLD_SIZE give rank "
        f"{explicit.rank} of {explicit.world_size}, {scheduler.source} gives rank "
        f"{scheduler.rank} of {scheduler.world_size} ({variables.read()}). "
        f"Unset RANK and WORLD_SIZE to use {scheduler.source}'s"
    )


def _check_ranges(variables: _Variables, env: RankEnv) -> None:
    problems = []
    world, local_world = env.world_size, env.local_world_size
    if not 0 <= env.rank < world:
        problems.append(f"rank {env.rank} is not in a world of {world}")
    if env.local_rank is not None and local_world is not None:
        if not 0 <= env.local_rank < local_world:
            problems.append(f"local rank {env.local_rank} is not among {local_world} on this host")
        if local_world > world:
            problems.append(f"{local_world} ranks on this host are more than the world of {world}")
    elif env.local_rank is not None and not 0 <= env.local_rank < world:
        problems.append(f"local rank {env.local_rank} is not in a world of {world}")
    if env.master_port is not None and not 0 <= env.master_port < 65536:
        problems.append(f"{env.master_port} is not a port")
    if problems:
        raise ConfigError(
            f"the environment contradicts itself: {'; '.join(problems)} ({variables.read()})"
        )


def expand_hostlist(text: str) -> list[str]:
    """The hosts of a Slurm list: "gpu[01-03,7],login" gives gpu01, gpu02, gpu03, gpu7, login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts += _expand_brackets(item.strip())
    if not hosts:
        raise ConfigError(f"this is not a list of hosts: {text!r}")
    return hosts


def _expand_brackets(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item]
    expanded: list[str] = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            raise ConfigError(f"this is not a list of hosts: {item!r}")
        names = [
            f"{item[: match.start()]}{n:0{len(first)}}{item[match.end() :]}"
            for n in range(int(first), int(last) + 1)
        ]
        expanded += [host for name in names for host in _expand_brackets(name)]
    return expanded
