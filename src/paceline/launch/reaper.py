"""The reaper: a small process between the launcher and the fork server, which survives both.

Ranks die with the fork server: the kernel sees to that. What ranks have started does not - loader
workers, a `sleep` - and comes to the nearest living ancestor that adopts orphans. Launcher and fork
server do, but both may be killed at once, and then the reaper is that ancestor. It does nothing
until the fork server ends, or does not end although its launcher has, or SIGTERM asks it to end
everything.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable

from paceline._linux import adopt_orphans, end_descendants, signal_when_parent_ends

__all__ = ["fork_below_reaper"]

_PARENT_ENDED = signal.SIGHUP
_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, _PARENT_ENDED)
# What a fork server may take to end its ranks and what they left, once its launcher is gone.
_CLEAN_UP_S = 8.0
_LONGEST_WAIT_S = 3600.0
_LEFTOVERS_WAIT_S = 0.5
_LEFTOVERS_TERM_S = 2.0


def fork_below_reaper(launcher: int, in_reaper: Callable[[], None]) -> int | None:
    """Fork. Returns None in the child, at once, and in this process - the reaper from now on - the
    exit code of the child, once that and all its descendants have ended. `in_reaper` closes what
    only the child needs.
    """
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how the child ended
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    in_reaper()
    signal_when_parent_ends(_PARENT_ENDED)
    status = _wait(child, launcher)
    if status != 0:
        end_descendants(os.getpid(), wait_s=_LEFTOVERS_WAIT_S, term_s=_LEFTOVERS_TERM_S)
    exitcode = os.waitstatus_to_exitcode(status)
    if exitcode < 0:
        _end_by_signal(-exitcode)
    return exitcode


def _end_by_signal(number: int) -> None:
    """To whoever waits for this process, it is the fork server, which this signal has ended."""
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _wait(child: int, launcher: int) -> int:
    """Wait for the child; kill it if that is asked for, or if it is still there some time after the
    launcher's end.
    """
    deadline = math.inf
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if deadline == math.inf and os.getppid() != launcher:
            deadline = time.monotonic() + _CLEAN_UP_S
        left_s = min(_LONGEST_WAIT_S, max(0.0, deadline - time.monotonic()))
        received = signal.sigtimedwait(_WAITED_FOR, left_s)
        is_asked = received is not None and received.si_signo == signal.SIGTERM
        if is_asked or time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
