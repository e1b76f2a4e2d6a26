"""Lets other processes see the Python stacks of this one, however stuck its main thread is.

faulthandler writes the stacks of all threads into anonymous memory (a memfd) when a signal comes.
Its handler is plain C that needs neither the interpreter's lock nor the main thread's cooperation.
The status page holds the number of the descriptor; `paceline.diagnostics.stack_reader` sends the
signal and reads the memory through `/proc`.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

from paceline._linux import anonymous_memory

__all__ = ["DUMP_MEMFD_NAME", "DUMP_SIGNAL", "StackDump"]

# A real-time signal: SIGUSR1 and SIGUSR2 belong to users, and to requests to save.
DUMP_SIGNAL = signal.SIGRTMIN + 8
DUMP_MEMFD_NAME = "paceline-stacks"


class StackDump:
    """Answers requests for stacks from its creation until `close`."""

    def __init__(self) -> None:
        self.descriptor = anonymous_memory(DUMP_MEMFD_NAME)
        # In append mode whoever asks can truncate the memory first, and the offset follows.
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        faulthandler.register(DUMP_SIGNAL, file=self.descriptor, all_threads=True, chain=False)

    def close(self) -> None:
        """Ignore requests from now on: a late one must not kill the process."""
        faulthandler.unregister(DUMP_SIGNAL)
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        os.close(self.descriptor)
        self.descriptor = -1
