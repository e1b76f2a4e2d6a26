"""Which lines of a stack are the user's, and how a stack is shown."""

from __future__ import annotations

import os

import paceline
from paceline.diagnostics.stack_reader import Frame, Stack, parse_stacks

PACELINE = os.path.dirname(paceline.__file__)
STANDARD_LIBRARY = os.path.dirname(os.__file__)
TORCH = f"{STANDARD_LIBRARY}/site-packages/torch"
# How a rank comes to its program, the outermost frame last.
LAUNCH = [
    Frame("<frozen runpy>", 88, "_run_code"),
    Frame("<frozen runpy>", 229, "run_module"),
    Frame(f"{PACELINE}/launch/rank_main.py", 125, "_run_script"),
    Frame(f"{PACELINE}/launch/fork_server.py", 87, "main"),
    Frame("<string>", 1, "<module>"),
]


def _files(stack):
    """The files of the lines that are shown, outermost first."""
    return [line.split('"')[1] for line in stack.format().splitlines() if "File" in line]


def test_the_lines_of_a_script_and_what_it_called():
    calls = [
        Frame(f"{STANDARD_LIBRARY}/selectors.py", 9, "select"),
        Frame(f"{TORCH}/utils/data.py", 5, "get"),
    ]
    own = [Frame("/home/u/train.py", 3, "step"), Frame("/home/u/train.py", 9, "<module>")]
    stack = Stack(1, (*calls, *own, *LAUNCH))
    assert stack.innermost == own[0]
    assert _files(stack) == ["/home/u/train.py", "/home/u/train.py", f"{TORCH}/utils/data.py"]
    assert "1 more inside libraries" in stack.format()


def test_a_program_that_is_installed_shows_its_own_lines_not_the_launcher_s():
    """`paceline run -m package.train`: all frames are in libraries."""
    package = f"{STANDARD_LIBRARY}/site-packages/package"
    own = [Frame(f"{package}/data/read.py", 3, "read"), Frame(f"{package}/train.py", 9, "<module>")]
    stack = Stack(1, (Frame(f"{TORCH}/nn.py", 5, "call"), *own, *LAUNCH))
    assert stack.innermost == own[0]
    assert _files(stack) == [own[1].file, own[0].file, f"{TORCH}/nn.py"]


def test_an_installed_program_of_one_file():
    main = Frame("/usr/lib/python3/dist-packages/train.py", 3, "<module>")
    stack = Stack(1, (Frame("/usr/lib/python3/dist-packages/other.py", 1, "f"), main, *LAUNCH))
    assert stack.innermost == main


def test_a_rank_of_another_environment_than_ours():
    """`paceline ps` may be installed elsewhere, for another version of Python."""
    other = "/opt/env/lib/python3.9"
    own = Frame("/home/u/train.py", 9, "<module>")
    start = [
        Frame(f"{other}/runpy.py", 87, "_run_code"),
        Frame(f"{other}/site-packages/paceline/launch/rank_main.py", 125, "_run_script"),
    ]
    stack = Stack(1, (Frame(f"{other}/threading.py", 5, "wait"), own, *start))
    assert stack.innermost == own
    assert _files(stack) == [own.file, f"{other}/threading.py"]


def test_a_stack_without_a_program_is_shown_whole():
    stack = Stack(1, tuple(LAUNCH))
    assert stack.innermost == LAUNCH[0]
    assert len(_files(stack)) == len(LAUNCH)
    assert Stack(1, ()).innermost is None
    assert Stack(1, ()).format() == ""


def test_names_beyond_ascii_are_read_as_they_are():
    text = 'Thread 0x10 (most recent call first):\n  File "/jos\\xe9/\\u732b.py", line 3 in f\n'
    assert parse_stacks(text) == [Stack(16, (Frame("/josé/猫.py", 3, "f"),))]
