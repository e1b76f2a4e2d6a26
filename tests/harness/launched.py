"""Starts programs that start programs, and finds every process of theirs by a mark it inherits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator

_MARK = "PACELINE_TEST_MARK"
_CARD = re.compile(r"^paceline: \S+ (?:finished|failed|was stopped) after ", re.MULTILINE)
# The tests' own rank variables, and their terminal, are not those of a launched job.
_NOT_PASSED_ON = (
    "COLUMNS",
    "LINES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


@dataclasses.dataclass
class Launched:
    """A started program and its descendants."""

    process: subprocess.Popen[str]
    mark: str
    stdout: str = ""
    stderr: str = ""

    def wait(self, timeout: float = 180.0) -> int:
        """Its exit code; collects the output."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode

    @property
    def last_line(self) -> str:
        """The last line before the card about the training, if there is one."""
        return _CARD.split(self.stderr)[0].strip().splitlines()[-1]

    def processes(self) -> list[int]:
        """Every living process with the mark."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    entry.name.isdigit()
                    and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
        return found

    def left_after(self, seconds: float) -> list[int]:
        """What still lives after at most so long."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def run_command(
    script: pathlib.Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()
) -> list[str]:
    """`paceline run`; without torch in the image unless the options say so."""
    fast = () if any("--preload" in option for option in options) else ("--preload=",)
    return [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        str(ranks),
        *fast,
        *options,
        "--",
        str(script),
        *arguments,
    ]


def write_script(folder: pathlib.Path, text: str, name: str = "train.py") -> pathlib.Path:
    script = folder / name
    script.write_text(textwrap.dedent(text))
    return script


@contextlib.contextmanager
def launched(
    command: list[str], env: dict[str, str] | None = None, **options: object
) -> Iterator[Launched]:
    """Start a program; afterwards end what is left of it, by pid."""
    mark = uuid.uuid4().hex
    environ = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
    environ = {**environ, "PYTHONWARNINGS": "error", **(env or {}), _MARK: mark}
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **options,
    }
    process = subprocess.Popen(
        command,
        env=environ,
        text=True,
        preexec_fn=_restore_signals,  # noqa: PLW1509 - safe: it makes system calls alone
        **streams,
    )
    job = Launched(process, mark)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.kill()
        for pid in job.left_after(5.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for stream in (process.stdout, process.stderr, process.stdin):
            if stream is not None:
                stream.close()
        process.wait()


def run_to_end(command: list[str], code: int = 0, **options: object) -> Launched:
    """Start a program that ends by itself, with this exit code, and leaves nothing behind."""
    with launched(command, **options) as job:
        found = job.wait()
        assert found == code, job.stderr
        assert job.left_after(2.0) == []
    return job


def _restore_signals() -> None:
    """Undo what `nohup`, or a script's background, made the tests ignore and pass on."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port for servers of the test. Bound meanwhile, so that the system gives it to nobody else;
    servers that allow the address to be reused, as all do, may listen on it.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def ray_environment(folder: pathlib.Path) -> dict[str, str]:
    """Variables for programs that use Ray: it says little, and its workers find the tests."""
    return {
        "PYTHONWARNINGS": "ignore",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "HOME": str(folder),
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    }


def wait_for_files(*paths: pathlib.Path, timeout: float = 150.0) -> None:
    """Until all exist and are not empty: how a script tells a test how far it is."""
    deadline = time.monotonic() + timeout
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, (
            f"still missing or empty after {timeout} s: "
            f"{[str(p) for p in paths if not (p.exists() and p.stat().st_size)]}"
        )
        time.sleep(0.02)
