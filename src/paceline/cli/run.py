"""`paceline run`: start a script on several ranks of this host."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import pathlib
import signal
import sys
import uuid
from typing import TYPE_CHECKING

from paceline._linux import adopt_orphans
from paceline.errors import ConfigError, describe_exit
from paceline.launch.line_prefix import FIELDS
from paceline.launch.messages import (
    PRELOAD,
    ElasticConfig,
    RendezvousConfig,
    ReportKind,
    Script,
    exit_code_for_shell,
)
from paceline.launch.output import Output
from paceline.launch.resources import count_ranks, threads_for
from paceline.launch.screen import Screen
from paceline.launch.supervisor import Failure, JobResult, Plan, Supervisor
from paceline.telemetry.variables import RUN_ID, SCRIPT, STALL_AFTER, TRACE, stall_after_s

if TYPE_CHECKING:
    from paceline.diagnostics.run_summary import RunSummary

__all__ = ["add_arguments", "run"]

_MAX_RESTARTS = 100
_STOPPED = "PACELINE_STOPPED_S"  # how long a rank of an elastic job may be stopped
_HOST_SILENCE = "PACELINE_HOST_SILENCE_S"  # how long a host of one may not be heard
_SHORTEST_SILENCE_S = 0.5
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "paceline run [options] [--] train.py [arguments]\n"
        "       paceline run [options] -m module [arguments]"
    )
    parser.add_argument(
        "-n", "--nproc", "--nproc-per-node", "--nproc_per_node", dest="ranks", metavar="N",
        default=_torchrun("NPROC_PER_NODE", ""),
        help="ranks on this host, or auto: one per accelerator, else one per core (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank-N.log",
    )
    parser.add_argument(
        "--quiet-ranks",
        action="store_true",
        help="show the output of rank 0 only (and every failure)",
    )
    parser.add_argument(
        "--grace", default="30", metavar="SECONDS",
        help="time ranks get to end after Ctrl-C or SIGTERM before they are killed (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--stall-after", metavar="SECONDS",
        help="report who holds the job up when a rank waits this long; 0: never "
        "(default: PACELINE_STALL_AFTER, else 30)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=pathlib.Path, metavar="DIR",
        help="record a timeline of every rank in DIR; `paceline report DIR` shows it",
    )  # fmt: skip
    parser.add_argument(
        "--log-prefix", metavar="TEMPLATE",
        help="what to show before each line of a rank, such as '{host} {rank}: ', with any of "
        f"{' '.join(f'{{{name}}}' for name in FIELDS)}; '' for nothing (default: '[{{rank}}] ')",
    )  # fmt: skip
    parser.add_argument(
        "--no-summary", action="store_true",
        help="do not show the card with speed and waiting at the end of a training",
    )  # fmt: skip
    parser.add_argument(
        "--summary-json", type=pathlib.Path, metavar="FILE",
        help="also write what is on the card to FILE; `paceline compare` reads it",
    )  # fmt: skip
    parser.add_argument(
        "--start-method", choices=("fork", "spawn"), default="fork",
        help="fork: from one process that has torch loaded, fast; spawn: an interpreter per rank "
        "(default: fork)",
    )  # fmt: skip
    parser.add_argument(
        "--preload", default=",".join(PRELOAD), metavar="MODULES",
        help="imported once before ranks are forked; add what your script takes long to import "
        "(default: %(default)s)",
    )  # fmt: skip
    elastic = parser.add_argument_group(
        "elastic jobs (the script trains with paceline.Training; bits are those of any other run)"
    )
    elastic.add_argument(
        "--elastic", metavar="MIN:MAX",
        help="ranks that die are replaced, and may come and go: never fewer than MIN at work, "
        "never more than MAX (with -n: how many to begin with; default: MAX). With "
        "--rdzv-endpoint the ranks of all hosts together",
    )  # fmt: skip
    elastic.add_argument(
        "--max-restarts", metavar="N",
        help="replace at most N ranks in all; then go on with those that are left, down to MIN "
        f"(default: {_MAX_RESTARTS})",
    )  # fmt: skip
    elastic.add_argument(
        "--restart-on-error", action="store_true",
        help="also replace a rank whose script raised an exception, instead of ending the job",
    )  # fmt: skip
    nodes = parser.add_argument_group(
        "several hosts (start the same command on each; names as in torchrun)"
    )
    nodes.add_argument(
        "--nnodes",
        default=_torchrun("NNODES", "1"),
        metavar="N",
        help="number of hosts; of an elastic job: to begin with, others may join later",
    )
    nodes.add_argument(
        "--node-rank",
        "--node_rank",
        default=_torchrun("NODE_RANK", ""),
        metavar="I",
        help="this host's number; 0 serves the rendezvous",
    )
    nodes.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default=_torchrun("RDZV_ENDPOINT", ""),
        metavar="HOST:PORT",
        help="where the hosts meet: an address of one of them",
    )  # fmt: skip
    nodes.add_argument(
        "--rdzv-id",
        "--rdzv_id",
        default=_torchrun("RDZV_ID", "none"),
        metavar="ID",
        help="a name for the job",
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _torchrun(name: str, default: str) -> str:
    """torchrun's own variables for its options, which Kubernetes' training operator sets."""
    return os.environ.get(f"PET_{name}", default)


def run(options: argparse.Namespace) -> int:
    _open_closed_streams()
    _check_summary_file(options.summary_json)
    plan = _plan(options)
    screen = Screen()
    output = Output(
        plan.ranks,
        screen.write,
        colour=screen.colour,
        prefix=options.log_prefix,
        shown=frozenset({0}) if options.quiet_ranks else None,
        log_dir=options.log_dir,
        has_room=screen.has_room,
    )
    supervisor = Supervisor(plan, output)
    screen.connect(
        on_broken_pipe=lambda: supervisor.ask_to_stop(signal.SIGPIPE), on_room=supervisor.wake
    )
    _pass_signals_to(supervisor)
    adopt_orphans()
    result = supervisor.run()
    timeline = None if options.trace is None else _write_timeline(options.trace, screen)
    code = _report_result(result, plan, output, screen)
    _sum_up(options, result, plan, code, timeline, screen)
    output.close()
    is_shown = screen.flush(lambda: supervisor.stop_signal is not None)
    if not is_shown and result.stopped_by is None and supervisor.stop_signal is not None:
        # The job was over, and the launcher only waited for its reader.
        return exit_code_for_shell(-supervisor.stop_signal)
    return code


def _write_timeline(directory: pathlib.Path, screen: Screen) -> str | None:
    """Also after a failure: then it shows what led there."""
    from paceline.diagnostics.report_page import write_report

    try:
        return str(write_report(directory))
    except ConfigError as error:
        screen.report(f"no timeline: {error}")
    return None


def _sum_up(
    options: argparse.Namespace,
    result: JobResult,
    plan: Plan,
    code: int,
    timeline: str | None,
    screen: Screen,
) -> None:
    """What the job has done, after how it ended. A job that never trained has nothing to sum up."""
    # Imported now: a job that is starting does without.
    from paceline.cli.summary_card import render_card

    summary = _summary(result, plan, code, timeline)
    is_read = result.stopped_by != signal.SIGPIPE  # else `| head` has read enough
    if summary.steps and is_read and not options.no_summary:
        screen.show(render_card(summary, width=screen.width, colour=screen.colour))
    elif timeline is not None:
        screen.report(f"timeline: {timeline}")
    if options.summary_json is not None:
        try:
            options.summary_json.write_text(json.dumps(summary.dump(), indent=1) + "\n")
        except OSError as error:
            screen.report(f"no summary: {options.summary_json} cannot be written: {error.strerror}")


def _summary(result: JobResult, plan: Plan, code: int, timeline: str | None) -> RunSummary:
    from paceline.diagnostics.page_reader import parse_page
    from paceline.diagnostics.run_summary import ElasticFigures, RankLife, RunSummary

    history = result.history
    pages = [(left, parse_page(left.page)) for left in history.pages]
    # A replacement that comes when the job is over has neither joined it nor is it lost.
    trained = [(left, page) for left, page in pages if page is not None and page.step]
    lives = [RankLife(result.first_rank + left.rank, page, left.host) for left, page in trained]
    elastic = None
    if plan.elastic is not None:
        lost = sum(left.is_lost for left, _ in trained)
        # The first host hears of the ranks of all, another one of its own.
        is_first = result.first_rank == 0
        began = plan.elastic.start_ranks * (plan.elastic.hosts if is_first else 1)
        joined = max(0, len(trained) - began)
        elastic = ElasticFigures(history.generations, lost, joined, of_this_host=not is_first)
    outcome = "finished" if code == 0 else "failed"
    if result.stopped_by is not None:
        outcome = "stopped"
    script = plan.environ[SCRIPT]
    return RunSummary.of_pages(
        lives, script=script, outcome=outcome, elastic=elastic, timeline=timeline
    )


def _check_summary_file(path: pathlib.Path | None) -> None:
    """Before the job: after it, it would be too late."""
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"--summary-json should be a file that can be written, but {str(path)!r} cannot"
        )


def _open_closed_streams() -> None:
    """Give closed standard streams /dev/null, or a pipe of ours would get the number 0, 1 or 2."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(opened, True)


