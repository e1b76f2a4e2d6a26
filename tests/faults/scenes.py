"""How a rank fails while the others wait for it, and what the others report afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from tests.harness import Outcome, init_group, run_ranks
from tests.harness.ranks import RENDEZVOUS

# Noticed, not waited for until the group gives up. The engine takes milliseconds; but other tests
# have these cores, too, and a rank may not run for seconds.
DETECTION_S = 20.0
GROUP_TIMEOUT = timedelta(seconds=60)  # far beyond: a test that passes has not waited for it


@dataclasses.dataclass
class Report:
    """What one surviving rank saw."""

    error: str
    message: str
    took_s: float  # from the event to the exception
    rank: int | None = None
    pid: int | None = None
    exitcode: int | None = None
    missing: tuple[int, ...] = ()
    victim_pid: int = 0
    left_over: tuple[str, ...] = ()


def event_file() -> pathlib.Path:
    """Where the failing rank writes when it happened. `time.monotonic` is one clock for all
    processes.
    """
    return pathlib.Path(os.environ[RENDEZVOUS] + ".event")


def mark_event() -> None:
    event_file().write_text(f"{time.monotonic()} {os.getpid()}")


def die_by(number: int) -> Callable[[], None]:
    """The victim ends by a signal, without a core file."""

    def die() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mark_event()
        os.kill(os.getpid(), number)

    return die


def exit_with(code: int) -> Callable[[], None]:
    def leave() -> None:
        mark_event()
        os._exit(code)

    return leave


def native_left_over() -> tuple[str, ...]:
    """Mappings, descriptors and threads of the engine that this process still has, after a grace
    for ending threads.
    """
    deadline = time.monotonic() + 2.0
    while (left := _mappings() + _descriptors() + _threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return tuple(left)


def _mappings() -> list[str]:
    return [
        line
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if "memfd:paceline" in line
    ]


def _descriptors() -> list[str]:
    descriptors = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if "memfd:paceline" in target or "pidfd" in target:
                descriptors.append(f"descriptor {entry.name} -> {target}")
    return descriptors


def _threads() -> list[str]:
    tasks = {int(task.name) for task in pathlib.Path("/proc/self/task").iterdir()}
    return [f"thread {task}" for task in sorted(tasks - _TASKS_BEFORE)]


_TASKS_BEFORE: set[int] = set()


def remember_threads() -> None:
    """Threads there are before the group: torch has some of its own."""
    _TASKS_BEFORE.update(int(task.name) for task in pathlib.Path("/proc/self/task").iterdir())


def report_of(call: Callable[[], Any]) -> Report:
    """Make the call, which must fail, destroy the group, and report what was seen."""
    try:
        call()
    except PacelineError as error:
        now = time.monotonic()
        event, victim_pid = event_file().read_text().split()
        facts = {
            name: getattr(error, name)
            for name in ("rank", "pid", "exitcode", "missing")
            if hasattr(error, name)
        }
        report = Report(
            type(error).__name__,
            str(error),
            now - float(event),
            victim_pid=int(victim_pid),
            **facts,
        )
    else:
        raise AssertionError("the call succeeded although a peer was gone")
    dist.destroy_process_group()
    report.left_over = native_left_over()
    return report


def strike(
    world: int,
    victim: int,
    fault: Callable[[], None],
    call: Callable[[int, int], Any],
    timeout: timedelta = GROUP_TIMEOUT,
    during: bool = False,
) -> list[Outcome]:
    """Run `call(rank, victim)` on all ranks but the victim, on which `fault()` is called while they
    wait for it.

    With `during` the victim makes the call too, over and over, and a thread calls `fault()` in the
    middle.
    """

    def body(rank: int, world: int) -> Report | None:
        remember_threads()
        init_group("paceline", timeout=timeout)
        dist.barrier()
        if rank != victim:
            return report_of(lambda: call(rank, victim))
        if during:
            threading.Timer(0.1, fault).start()
            call(rank, victim)
        else:
            time.sleep(0.2)  # the others are waiting now
            fault()
        return None

    return run_ranks(world, body, check=False, timeout=90)


def survivors(outcomes: list[Outcome], victim: int) -> dict[int, Report]:
    """The reports, after making sure that every survivor made one and left nothing behind."""
    reports = {}
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.error is None, (
            f"rank {outcome.rank}: {outcome.error!r} {outcome.error.__notes__}"
        )
        assert outcome.value.left_over == (), (
            f"rank {outcome.rank} left behind {outcome.value.left_over}"
        )
        reports[outcome.rank] = outcome.value
    return reports


# --- calls in which a rank can wait ---------------------------------------------------------------
def _list(world: int) -> list[torch.Tensor]:
    return [torch.empty(10) for _ in range(world)]


def all_reduce(rank: int, victim: int) -> None:
    dist.all_reduce(torch.ones(10))


def barrier(rank: int, victim: int) -> None:
    dist.barrier()


def broadcast(rank: int, victim: int) -> None:
    dist.broadcast(torch.ones(10), src=victim)


def all_gather(rank: int, victim: int) -> None:
    dist.all_gather(_list(dist.get_world_size()), torch.ones(10))


def all_to_all(rank: int, victim: int) -> None:
    world = dist.get_world_size()
    dist.all_to_all(_list(world), _list(world))


def reduce_scatter(rank: int, victim: int) -> None:
    dist.reduce_scatter(torch.empty(10), _list(dist.get_world_size()))


def recv(rank: int, victim: int) -> None:
    dist.recv(torch.empty(10), src=victim)


def send(rank: int, victim: int) -> None:
    # More than the buffers hold: it waits for the receiver.
    dist.send(torch.empty(1_000_000), dst=victim)


def async_all_reduce(rank: int, victim: int) -> None:
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def future(rank: int, victim: int) -> None:
    dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()


def large_all_reduces(rank: int, victim: int) -> None:
    data = torch.ones(8_000_000)
    while True:
        dist.all_reduce(data)
