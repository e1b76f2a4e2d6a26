"""`paceline bench observe`: what being observed costs a training step, ways interleaved in one run.

"off" replaces the recorder's methods by ones that do nothing and leaves the process groups' methods
alone; "page" is what every run has; "page + trace" also records a timeline; "off again" shows how
far two equal ways differ here. The figure that counts is the median, over rounds, of a way's time
over that of "off" in the same round. On a busy machine that is noise; then the last figure tells
more: the time of all notes of a step, each timed on its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["add_arguments", "run"]

_NOTES = (
    "phase",
    "count",
    "enter",
    "at_bucket",
    "leave",
    "bucket_filled",
    "bucket_averaged",
    "scalars",
)
_WAYS = ("off", "off again", "page", "page + trace")
_NOTING = _WAYS[2:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one thread each (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=400, help="steps of each way (default: 400)")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="length of a step (default: 10)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here")


def run(options: argparse.Namespace) -> int:
    import paceline

    arguments = (options.rounds, options.step_ms)
    found = paceline.spawn(_measure, arguments, options.ranks, env={"PACELINE_QUIET": "1"})[0]
    print(
        f"one step of {found['off_ms']:.2f} ms, {options.ranks} ranks x 1 thread, {options.rounds} steps of each way"
    )
    for way in _WAYS[1:]:
        middle, low, high, quiet = found["ratios"][way]
        print(
            f"  {way:<13} median {middle - 1:+.2%} (95% sure: {low - 1:+.2%} to {high - 1:+.2%}); "
            f"quiet steps {quiet - 1:+.2%}"
        )
    print(
        "one note, in nanoseconds:",
        ", ".join(f"{name} {ns:.0f}" for name, ns in found["notes_ns"].items()),
    )
    for way, (number, us) in found["notes"].items():
        print(
            f"notes in a step, {way}: {number}, together {us:.1f} us = {us / found['off_ms'] / 10:.2f}% of a step"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


def _measure(rounds: int, step_ms: float) -> dict[str, Any]:
    import torch.distributed as dist

    import paceline
    from paceline.telemetry.trace_file import TraceWriter

    paceline.init_process_group()
    step = _step_of(step_ms)
    for _ in range(5):
        step()
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        trace = TraceWriter(directory, 0, 1)
        for number in range(rounds):
            # Another order in each round: the machine's moods hit all alike.
            for way in _WAYS[number % 4 :] + _WAYS[: number % 4]:
                with _way(way, trace):
                    step()  # the change of ways itself is not what is measured
                    dist.barrier()
                    times[way].append(_seconds(step, 1))
        found: dict[str, Any] = {
            "off_ms": statistics.median(times["off"]) * 1e3,
            "ratios": {way: _ratio(times[way], times["off"]) for way in _WAYS[1:]},
            "notes_ns": _one_note(directory),
            "notes": {},
        }
        for way in _NOTING:
            with _way(way, trace):
                found["notes"][way] = _time_notes(step)
        trace.close()
    paceline.destroy_process_group()
    return found


def _step_of(step_ms: float) -> Callable[[], None]:
    """A training step of about that length on this machine: the batch is chosen by trying."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import paceline

    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = paceline.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step_with(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    rows = 64
    for _ in range(12):
        x = torch.randn(rows, 128)
        step_with(x)
        seconds = torch.tensor(min(_seconds(lambda x=x: step_with(x), 3) for _ in range(3)))  # type: ignore[misc]  # bound
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if float(seconds) * 1e3 >= step_ms:
            break
        rows = int(rows * min(2.0, max(1.1, step_ms / 1e3 / float(seconds))))
    return lambda: step_with(x)


@contextlib.contextmanager
def _way(way: str, trace: Any) -> Iterator[None]:
    from paceline.diagnostics import session
    from paceline.telemetry.recorder import recorder

    if way == "page + trace":
        recorder.trace = trace
        try:
            yield
        finally:
            recorder.trace = None
    elif way == "page":
        yield
    else:
        with session.paused():
            vars(recorder).update(dict.fromkeys(_NOTES, _nothing))
            try:
                yield
            finally:
                for name in _NOTES:
                    del vars(recorder)[name]


def _nothing(*_: Any, **__: Any) -> None: ...


def _seconds(step: Callable[[], None], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _ratio(times: list[float], against: list[float]) -> tuple[float, float, float, float]:
    """(median of the rounds' ratios, bounds of that median, ratio of the fastest quarters' ends)."""
    ratios = sorted(one / other for one, other in zip(times, against, strict=True))
    count = len(ratios)
    # The order statistics between which a median lies with 95 % certainty.
    spread = round(0.98 * count**0.5)
    low, high = ratios[max(0, count // 2 - spread)], ratios[min(count - 1, count // 2 + spread)]
    quiet = statistics.quantiles(times, n=4)[0] / statistics.quantiles(against, n=4)[0]
    return statistics.median(ratios), low, high, quiet


def _time_notes(step: Callable[[], None]) -> tuple[int, float]:
    """(number, microseconds) of the notes in one step: each note's median over many steps, without
    the clock's own.
    """
    from paceline.telemetry.recorder import recorder

    spent: list[int] = []
    originals = {name: getattr(recorder, name) for name in _NOTES}

    def timed(name: str) -> Callable[..., None]:
        original = originals[name]

        def note(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter_ns()
            original(*args, **kwargs)
            spent.append(time.perf_counter_ns() - start)

        return note

    rounds: list[list[int]] = []
    vars(recorder).update({name: timed(name) for name in _NOTES})
    try:
        for _ in range(50):
            spent.clear()
            step()
            rounds.append(list(spent))
    finally:
        for name in _NOTES:
            del vars(recorder)[name]
    usual = statistics.mode(len(one) for one in rounds)
    alike = [one for one in rounds if len(one) == usual]
    clock = statistics.median(-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(1000))
    return usual, sum(
        statistics.median(column) - clock for column in zip(*alike, strict=True)
    ) / 1e3


def _one_note(directory: str) -> dict[str, float]:
    """Nanoseconds of each kind of note: the best of many rounds."""
    from paceline.diagnostics import session
    from paceline.telemetry.recorder import recorder
    from paceline.telemetry.status_page import Phase, WaitLabel

    place = WaitLabel("all_reduce", "bench", 1, (), "weight, bias").packed()

    def wait() -> None:
        recorder.enter(place, 1, 0)
        recorder.leave()

    kinds: dict[str, Callable[[], None]] = {
        "phase": lambda: recorder.phase(int(Phase.OTHER)),
        "wait": wait,
    }
    found = {name: _best_ns(note) for name, note in kinds.items()}
    with session.trace(directory):
        for name, note in kinds.items():
            found[f"{name} with trace"] = _best_ns(note)
    return found


def _best_ns(note: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter_ns()
        for _ in range(500):
            note()
        best = min(best, (time.perf_counter_ns() - start) / 500)
    return best