def _plan(options: argparse.Namespace) -> Plan:
    command_line = list(options.command_line)
    if command_line[:1] == ["--"]:
        command_line = command_line[1:]
    if not command_line:
        raise ConfigError(
            "nothing to run: give a script (paceline run train.py) or a module (paceline run -m "
            "package.train)"
        )
    target, *arguments = command_line
    # As python does: the script's own directory, or with -m the current one, comes first.
    if options.module:
        first = _current_directory()
        _check_module(target, first)
    else:
        _check_script(target)
        first = os.path.dirname(os.path.realpath(target))
        if os.path.isdir(target):
            first = os.path.abspath(target)  # a directory with a __main__.py
    elastic = _elastic_config(options)
    ranks = count_ranks(options.ranks or "auto")
    if elastic is not None:
        ranks = elastic.start_ranks if options.rdzv_endpoint else elastic.max_ranks
    return Plan(
        work=Script(target, tuple(arguments), options.module),
        ranks=ranks,
        threads=threads_for(ranks),
        launcher="paceline run",
        path=(first, *_path_without_ours()),
        rendezvous=_rendezvous_config(options),
        start_method=options.start_method,
        preload=_preloaded(options.preload, is_elastic=elastic is not None),
        environ={
            RUN_ID: uuid.uuid4().hex,
            SCRIPT: os.path.basename(target),
            **_trace_directory(options),
        },
        stall_after_s=stall_after_s(options.stall_after or os.environ.get(STALL_AFTER)),
        grace_s=_seconds("--grace", options.grace),
        owns_process=True,
        elastic=elastic,
    )


