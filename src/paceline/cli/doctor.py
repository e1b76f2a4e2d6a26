"""`paceline doctor`: what this machine and installation offer, and whether they work. The output is
meant for bug reports.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from paceline._version import __version__
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    import torch

__all__ = ["add_arguments", "run"]

_SMOKE_RANKS = 2
_SMALL_SHM_BYTES = 64 << 20
_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KUBERNETES_SERVICE_HOST", "RAY_ADDRESS",
)  # fmt: skip
_PREFIXES = (
    "PACELINE_",
    "SLURM_STEP",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD",
    "PMI_",
    "TORCHELASTIC_",
    "PET_",
    "GLOO_",
    "NCCL_",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", nargs="?", type=pathlib.Path, metavar="DIR",
        help="what `paceline run --trace DIR` recorded: also say what its optimizer costs, or with "
        "--hosts how it will scale",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--no-smoke-test", action="store_true", help="leave out the test that starts two ranks"
    )
    hosts = parser.add_argument_group(
        "several hosts (started on every rank, by any launcher; rank 0 reports)"
    )
    hosts.add_argument(
        "--hosts", action="store_true",
        help="measure what is between and inside the hosts of this job instead",
    )  # fmt: skip
    hosts.add_argument(
        "--parameters", type=float, metavar="N",
        help="with --hosts: also say how a model of N float32 parameters will scale, e.g. 17e6",
    )  # fmt: skip
    hosts.add_argument(
        "--step-ms", type=float, metavar="MS", help="what a step of that model takes on one host"
    )


_State = Literal["info", "ok", "warning", "failed"]


@dataclasses.dataclass(frozen=True)
class _Finding:
    """One line: a fact, or a check that passed, warns or failed."""

    topic: str
    value: str
    state: _State = "info"
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)


def run(options: argparse.Namespace) -> int:
    if options.hosts:
        from paceline.cli.doctor_hosts import run_between_hosts

        return run_between_hosts(options)
    checks: list[Callable[[], _Finding]] = [
        _versions, _system, _cores, _threads, _memory, _shared_memory, _native_core, _backends,
        _accelerator, _environment, _optimizers,
    ]  # fmt: skip
    if options.trace is not None:

        def optimizers_of_the_run() -> _Finding:
            return _optimizers_of(options.trace)

        checks.append(optimizers_of_the_run)
    if not options.no_smoke_test:
        checks.append(_smoke_test)
    findings = [_guarded(check) for check in checks]
    healthy = all(finding.state != "failed" for finding in findings)
    if options.json:
        print(
            json.dumps(
                {"healthy": healthy, "findings": [dataclasses.asdict(f) for f in findings]},
                indent=1,
            )
        )
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def _guarded(check: Callable[[], _Finding]) -> _Finding:
    """A check that raises is a finding, not the end of the report."""
    try:
        return check()
    except Exception as error:
        return _Finding(
            check.__name__.strip("_").replace("_", " "),
            f"{type(error).__name__}: {error}",
            "failed",
        )


def _print(findings: list[_Finding], healthy: bool) -> None:
    marks = {"info": "  ", "ok": "ok", "warning": "! ", "failed": "X "}
    width = max(len(finding.topic) for finding in findings)
    print("paceline doctor")
    for finding in findings:
        first, *rest = finding.value.splitlines() or [""]
        print(f"{marks[finding.state]} {finding.topic:<{width}}  {first}")
        for line in rest:
            print(f"   {'':<{width}}  {line}")
    print("healthy" if healthy else "NOT healthy: see the lines marked X")


def _versions() -> _Finding:
    facts = {"paceline": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "ray"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return _Finding(
        "versions", ", ".join(f"{name} {value}" for name, value in facts.items()), facts=facts
    )


def _system() -> _Finding:
    facts = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "executable": sys.executable,
    }
    return _Finding("system", f"{facts['system']}, {facts['machine']}", facts=facts)


def _cores() -> _Finding:
    from paceline.launch.resources import allowed_cores, cpu_quota, usable_cores

    allowed, quota = sorted(allowed_cores()), cpu_quota()
    facts = {"cores": os.cpu_count(), "allowed": allowed, "quota": quota, "usable": usable_cores()}
    limit = "no quota" if quota is None else f"quota {quota:g} cores"
    return _Finding(
        "cores",
        f"{facts['usable']} usable: {len(allowed)} of {facts['cores']} allowed, {limit}",
        facts=facts,
    )


def _threads() -> _Finding:
    import torch

    from paceline.launch.resources import threads_for

    ranks = {n: threads_for(n) for n in (1, 2, 4)}
    value = f"torch uses {torch.get_num_threads()}; per rank: " + ", ".join(
        f"{n} ranks {t}" for n, t in ranks.items()
    )
    return _Finding("threads", value, facts={"torch": torch.get_num_threads(), "per_rank": ranks})


def _memory() -> _Finding:
    lines = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    total, free = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts = {"total_bytes": total, "available_bytes": free, "lockable_bytes": locked}
    return _Finding("memory", f"{_size(free)} available of {_size(total)}", facts=facts)


def _shared_memory() -> _Finding:
    usage = shutil.disk_usage("/dev/shm")
    facts = {"total_bytes": usage.total, "free_bytes": usage.free}
    value = f"{_size(usage.free)} free of {_size(usage.total)} in /dev/shm"
    if usage.free < _SMALL_SHM_BYTES:
        return _Finding(
            "shared memory",
            f"{value}: too little; in Docker use --shm-size or --ipc=host",
            "warning",
            facts,
        )
    return _Finding("shared memory", value, "ok", facts)


def _native_core() -> _Finding:
    from paceline.core import native_status

    status = native_status()
    facts = dataclasses.asdict(status)
    if status.available:
        return _Finding("native core", f"works, {status.instruction_set}", "ok", facts)
    command = f"\nbuilt with: {status.build_command}" if status.build_command else ""
    return _Finding(
        "native core", f"Gloo is used instead: {status.reason}{command}", "warning", facts
    )


def _backends() -> _Finding:
    import torch.distributed as dist

    facts = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "xccl": dist.is_xccl_available(),
        "paceline": "paceline" in dist.Backend.backend_list,
    }
    return _Finding(
        "backends", ", ".join(name for name, available in facts.items() if available), facts=facts
    )


def _accelerator() -> _Finding:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return _Finding("accelerator", "none", facts={"type": None, "count": 0})
    count = torch.accelerator.device_count()
    return _Finding(
        "accelerator", f"{count} x {device.type}", facts={"type": device.type, "count": count}
    )


def _environment() -> _Finding:
    from paceline.rank_env import find_rank_env

    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    shown = "".join(f"\n{name}={value}" for name, value in variables.items())
    try:
        env = find_rank_env(os.environ)
    except ConfigError as error:
        return _Finding("environment", f"{error}{shown}", "failed", {"variables": variables})
    facts = {"variables": variables, **dataclasses.asdict(env)}
    return _Finding(
        "environment", f"{env.source}: rank {env.rank} of {env.world_size}{shown}", facts=facts
    )


def _optimizers() -> _Finding:
    """What a step costs here, by whose optimizer it is."""

    times = _step_ms("AdamW", [1_000_000])
    return _Finding(
        "optimizers",
        f"AdamW step of a million parameters on the CPU: {_listed_ms(times)}",
        facts=times,
    )


def _optimizers_of(directory: pathlib.Path) -> _Finding:
    """Whether a recorded run uses torch's slow loop, and what another optimizer would save."""
    import torch

    from paceline.diagnostics.timeline import Timeline
    from paceline.diagnostics.trace_reader import read_traces

    topic = f"optimizers of {directory}"
    timeline = Timeline(read_traces(directory))
    slow = timeline.slow_optimizer()
    if slow is None:
        seen = {facts.describe() for trace in timeline.traces for facts in trace.optimizers}
        known = f": {', '.join(sorted(seen))}" if seen else " was recorded"
        return _Finding(topic, f"none that torch steps with a loop on the CPU{known}", "ok")
    facts = slow.facts
    measured = min(facts.elements, _MOST_ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(facts.threads)
    try:
        each = max(1, measured // facts.tensors)
        times = _step_ms(facts.name, [each] * facts.tensors, dict(facts.options))
    finally:
        torch.set_num_threads(threads)
    default, ours = times[_TORCH_DEFAULT], times[_OURS]
    saved = slow.share * (1 - ours / default)
    size = "" if measured == facts.elements else f", {measured / facts.elements:.0%} of the size"
    value = (
        f"{slow.describe()}\nA step like it, measured on this machine now{size}: "
        f"{_listed_ms(times)}.\n"
    )
    if saved <= 0:
        return _Finding(topic, f"{value}Another optimizer would save nothing.", "ok", times)
    most = "About" if slow.is_only_one else "At most"
    value += (
        f"{most} {saved:.0%} of the ranks' time would be saved by paceline.optim.{facts.name}, "
        "if the machine is the one of the run and memory is as busy."
    )
    return _Finding(topic, value, "warning", {**times, "share": slow.share, "saved": saved})


_TORCH_DEFAULT, _OURS = "torch's default", "paceline.optim"
_MOST_ELEMENTS = 20_000_000
_NO_OPTIONS: Mapping[str, Any] = {}


def _step_ms(
    name: str, sizes: list[int], options: Mapping[str, Any] = _NO_OPTIONS
) -> dict[str, float]:
    """The shortest step of this kind of optimizer over tensors of these sizes, by whose code it
    is.
    """
    import torch

    import paceline.optim

    stock: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    ours: Callable[..., torch.optim.Optimizer] = getattr(paceline.optim, name)
    makers: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
        _TORCH_DEFAULT: lambda parameters: stock(parameters, **options),
        "torch's fused=True": lambda parameters: stock(parameters, fused=True, **options),
        _OURS: lambda parameters: ours(parameters, **options),
    }
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return {code: _best_step_ms(make(parameters)) for code, make in makers.items()}


def _best_step_ms(optimizer: torch.optim.Optimizer) -> float:
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def _listed_ms(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())


def _smoke_test() -> _Finding:
    from paceline.launch.spawn import spawn

    began = time.monotonic()
    try:
        results = spawn(_average_on_ranks, (), _SMOKE_RANKS, env=_SMOKE_ENVIRON, quiet=True)
    except PacelineError as error:
        return _Finding("smoke test", f"{_SMOKE_RANKS} ranks: {error}", "failed")
    backend, values = results[0][0], [value for _, value in results]
    facts = {"backend": backend, "values": values, "seconds": round(time.monotonic() - began, 2)}
    if values != [1.5] * _SMOKE_RANKS:
        return _Finding(
            "smoke test",
            f"{backend}: the average of 1 and 2 should be 1.5 but is {values}",
            "failed",
            facts,
        )
    value = (
        f"{_SMOKE_RANKS} ranks averaged a tensor over {backend}, {facts['seconds']} s with start-up"
    )
    return _Finding("smoke test", value, "ok", facts)


_SMOKE_ENVIRON = {"PACELINE_QUIET": "1", "PACELINE_JOIN_TIMEOUT": "60"}


def _average_on_ranks() -> tuple[str, float]:
    import torch
    import torch.distributed as dist

    from paceline.launch.init import destroy_process_group, init_process_group, rank

    init_process_group()
    value = torch.tensor([rank() + 1.0])
    dist.all_reduce(value)
    backend = dist.get_backend()
    destroy_process_group()
    return backend, value.item() / _SMOKE_RANKS


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
