"""Opens the store through which the ranks of a job meet.

It is found in one of three ways: a server the launcher already runs (paceline run, torchrun),
MASTER_ADDR and MASTER_PORT with rank 0 as the server, or - ranks of one host under mpirun or srun,
which name no port - a small file in which rank 0 publishes the port the system gave it. The file is
in a directory below the temporary one that only this user can write to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from paceline._linux import read_stat
from paceline.errors import CollectiveTimeout, ConfigError
from paceline.rank_env import RankEnv

if TYPE_CHECKING:
    from paceline._torch_internals import Store, TCPStore

__all__ = ["JobStore", "open_group_store", "open_store"]

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

_LARGEST_PORT_FILE_BYTES = 4096

# Stores served at an address given to us, kept until the process ends: ranks that leave a group and
# join again at once would otherwise meet at the old server just before it closes.
_served: dict[tuple[str, int], TCPStore] = {}


class _Groups:
    """Counts the groups joined so far. The number is the same on every rank and names the group's
    part of the store, which may be the same store each time.
    """

    joined = 0


@dataclasses.dataclass(frozen=True)
class JobStore:
    """A store all ranks of the job share, and what this process has to do with it."""

    store: Store
    served_here: bool = False
    port_file: pathlib.Path | None = None

    def remove_port_file(self) -> None:
        """All ranks have joined, or no more ranks should."""
        if self.port_file is not None:
            self.port_file.unlink(missing_ok=True)


def open_store(env: RankEnv, environ: Mapping[str, str], timeout_s: float) -> JobStore:
    """The store all ranks of this job share. Fails within the time limit, naming what could not be
    reached.
    """
    from paceline._torch_internals import HashStore, PrefixStore

    if env.world_size == 1 and env.master_addr is None:
        return JobStore(HashStore())
    if env.master_addr is None and env.one_host:
        return _open_through_file(env, timeout_s)
    if env.master_addr is None or env.master_port is None:
        raise ConfigError(_no_address(env))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _connect(env, env.master_addr, env.master_port, timeout_s)
        return JobStore(PrefixStore(f"paceline/attempt_{attempt}", store))
    if env.rank == 0:
        served = _serve_at(env.master_addr, env.master_port, env.world_size, timeout_s)
        return JobStore(served, served_here=True)
    return JobStore(_connect(env, env.master_addr, env.master_port, timeout_s))


@contextlib.contextmanager
def open_group_store(job: JobStore) -> Iterator[Store]:
    """The part of the job's store for the next group; counted as joined when the block succeeds."""
    from paceline._torch_internals import PrefixStore

    yield PrefixStore(f"paceline/group_{_Groups.joined}", job.store)
    _Groups.joined += 1


def _no_address(env: RankEnv) -> str:
    address = env.master_addr or "(not set)"
    port = env.master_port or "(not set)"
    cure = {
        "Open MPI": "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> ...",
        "MPICH": "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <free port> ...",
    }.get(
        env.source,
        "export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>, or start with `paceline run`",
    )
    return (
        f"rank {env.rank} of {env.world_size} ({env.source}) does not know where to meet the "
        f"others: MASTER_ADDR={address}, MASTER_PORT={port}. Ranks on several hosts need both: "
        f"{cure}"
    )


def _serve_at(address: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """Serve a store at an address that the environment names."""
    from torch.distributed import DistNetworkError

    from paceline._torch_internals import TCPStore

    if (address, port) not in _served:
        try:
            _served[address, port] = TCPStore(
                address,
                port,
                world_size,
                is_master=True,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except DistNetworkError as error:
            raise ConfigError(
                f"rank 0 cannot listen on port {port} for the other ranks: {_first_line(error)}. "
                "Another job may use the port: set MASTER_PORT to a free one, or start with "
                "`paceline run`, which needs none"
            ) from error
    return _served[address, port]


def _connect(env: RankEnv, address: str, port: int, timeout_s: float) -> TCPStore:
    from torch.distributed import DistNetworkError, DistStoreError

    from paceline._torch_internals import TCPStore

    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return TCPStore(
            address, port, env.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except (DistNetworkError, DistStoreError) as error:
        raise CollectiveTimeout(
            f"rank {env.rank} could not reach {address}:{port}, where rank 0 or the launcher "
            f"should answer, within {timeout_s:g} s: {_first_line(error)}. Rank 0 is missing or "
            "MASTER_ADDR/MASTER_PORT are wrong",
            missing=[0],
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# -- ranks of one host under a launcher that names no port -----------------------------------------


def _open_through_file(env: RankEnv, timeout_s: float) -> JobStore:
    key = env.job_key or _launcher_process()
    if key is None:
        raise ConfigError(_no_address(env))
    path = _own_directory() / f"{hashlib.sha256(key.encode(errors='replace')).hexdigest()}.json"
    if env.rank != 0:
        port = _read_port(path, env, timeout_s)
        return JobStore(_connect(env, "127.0.0.1", port, timeout_s))
    from paceline._torch_internals import TCPStore

    listen_socket = socket.create_server(("127.0.0.1", 0), backlog=env.world_size + 8)
    port = listen_socket.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        env.world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_socket.detach(),
    )
    pid = os.getpid()
    _write_atomically(path, {"port": port, "pid": pid, "started": _start_ticks(pid)})
    return JobStore(store, served_here=True, port_file=path)


def _own_directory() -> pathlib.Path:
    """A directory of this user's in the temporary directory, where everybody may make files and
    links of any name.
    """
    user = os.geteuid()
    path = pathlib.Path(tempfile.gettempdir(), f"paceline-{user}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != user:
        problem = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        problem = "can be written to by other users"
    else:
        return path
    raise ConfigError(
        f"ranks of this host meet through a file in {path}, which should be a directory of user "
        f"{user} alone but {problem}. Remove it, or set TMPDIR to a directory of your own, or set "
        "MASTER_ADDR and MASTER_PORT"
    )


def _write_atomically(path: pathlib.Path, content: Mapping[str, object]) -> None:
    # NamedTemporaryFile has mode 0600 already.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(content, file)
    os.replace(file.name, path)


def _read_port(path: pathlib.Path, env: RankEnv, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(_read_own_file(path))
            # A file left by a job that died names a process that is gone, or another one with its
            # number.
            if content["started"] == _start_ticks(int(content["pid"])):
                return int(content["port"])
        time.sleep(0.02)
    raise CollectiveTimeout(
        f"rank {env.rank} of {env.world_size} ({env.source}): rank 0 did not join within "
        f"{timeout_s:g} s; check that rank 0 was started and see its output",
        missing=[0],
    )


def _read_own_file(path: pathlib.Path) -> bytes:
    """The content of a file that this user made; no link is followed to another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        return file.read(_LARGEST_PORT_FILE_BYTES)


def _launcher_process() -> str | None:
    """A name for this job made from the mpirun (or the like) above this process."""
    pid = os.getppid()
    while pid > 1 and (process := read_stat(pid)) is not None:
        if process.command in _LAUNCHERS:
            return f"{process.command}-{pid}-{process.start_ticks}"
        pid = process.parent
    return None


def _start_ticks(pid: int) -> int | None:
    """With the pid, a name of a running process that no other will have."""
    process = read_stat(pid)
    return None if process is None or process.has_ended else process.start_ticks