def _preloaded(names: str, *, is_elastic: bool) -> tuple[str, ...]:
    """The modules to load before ranks are forked. In an elastic job the others train while a
    replacement starts, so whatever every script needs there is in the image.
    """
    own = ("paceline.training.training",) if names and is_elastic else ()
    return (*filter(None, names.split(",")), *own)


def _elastic_config(options: argparse.Namespace) -> ElasticConfig | None:
    if options.elastic is None:
        for option, is_given in (
            ("--max-restarts", options.max_restarts is not None),
            ("--restart-on-error", options.restart_on_error),
        ):
            if is_given:
                raise ConfigError(f"{option} needs --elastic MIN:MAX: other jobs restart nothing")
        return None
    low, high = _elastic_range(options.elastic)
    if options.rdzv_endpoint:
        # On several hosts -n is for each of them, and --elastic for all together.
        start, low_start = min(count_ranks(options.ranks or "auto"), high), 1
    else:
        start, low_start = count_ranks(options.ranks) if options.ranks else high, low
    if not low_start <= start <= high:
        raise ConfigError(
            f"-n should be from {low} to {high}, as --elastic {options.elastic} says, but is "
            f"{start}"
        )
    restarts = _MAX_RESTARTS
    if options.max_restarts is not None:
        restarts = _whole_number("--max-restarts", options.max_restarts)
    if restarts < 0:
        raise ConfigError(f"--max-restarts should be 0 or more but is {restarts}")
    return ElasticConfig(
        low,
        high,
        start,
        restarts,
        options.restart_on_error,
        stopped_s=_seconds(_STOPPED, os.environ.get(_STOPPED, "10")),
        hosts=_whole_number("--nnodes", options.nnodes),
        host_silence_s=_host_silence_s(),
    )


def _host_silence_s() -> float:
    text = os.environ.get(_HOST_SILENCE, "5")
    seconds = _seconds(_HOST_SILENCE, text)
    if seconds < _SHORTEST_SILENCE_S:
        raise ConfigError(f"{_HOST_SILENCE} should be {_SHORTEST_SILENCE_S} or more but is {text}")
    return seconds


def _elastic_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(
            "--elastic should be MIN:MAX, two numbers of ranks such as 2:4 with 1 <= MIN <= MAX, "
            f"but is {text!r}"
        )
    return count_ranks(low), count_ranks(high)


def _check_script(target: str) -> None:
    """Refuse here what would otherwise fail on every rank."""
    if not os.path.exists(target):
        raise ConfigError(f"there is no file {target!r} in {_current_directory()}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise ConfigError(
            f"{target!r} should be a script but is a directory without a __main__.py; a package is "
            "started with -m"
        )
    if not os.access(target, os.R_OK):
        raise ConfigError(f"{target!r} should be a script but cannot be read: permission denied")


def _check_module(name: str, first: str) -> None:
    """As `_check_script`. Only the package is looked for: what is in it, it may make when it is
    imported.
    """
    before, sys.path[:] = list(sys.path), [first, *_path_without_ours()]
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path[:] = before
    if found is None:
        raise ConfigError(
            f"there is no module {name!r}, neither in {first} nor installed; a script is started "
            "without -m"
        )


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory cannot be used ({error.strerror}); change to another one"
        ) from None


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{option} should be a number of seconds, 0 or more, but is {text!r}")
    return seconds


