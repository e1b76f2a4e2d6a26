"""What a rank runs: the user's script as `__main__`, or a function of `paceline.spawn` - and how
its end is reported.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import os
import pickle
import random
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from types import ModuleType, TracebackType

from paceline.diagnostics import session
from paceline.errors import ConfigError, PeerLost, StepError
from paceline.failure_channel import previous_excepthook, publish_error
from paceline.launch.messages import ELASTIC, Function, Report, ReportKind, Script
from paceline.rank_env import find_rank_env

__all__ = ["Role", "main", "run", "send_frame"]

_PACKAGE = os.path.dirname(__file__)
_PACELINE = os.path.dirname(_PACKAGE) + os.sep


@dataclasses.dataclass(frozen=True)
class Role:
    """What a rank is sent when it may start."""

    work: Script | Function
    variables: Mapping[str, str]


def main(role_fd: int, report_fd: int, page_fd: int) -> int:
    """A rank in an interpreter of its own (`--start-method spawn`)."""
    for descriptor in (role_fd, report_fd, page_fd):
        os.set_inheritable(descriptor, False)
    return run(role_fd, report_fd, page_fd)


def run(role_fd: int, report_fd: int, page_fd: int) -> int:
    """Wait for the role, do the work, report; returns the exit code of this process."""
    role = _receive_role(role_fd)
    os.close(role_fd)
    if role is None:
        return 1  # the launcher is gone
    os.environ.update(role.variables)
    _separate_from_image(role.variables)
    env = find_rank_env(role.variables)
    try:
        session.begin(env.rank, env.world_size, page_fd=page_fd)
        if isinstance(role.work, Function):
            _call(role.work, report_fd)
        else:
            _run_script(role.work)
    except BaseException as error:
        return _report_error(error, env.rank, report_fd)
    return 0


def send_frame(descriptor: int, message: Role | Report) -> None:
    """Write one pickled message, with its length before it."""
    data = pickle.dumps(message)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(descriptor, data) :]


def _receive_role(descriptor: int) -> Role | None:
    """Read the one message a rank is sent; None if the writer is gone."""
    header = _read(descriptor, 8)
    body = _read(descriptor, int.from_bytes(header, "little")) if header is not None else None
    if body is None:
        return None
    role: Role = pickle.loads(body)
    return role


def _read(descriptor: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            return None
        data += part
    return data


def _separate_from_image(variables: Mapping[str, str]) -> None:
    """Undo what ranks forked from one image share: random state, thread count, buffering made for
    another stream.
    """
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()


def _call(work: Function, report_fd: int) -> None:
    import cloudpickle

    fn, args, kwargs = cloudpickle.loads(work.payload)
    result = cloudpickle.dumps(fn(*args, **kwargs))
    send_frame(report_fd, Report(ReportKind.RESULT, time.monotonic(), payload=result))


def _run_script(script: Script) -> None:
    sys.argv = [script.target, *script.arguments]
    if script.is_module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(script.target) or script.target.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(script.target, run_name="__main__")
    else:
        _run_file(script.target)


def _run_file(path: str) -> None:
    """As `python path` does: the module stays `__main__` for good, so that pickling and late
    threads find it.
    """
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = sys.modules["builtins"]  # the interpreter sets it, too
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


# -- how it ended ----------------------------------------------------------------------------------


def _report_error(error: BaseException, rank: int, report_fd: int) -> int:
    """Report an exception that reached the top; returns the exit code it stands for."""
    now = time.monotonic()
    publish_error(error)
    _tell_elastic_job(error)
    if isinstance(error, SystemExit):
        return _report_exit(error, report_fd, now)
    tb = _without_our_frames(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        send_frame(report_fd, Report(ReportKind.INTERRUPT, now, _innermost(tb)))
        return 130
    text = "".join(traceback.format_exception(type(error), error, tb, limit=_frames(error, tb)))
    # A hook of the script's own, such as rich's; torch's would only repeat the traceback.
    hook = previous_excepthook(sys.excepthook)
    if hook is not sys.__excepthook__ and not hook.__module__.startswith("torch."):
        hook(type(error), error, tb)
    summary = traceback.format_exception_only(error)[0].strip()
    payload, cause = _dump(error, tb), _caused_by(error, rank)
    send_frame(report_fd, Report(ReportKind.ERROR, now, text, summary, payload, cause))
    return 1


def _tell_elastic_job(error: BaseException) -> None:
    """In an elastic job: it is an error that ends this rank, not a fate that a replacement may be
    spared.
    """
    is_success = isinstance(error, SystemExit) and error.code in (None, 0)
    if ELASTIC not in os.environ or is_success:
        return
    from paceline.launch.elastic_job import current_elastic_job

    if (job := current_elastic_job()) is not None:
        job.failing(has_lost_peer=isinstance(error, PeerLost))


def _caused_by(error: BaseException, rank: int) -> int | None:
    """The rank that failed first, if this error is about a failure elsewhere."""
    other = None
    if isinstance(error, StepError) or (isinstance(error, PeerLost) and error.traceback):
        other = error.rank
    return None if other == rank else other


def _report_exit(error: SystemExit, report_fd: int, now: float) -> int:
    code = error.code
    if code is None or code == 0:
        return 0
    if isinstance(code, int):
        number = code & 0xFF or 1
        summary = f"sys.exit({code})"
        send_frame(report_fd, Report(ReportKind.EXIT, now, summary=summary, exitcode=number))
        return number
    send_frame(report_fd, Report(ReportKind.EXIT, now, f"{code}\n", summary=str(code)))
    return 1


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first line on."""
    start = tb
    while start is not None and _is_ours(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return start or (tb if tb is None or tb.tb_next is None else None)


def _frames(error: BaseException, tb: TracebackType | None) -> int | None:
    """How many frames of a traceback to show. A caller's mistake is where the caller is, not where
    we noticed it.
    """
    if not isinstance(error, ConfigError):
        return None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb)]
    while files and files[-1].startswith(_PACELINE):
        files.pop()
    return len(files)


def _is_ours(filename: str) -> bool:
    return (
        filename.startswith((_PACKAGE, "<frozen runpy>", "<frozen importlib"))
        or filename == runpy.__file__
    )


def _innermost(tb: TracebackType | None) -> str:
    frames = traceback.extract_tb(tb)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _dump(error: BaseException, tb: TracebackType | None) -> bytes:
    """The exception for the launcher, if it survives pickling."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(error.with_traceback(tb))
        # Fails for an exception whose constructor takes other arguments than it stores.
        cloudpickle.loads(data)
    except Exception:
        return b""
    return data
