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

__all__ = ["Frame", "Stack", "main_stack", "parse_stacks", "request_stacks"]

_ANSWER_S = 1.0
_QUIET_S = 0.03
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_PY_SPY_FRAME = re.compile(r"^    (.*?) \((.*):(\d+)\)$")
_PACELINE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Those of ranks that run in another environment than whoever looks at them: `paceline ps`.
_OTHER_PACELINE = re.compile(r"/(?:site-packages|dist-packages|src)/paceline/")
_OTHER_STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+t?/")
_INSTALLED = frozenset({"site-packages", "dist-packages"})


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
        return self.starts_programs or self._is_installed

    @property
    def starts_programs(self) -> bool:
        """Whether this is code of Paceline, the interpreter or the standard library: where every
        stack begins, before the program's first line.
        """
        if self.file.startswith((_PACELINE, "<")) or _OTHER_PACELINE.search(self.file):
            return True
        is_standard = (
            self.file.startswith(_STANDARD_LIBRARY)
            or _OTHER_STANDARD_LIBRARY.search(self.file) is not None
        )
        return is_standard and not self._is_installed

    @property
    def _is_installed(self) -> bool:
        return not _INSTALLED.isdisjoint(self.file.split(os.sep))

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
        """Where the user's code is: its innermost frame, if there is one."""
        own = self._own()
        if own:
            return self.frames[own[0]]
        return self.frames[0] if self.frames else None

    def _own(self) -> list[int]:
        """Which frames are the user's code, the innermost first."""
        own = [index for index, frame in enumerate(self.frames) if not frame.in_library]
        if own:
            return own
        # The program itself is installed: `python -m package.train`. Its own package is the user's
        # code then.
        program = [frame for frame in self.frames if not frame.starts_programs]
        package = _package_of(program[-1].file) if program else None
        return [
            index
            for index, frame in enumerate(self.frames)
            if package is not None and _package_of(frame.file) == package
        ]

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
        own = self._own()
        return max(0, own[0] - 1) if own else 0

    def _shown(self) -> list[Frame]:
        """From the user's first line on, outermost first."""
        own = self._own()
        outermost = own[-1] if own else len(self.frames) - 1
        return list(reversed(self.frames[self._depth_in_libraries() : outermost + 1]))


def _package_of(file: str) -> str:
    """The installed package, or single module, that a file belongs to; else its directory."""
    parts = file.split(os.sep)
    for index, part in enumerate(parts[:-1]):
        if part in _INSTALLED:
            return os.sep.join(parts[: index + 2])
    return os.path.dirname(file)


def request_stacks(page: StatusPage) -> list[Stack]:
    """The stacks of a rank's threads; an empty list if it cannot answer (it is stopped or gone)."""
    stat = read_stat(page.pid)
    if stat is not None and not stat.is_stopped and catches_signal(page.pid, DUMP_SIGNAL):
        with contextlib.suppress(OSError):
            descriptor = _open_dump(page)
            try:
                os.ftruncate(descriptor, 0)
                os.kill(page.pid, DUMP_SIGNAL)
                stacks = parse_stacks(_read_answer(descriptor))
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


def parse_stacks(text: str) -> list[Stack]:
    """What faulthandler has written."""
    stacks: list[Stack] = []
    frames: list[Frame] = []
    thread = 0
    for line in [*text.splitlines(), "Thread 0x0"]:
        if heading := _THREAD.match(line):
            if frames:
                stacks.append(Stack(thread, tuple(frames)))
            thread, frames = int(heading[1], 16), []
        elif frame := _FRAME.match(line):
            line_number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(Frame(_unescape(frame[1]), line_number, _unescape(frame[3])))
    return stacks


def _unescape(text: str) -> str:
    """faulthandler writes characters beyond ASCII as their numbers: `jos\\xe9`."""
    return _ESCAPE.sub(lambda match: chr(int(match[match.lastindex or 1], 16)), text)


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