def _whole_number(option: str, text: str) -> int:
    """An option's value, which may come from torchrun's variable for it."""
    try:
        return int(text)
    except ValueError:
        variable = f"PET_{option.lstrip('-').replace('-', '_').upper()}"
        from_variable = f" ({variable})" if os.environ.get(variable) == text else ""
        raise ConfigError(
            f"{option}{from_variable} should be a whole number but is {text!r}"
        ) from None


def _trace_directory(options: argparse.Namespace) -> dict[str, str]:
    from_variable = os.environ.get(TRACE)
    directory = options.trace or (pathlib.Path(from_variable) if from_variable else None)
    if directory is None:
        return {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--trace ({TRACE}) should be a directory that can be written, but {error.filename!r} "
            f"cannot: {error.strerror}"
        ) from error
    return {TRACE: str(directory.resolve())}


def _path_without_ours() -> list[str]:
    """sys.path less its first entry, which is the directory of the `paceline` command itself."""
    return sys.path[1:] if not sys.flags.safe_path else list(sys.path)


def _rendezvous_config(options: argparse.Namespace) -> RendezvousConfig:
    nodes = _whole_number("--nnodes", options.nnodes)
    if nodes < 1:
        raise ConfigError(f"--nnodes should be 1 or more but is {nodes}")
    node_rank = _whole_number("--node-rank", options.node_rank) if options.node_rank else None
    # A host may join an elastic job later, so that one which begins with a single host has an
    # endpoint as well.
    if nodes == 1 and not (options.elastic and options.rdzv_endpoint):
        return RendezvousConfig()
    if not options.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, an address of one of the hosts"
        )
    _check_endpoint(options.rdzv_endpoint)
    if node_rank is not None and not 0 <= node_rank < nodes and not options.elastic:
        raise ConfigError(f"--node-rank should be from 0 to {nodes - 1} but is {node_rank}")
    return RendezvousConfig(nodes, node_rank, options.rdzv_endpoint, options.rdzv_id)


def _check_endpoint(text: str) -> None:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if colon and not (host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--rdzv-endpoint should be HOST:PORT but is {text!r}")


def _pass_signals_to(supervisor: Supervisor) -> None:
    for number in _PASSED_ON:
        # Ignored from the start means nohup, or a job in the background: leave it so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: supervisor.ask_to_stop(number))


# -- how it ended ----------------------------------------------------------------------------------


def _report_result(result: JobResult, plan: Plan, output: Output, screen: Screen) -> int:
    """How the job ended: later failures in a line each, the first in full, then one sentence about
    it. Returns the exit code.
    """
    if result.stopped_by is not None:
        return _report_stop(result, screen)
    if result.failures:
        return _report_failure(result, plan, output, screen)
    if result.start_failure is not None:
        screen.report(result.start_failure.reason)
        return exit_code_for_shell(result.start_failure.exitcode)
    return 0


def _report_stop(result: JobResult, screen: Screen) -> int:
    number = result.stopped_by or 0
    if number == signal.SIGPIPE:
        return exit_code_for_shell(-signal.SIGPIPE)
    for rank, report in enumerate(result.reports):
        if report is not None and report.kind is ReportKind.INTERRUPT and report.text:
            screen.report(f"rank {result.first_rank + rank} was interrupted at {report.text}")
    name = signal.Signals(number).name
    if number != signal.SIGINT and not result.failures and _all_succeeded(result):
        screen.report(f"stopped by {name}: all ranks exited with status 0")
        return 0
    screen.report(f"stopped by {name}")
    return exit_code_for_shell(-number)


def _all_succeeded(result: JobResult) -> bool:
    return 0 < len(result.succeeded) == len(result.pids)


def _report_failure(result: JobResult, plan: Plan, output: Output, screen: Screen) -> int:
    first, *later = result.failures
    for other in reversed(later):
        screen.report(f"{_name(other, result)} failed later: {_reason(other)}")
    if first.report is not None and first.report.text:
        output.report(first.rank, first.report.text)
    elif output.tails[first.rank] and plan.ranks > 1:
        output.report(first.rank, "\n".join(["its last lines:", *output.tails[first.rank]]))
    others = len(result.pids) - 1
    stopped = "" if others == 0 else f"; {others} other{'s' if others > 1 else ''} stopped"
    screen.report(f"{_name(first, result)} failed first: {_reason(first)}{stopped}")
    return exit_code_for_shell(first.exitcode or 1)


def _name(failure: Failure, result: JobResult) -> str:
    return f"rank {result.first_rank + failure.rank} (pid {result.pids.get(failure.rank)})"


def _reason(failure: Failure) -> str:
    if failure.report is not None and failure.report.summary:
        return failure.report.summary.partition("\n")[0]
    return describe_exit(failure.exitcode)
