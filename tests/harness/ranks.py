"""`run_ranks(n, fn)`: run a function on N real processes and bring back its results, or its first
error.

A fork server that has torch loaded starts the ranks, so that a rank costs milliseconds instead of
an import of torch. Rendezvous is a file in a temporary directory: no ports.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

RENDEZVOUS = "PACELINE_TEST_RENDEZVOUS"
# Ranks believe to be on so many hosts, in all tests: `make test-hosts`.
HOSTS = "PACELINE_TEST_HOSTS"
_STACK_SIGNAL = signal.SIGUSR1

_context = multiprocessing.get_context("forkserver")
# What most ranks would import anyway, hundreds of times in a run of the suite. torch._dynamo: the
# first optimizer a process makes imports it, for more than a second.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "pytest",
    "hypothesis",
    "paceline.checkpoint",
    "paceline.data",
    "paceline.ddp",
    "paceline.diagnostics.session",
    "paceline.dp",
    "paceline.launch.init",
    "tests.harness.ranks",
]
_context.set_forkserver_preload(_PRELOAD)

# Stock DDP drops its group while it holds the GIL. If that was the last reference, Gloo's
# destructor joins a thread that wants the GIL for its last piece of work: a deadlock, seen once in
# some hundred runs. So ranks never drop it.
_kept_groups: list[Any] = []


class RankDied(Exception):
    """A rank ended without a result."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        super().__init__(f"rank {rank} ended with exit code {exitcode} and no result")
        self.rank, self.exitcode = rank, exitcode


class RanksTimedOut(Exception):
    """Ranks were still running at the time limit; the message holds every rank's Python stack."""


@dataclasses.dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    pid: int
    value: Any = None
    error: BaseException | None = None
    ended_at: float = 0.0  # time.monotonic() in the rank when it returned or raised
    exitcode: int | None = None


def free_rendezvous() -> str:
    """A fresh `file://` address for torch.distributed; `run_ranks` removes it afterwards."""
    return f"file://{os.environ[RENDEZVOUS]}"


def init_group(backend: str = "gloo", **options: Any) -> None:
    """Join the default group of this `run_ranks` call."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, init_method=free_rendezvous(), rank=rank, world_size=world, **options
    )
    if "gloo" in backend:
        _kept_groups.append(dist.group.WORLD)


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    on_start: Callable[[list[int]], None] | None = None,
    uncaught: bool = False,
) -> list[Any]:
    """Run `fn(rank, world, *args)` on `world` processes.

    Returns each rank's result. If ranks fail, raises the error that came first in time, with the
    others as notes. With `check=False` returns an `Outcome` per rank instead, for tests about
    failing. `on_start` gets the pids. With `uncaught` nobody catches what a rank raises: it ends as
    any process of multiprocessing does, without an error here.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
        run = _run_uncaught if uncaught else _run_rank
        ranks = [
            _start(run, rank, world, fn, args, env or {}, pathlib.Path(directory))
            for rank in range(world)
        ]
        try:
            if on_start is not None:
                on_start([rank.process.pid or 0 for rank in ranks])
            outcomes = _collect(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
    return outcomes if not check else _results(outcomes)


@dataclasses.dataclass
class _Rank:
    index: int
    process: Any
    pipe: Connection
    stacks: pathlib.Path

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()


def _start(
    run: Callable[..., None],
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: Any,
    env: Mapping[str, str],
    directory: pathlib.Path,
) -> _Rank:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        RENDEZVOUS: str(directory / "rendezvous"),
        **env,
    }
    ours, theirs = _context.Pipe(duplex=False)
    stacks = directory / f"stacks-{rank}"
    payload = cloudpickle.dumps((fn, (rank, world, *args)))
    process = _context.Process(
        target=run, args=(payload, theirs, variables, str(stacks)), daemon=True
    )
    process.start()
    theirs.close()
    return _Rank(rank, process, ours, stacks)


