"""Dispatches `paceline <command>`. Each command's module is imported only when that command is
called.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from paceline._version import __version__
from paceline.errors import PacelineError

__all__ = ["COMMANDS", "main"]

# name -> (module with `add_arguments(parser)` and `run(options) -> int`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("paceline.cli.run", "start a script on several ranks of this host"),
    "ps": ("paceline.cli.ps", "show what running ranks are doing, from outside"),
    "top": ("paceline.cli.top", "keep showing what running jobs are doing, and how fast"),
    "scale": ("paceline.cli.scale", "change the number of ranks of a running elastic job"),
    "chaos": ("paceline.cli.chaos", "train under faults, and compare the bits of every step"),
    "report": ("paceline.cli.report", "make a page of a recorded timeline"),
    "compare": ("paceline.cli.compare", "set two runs side by side: which is faster, and where"),
    "diff": ("paceline.cli.diff", "find where two runs of paceline.Training part"),
    "bench": (
        "paceline.cli.bench_command",
        "measure Paceline next to stock PyTorch on this machine",
    ),
    "doctor": (
        "paceline.cli.doctor",
        "show what this machine and installation offer, and whether they work",
    ),
    "completion": ("paceline.cli.completion", "print a script that completes commands in a shell"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error does: names of files may be no text, and terminals may know ASCII alone.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="paceline", description="Data-parallel training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            importlib.import_module(module).add_arguments(sub)
    if arguments and (problem := _why_no_command(arguments[0])) is not None:
        print(f"paceline: {problem}", file=sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        code: int = importlib.import_module(COMMANDS[options.command][0]).run(options)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `| head` has read enough. What is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    return code


def _why_no_command(word: str) -> str | None:
    """What to type instead of a word that is no command; None if it is one, or an option."""
    if word in COMMANDS or word.startswith("-"):
        return None
    if word.endswith(".py"):
        return f"{word!r} is no command: `paceline run {word}` starts a script"
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean `paceline {close[0]}`?" if close else "`paceline --help` lists them"
    return f"there is no command {word!r}: {hint}"
