"""The one place for tricks with the interpreter: what Python allows and does not recommend.

Each entry says why it is needed, where CPython promises it, and what happens where it does not
hold. `tests/unit/test_interpreter.py` guards every one of them.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = [
    "NotifiesOnDrop",
    "REFERENCES_OF_ARGUMENT",
    "find_caller",
    "freeze_garbage",
    "interpreter_flags",
    "live_objects",
    "reference_count",
    "stacklevel_outside",
    "without_collecting",
]

# ------------------------------------------------------------ reference counts

# Whether somebody besides us holds a tensor: only then must its memory be left alone. There is no
# other way to ask. CPython counts references exactly (docs: sys.getrefcount) up to immortal
# objects, which tensors are not; an interpreter that counted differently would make the count
# larger, and the callers then copy where they need not. Bound here as a plain name: it is called
# for every gradient in every step.
reference_count = sys.getrefcount

# What `reference_count(x)` is when only one name or container refers to x: that one, and the
# argument of the call.
REFERENCES_OF_ARGUMENT = 2


# ---------------------------------------------------------------------- frames


def find_caller(function_name: str) -> FrameType | None:
    """The innermost frame above this one that runs a function of this name.

    For what an interface does not pass on and only its caller knows. `sys._getframe` is CPython's
    (docs: sys._getframe); where it is missing nobody is found, and callers treat that as "not
    called from there".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function_name:
        frame = frame.f_back
    return frame


def stacklevel_outside(*packages: str) -> int:
    """The `stacklevel` with which the caller's `warnings.warn` names the innermost line that is in
    none of these top-level packages: the user's, however many frames a library puts in between.

    By `sys._getframe`, as `find_caller`. If there is no such line, that of the caller is named.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in packages:
            return level
        frame, level = frame.f_back, level + 1
    return 1


# ------------------------------------------------------------------ finalizers


class NotifiesOnDrop:
    """`on_drop()` runs when nobody refers to the object any more (docs: object.__del__).

    For what only the end of an object tells: autograd drops its callback uncalled when a backward
    raises; a user drops the result of an asynchronous call that must run all the same. CPython runs
    it at once, in whichever thread drops the last reference, and not at all for objects that are
    alive when the interpreter ends: nothing may depend on it that outlives the process.
    """

    __slots__ = ()

    def on_drop(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        self.on_drop()


# ---------------------------------------------------------- garbage collection


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection inside, for example around a fork or while much is imported."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def freeze_garbage() -> None:
    """What exists now is never collected (docs: gc.freeze).

    In a process that forks: the collector would touch, and so copy, every page in every child. In
    the child: what the parent had not collected yet may own threads that the child does not have.
    """
    gc.freeze()


def live_objects() -> list[Any]:
    """Everything the collector knows (docs: gc.get_objects), to find a function by its address.

    A forked child has the objects of its parent at the same addresses; what cannot be imported by
    name can be found so. Untracked objects are missing: callers then report the object as unknown.
    """
    return gc.get_objects()


# --------------------------------------------------------------- child processes


def interpreter_flags() -> list[str]:
    """The command-line options this interpreter runs with, such as -O and -W, for a child.

    multiprocessing and concurrent.futures start children with the same function
    (Lib/subprocess.py). Where it is missing, children run without the options.
    """
    flags = getattr(subprocess, "_args_from_interpreter_flags", list)
    return list(flags())
