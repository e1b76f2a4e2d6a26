"""`paceline.spawn(fn, args, nprocs)`: run a function on ranks of this host and return what each
returned.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, LaunchError, describe_exit
from paceline.launch.messages import PRELOAD, Function, Report, ReportKind
from paceline.launch.output import Output
from paceline.launch.resources import count_ranks, threads_for
from paceline.launch.supervisor import Failure, JobResult, Plan, Supervisor
from paceline.rank_env import find_rank_env
from paceline.telemetry.status_page import script_name
from paceline.telemetry.variables import RUN_ID, SCRIPT, STALL_AFTER, stall_after_s

__all__ = ["spawn"]


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | str = "auto",
    *,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = PRELOAD,
    quiet: bool = False,
) -> list[Any]:
    """Call a function on new processes, the ranks of a job.

    Works in scripts - without an `if __name__ == "__main__"` guard - and in notebooks: functions
    and classes defined in a cell are pickled by value. In the function,
    `paceline.init_process_group()` joins the ranks and `paceline.rank()` is the number of this one.

    Args:
        fn: called as `fn(*args, **kwargs)` on every rank.
        args: its arguments, the same for all.
        nprocs: how many ranks; "auto" is one for each core or accelerator.
        kwargs: its keyword arguments.
        env: variables to set in the ranks.
        preload: modules that are imported once, before the ranks are forked.
        quiet: what ranks print does not appear here, where it otherwise does with the rank before
            it.

    Returns:
        Each rank's result, in rank order.

    Raises:
        LaunchError: a rank died without an error of its own. The first error of a rank is raised
            here as it was raised there, with its traceback as a note; the other ranks are stopped.
        ConfigError: an argument is wrong, or `fn` cannot be sent to other processes.

    Example:
        ```python
        def train(steps):
            paceline.init_process_group()
            return paceline.rank() * steps

        print(paceline.spawn(train, (3,), nprocs=2))
        ```
    """
    import cloudpickle

    if "PACELINE_SPAWNED" in os.environ:
        rank = find_rank_env(os.environ).rank
        raise ConfigError(
            f"rank {rank} of paceline.spawn calls paceline.spawn again; call it outside `fn`"
        )
    ranks = count_ranks(str(nprocs))
    plan = Plan(
        work=Function(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))),
        ranks=ranks,
        threads=threads_for(ranks),
        launcher="paceline.spawn",
        path=tuple(sys.path),
        preload=tuple(preload),
        environ={
            RUN_ID: uuid.uuid4().hex,
            SCRIPT: script_name(),
            **(env or {}),
            "PACELINE_SPAWNED": "1",
        },
        grace_s=5.0,
        stall_after_s=stall_after_s((env or {}).get(STALL_AFTER) or os.environ.get(STALL_AFTER)),
    )
    output = Output(ranks, _print, shown=frozenset() if quiet else None)
    result = Supervisor(plan, output).run()
    _raise_first(result, output)
    return [_value(report) for report in result.reports]


def _print(stream: int, data: bytes) -> None:
    """To sys.stdout and sys.stderr, which a notebook shows in the cell."""
    target = sys.stdout if stream == 1 else sys.stderr
    text = data.decode(errors="replace")
    try:
        target.write(text)
    except UnicodeEncodeError as error:  # a terminal that knows ASCII alone
        target.write(text.encode(error.encoding, errors="replace").decode(error.encoding))
    target.flush()


def _value(report: Report | None) -> Any:
    import cloudpickle

    assert report is not None, "a rank that ended well has reported its result"
    return cloudpickle.loads(report.payload)


def _raise_first(result: JobResult, output: Output) -> None:
    if result.failures:
        first, *later = result.failures
        error = _as_exception(first, result, output)
        for other in later:
            summary = other.report.summary if other.report else ""
            reason = summary or describe_exit(other.exitcode)
            error.add_note(f"later rank {other.rank} failed as well: {reason}")
        raise error
    if result.start_failure is not None:
        raise LaunchError(result.start_failure.reason, exitcode=result.start_failure.exitcode)
    without_result = [rank for rank, report in enumerate(result.reports) if report is None]
    if without_result:
        raise LaunchError(
            f"rank {without_result[0]} exited with status 0 before the function returned (os._exit "
            "or sys.exit inside it?)",
            rank=without_result[0],
            exitcode=0,
        )


def _as_exception(failure: Failure, result: JobResult, output: Output) -> BaseException:
    import cloudpickle

    report = failure.report
    if report is not None and report.kind is ReportKind.ERROR and report.payload:
        error: BaseException = cloudpickle.loads(report.payload)
        error.add_note(f"raised by rank {failure.rank}:\n{report.text}")
        return error
    tail = "\n".join(output.tails[failure.rank])
    reason = (report.text or report.summary) if report else describe_exit(failure.exitcode)
    pid = result.pids.get(failure.rank)
    return LaunchError(
        f"rank {failure.rank} (pid {pid}) failed first: {reason}"
        + (f"\nits last output:\n{tail}" if tail else ""),
        rank=failure.rank,
        exitcode=failure.exitcode,
        tail=tail,
    )
