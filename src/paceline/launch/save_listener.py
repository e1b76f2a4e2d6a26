"""How a signal to any rank becomes one answer that all ranks get at the same call of
`save_requested()`, without a collective per step.

A signal only sets a flag. A thread carries it to the group's store and watches there for flags of
others, so the usual call costs a few attributes. A rank that sees the flag in its k-th call waits
in that call and posts k. When all ranks have posted, the save belongs to call max(k): ranks that
are there return the request now, the others return "no" until they get there. No rank waits for one
that is ahead of it, so this cannot deadlock as long as all ranks make the same calls in the same
order - which is what one training loop does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import threading
from typing import TYPE_CHECKING

from paceline.core.store_exchange import ExchangeCancelled, exchange
from paceline.errors import ConfigError
from paceline.rank_env import current_rank_and_world

if TYPE_CHECKING:
    from paceline._torch_internals import Store

__all__ = ["NO_REQUEST", "SAVE_SIGNAL", "STOP_SIGNAL", "SaveListener", "SaveRequest"]

STOP_SIGNAL = signal.SIGTERM
SAVE_SIGNAL = signal.SIGUSR1
_POLL_S = 0.2
_AGREE_TIMEOUT_S = 120.0
# Set by the first rank that stops listening: nobody waits for it from then on.
_LEFT_KEY = "save/left"


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """The answer of `save_requested()`: true if a save is due now; `stop` if the script should end
    after it.
    """

    due: bool = False
    stop: bool = False

    def __bool__(self) -> bool:
        return self.due


NO_REQUEST = SaveRequest()


class SaveListener:
    """Handlers for the two signals, and the thread that exchanges flags with the store."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "save_requested() listens for signals, which Python allows in the main thread only"
            )
        self._pid = os.getpid()
        self._calls = 0
        self._requests = 0  # agreed so far: names the keys of the next one
        self._flag = threading.Event()
        self._due_at: int | None = None  # agreed call that is still ahead of this rank
        self._agreed = NO_REQUEST
        self._stop_wanted = False
        self._signals = 0  # received here so far
        self._lock = threading.Lock()  # `_requests` and `_flag` change together
        self._done = threading.Event()
        self._mask: set[signal.Signals | int] | None = None  # while a fork is under way
        self._before = {s: signal.signal(s, self._on_signal) for s in (STOP_SIGNAL, SAVE_SIGNAL)}
        self._store = _group_store()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(
                target=self._watch, name="paceline-save-request", daemon=True
            )
            self._thread.start()

    def next_call(self) -> SaveRequest:
        """The answer to this rank's next call of `save_requested()`."""
        self._calls += 1
        if self._due_at is None and self._flag.is_set():
            self._agree()
        if self._due_at is None or self._calls < self._due_at:
            return NO_REQUEST
        self._due_at = None
        return self._agreed

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a forked child whose fork no handler saw
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signals += 1
        self._stop_wanted = self._stop_wanted or number == STOP_SIGNAL
        self._flag.set()

    def _watch(self) -> None:
        assert self._store is not None
        # A connection of its own: the main thread may be waiting on the other one.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        published = -1
        # The store ends with its server; that a group is lost is reported elsewhere.
        with contextlib.suppress(Exception):
            while not self._done.wait(_POLL_S):
                number = self._requests
                if self._flag.is_set() and published != number:
                    published = number
                    store.set(f"save/{number}/wanted", "1")
                elif not self._flag.is_set() and store.check([f"save/{number}/wanted"]):
                    with self._lock:
                        if self._requests == number:  # not agreed in the meantime
                            self._flag.set()

    def _agree(self) -> None:
        """All ranks wait in a call of theirs: the save is due at the latest of these.

        If a rank has left for good - training ends just now - there is nothing left to save in the
        middle of.
        """
        signals = self._signals
        with contextlib.suppress(ExchangeCancelled):
            answers = [tuple(map(int, answer.split())) for answer in self._exchange_calls()]
            self._due_at = max(call for call, _ in answers)
            self._agreed = SaveRequest(due=True, stop=any(stop for _, stop in answers))
        with self._lock:
            self._requests += 1
            # A signal that came while ranks agreed is a request of its own.
            if self._signals == signals:
                self._flag.clear()
                self._stop_wanted = False

    def _exchange_calls(self) -> list[str]:
        """Every rank's current call, and whether it is to stop: "17 0"."""
        mine = f"{self._calls} {int(self._stop_wanted)}"
        if self._store is None:
            return [mine]
        rank, world = current_rank_and_world()
        self._store.set(f"save/{self._requests}/wanted", "1")
        answers = exchange(
            self._store,
            f"save/{self._requests}",
            rank,
            range(world),
            mine,
            datetime.timedelta(seconds=_AGREE_TIMEOUT_S),
            describe_missing=lambda missing: (
                f"a save was requested and rank {rank} waited {_AGREE_TIMEOUT_S:g} s for all ranks "
                f"to call save_requested(), but ranks {missing} did not. Call it on every rank, "
                "once per step"
            ),
            cancel_key=_LEFT_KEY,
        )
        return list(answers.values())

    def close(self) -> None:
        """Give the signals back, and let the others know."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store's server may be gone already
                self._store.set(_LEFT_KEY, "1")
        self._done.set()
        if self._thread is not None:
            self._thread.join(5.0)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def hold_signals(self) -> None:
        """Before a fork: Python drops signals that reach a child before it has set itself up, so
        they wait in the kernel.
        """
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (STOP_SIGNAL, SAVE_SIGNAL))

    def release_signals(self) -> None:
        """After a fork, in both processes."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def abandon_signals(self) -> None:
        """In a forked child, such as a loader's worker: SIGTERM ends it, as its sender expects."""
        for number in (STOP_SIGNAL, SAVE_SIGNAL):
            signal.signal(number, signal.SIG_DFL)


def _group_store() -> Store | None:
    """Where the ranks of the default group agree; None for a single process."""
    import torch.distributed as dist

    from paceline._torch_internals import PrefixStore, default_store

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return PrefixStore("paceline/requests", default_store())
