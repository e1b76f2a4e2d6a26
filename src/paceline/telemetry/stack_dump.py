"""Python stacks of a rank from outside, however stuck its main thread is.

Each rank lets faulthandler write its stacks into anonymous memory when a signal comes: the handler
needs neither the interpreter's lock nor the main thread's help. Outsiders send the signal - after
making sure that it is being caught, for it would end a process that does not expect it - and read
the memory through `/proc`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import linecache
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

from paceline.telemetry.status_page import StatusPage

__all__ = ["Frame", "Stack", "ask", "main_stack", "register", "unregister"]

# A real-time signal: SIGUSR1 and SIGUSR2 belong to users, and to requests to save.
_SIGNAL = signal.SIGRTMIN + 8
_MEMFD_NAME = "paceline-stacks"
_ANSWER_S = 1.0
_QUIET_S = 0.03
_HEADING = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PY_SPY_FRAME = re.compile(r"^    (.*?) \((.*):(\d+)\)$")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The source line, if it can be found here."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def words(self) -> str:
        code = f": {self.code}" if self.code else ""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}{code}"


@dataclasses.dataclass(frozen=True)
class Stack:
    """One thread's stack, the innermost frame first."""

    thread: int
    frames: tuple[Frame, ...]

    @property
    def innermost(self) -> Frame | None:
        """Where the user's code is: the innermost frame outside the libraries, if there is one."""
        for frame in self.frames:
            if not _is_library(frame.file):
                return frame
        return self.frames[0] if self.frames else None

    @property
    def text(self) -> str:
        """As Python prints a traceback: the innermost call last."""
        lines = []
        for frame in self._shown():
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.code:
                lines.append(f"    {frame.code}")
        if hidden := self._depth_in_libraries():
            lines.append(f"  ... and {hidden} more inside libraries")
        return "\n".join(lines)

    def _depth_in_libraries(self) -> int:
        """Frames below the user's innermost one, but for one that says what was called."""
        own = [index for index, frame in enumerate(self.frames) if not _is_library(frame.file)]
        return max(0, own[0] - 1) if own else 0

    def _shown(self) -> list[Frame]:
        """From the user's first line on, outermost first."""
        frames = list(reversed(self.frames[self._depth_in_libraries() :]))
        own = [index for index, frame in enumerate(frames) if not _is_library(frame.file)]
        return frames[own[0] :] if own else frames


class _Registered:
    """The memory faulthandler writes to in this process."""

    descriptor = -1


def register() -> int:
    """Answer requests for stacks; returns the descriptor they are written to."""
    if _Registered.descriptor < 0:
        descriptor = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
        # Appending, so that whoever asks can empty it first.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(_SIGNAL, file=descriptor, all_threads=True, chain=False)
        _Registered.descriptor = descriptor
    return _Registered.descriptor


def unregister() -> None:
    if _Registered.descriptor >= 0:
        faulthandler.unregister(_SIGNAL)
        signal.signal(_SIGNAL, signal.SIG_IGN)  # a late request must not end the process
        os.close(_Registered.descriptor)
        _Registered.descriptor = -1


def ask(page: StatusPage) -> list[Stack]:
    """The stacks of a rank's threads; an empty list if it cannot answer (it is stopped, or gone)."""
    if not _is_stopped(page.pid) and _catches(page.pid):
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{page.pid}/fd/{page.stacks_fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, 0)
                os.kill(page.pid, _SIGNAL)
                stacks = _parse(_written(descriptor))
            finally:
                os.close(descriptor)
            if stacks:
                return stacks
    return _ask_py_spy(page)


def main_stack(stacks: list[Stack], page: StatusPage) -> Stack | None:
    """The stack of the main thread."""
    for stack in stacks:
        if stack.thread == page.main_thread:
            return stack
    return stacks[0] if stacks else None


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
        return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)
    return False


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return True


def _written(descriptor: int) -> str:
    """What the handler writes, once it has written and gone quiet."""
    deadline = time.monotonic() + _ANSWER_S
    size, changed = 0, time.monotonic()
    while time.monotonic() < deadline:
        now = os.fstat(descriptor).st_size
        if now != size:
            size, changed = now, time.monotonic()
        elif size and time.monotonic() - changed > _QUIET_S:
            break
        time.sleep(0.005)
    return os.pread(descriptor, 1 << 20, 0).decode(errors="replace")


def _parse(text: str) -> list[Stack]:
    stacks: list[Stack] = []
    frames: list[Frame] = []
    thread = 0
    for line in [*text.splitlines(), "Thread 0x0"]:
        if heading := _HEADING.match(line):
            if frames:
                stacks.append(Stack(thread, tuple(frames)))
            thread, frames = int(heading[2], 16), []
        elif found := _FRAME.match(line):
            frames.append(Frame(found[1], int(found[2]) if found[2].isdigit() else 0, found[3]))
    return stacks


def _ask_py_spy(page: StatusPage) -> list[Stack]:
    """py-spy, where installed, reads the memory of a process that cannot answer itself."""
    program = shutil.which("py-spy")
    if program is None:
        return []
    command = [program, "dump", "--nonblocking", "--pid", str(page.pid)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    threads = answer.stdout.split("\nThread ")
    main = next((text for text in threads if '"MainThread"' in text), threads[-1])
    frames = [found for line in main.splitlines() if (found := _PY_SPY_FRAME.match(line))]
    stack = Stack(
        page.main_thread, tuple(Frame(found[2], int(found[3]), found[1]) for found in frames)
    )
    return [stack] if stack.frames else []


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, _STANDARD_LIBRARY, "<")) or "site-packages" in file
