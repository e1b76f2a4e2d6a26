"""Python stacks of a rank, read from outside.

A rank lets faulthandler write its stacks to anonymous memory when a signal comes: see
`paceline.telemetry.stack_dump`. Here the memory is emptied, the signal sent - after checking that
it is being caught, because it would kill a process that does not expect it - and the memory read
once it has stopped growing. A stopped process cannot answer; py-spy, if installed, reads its stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import re
import shutil
import subprocess
import time

from paceline._linux import catches_signal, open_descriptor_of, read_stat
from paceline.diagnostics.page_reader import StatusPage
from paceline.telemetry.stack_dump import DUMP_MEMFD_NAME, DUMP_SIGNAL

__all__ = ["Frame", "Stack", "main_stack", "request_stacks"]

_ANSWER_S = 1.0
_QUIET_S = 0.03
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PY_SPY_FRAME = re.compile(r"^    (.*?) \((.*):(\d+)\)$")
_PACELINE = os.path.dirname(os.path.dirname(__file__)) + os.sep
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
    def in_library(self) -> bool:
        """Whether this is code of Paceline, the standard library or an installed package."""
        libraries = (_PACELINE, _STANDARD_LIBRARY, "<")
        return self.file.startswith(libraries) or "site-packages" in self.file

    def describe(self) -> str:
        """ "train.py:24 in read: time.sleep(delay)"."""
        code = f": {self.code}" if self.code else ""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}{code}"


@dataclasses.dataclass(frozen=True)
class Stack:
    """One thread's stack, the innermost frame first."""

    thread: int
    frames: tuple[Frame, ...]

    @property
    def innermost(self) -> Frame | None:
        """Where the user's code is: the innermost frame outside libraries, if there is one."""
        for frame in self.frames:
            if not frame.in_library:
                return frame
        return self.frames[0] if self.frames else None

    def format(self) -> str:
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
        """How many frames inside the user's innermost call to hide: all but what it called."""
        own = [index for index, frame in enumerate(self.frames) if not frame.in_library]
        return max(0, own[0] - 1) if own else 0

    def _shown(self) -> list[Frame]:
        """From the user's first line on, outermost first."""
        frames = list(reversed(self.frames[self._depth_in_libraries() :]))
        own = [index for index, frame in enumerate(frames) if not frame.in_library]
        return frames[own[0] :] if own else frames


def request_stacks(page: StatusPage) -> list[Stack]:
    """The stacks of a rank's threads; an empty list if it cannot answer (it is stopped or gone)."""
    stat = read_stat(page.pid)
    if stat is not None and not stat.is_stopped and catches_signal(page.pid, DUMP_SIGNAL):
        with contextlib.suppress(OSError):
            descriptor = _open_dump(page)
            try:
                os.ftruncate(descriptor, 0)
                os.kill(page.pid, DUMP_SIGNAL)
                stacks = _parse(_read_answer(descriptor))
            finally:
                os.close(descriptor)
            if stacks:
                return stacks
    return _ask_py_spy(page)


def _open_dump(page: StatusPage) -> int:
    """The memory a rank dumps its stacks to. Checked by its name, because it will be emptied: a
    page that is not what it seems must not cost its owner a file.
    """
    name = os.readlink(f"/proc/{page.pid}/fd/{page.stacks_fd}")
    if not name.startswith(f"/memfd:{DUMP_MEMFD_NAME}"):
        raise FileNotFoundError(f"descriptor {page.stacks_fd} of {page.pid} is {name}")
    return open_descriptor_of(page.pid, page.stacks_fd)


def main_stack(stacks: list[Stack], page: StatusPage) -> Stack | None:
    """The stack of the main thread."""
    for stack in stacks:
        if stack.thread == page.main_thread:
            return stack
    return stacks[0] if stacks else None


def _read_answer(descriptor: int) -> str:
    """What the handler has written, once it has written something and then nothing more."""
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
        if heading := _THREAD.match(line):
            if frames:
                stacks.append(Stack(thread, tuple(frames)))
            thread, frames = int(heading[1], 16), []
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
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
    matches = [match for line in main.splitlines() if (match := _PY_SPY_FRAME.match(line))]
    frames = tuple(Frame(match[2], int(match[3]), match[1]) for match in matches)
    return [Stack(page.main_thread, frames)] if frames else []
