"""Where ranks meet: opens the store that the environment points to, and exchanges who is where.

A store is found in one of three ways: a server the launcher already runs (paceline run, torchrun),
MASTER_ADDR and MASTER_PORT with rank 0 as the server, or - ranks of one host under mpirun or srun,
which name no port - a small file in the temporary directory through which rank 0 tells the port the
system gave it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from paceline.core import host_identity
from paceline.errors import CollectiveTimeout, ConfigError
from paceline.launch.agreement import exchange
from paceline.launch.resources import allowed_cores, cpu_quota, threads_per_rank
from paceline.rank_env import RankEnv

__all__ = ["Placement", "MeetingPlace", "open_store", "place", "place_from", "process_start_time"]

_LAUNCHERS = (
    "hydra_pmi_proxy",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "orted",
    "prted",
    "prterun",
    "slurmstepd",
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a rank is, agreed with all others."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int
    threads: int


@dataclasses.dataclass(frozen=True)
class MeetingPlace:
    """A store all ranks share, and what this process has to do with it."""

    store: Any
    served_here: bool = False
    file: pathlib.Path | None = None  # points others to it; removed when everybody came


def open_store(env: RankEnv, environ: Mapping[str, str], timeout_s: float) -> MeetingPlace:
    """The store all ranks of this job share. Fails within the time limit, saying what could not be
    reached.
    """
    from torch._C._distributed_c10d import HashStore, PrefixStore

    if env.world_size == 1 and env.master_addr is None:
        return MeetingPlace(HashStore())
    if env.master_addr is None and env.one_host:
        return _meet_through_file(env, timeout_s)
    if env.master_addr is None or env.master_port is None:
        raise ConfigError(_no_address(env))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _connect(env, env.master_addr, env.master_port, timeout_s)
        return MeetingPlace(PrefixStore(f"paceline/attempt_{attempt}", store))
    if env.rank == 0:
        store = _serve(env.master_addr, env.master_port, env.world_size, timeout_s)
        return MeetingPlace(store, served_here=True)
    return MeetingPlace(_connect(env, env.master_addr, env.master_port, timeout_s))


def _no_address(env: RankEnv) -> str:
    found = f"MASTER_ADDR={env.master_addr or '(not set)'}, MASTER_PORT={env.master_port or '(not set)'}"
    cure = {
        "Open MPI": "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> ...",
        "MPICH": "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <free port> ...",
    }.get(
        env.source,
        "export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>, or start with `paceline run`",
    )
    return (
        f"rank {env.rank} of {env.world_size} ({env.source}) does not know where to meet the others: {found}. "
        f"Ranks on several hosts need both: {cure}"
    )


def _serve(
    address: str, port: int, world_size: int, timeout_s: float, listen: socket.socket | None = None
) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if listen is None and (address, port) in _served:
        return _served[address, port]
    options: dict[str, Any] = {} if listen is None else {"master_listen_fd": listen.detach()}
    try:
        store = TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=listen is None,
            **options,
        )
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"rank 0 cannot listen on port {port} for the other ranks: {_first_line(error)}. Another job may use the "
            "port: set MASTER_PORT to a free one, or start with `paceline run`, which needs none"
        ) from error
    if listen is None:
        _served[address, port] = store
    return store


# Stores served at an address given to us, kept while the process lives: ranks that leave a group
# and join again at once would otherwise meet at the old server just before it closes.
_served: dict[tuple[str, int], Any] = {}


def _connect(env: RankEnv, address: str, port: int, timeout_s: float) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    limit = datetime.timedelta(seconds=timeout_s)
    try:
        return TCPStore(
            address, port, env.world_size, is_master=False, timeout=limit, wait_for_workers=False
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise CollectiveTimeout(
            f"rank {env.rank} could not reach {address}:{port}, where rank 0 or the launcher should answer, within "
            f"{timeout_s:g} s: {_first_line(error)}. Rank 0 is missing or MASTER_ADDR/MASTER_PORT are wrong",
            missing=[0],
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# -- ranks of one host under a launcher that names no port ---------------------------------------------------------


def _meet_through_file(env: RankEnv, timeout_s: float) -> MeetingPlace:
    key = env.job_key or _launcher_process()
    if key is None:
        raise ConfigError(_no_address(env))
    path = pathlib.Path(tempfile.gettempdir(), f"paceline-{os.getuid()}-{key}.json")
    if env.rank == 0:
        listen = socket.create_server(("127.0.0.1", 0), backlog=env.world_size + 8)
        port = listen.getsockname()[1]
        store = _serve("127.0.0.1", port, env.world_size, timeout_s, listen)
        _publish(
            path, {"port": port, "pid": os.getpid(), "started": process_start_time(os.getpid())}
        )
        return MeetingPlace(store, served_here=True, file=path)
    port = _read_port(path, env, timeout_s)
    return MeetingPlace(_connect(env, "127.0.0.1", port, timeout_s))


def _publish(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(content, file)
    os.replace(file.name, path)  # NamedTemporaryFile is 0600 already


def _read_port(path: pathlib.Path, env: RankEnv, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(path.read_text())
            ours = path.stat().st_uid == os.getuid()
            # A file left by a job that died names a process that is gone, or another one with its
            # number.
            if ours and content["started"] == process_start_time(content["pid"]):
                return int(content["port"])
        time.sleep(0.02)
    raise CollectiveTimeout(
        f"rank {env.rank} of {env.world_size} ({env.source}) waited {timeout_s:g} s for rank 0, which never came",
        missing=[0],
    )


def process_start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is no such process."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _launcher_process() -> str | None:
    """A name for this job made from the mpirun (or the like) above this process."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        if name in _LAUNCHERS:
            return f"{name}-{pid}-{process_start_time(pid)}"
        pid = int(stat.rpartition(")")[2].split()[1])
    return None