def _run_rank(payload: bytes, pipe: Connection, variables: Mapping[str, str], stacks: str) -> None:
    with open(stacks, "w") as stack_file:
        faulthandler.register(_STACK_SIGNAL, file=stack_file, all_threads=True)
        os.environ.update(variables)
        import torch

        torch.set_num_threads(1)
        _spread_over_hosts()
        try:
            fn, args = cloudpickle.loads(payload)
            message: tuple[float, Any, Any] = (time.monotonic(), fn(*args), None)
            message = (time.monotonic(), message[1], None)
        except BaseException as error:
            now = time.monotonic()
            error.add_note(f"[rank {variables['RANK']}] {traceback.format_exc()}")
            message = (now, None, error)
        pipe.send_bytes(_dump(message))
        pipe.close()


def _spread_over_hosts() -> None:
    """Give this rank the identity of another host, if the tests are to run on several."""
    if hosts := int(os.environ.get(HOSTS, "0")):
        from paceline.backend import create

        host = int(os.environ["RANK"]) * hosts // int(os.environ["WORLD_SIZE"])
        create.host_identity = lambda: f"host{host}"


def _run_uncaught(
    payload: bytes, pipe: Connection, variables: Mapping[str, str], stacks: str
) -> None:
    sys.stderr = open(stacks, "w")  # noqa: SIM115 - for the traceback that multiprocessing prints
    faulthandler.register(_STACK_SIGNAL, file=sys.stderr, all_threads=True)
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    _spread_over_hosts()
    fn, args = cloudpickle.loads(payload)
    value = fn(*args)
    pipe.send_bytes(_dump((time.monotonic(), value, None)))
    pipe.close()


def _dump(message: tuple[float, Any, Any]) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(message)
        # Fails for an exception whose constructor takes other arguments than it stores.
        cloudpickle.loads(data)
    except Exception:
        when, value, error = message
        stand_in = RuntimeError(f"not picklable: {error!r} / {value!r}")
        for note in getattr(error, "__notes__", []):
            stand_in.add_note(note)
        data = cloudpickle.dumps((when, None, stand_in))
    return data


def _collect(ranks: list[_Rank], timeout: float) -> list[Outcome]:
    outcomes = [Outcome(rank.index, rank.process.pid) for rank in ranks]
    pending = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksTimedOut(_stacks_of(ranks, list(pending.values()), outcomes, timeout))
        for pipe in ready:
            rank = pending.pop(pipe)  # type: ignore[index]
            _finish(rank, outcomes[rank.index], deadline)
    return outcomes


def _finish(rank: _Rank, outcome: Outcome, deadline: float) -> None:
    try:
        outcome.ended_at, outcome.value, outcome.error = cloudpickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        outcome.ended_at = time.monotonic()
    rank.process.join(max(1.0, deadline - time.monotonic()))
    outcome.exitcode = rank.process.exitcode
    if outcome.error is None and outcome.exitcode != 0:
        outcome.error = RankDied(rank.index, outcome.exitcode)


def _stacks_of(
    ranks: list[_Rank], late: list[_Rank], outcomes: list[Outcome], timeout: float
) -> str:
    for rank in late:
        os.kill(rank.process.pid, _STACK_SIGNAL)
    time.sleep(0.5)  # the handler writes from C at once; this is for a loaded machine
    parts = [f"{len(late)} of {len(ranks)} ranks still running after {timeout:g} s"]
    for rank in ranks:
        if rank in late:
            parts.append(
                f"--- rank {rank.index}, pid {rank.process.pid}:\n{rank.stacks.read_text()}"
            )
        else:
            notes = "\n".join(getattr(outcomes[rank.index].error, "__notes__", []))
            parts.append(f"--- rank {rank.index} ended: {outcomes[rank.index].error!r}\n{notes}")
    return "\n".join(parts)


def _results(outcomes: list[Outcome]) -> list[Any]:
    failed = sorted((o for o in outcomes if o.error is not None), key=lambda o: o.ended_at)
    if failed:
        first = failed[0].error
        assert first is not None
        for other in failed[1:]:
            notes = "\n".join(getattr(other.error, "__notes__", []))
            first.add_note(f"and later rank {other.rank}: {other.error!r}\n{notes}")
        raise first
    return [o.value for o in outcomes]
