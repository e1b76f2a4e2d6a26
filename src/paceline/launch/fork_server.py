"""The fork server: imports torch once, forks the ranks from that warm image, then supervises them.

    launcher  --control connection-->  fork server  --fork-->  rank 0, rank 1, ...
    (no torch, owns the screen)        (torch loaded)

Launcher, reaper (a process between the two) and fork server guard each other. All adopt orphans, so
what a rank leaves behind comes to the fork server, and if that is killed, to the reaper, then to
the launcher: whichever survives ends every descendant. The ranks themselves end with the fork
server (they asked the kernel for it with PR_SET_PDEATHSIG).

Ranks are forked before anything starts a thread here - the store's server does - and wait until
they are sent their role. Importing torch alone starts no thread that matters: OpenBLAS stops and
restarts its own around a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import importlib
import os
import selectors
import signal
import socket
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from paceline._interpreter import freeze_garbage, without_collecting
from paceline._linux import (
    adopt_orphans,
    catches_signal,
    die_with_parent,
    end_descendants,
    outlive_parent,
)
from paceline.errors import describe_exit
from paceline.launch import rank_main
from paceline.launch.messages import (
    Job,
    JobPlaced,
    RankEnd,
    RendezvousConfig,
    ServerMessage,
    Signal,
    Started,
    StartFailure,
)
from paceline.launch.rank_process import (
    LIMITS,
    CannotStart,
    ThisRank,
    become_rank,
    inherited_descriptors,
    role_variables,
    wake_on_child_change,
)
from paceline.launch.reaper import fork_below_reaper
from paceline.telemetry.status_page import new_page, read_and_close

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from paceline._torch_internals import Store

__all__ = ["main"]

_ELASTIC_PORT = 29400  # torchrun's, where an endpoint names none
_PEER_POLL_S = 1.0
_LEFTOVERS_WAIT_S = 0.5
_LEFTOVERS_TERM_S = 2.0


def main(control_fd: int) -> int:
    """Serve one job. Returns more than once, like fork: in the reaper and in the fork server when
    the job is over, in each rank with its exit code.
    """
    control = Connection(control_fd)
    os.set_inheritable(control_fd, False)
    job: Job = control.recv()
    os.setsid()  # the terminal's Ctrl-C goes to the launcher alone, which passes it on
    reaper = os.getpid()
    try:
        exitcode = fork_below_reaper(job.launcher_pid, lambda: _close_inherited(job, control))
    except OSError as error:
        _report_failure(control, f"no process could be started: {error.strerror}{LIMITS}", 2)
        return 1
    if exitcode is not None:
        return exitcode
    die_with_parent(reaper)  # until the ranks exist there is nothing to clean up
    adopt_orphans()
    for descriptor in inherited_descriptors(job):
        os.set_inheritable(descriptor, False)
    os.environ.update(job.environ)
    # OpenMP and OpenBLAS read it once, when torch loads them.
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    try:
        _preload(job)
        if job.elastic is not None:
            return _run_elastic(job, control)
        started = _start_ranks(job, control)
    except CannotStart as error:
        _report_failure(control, str(error), error.exitcode)
        return 1
    if isinstance(started, ThisRank):
        return rank_main.run(*dataclasses.astuple(started))
    return _Server(job, control, started).serve()


def _run_elastic(job: Job, control: Connection) -> int:
    # Imported here: other jobs do without.
    from paceline.launch.elastic_follower import ElasticFollower
    from paceline.launch.elastic_server import ElasticServer

    listener = _listen_for_hosts(job.rendezvous) if job.rendezvous.endpoint else None
    if listener is None and job.rendezvous.endpoint:
        ended = ElasticFollower(job, control).serve()
    else:
        ended = ElasticServer(job, control, listener).serve()
    if isinstance(ended, ThisRank):
        return rank_main.run(*dataclasses.astuple(ended))
    return ended


def _listen_for_hosts(config: RendezvousConfig) -> socket.socket | None:
    """Where an elastic job's other hosts come to; None if this is one of them. The first host is
    the one that the endpoint is an address of.
    """
    from paceline.launch.host_link import listen

    if config.node_rank not in {None, 0}:
        return None
    try:
        listener = listen(config.endpoint)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and config.node_rank is None:
            return None  # by the first launcher on this host
        raise CannotStart(
            f"no host can be awaited at {config.endpoint} (--rdzv-endpoint): {error.strerror}", 1
        ) from None
    if listener is None and config.node_rank == 0:
        raise CannotStart(
            f"--node-rank 0 is the host that others come to, but {config.endpoint} "
            "(--rdzv-endpoint) is no address of this one",
            2,
        )
    return listener


def _close_inherited(job: Job, control: Connection) -> None:
    """In the reaper: a copy of a descriptor would hide its end from the launcher."""
    control.close()
    for descriptor in inherited_descriptors(job):
        os.close(descriptor)


def _preload(job: Job) -> None:
    if job.start_method == "fork":
        # Imports make much and drop little: collecting meanwhile costs a tenth of the time.
        with without_collecting():
            for name in job.preload:
                _import(name)
            freeze_garbage()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        reason = traceback.format_exception_only(error)[-1].strip()
        message = f"--preload should name modules, but {name!r} cannot be imported: {reason}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise CannotStart(message, 2) from None
        # The module itself fails: where it does, is worth a look.
        raise CannotStart(f"{traceback.format_exc()}{message}", 1) from None


def _report_failure(control: Connection, reason: str, exitcode: int = 1) -> None:
    with contextlib.suppress(OSError):
        control.send(StartFailure(reason, exitcode))


@dataclasses.dataclass(frozen=True)
class _Child:
    """What `_start_ranks` returns, for each rank, in the server."""

    pid: int
    role_fd: int
    page_fd: int  # its status page


def _start_ranks(job: Job, control: Connection) -> ThisRank | list[_Child]:
    server = os.getpid()
    children: list[_Child] = []
    for rank in range(job.ranks):
        try:
            role_read, role_write = os.pipe()
            page_fd = new_page()
            pid = os.fork()
        except OSError as error:
            # Those that were forked end with this process.
            raise CannotStart(
                f"rank {rank} of {job.ranks} could not be started: {error.strerror}{LIMITS}", 2
            ) from None
        if pid == 0:
            die_with_parent(server)
            os.setpgid(0, 0)
            # A copy of a descriptor kept here would hide its end from the other side: that of the
            # control connection from the launcher, that of a role pipe from the rank waiting on it.
            control.close()
            for child in children:
                os.close(child.role_fd)
                os.close(child.page_fd)
            os.close(role_write)
            return become_rank(job, rank, role_read, page_fd)
        os.close(role_read)
        children.append(_Child(pid, role_write, page_fd))
    # Only the ranks write to these: the launcher sees the end of a pipe when its rank is gone.
    for pipes in job.pipes:
        for descriptor in pipes.all():
            os.close(descriptor)
    return children


class _Server:
    """After the fork: meets the other nodes, sends every rank its role, passes signals on, reports
    how ranks end.
    """

    def __init__(self, job: Job, control: Connection, children: list[_Child]) -> None:
        self._job = job
        self._control = control
        self._children = children
        self._running = {child.pid: rank for rank, child in enumerate(children)}
        self._failed = False

    def serve(self) -> int:
        outlive_parent()  # from here on a killed launcher is noticed as the end of the connection
        with contextlib.ExitStack() as stack:
            wake = stack.enter_context(wake_on_child_change())
            try:
                pids = {rank: child.pid for rank, child in enumerate(self._children)}
                self._send(Started(pids, os.getpid()))
                nodes = _Nodes(self._job)
                stack.callback(lambda: nodes.leave(self._failed))
                self._send_roles(nodes)
                self._loop(wake, nodes)
            except (BrokenPipeError, ConnectionResetError):
                # The launcher is gone.
                self._kill_ranks()
            except Exception as error:
                _report_failure(self._control, f"{type(error).__name__}: {error}")
                self._kill_ranks()
            end_descendants(os.getpid(), wait_s=_LEFTOVERS_WAIT_S, term_s=_LEFTOVERS_TERM_S)
        return 0

    def _send(self, message: ServerMessage) -> None:
        self._control.send(message)

    def _send_roles(self, nodes: _Nodes) -> None:
        job = self._job
        self._send(JobPlaced(nodes.first_rank, nodes.world_size))
        for local, child in enumerate(self._children):
            variables = role_variables(
                job,
                rank=nodes.first_rank + local,
                local_rank=local,
                world_size=nodes.world_size,
                node=nodes.node,
                address=nodes.address,
                port=nodes.port,
            )
            with contextlib.suppress(BrokenPipeError):  # it was killed before it began
                rank_main.send_frame(child.role_fd, rank_main.Role(job.work, variables))
            os.close(child.role_fd)

    def _loop(self, wake: socket.socket, nodes: _Nodes) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        pause = _PEER_POLL_S if self._job.rendezvous.nodes > 1 else None
        listen_socket = nodes.listen_socket
        if listen_socket is not None:
            selector.register(listen_socket, selectors.EVENT_READ)
        self._reap(nodes)  # those that ended before the handler was there
        while self._running:
            for key, _ in selector.select(pause):
                if key.fileobj is wake:
                    wake.recv(4096)
                elif key.fileobj is listen_socket:
                    selector.unregister(listen_socket)
                    nodes.open_store()
                else:
                    self._follow_order()
            self._reap(nodes)
            if pause is not None and (reason := nodes.failure_elsewhere()):
                self._send(StartFailure(reason))
                pause = None

    def _follow_order(self) -> None:
        try:
            order = self._control.recv()
        except EOFError:
            raise BrokenPipeError from None
        if not isinstance(order, Signal):
            return
        for pid in [pid for pid, rank in self._running.items() if rank != order.skip]:
            # A request to save must not end a rank that is still starting.
            if order.number == signal.SIGUSR1 and not catches_signal(pid, signal.SIGUSR1):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, order.number)

    def _reap(self, nodes: _Nodes) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                rank = self._running.pop(pid, None)
                if rank is None:
                    continue  # an orphan that a rank left behind
                code = os.waitstatus_to_exitcode(status)
                # Only the first failure: those that follow are mostly its consequences, and the
                # other nodes show a single reason.
                if code != 0 and not self._failed:
                    self._failed = True
                    nodes.publish_failure(rank, code)
                page = read_and_close(self._children[rank].page_fd)
                self._send(RankEnd(rank, code, time.monotonic(), page))

    def _kill_ranks(self) -> None:
        """Ranks first, so that helpers which clean up after their parent get to do so."""
        self._failed = True
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Nodes:
    """The rendezvous of all nodes' fork servers, whose store is also the ranks' store."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store: Store | None = None
        self._handler: RendezvousHandler | None = None
        self.listen_socket: socket.socket | None = None
        if job.rendezvous.nodes == 1:
            # The port is open already: whoever connects before the store is served waits in the
            # queue.
            self.listen_socket = socket.socket(fileno=job.rendezvous.listen_fd)
            self.address, self.port = self.listen_socket.getsockname()[:2]
            self.node, self.first_rank, self.world_size = 0, 0, job.ranks
        else:
            self._meet(job.rendezvous)

    def open_store(self) -> None:
        """A rank connects: serve the store. A job without groups needs no torch here."""
        from paceline._torch_internals import TCPStore

        assert self.listen_socket is not None
        self._store = TCPStore(
            self.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self.listen_socket.detach(),
        )

    def _meet(self, config: RendezvousConfig) -> None:
        """torch's own rendezvous: static with --node-rank, else c10d, which gives out the node
        ranks.
        """
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        static = config.node_rank is not None
        limit = int(config.timeout_s)
        options: dict[str, Any] = {"timeout": limit, "join_timeout": limit}
        if config.node_rank is not None:
            options["rank"] = config.node_rank
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend="static" if static else "c10d",
                endpoint=config.endpoint,
                run_id=config.run_id,
                min_nodes=config.nodes,
                max_nodes=config.nodes,
                **options,
            )
        )
        info = handler.next_rendezvous()
        self._handler = handler  # its store is served as long as it exists
        self.node = info.rank
        self._store = info.store
        counts = self._ranks_of_nodes(info.store)
        self.first_rank, self.world_size = sum(counts[: self.node]), sum(counts)
        # Both kinds serve their store at the endpoint itself: the ranks use the same one.
        self.address, self.port = parse_rendezvous_endpoint(
            config.endpoint, default_port=_ELASTIC_PORT
        )

    def _ranks_of_nodes(self, store: Store) -> list[int]:
        """How many ranks each node has."""
        store.set(f"paceline/ranks/{self.node}", str(self._job.ranks))
        limit = datetime.timedelta(seconds=self._job.rendezvous.timeout_s)
        keys = [f"paceline/ranks/{node}" for node in range(self._job.rendezvous.nodes)]
        store.wait(keys, limit)
        return [int(store.get(key)) for key in keys]

    def publish_failure(self, rank: int, code: int) -> None:
        """Let the other nodes know that a rank of this one failed."""
        if self._job.rendezvous.nodes == 1 or self._store is None:
            return
        # The node that serves the store may be the one that died.
        with contextlib.suppress(Exception):
            text = f"rank {self.first_rank + rank} on node {self.node}: {describe_exit(code)}"
            self._store.set("paceline/failed", text)

    def failure_elsewhere(self) -> str | None:
        """What another node published, or that the store went with the node that served it."""
        if self._store is None:
            return None
        try:
            if self._store.check(["paceline/failed"]):
                text = self._store.get("paceline/failed").decode()
                return None if f"on node {self.node}:" in text else f"another node failed: {text}"
        except Exception as error:
            return f"the node that serves the rendezvous is gone ({type(error).__name__})"
        return None

    def leave(self, failed: bool) -> None:
        """The node that serves the store goes last. With c10d that may be any node, so each waits
        for all.
        """
        if self.listen_socket is not None:
            self.listen_socket.close()
        if self._job.rendezvous.nodes == 1 or failed or self._store is None:
            return
        with contextlib.suppress(Exception):
            self._store.set(f"paceline/left/{self.node}", "1")
            keys = [f"paceline/left/{node}" for node in range(self._job.rendezvous.nodes)]
            self._store.wait(keys, datetime.timedelta(seconds=self._job.rendezvous.timeout_s))