# -- who is where --------------------------------------------------------------------------------------------------


def place(
    env: RankEnv, meeting: MeetingPlace, generation: int, timeout_s: float
) -> tuple[Placement, Any]:
    """Meet all ranks at the store; returns this rank's placement and the store to build the group
    on.

    Raises `CollectiveTimeout` naming the ranks that did not come.
    """
    from torch._C._distributed_c10d import PrefixStore

    store = PrefixStore(f"paceline/group_{generation}", meeting.store)
    try:
        _claim_rank(env, store)
        about = {
            "host": host_identity(),
            "cores": sorted(allowed_cores()),
            "local_rank": env.local_rank,
        }
        values = exchange(
            store,
            "here",
            env.rank,
            env.world_size,
            json.dumps(about),
            timeout_s=timeout_s,
            complain=lambda missing: (
                f"rank {env.rank} waited {timeout_s:g} s for a world of {env.world_size} ({env.source}), but "
                f"{_ranks(missing)} did not come. Look at their output first; a longer wait is "
                "PACELINE_JOIN_TIMEOUT=<seconds>"
            ),
        )
    finally:
        if meeting.file is not None:
            meeting.file.unlink(missing_ok=True)
    assert values is not None, "this exchange is never called off"
    return place_from(env, [json.loads(value) for value in values], cpu_quota()), store


def _claim_rank(env: RankEnv, store: Any) -> None:
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    if store.add(f"claim/{env.rank}", 1) > 1:
        other = store.get(f"claimed_by/{env.rank}").decode()
        raise ConfigError(
            f"two processes say they are rank {env.rank} of {env.world_size}: {other}, and this one, {who}. Each needs "
            "a RANK of its own; two jobs need different MASTER_PORTs"
        )
    store.set(f"claimed_by/{env.rank}", who)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (
        f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def place_from(env: RankEnv, about: list[dict[str, Any]], quota: float | None) -> Placement:
    """This rank's placement, from what every rank told about itself."""
    host = about[env.rank]["host"]
    neighbours = [r for r, entry in enumerate(about) if entry["host"] == host]
    others = [about[r]["cores"] for r in neighbours if r != env.rank]
    local_rank = env.local_rank if env.local_rank is not None else neighbours.index(env.rank)
    return Placement(
        source=env.source,
        rank=env.rank,
        world_size=env.world_size,
        local_rank=local_rank,
        local_world_size=env.local_world_size or max(len(neighbours), local_rank + 1),
        hosts=len({entry["host"] for entry in about}),
        threads=threads_per_rank(about[env.rank]["cores"], others, quota),
    )
