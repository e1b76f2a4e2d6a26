"""`paceline bench observe`: what telemetry costs a training step, modes interleaved in one run.

"off" replaces the recorder's methods by ones that do nothing and leaves the process groups' methods
alone; "page" is what every run has; "page + trace" also records a timeline; "off again" shows how
far two equal modes differ here. The figure that counts is the median, over rounds, of a mode's time
over that of "off" in the same round. On a busy machine that is noise; then the last figure is the
better one: the time of all recorder calls of a step, each timed on its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.diagnostics import session
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase, WaitLabel
from paceline.telemetry.trace_writer import TraceWriter

__all__ = ["add_arguments", "run"]

_METHODS = (
    "phase",
    "count",
    "enter",
    "at_bucket",
    "leave",
    "bucket_filled",
    "bucket_averaged",
    "scalars",
)
_MODES = ("off", "off again", "page", "page + trace")
_RECORDING = _MODES[2:]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, one thread each (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=400, help="steps in each mode (default: 400)")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="length of a step (default: 10)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    import paceline

    arguments = (options.rounds, options.step_ms)
    figures: dict[str, Any] = paceline.spawn(
        _measure, arguments, options.ranks, env={"PACELINE_QUIET": "1"}
    )[0]
    off_ms = figures["off_ms"]
    print(
        f"one step of {off_ms:.2f} ms, {options.ranks} ranks x 1 thread, "
        f"{options.rounds} steps in each mode"
    )
    for mode in _MODES[1:]:
        median, low, high, quiet = figures["ratios"][mode]
        print(
            f"  {mode:<13} median {median - 1:+.2%} (95% confidence: {low - 1:+.2%} to "
            f"{high - 1:+.2%}); quiet steps {quiet - 1:+.2%}"
        )
    calls_ns = ", ".join(f"{name} {ns:.0f}" for name, ns in figures["notes_ns"].items())
    print(f"one recorder call, in nanoseconds: {calls_ns}")
    for mode, (number, us) in figures["notes"].items():
        print(
            f"recorder calls in a step, {mode}: {number}, together {us:.1f} us = "
            f"{us / off_ms / 10:.2f}% of a step"
        )
    return figures


def _measure(rounds: int, step_ms: float) -> dict[str, Any]:
    import torch.distributed as dist

    import paceline

    paceline.init_process_group()
    step = _step_of(step_ms)
    for _ in range(5):
        step()
    times: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        trace = TraceWriter(directory, 0, 1)
        for number in range(rounds):
            # Another order in each round, so that drifts of the machine affect all modes alike.
            for mode in _MODES[number % 4 :] + _MODES[: number % 4]:
                with _mode(mode, trace):
                    # The first step after a change of modes is not measured.
                    step()
                    dist.barrier()
                    times[mode].append(_seconds(step, 1))
        # "notes" is part of the interface: programs read this JSON.
        figures: dict[str, Any] = {
            "off_ms": statistics.median(times["off"]) * 1e3,
            "ratios": {mode: _ratio(times[mode], times["off"]) for mode in _MODES[1:]},
            "notes_ns": _time_calls(directory),
            "notes": {},
        }
        for mode in _RECORDING:
            with _mode(mode, trace):
                figures["notes"][mode] = _time_step_calls(step)
        trace.close()
    paceline.destroy_process_group()
    return figures


def _step_of(step_ms: float) -> Callable[[], None]:
    """A training step of about that length on this machine: the batch size is found by trial."""
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
        trial = functools.partial(step_with, x)
        seconds = torch.tensor(min(_seconds(trial, 3) for _ in range(3)))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if float(seconds) * 1e3 >= step_ms:
            break
        rows = int(rows * min(2.0, max(1.1, step_ms / 1e3 / float(seconds))))
    return lambda: step_with(x)


@contextlib.contextmanager
def _mode(mode: str, trace: TraceWriter) -> Iterator[None]:
    if mode == "page + trace":
        recorder.trace = trace
        try:
            yield
        finally:
            recorder.trace = None
    elif mode == "page":
        yield
    else:
        with session.paused():
            vars(recorder).update(dict.fromkeys(_METHODS, _nothing))
            try:
                yield
            finally:
                for name in _METHODS:
                    del vars(recorder)[name]


def _nothing(*_: Any, **__: Any) -> None: ...


def _seconds(step: Callable[[], None], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _ratio(times: list[float], against: list[float]) -> tuple[float, float, float, float]:
    """(median of the rounds' ratios, its lower and upper bound, ratio of the first quartiles)."""
    ratios = sorted(time_s / off_s for time_s, off_s in zip(times, against, strict=True))
    count = len(ratios)
    # The order statistics between which a median lies with 95 % certainty.
    spread = round(0.98 * count**0.5)
    low, high = ratios[max(0, count // 2 - spread)], ratios[min(count - 1, count // 2 + spread)]
    quiet = statistics.quantiles(times, n=4)[0] / statistics.quantiles(against, n=4)[0]
    return statistics.median(ratios), low, high, quiet


def _time_step_calls(step: Callable[[], None]) -> tuple[int, float]:
    """(number, microseconds) of the recorder calls in one step: each call's median over many steps,
    less the clock's own time.
    """
    spent: list[int] = []
    originals = {name: getattr(recorder, name) for name in _METHODS}

    def timed(name: str) -> Callable[..., None]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter_ns()
            original(*args, **kwargs)
            spent.append(time.perf_counter_ns() - start)

        return call

    rounds: list[list[int]] = []
    vars(recorder).update({name: timed(name) for name in _METHODS})
    try:
        for _ in range(50):
            spent.clear()
            step()
            rounds.append(list(spent))
    finally:
        for name in _METHODS:
            del vars(recorder)[name]
    usual = statistics.mode(len(calls) for calls in rounds)
    alike = [calls for calls in rounds if len(calls) == usual]
    clock = statistics.median(-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(1000))
    return usual, sum(
        statistics.median(column) - clock for column in zip(*alike, strict=True)
    ) / 1e3


def _time_calls(directory: str) -> dict[str, float]:
    """Nanoseconds of each kind of recorder call: the best of many rounds."""
    label = WaitLabel("all_reduce", "bench", 1, (), "weight, bias").packed()

    def wait() -> None:
        recorder.enter(label, 1, 0)
        recorder.leave()

    kinds: dict[str, Callable[[], None]] = {
        "phase": lambda: recorder.phase(int(Phase.OTHER)),
        "wait": wait,
    }
    best = {name: _best_ns(call) for name, call in kinds.items()}
    with session.trace(directory):
        for name, call in kinds.items():
            best[f"{name} with trace"] = _best_ns(call)
    return best


def _best_ns(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter_ns()
        for _ in range(500):
            call()
        best = min(best, (time.perf_counter_ns() - start) / 500)
    return best
